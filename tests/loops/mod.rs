//! What it takes to make a plain loop data-parallel: the diff in the README, compiled and run.
mod data_parallel;
mod plain;
mod sharded;

use burn::{
    nn::loss::CrossEntropyLossConfig,
    tensor::{Device, Int, Tensor, TensorData},
};
use collectives::{CommunicatorConfig, Place, launch};
use ddp::{Batch, DistributedSampler};
use examples::{DataSet, Mlp, Precision, digits};
use zero::{Stage, ZeroConfig};

const README: &str = include_str!("../../README.md");
const PLAIN: &str = include_str!("plain.rs");
const DATA_PARALLEL: &str = include_str!("data_parallel.rs");
const SHARDED: &str = include_str!("sharded.rs");

/// The data and the model of both loops; neither knows of ranks.
struct Digits {
    device: Device,
    data: DataSet,
}

impl Digits {
    fn new() -> Self {
        Self {
            device: Device::flex().autodiff(),
            data: digits(),
        }
    }

    fn model(&self) -> Mlp {
        Mlp::new(&[64, 128, 10], 1, Precision::F32, &self.device)
    }

    fn sampler(&self) -> DistributedSampler {
        self.sampler_of(Place::new(0, 1))
    }

    fn sampler_of(&self, place: Place) -> DistributedSampler {
        let sampler = DistributedSampler::new(self.data.train.len(), 100, place);
        sampler.expect("there are rows").with_shuffle(1)
    }

    fn loss(&self, model: &Mlp, batch: &Batch) -> Tensor<1> {
        let train = &self.data.train;
        let features: Vec<f32> = batch
            .rows
            .iter()
            .flat_map(|&row| train.row(row).to_vec())
            .collect();
        let labels: Vec<i64> = batch
            .rows
            .iter()
            .map(|&row| train.labels()[row].into())
            .collect();
        let rows = batch.rows.len();
        let features = TensorData::new(features, [rows, train.width()]);
        let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [rows]), &self.device);
        let logits = model.forward(Tensor::from_data(features, &self.device));
        CrossEntropyLossConfig::new()
            .init(&self.device)
            .forward(logits, labels)
    }
}

#[test]
fn all_loops_reach_the_same_loss() {
    let digits = Digits::new();
    let rows = digits.data.train.len();
    let alone = Place { rank: 0, world: 1 };
    let all = DistributedSampler::new(rows, rows, alone).unwrap().epoch();
    let all = all.into_iter().next().unwrap();
    let end = |model: &Mlp| digits.loss(model, &all).into_scalar::<f32>();
    let plain = end(&plain::train(&digits));
    // 1440 rows in batches of 100: the last one has 40, and no batch cuts into three equal parts.
    let ranks = launch::spawn(3, &CommunicatorConfig::new(), |communicator| {
        data_parallel::train(&digits, communicator).map(|model| end(&model))
    })
    .unwrap();
    assert!(
        ranks
            .iter()
            .all(|loss| loss.to_bits() == ranks[0].to_bits()),
        "{ranks:?}"
    );
    // The tolerance of `mlp compare`: thirty times the rounding of such a run.
    assert!(
        (plain - ranks[0]).abs() < 1e-5,
        "{plain} against {}",
        ranks[0]
    );
    for stage in Stage::ALL {
        let ranks = launch::spawn(3, &CommunicatorConfig::new(), |communicator| {
            let config = ZeroConfig::new(stage);
            sharded::train(&digits, config, communicator).map(|model| end(&model))
        })
        .unwrap();
        let same = |loss: &f32| loss.to_bits() == ranks[0].to_bits();
        assert!(ranks.iter().all(same), "{stage:?}: {ranks:?}");
        let far = (plain - ranks[0]).abs();
        assert!(far < 1e-5, "{stage:?}: {plain} against {}", ranks[0]);
    }
}

#[test]
fn a_plain_loop_changes_in_at_most_five_lines() {
    for other in [DATA_PARALLEL, SHARDED] {
        let changes = difference(body(PLAIN), body(other));
        let added = changes.iter().filter(|line| line.starts_with('+')).count();
        assert!(added <= 5, "{changes:#?}");
        let shown = changes.join("\n");
        assert!(
            README.contains(&shown),
            "the README shows another difference than\n{shown}"
        );
    }
}

/// The lines of the function that a file ends with.
fn body(source: &str) -> Vec<&str> {
    let signature = |line: &&str| !line.contains(") -> ");
    let lines = source.lines().skip_while(signature);
    lines.skip(1).take_while(|line| *line != "}").collect()
}

/// The lines that differ, with `-` and `+`, and those that do not, with a space.
fn difference(old: Vec<&str>, new: Vec<&str>) -> Vec<String> {
    // Longest common subsequence, by length from each pair of places to the ends.
    let mut common = vec![vec![0; new.len() + 1]; old.len() + 1];
    for (i, a) in old.iter().enumerate().rev() {
        for (j, b) in new.iter().enumerate().rev() {
            common[i][j] = match a == b {
                true => common[i + 1][j + 1] + 1,
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j, mut lines) = (0, 0, vec![]);
    while i < old.len() || j < new.len() {
        let (a, b) = (old.get(i), new.get(j));
        if let (Some(a), Some(b)) = (a, b)
            && a == b
        {
            lines.push(format!(" {a}"));
            (i, j) = (i + 1, j + 1);
        } else if let Some(a) = a
            && (b.is_none() || common[i + 1][j] >= common[i][j + 1])
        {
            lines.push(format!("-{a}"));
            i += 1;
        } else if let Some(b) = b {
            lines.push(format!("+{b}"));
            j += 1;
        }
    }
    lines
}
