//! What moves, and what is held meanwhile: by the counters, and by the allocator.
use allocation_counter::measure;
use burn::optim::AdamConfig;
use burn::tensor::DType;
use collectives::{Algorithm, Collective, CommunicatorConfig, Row, launch};
use ddp::DdpConfig;
use zero::{Result, Stage, ZeroConfig};

use crate::run::agree;
use crate::support::{Mlp, caps};

/// 8 layers of 64 x 64 and a bias.
const PARAMETERS: u64 = 8 * (64 * 64 + 64);
const TENSORS: u64 = 16;

/// The rows of one step, after a first one, in which the layout is agreed on.
fn step(stage: Stage, world: usize) -> [Row; 3] {
    let config = CommunicatorConfig::new().with_algorithm(Algorithm::Ring);
    let mut ranks = launch::spawn(world, &config, |communicator| {
        let zero = ZeroConfig::new(stage).with_ddp(caps(20_000, 40_000));
        let model = Mlp::new(&[64; 9], DType::F32);
        let mut model = zero.init(model, AdamConfig::new().init(), communicator)?;
        let kinds = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
        ];
        let mut before = [Row::default(); 3];
        for _ in 0..2 {
            let stats = model.stats()?;
            before = kinds.map(|kind| stats.of(kind));
            model.backward(model.loss(&[0, 1]), 2)?;
            model.step(0.1)?;
        }
        let stats = model.stats()?;
        let total = stats.total();
        assert_eq!(total.bytes_sent, total.predicted_sent);
        let mut rows = kinds.map(|kind| stats.of(kind));
        for (row, before) in rows.iter_mut().zip(before) {
            row.calls -= before.calls;
            row.elements -= before.elements;
            row.bytes_sent -= before.bytes_sent;
        }
        Ok::<_, zero::Error>(rows)
    })
    .unwrap();
    let sent =
        |ranks: &[[Row; 3]], kind: usize| ranks.iter().map(|rows| rows[kind].bytes_sent).sum();
    let all: [u64; 3] = [sent(&ranks, 0), sent(&ranks, 1), sent(&ranks, 2)];
    let mut rows = ranks.swap_remove(0);
    for (row, bytes) in rows.iter_mut().zip(all) {
        row.bytes_sent = bytes;
    }
    rows
}

/// What rides in the tails: the sample total and the loss, a count per parameter, and one more.
const TAILS: u64 = 5 + TENSORS + 1;

#[test]
fn stage_1_all_reduces_gradients_and_gathers_parameters() {
    for world in 2..=4 {
        let [reduced, scattered, gathered] = step(Stage::One, world);
        let others = world as u64 - 1;
        assert_eq!(reduced.elements, PARAMETERS + TAILS);
        assert_eq!(reduced.bytes_sent, 2 * others * 4 * (PARAMETERS + TAILS));
        assert_eq!(scattered.calls, 0);
        assert_eq!(gathered.elements, PARAMETERS);
        assert_eq!(gathered.bytes_sent, others * 4 * PARAMETERS);
    }
}

#[test]
fn stage_2_reduce_scatters_gradients_and_gathers_parameters() {
    for world in 2..=4 {
        let [reduced, scattered, gathered] = step(Stage::Two, world);
        let others = world as u64 - 1;
        // Together the ranks send N-1 times the gradients: (N-1)/N of them each.
        assert_eq!(scattered.elements, PARAMETERS);
        assert_eq!(scattered.bytes_sent, others * 4 * PARAMETERS);
        // The tails of the first and the last bucket, and nothing else, are all-reduced.
        assert_eq!((reduced.calls, reduced.elements), (2, TAILS));
        // And each rank says whether its part is numbers: one f64.
        assert_eq!(gathered.elements, PARAMETERS + world as u64);
        assert_eq!(
            gathered.bytes_sent,
            others * 4 * PARAMETERS + others * world as u64 * 8
        );
        assert_eq!(gathered.calls, scattered.calls + 1);
    }
}

#[test]
fn stage_3_gathers_parameters_where_they_are_used_and_reduce_scatters_gradients() {
    for world in 2..=4 {
        let [reduced, scattered, gathered] = step(Stage::Three, world);
        let others = world as u64 - 1;
        assert_eq!(scattered.elements, PARAMETERS);
        assert_eq!(scattered.bytes_sent, others * 4 * PARAMETERS);
        assert_eq!((reduced.calls, reduced.elements), (2, TAILS));
        // Once for the forward pass and once for the backward pass, but for the last bucket, of the
        // first layer's weight, whose input needs no gradient: three units with the gradients.
        let buckets = scattered.calls;
        assert_eq!(gathered.calls, buckets + (buckets - 1) + 1);
        let all = 2 * PARAMETERS - 64 * 64;
        assert_eq!(gathered.elements, all + world as u64);
        assert_eq!(
            gathered.bytes_sent,
            others * 4 * all + others * world as u64 * 8
        );
    }
}

/// Layers of the model whose memory is measured, each a bucket.
const LAYERS: u64 = 16;
const BUCKET: u64 = 4 * (256 * 256 + 256);

/// The most that this thread holds at a time in each of two backward passes, and in one of Burn's own.
/// The first one also makes the room that the communicator keeps.
fn peaks_of_backward(stage: Stage, world: usize) -> [u64; 3] {
    let peaks = launch::spawn(world, &CommunicatorConfig::new(), |communicator| {
        // Reduced on this thread, whose allocations are counted.
        let config = caps(BUCKET as usize, BUCKET as usize);
        let config = config.with_comm_thread(false);
        let zero = ZeroConfig::new(stage).with_ddp(config);
        let plain = Mlp::new(&[256; LAYERS as usize + 1], DType::F32);
        let loss = plain.loss(&[0, 1]);
        let mut peaks = [0, 0, measure(|| drop(loss.backward())).bytes_max];
        let mut model = zero.init(plain.clone(), AdamConfig::new().init(), communicator)?;
        for peak in &mut peaks[..2] {
            let loss = model.loss(&[0, 1]);
            let mut passed: Result<()> = Ok(());
            *peak = measure(|| passed = model.backward(loss, 2)).bytes_max;
            passed?;
            model.step(0.1)?;
        }
        assert_eq!(model.plan().len() as u64, LAYERS);
        Ok::<_, zero::Error>(peaks)
    })
    .unwrap();
    peaks.into_iter().max().unwrap_or_default()
}

#[test]
fn the_peak_of_a_backward_pass_falls_with_the_world_size_in_stage_2() {
    for world in [2, 4] {
        let parts = LAYERS * BUCKET / world as u64;
        let [_, peak, burn] = peaks_of_backward(Stage::Two, world);
        // What Burn works with, beside the gradients that it ends with.
        let work = burn - LAYERS * BUCKET;
        // Beside the parts: that, the gradient that it hands over, the bucket that is filling, and
        // a message of at most a bucket to another thread.
        let held = parts..parts + work + 3 * BUCKET;
        assert!(held.contains(&peak), "{world}: {peak} of {held:?}");
        let [whole, ..] = peaks_of_backward(Stage::One, world);
        assert!(whole > LAYERS * BUCKET);
    }
}

#[test]
fn a_model_far_below_the_cap_is_in_several_buckets_too() {
    let config = DdpConfig::new().with_first_bucket_mb(0.001);
    let plain = || Mlp::new(&[64; 9], DType::F32);
    for stage in [None, Some(Stage::One), Some(Stage::Two), Some(Stage::Three)] {
        let buckets = agree(1, |communicator| {
            Ok(match stage {
                None => config.init(plain(), communicator)?.plan().len(),
                Some(stage) => {
                    let zero = ZeroConfig::new(stage).with_ddp(config);
                    let model = zero.init(plain(), AdamConfig::new().init(), communicator)?;
                    model.plan().len()
                }
            })
        });
        // The first bias by itself, and the rest in buckets of at most a quarter: of 133 kB.
        assert_eq!(buckets, 5, "{stage:?}");
    }
}
