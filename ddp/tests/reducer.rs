//! The reducer alone, without Burn.
use std::sync::Mutex;

use collectives::{CommStream, Communicator};
use ddp::{BucketPlan, Buffer, Caps, Error, Float, Gradient, Reducer, Result, SlotSpec};

use crate::support::ranks;

const F32: Float = Float::F32;

fn reducer(
    communicator: Communicator,
    lens: &[usize],
    bucket_bytes: usize,
    overlap: bool,
) -> Result<Reducer> {
    let slots: Vec<SlotSpec> = lens
        .iter()
        .map(|&len| SlotSpec { len, dtype: F32 })
        .collect();
    let order: Vec<usize> = (0..lens.len()).rev().collect();
    let plan = BucketPlan::new(
        &slots,
        &order,
        Caps {
            first_bytes: bucket_bytes,
            bucket_bytes,
        },
    );
    let names = (0..lens.len()).map(|slot| format!("slot {slot}")).collect();
    Ok(Reducer::new(
        plan,
        names,
        CommStream::new(communicator)?,
        overlap,
    ))
}

fn slot(reducer: &Reducer, buckets: &[Buffer], slot: usize) -> Vec<f32> {
    let (bucket, range) = reducer.plan().locate(slot);
    buckets[bucket].as_f32().unwrap()[range].to_vec()
}

#[test]
fn the_mean_is_weighted_by_samples() {
    // Per-sample gradients 1, 2, 3 on rank 0 and 10 on rank 1: 16 / 4, not (2 + 10) / 2.
    let means = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut reducer = reducer(communicator, &[1], 0, true)?;
        let (samples, gradient) = [(3, 2.0), (1, 10.0)][rank];
        reducer.begin(samples, f64::from(gradient))?;
        reducer.ready(0, Gradient::F32(&[gradient]))?;
        let reduced = reducer.finish()?;
        assert_eq!(
            (reduced.samples, reduced.loss, &reduced.used[..]),
            (4, 4.0, &[2][..])
        );
        Ok(slot(&reducer, &reduced.buckets, 0))
    });
    assert_eq!(means, [[4.0], [4.0]]);
}

#[test]
fn a_rank_without_samples_contributes_zeros_even_if_its_gradient_is_nan() {
    let means = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut reducer = reducer(communicator, &[1], 0, true)?;
        let (samples, gradient) = [(2, 5.0), (0, f32::NAN)][rank];
        reducer.begin(samples, f64::from(gradient))?;
        reducer.ready(0, Gradient::F32(&[gradient]))?;
        let reduced = reducer.finish()?;
        assert_eq!(
            (reduced.samples, reduced.loss, &reduced.used[..]),
            (2, 5.0, &[1][..])
        );
        Ok(slot(&reducer, &reduced.buckets, 0))
    });
    assert_eq!(means, [[5.0], [5.0]]);
}

#[test]
fn sample_counts_beyond_f32_stay_exact() {
    let counts = [(1 << 40) + 1, (1 << 24) + 1, 4095];
    let totals = ranks(3, |communicator| {
        let rank = communicator.rank();
        let mut reducer = reducer(communicator, &[], 0, true)?;
        reducer.begin(counts[rank], 1.0)?;
        Ok(reducer.finish()?.samples)
    });
    assert_eq!(totals, [counts.iter().sum::<usize>() as u64; 3]);
}

#[test]
fn nobody_with_samples_is_an_error_on_every_rank() {
    let errors = ranks(2, |communicator| {
        let mut reducer = reducer(communicator, &[1], 0, true)?;
        reducer.begin(0, f64::NAN)?;
        Ok(reducer.finish().unwrap_err())
    });
    assert_eq!(errors, [Error::NoSamples, Error::NoSamples]);
}

#[test]
fn buckets_start_in_plan_order_though_ranks_fill_them_in_opposite_orders() {
    let means = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut reducer = reducer(communicator, &[1, 2, 3], 0, true)?;
        reducer.begin(1, 0.0)?;
        for turn in 0..3 {
            let slot = if rank == 0 { turn } else { 2 - turn };
            reducer.ready(slot, Gradient::F32(&vec![(slot + rank) as f32; slot + 1]))?;
        }
        let reduced = reducer.finish()?;
        assert!(
            reduced
                .records
                .windows(2)
                .all(|pair| pair[0].end <= pair[1].start)
        );
        Ok([0, 1, 2].map(|at| slot(&reducer, &reduced.buckets, at)))
    });
    assert_eq!(means[0], [vec![0.5], vec![1.5; 2], vec![2.5; 3]]);
    assert_eq!(means[0], means[1]);
}

#[test]
fn a_slot_that_never_came_counts_as_zero_also_in_a_recycled_buffer() {
    let means = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut reducer = reducer(communicator, &[2, 1], 1 << 10, true)?;
        let mut last = Vec::new();
        for step in 0..2 {
            reducer.begin(1, 0.0)?;
            reducer.ready(1, Gradient::F32(&[8.0]))?;
            if step == 0 || rank == 0 {
                reducer.ready(0, Gradient::F32(&[6.0, 4.0]))?;
            }
            let reduced = reducer.finish()?;
            last = slot(&reducer, &reduced.buckets, 0);
            assert_eq!(reduced.used, [if step == 0 { 2 } else { 1 }, 2]);
            reduced
                .buckets
                .into_iter()
                .for_each(|buffer| reducer.recycle(buffer));
        }
        Ok(last)
    });
    assert_eq!(means, [[3.0, 2.0], [3.0, 2.0]]);
}

#[test]
fn buffers_are_used_again() {
    let address = |buffers: &[Buffer]| -> Vec<*const f32> {
        buffers
            .iter()
            .map(|buffer| buffer.as_f32().unwrap().as_ptr())
            .collect()
    };
    ranks(2, |communicator| {
        let mut reducer = reducer(communicator, &[1000, 2000], 0, true)?;
        let mut addresses = Vec::new();
        for _ in 0..3 {
            reducer.begin(1, 0.0)?;
            let reduced = reducer.finish()?;
            addresses.push(address(&reduced.buckets));
            reduced
                .buckets
                .into_iter()
                .for_each(|buffer| reducer.recycle(buffer));
        }
        assert_eq!(addresses[1], addresses[0]);
        assert_eq!(addresses[2], addresses[0]);
        Ok(())
    });
}

#[test]
fn without_overlap_nothing_starts_before_finish() {
    for (overlap, expected) in [(true, 2), (false, 0)] {
        let counts = Mutex::new(Vec::new());
        ranks(1, |communicator| {
            let mut reducer = reducer(communicator, &[1, 1], 0, overlap)?;
            reducer.begin(1, 0.0)?;
            reducer.ready(1, Gradient::F32(&[1.0]))?;
            reducer.ready(0, Gradient::F32(&[1.0]))?;
            // Behind the buckets on the same stream, if they are there.
            reducer.stream().run(|_| Ok(())).wait()?;
            counts.lock().unwrap().push(reducer.progress().reduced());
            reducer.finish()?;
            Ok(())
        });
        assert_eq!(counts.into_inner().unwrap(), [expected]);
    }
}

#[test]
fn a_second_gradient_in_one_pass_is_an_error_that_names_the_slot() {
    let again = Error::ReadyTwice {
        parameter: "slot 1".into(),
    };
    ranks(1, |communicator| {
        let mut reducer = reducer(communicator, &[1, 1], 1 << 10, true)?;
        reducer.begin(1, 0.0)?;
        reducer.ready(1, Gradient::F32(&[1.0]))?;
        // While the bucket fills, and when it is on its way.
        assert_eq!(reducer.ready(1, Gradient::F32(&[1.0])), Err(again.clone()));
        reducer.ready(0, Gradient::F32(&[1.0]))?;
        assert_eq!(reducer.ready(1, Gradient::F32(&[1.0])), Err(again.clone()));
        Ok(())
    });
}

#[test]
fn a_pass_cannot_begin_or_change_its_buckets_while_another_is_open() {
    ranks(1, |communicator| {
        let mut reducer = reducer(communicator, &[1], 0, true)?;
        reducer.begin(1, 0.0)?;
        reducer.ready(0, Gradient::F32(&[1.0]))?;
        assert!(matches!(reducer.begin(1, 0.0), Err(Error::State(_))));
        let plan = reducer.plan().clone();
        assert!(matches!(reducer.replan(plan), Err(Error::State(_))));
        assert_eq!(reducer.finish()?.buckets[0].as_f32().unwrap()[0], 1.0);
        assert!(matches!(reducer.finish(), Err(Error::State(_))));
        Ok(())
    });
}

#[test]
fn a_gradient_of_another_size_or_type_is_an_error_that_says_both() {
    ranks(1, |communicator| {
        let mut reducer = reducer(communicator, &[2], 0, true)?;
        reducer.begin(1, 0.0)?;
        let error = reducer.ready(0, Gradient::F64(&[1.0])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the gradient of slot 0 is 1 x f64, the parameter 2 x f32"
        );
        Ok(())
    });
}
