//! Who gets which rows (trial BR-22).
use std::collections::BTreeSet;

use collectives::Place;
use ddp::{Batch, DistributedSampler, Error};

fn sampler(rows: usize, global_batch: usize, rank: usize, world: usize) -> DistributedSampler {
    DistributedSampler::new(rows, global_batch, Place { rank, world }).unwrap()
}

/// The rows that count, per global batch, over all ranks.
fn dealt(rows: usize, global_batch: usize, world: usize, seed: u64) -> Vec<Vec<usize>> {
    let epochs = (0..world).map(|rank| {
        sampler(rows, global_batch, rank, world)
            .with_shuffle(seed)
            .epoch()
            .collect::<Vec<Batch>>()
    });
    let mut global = vec![Vec::new(); rows.div_ceil(global_batch)];
    for epoch in epochs {
        assert_eq!(
            epoch.len(),
            global.len(),
            "all ranks take the same number of steps"
        );
        for (batch, global) in epoch.iter().zip(&mut global) {
            assert_eq!(batch.rows.len(), batch.samples.max(1));
            global.extend(&batch.rows[..batch.samples]);
        }
    }
    global
}

#[test]
fn a_global_batch_is_the_same_for_every_world_size() {
    for (rows, global_batch) in [(10, 4), (22, 8), (3, 8), (1, 1), (64, 16)] {
        let one = dealt(rows, global_batch, 1, 5);
        for world in 2..=7 {
            assert_eq!(dealt(rows, global_batch, world, 5), one);
        }
    }
}

#[test]
fn evaluation_sees_each_row_once_whatever_the_world_size() {
    for world in 1..=7 {
        let rows: Vec<usize> = dealt(10, 4, world, 0).concat();
        // Only rows 0 and 1 are classified correctly.
        let correct = rows.iter().filter(|&&row| row < 2).count();
        assert_eq!((correct, rows.len()), (2, 10));
    }
}

#[test]
fn a_rank_without_rows_gets_a_stand_in_that_does_not_count() {
    for rank in 3..7 {
        let batches: Vec<Batch> = sampler(3, 7, rank, 7).epoch().collect();
        let [Batch { rows, samples, .. }] = &batches[..] else {
            panic!("{} batches", batches.len());
        };
        assert_eq!((&rows[..], *samples), (&[0][..], 0));
    }
}

#[test]
fn no_rows_or_an_empty_batch_is_a_typed_error() {
    for (rows, global_batch, wrong) in [(0, 4, "rows"), (4, 0, "global_batch")] {
        match DistributedSampler::new(rows, global_batch, Place { rank: 0, world: 2 }) {
            Err(Error::Config { name, .. }) => assert_eq!(name, wrong),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn each_epoch_is_shuffled_anew_and_can_be_repeated() {
    let order = |sampler: &mut DistributedSampler| -> Vec<usize> {
        sampler.epoch().flat_map(|batch| batch.rows).collect()
    };
    let mut shuffled = sampler(22, 4, 0, 1).with_shuffle(9);
    let (zero, one) = (order(&mut shuffled), order(&mut shuffled));
    assert_ne!(zero, one);
    shuffled.set_epoch(0);
    assert_eq!(order(&mut shuffled), zero);
    assert_ne!(order(&mut sampler(22, 4, 0, 1).with_shuffle(10)), zero);
    for order in [zero, one] {
        assert_eq!(order.into_iter().collect::<BTreeSet<_>>().len(), 22);
    }
    let mut plain = sampler(22, 4, 0, 1).with_shuffle(9).without_shuffle();
    assert_eq!(order(&mut plain), (0..22).collect::<Vec<_>>());
}

#[test]
fn a_resumed_epoch_repeats_and_loses_no_row() {
    let mut shuffled = sampler(22, 4, 1, 2).with_shuffle(9);
    let whole: Vec<Batch> = shuffled.epoch().collect();
    shuffled.set_epoch(0);
    let resumed: Vec<Batch> = shuffled.epoch().skip(2).collect();
    assert_eq!(resumed, whole[2..]);
}
