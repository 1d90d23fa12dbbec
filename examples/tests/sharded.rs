//! `train` by the stages of ZeRO.

use std::sync::Mutex;

use examples::{Epoch, News, OptimizerKind, Settings, Task, TrainReport, train};
use zero::Stage;

use crate::data::folder;

/// The loss of each step, the epochs, and the report.
fn trained(settings: Settings) -> (Vec<f64>, Vec<Epoch>, TrainReport) {
    let told = Mutex::new((Vec::new(), Vec::new()));
    let report = train(&Task::new(settings).unwrap(), |news| {
        let mut told = told.lock().unwrap();
        match news {
            News::Step { loss, .. } => told.0.push(loss),
            News::Epoch(epoch) => told.1.push(epoch),
        }
    });
    let (losses, epochs) = told.into_inner().unwrap();
    (losses, epochs, report.unwrap())
}

fn settings(stage: Option<Stage>) -> Settings {
    let mut settings = Settings::train();
    settings.run.world_size = 3;
    settings.optim.kind = OptimizerKind::Adam;
    settings.optim.lr = 0.01;
    // The last batch of an epoch has 40 rows, of which the ranks get 14, 13, 13.
    settings.train.global_batch_size = 100;
    settings.train.steps = 18;
    settings.ddp.first_bucket_mb = 0.001;
    settings.ddp.bucket_cap_mb = 0.006;
    settings.collectives.deterministic = true;
    settings.zero.stage = stage;
    settings
}

/// Every stage trains as ddp does, to the bit; its reports are returned.
fn same(change: impl Fn(&mut Settings)) -> Vec<TrainReport> {
    let run = |stage| {
        let mut settings = settings(stage);
        change(&mut settings);
        trained(settings)
    };
    let (losses, epochs, _) = run(None);
    assert_eq!(losses.len(), 18);
    let stages = Stage::ALL.map(|stage| {
        let (of_stage, its_epochs, report) = run(Some(stage));
        assert_eq!(of_stage, losses, "{stage:?}");
        assert_eq!(its_epochs.len(), epochs.len());
        for (epoch, due) in its_epochs.iter().zip(&epochs) {
            let of = |epoch: &Epoch| (epoch.loss, epoch.accuracy);
            assert_eq!(of(epoch), of(due), "{stage:?}");
        }
        assert!(report.bits_equal_ranks, "{stage:?}");
        assert_eq!(report.held, report.held_formula, "{stage:?}");
        report
    });
    stages.into()
}

#[test]
fn every_stage_trains_as_ddp_does_holds_less_and_says_what_it_moved() {
    let reports = same(|_| ());
    let totals: Vec<usize> = reports.iter().map(|report| report.held.total()).collect();
    assert!(totals[0] > totals[1] && totals[1] > totals[2], "{totals:?}");
    // 9,610 parameters in Adam, of which rank 0 has 4 of 10, 470 of 1,408, and 2,731 of 8,192.
    let part = 4 + 470 + 2731;
    let expected = [
        8 * 9610 + 4 * 10 + 8 * part,
        4 * 9610 + 12 * part,
        16 * part,
    ];
    assert_eq!(totals, expected);
    for (report, kinds) in reports.iter().zip([
        &["all_reduce", "all_gather"][..],
        &["all_reduce", "reduce_scatter", "all_gather"],
        &["all_reduce", "reduce_scatter", "all_gather"],
    ]) {
        let said: Vec<&str> = report.sent.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(said, kinds);
        let sum: u64 = report.sent.iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(sum, report.moved.bytes_sent);
        assert_eq!(sum, report.moved.predicted_sent);
    }
}

#[test]
fn accumulation_and_clipping_go_with_every_stage() {
    same(|settings| {
        // Of 5 rows the ranks have 2, 2 and 1: fewer than the micro-batches that stage 3 needs alike.
        settings.train.global_batch_size = 5;
        settings.train.accumulate = 2;
        settings.ddp.max_grad_norm = 0.3;
    });
}

#[test]
fn micro_shards_go_with_every_stage() {
    same(|settings| settings.ddp.micro_shards = 6);
}

#[test]
fn log_and_trace_go_with_every_stage() {
    let folder = folder("sharded-log");
    for stage in Stage::ALL {
        let number = u8::from(stage);
        let mut settings = settings(Some(stage));
        settings.log.steps = folder.join(format!("{number}.jsonl"));
        settings.log.trace = folder.join(format!("{number}.json"));
        trained(settings.clone());
        let lines = std::fs::read_to_string(&settings.log.steps).unwrap();
        assert_eq!(lines.lines().count(), 18 * 3);
        let trace = std::fs::read_to_string(&settings.log.trace).unwrap();
        let trace: Vec<serde_json::Value> = serde_json::from_str(&trace).unwrap();
        let scatters = trace.iter().any(|event| event["name"] == "reduce_scatter");
        assert_eq!(scatters, stage > Stage::One);
    }
}
