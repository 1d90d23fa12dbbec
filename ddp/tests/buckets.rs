//! The layout of buckets: pure, so tested for everything at once.
use ddp::{BucketPlan, Caps, Float, SlotSpec};
use proptest::prelude::*;

fn slot() -> impl Strategy<Value = SlotSpec> {
    (
        0..40usize,
        prop_oneof![4 => Just(Float::F32), 1 => Just(Float::F64)],
    )
        .prop_map(|(len, dtype)| SlotSpec { len, dtype })
}

fn layout() -> impl Strategy<Value = (Vec<SlotSpec>, Vec<usize>, Caps)> {
    prop::collection::vec(slot(), 0..30).prop_flat_map(|slots| {
        let order: Vec<usize> = (0..slots.len()).rev().collect();
        let caps = (0..200usize, 0..200usize).prop_map(|(first_bytes, bucket_bytes)| Caps {
            first_bytes,
            bucket_bytes,
        });
        (Just(slots), Just(order).prop_shuffle(), caps)
    })
}

proptest! {
    #[test]
    fn every_slot_lies_once_and_buckets_are_covered_without_overlap((slots, order, caps) in layout()) {
        let plan = BucketPlan::new(&slots, &order, caps);
        let mut found = vec![0; slots.len()];
        for bucket in 0..plan.len() {
            let mut end = 0;
            for &slot in plan.slots_in(bucket) {
                found[slot] += 1;
                prop_assert_eq!(plan.locate(slot), (bucket, end..end + slots[slot].len));
                prop_assert_eq!(plan.dtype(bucket), slots[slot].dtype);
                end += slots[slot].len;
            }
            prop_assert_eq!(plan.gradients_in(bucket), end);
        }
        prop_assert!(found.iter().all(|&times| times == 1));
        for dtype in [Float::F32, Float::F64] {
            let of_type = |slot: &usize| slots[*slot].dtype == dtype;
            let packed = (0..plan.len()).flat_map(|bucket| plan.slots_in(bucket).to_vec());
            let packed: Vec<usize> = packed.filter(of_type).collect();
            let wanted: Vec<usize> = order.iter().copied().filter(of_type).collect();
            prop_assert_eq!(packed, wanted);
        }
    }

    #[test]
    fn only_a_slot_alone_exceeds_a_cap((slots, order, caps) in layout()) {
        let plan = BucketPlan::new(&slots, &order, caps);
        for bucket in 0..plan.len() {
            let cap = if bucket == 0 { caps.first_bytes.min(caps.bucket_bytes) } else { caps.bucket_bytes };
            let bytes = plan.gradients_in(bucket) * plan.dtype(bucket).bytes();
            prop_assert!(bytes <= cap || plan.slots_in(bucket).len() == 1);
        }
    }

    #[test]
    fn buckets_are_as_full_as_the_cap_allows((slots, order, caps) in layout()) {
        let plan = BucketPlan::new(&slots, &order, caps);
        for bucket in 1..plan.len() {
            // The last before of the same type: one of each stays open.
            let same = |&before: &usize| plan.dtype(before) == plan.dtype(bucket);
            let Some(before) = (0..bucket).rev().find(same) else { continue };
            let cap = if before == 0 { caps.first_bytes.min(caps.bucket_bytes) } else { caps.bucket_bytes };
            let next = slots[plan.slots_in(bucket)[0]];
            let elements = plan.gradients_in(before) + next.len;
            prop_assert!(cap == 0 || elements * next.dtype.bytes() > cap);
        }
    }

    #[test]
    fn equal_arguments_give_equal_plans((slots, order, caps) in layout()) {
        prop_assert_eq!(BucketPlan::new(&slots, &order, caps), BucketPlan::new(&slots, &order, caps));
    }

    #[test]
    fn tails_lie_behind_the_gradients((slots, order, caps) in layout()) {
        let plan = BucketPlan::new(&slots, &order, caps);
        let last = plan.len() - 1;
        prop_assert_eq!(plan.totals().start, plan.gradients_in(0));
        prop_assert_eq!(plan.used().len(), slots.len());
        prop_assert_eq!(plan.used().end, plan.non_finite());
        prop_assert_eq!(plan.non_finite() + 1, plan.elements(last));
        if last == 0 {
            prop_assert_eq!(plan.totals().end, plan.used().start);
        } else {
            prop_assert_eq!(plan.totals().end, plan.elements(0));
            prop_assert_eq!(plan.used().start, plan.gradients_in(last));
        }
        let gradients: usize = slots.iter().map(|slot| slot.len).sum();
        prop_assert_eq!(plan.buckets().iter().sum::<usize>(), gradients + plan.totals().len() + slots.len() + 1);
    }
}

#[test]
fn a_cap_of_0_or_1_byte_gives_every_slot_its_bucket() {
    let slots = [3, 0, 5, 0].map(|len| SlotSpec {
        len,
        dtype: Float::F32,
    });
    let caps = |bytes| Caps {
        first_bytes: bytes,
        bucket_bytes: bytes,
    };
    let zero = BucketPlan::new(&slots, &[3, 2, 1, 0], caps(0));
    assert_eq!(zero.len(), 4);
    // At 1 byte the empty slots could share, but none lies beside another.
    assert_eq!(BucketPlan::new(&slots, &[3, 2, 1, 0], caps(1)).len(), 4);
}

#[test]
fn types_that_alternate_share_a_bucket_each() {
    let slots: Vec<SlotSpec> = (0..1000)
        .map(|at| SlotSpec {
            len: 16,
            dtype: [Float::F32, Float::F64][at % 2],
        })
        .collect();
    let order: Vec<usize> = (0..1000).rev().collect();
    let caps = Caps {
        first_bytes: 1 << 20,
        bucket_bytes: 25 << 20,
    };
    assert_eq!(BucketPlan::new(&slots, &order, caps).len(), 2);
}

#[test]
fn without_slots_there_is_one_bucket_for_the_tails() {
    let plan = BucketPlan::new(
        &[],
        &[],
        Caps {
            first_bytes: 4,
            bucket_bytes: 4,
        },
    );
    assert_eq!(
        (plan.len(), plan.elements(0), plan.used().len()),
        (1, plan.totals().len() + 1, 0)
    );
}

#[test]
fn a_megabyte_is_two_to_the_20_bytes() {
    // 100 MB of 10^6 bytes in buckets of 25 MB: 3.8 buckets of 2^20, 4.0 of 10^6.
    let slots = [SlotSpec {
        len: 1_000_000,
        dtype: Float::F32,
    }; 25];
    let order: Vec<usize> = (0..25).collect();
    let plan = BucketPlan::new(
        &slots,
        &order,
        Caps {
            first_bytes: 25 << 20,
            bucket_bytes: 25 << 20,
        },
    );
    assert_eq!(
        (0..plan.len())
            .map(|bucket| plan.slots_in(bucket).len())
            .collect::<Vec<_>>(),
        [6, 6, 6, 6, 1]
    );
}

#[test]
fn a_rung_stride_that_would_look_like_a_hang_is_refused() {
    let config = ddp::DdpConfig::new();
    assert!(config.with_rung_stride(1 << 16).validate().is_ok());
    for stride in [(1 << 16) + 1, usize::MAX] {
        let error = config.with_rung_stride(stride).validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("rung_stride = {stride}: 0 to 65536")
        );
    }
}
