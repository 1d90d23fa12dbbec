//! What travels with the data: two calls are alike, or they differ in a named field.
use collectives::{Algorithm, Call, Collective, DType, Fingerprint, Operator, ReduceOp, Route};
use proptest::{prelude::*, sample::select};

const COLLECTIVES: [Collective; 11] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Split,
    Collective::Barrier,
    Collective::SendRecv,
];

fn any_fingerprint() -> impl Strategy<Value = Fingerprint> {
    // Few values for each field, so that neighbours are often alike in most.
    (
        (1u64..3, 0u64..2),
        select(&COLLECTIVES),
        proptest::option::of(select(&ReduceOp::ALL)),
        proptest::option::of(0usize..2),
        select(DType::ALL),
        (0usize..3, 0u64..2),
        proptest::option::of((select(Algorithm::ALL), select(Algorithm::ALL))),
        (1usize..3, 0u64..3),
    )
        .prop_map(
            |(
                (seq, history),
                collective,
                op,
                root,
                dtype,
                (len, terms),
                route,
                (segment, message),
            )| {
                Fingerprint {
                    seq,
                    history,
                    call: Call {
                        collective,
                        op: op.map(Operator::Named),
                        root,
                        dtype,
                        len,
                        terms,
                    },
                    algorithm: route.map(|(reduce, spread)| Route { reduce, spread }),
                    segment,
                    message,
                }
            },
        )
}

proptest! {
    #[test]
    fn a_difference_is_the_same_from_both_sides(a in any_fingerprint(), b in any_fingerprint()) {
        prop_assert_eq!(a.difference(&b), b.difference(&a));
    }

    #[test]
    fn only_equals_have_no_difference(a in any_fingerprint(), b in any_fingerprint()) {
        prop_assert_eq!(a.difference(&b).is_none(), a == b);
        prop_assert_eq!(a.difference(&a), None);
    }

    #[test]
    fn one_field_that_differs_is_the_one_named(a in any_fingerprint(), b in any_fingerprint()) {
        let call = |change: fn(&mut Call, &Call)| {
            let mut changed = a;
            change(&mut changed.call, &b.call);
            changed
        };
        let changed = [
            ("the collective", call(|to, from| to.collective = from.collective)),
            ("the reduce operation", call(|to, from| to.op = from.op)),
            ("the root", call(|to, from| to.root = from.root)),
            ("the element type", call(|to, from| to.dtype = from.dtype)),
            ("the length", call(|to, from| to.len = from.len)),
            ("the counts, members or settings", call(|to, from| to.terms = from.terms)),
            ("the number of the call", Fingerprint { seq: b.seq, ..a }),
            ("the algorithm", Fingerprint { algorithm: b.algorithm, ..a }),
            ("the segment size", Fingerprint { segment: b.segment, ..a }),
            ("the calls before", Fingerprint { history: b.history, ..a }),
            ("the message", Fingerprint { message: b.message, ..a }),
        ];
        for (field, other) in changed {
            prop_assert_eq!(a.difference(&other), (a != other).then_some(field));
        }
    }
}
