//! Data-parallel training against the single process, right and wrong.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use examples::{
    Fault, Mode, ModeReport, OptimizerKind, Precision, Settings, Task, Verdict, compare,
};

/// Fewer steps than the command's default: the claims hold at any length, and
/// each fault shows within these.
const STEPS: usize = 40;

fn settings() -> Settings {
    let mut settings = Settings::compare();
    settings.train.steps = STEPS;
    settings
}

fn run(settings: Settings, modes: &[&str], fault: Option<Fault>) -> Vec<ModeReport> {
    let modes: Vec<Mode> = modes.iter().map(|mode| mode.parse().unwrap()).collect();
    compare(&Task::new(settings).unwrap(), &modes, fault, |_| ()).unwrap()
}

const MODES: [&str; 5] = ["single", "ddp:ring", "ddp:tree", "ddp:naive", "ddp:auto"];

static RIGHT: LazyLock<Vec<ModeReport>> = LazyLock::new(|| run(settings(), &MODES, None));

#[test]
fn every_mode_passes_and_says_what_it_did() {
    for (report, mode) in RIGHT.iter().zip(MODES) {
        assert_eq!(report.mode, mode);
        assert_eq!(
            report.verdict,
            Verdict::Pass,
            "{mode}: {:?}",
            report.failures
        );
        assert!(report.bits_equal_ranks);
        assert!(report.max_abs_diff <= 1e-5);
        assert_eq!((report.steps, report.losses.len()), (STEPS, STEPS));
        assert_eq!(report.final_loss, report.losses[STEPS - 1]);
        // A fresh model knows nothing of ten classes: ln 10; then it learns.
        assert!((report.losses[0] - 10f64.ln()).abs() < 0.1);
        assert!(report.final_loss < report.losses[0] - 0.05);
    }
}

#[test]
fn ranks_reduce_several_buckets_and_the_bytes_are_those_of_the_formula() {
    let settings = settings();
    let task = Task::new(settings.clone()).unwrap();
    for report in &RIGHT[1..] {
        assert!(
            report.buckets >= 3,
            "{}: {} buckets",
            report.mode,
            report.buckets
        );
        assert_eq!(report.bytes_per_rank, report.bytes_formula);
        let hidden = report.hidden.unwrap();
        assert!((0.0..=1.0).contains(&hidden));
    }
    let ran: Vec<_> = RIGHT
        .iter()
        .map(|report| report.algorithm.as_deref())
        .collect();
    assert_eq!(ran[..4], [None, Some("ring"), Some("tree"), Some("naive")]);
    // By hand: ring sends 2(N-1)/N of each buffer a rank, here of all gradients
    // and of a few words with the sample counts; blocks that do not come out
    // even cost the busiest rank one element a bucket and pass more at most.
    let world = settings.run.world_size as u64;
    let words = 4 * STEPS as u64;
    let least = 2 * (world - 1) * task.parameters() as u64 / world * words;
    let ring = RIGHT[1].bytes_per_rank;
    assert!(
        (least..least + 100 * words).contains(&ring),
        "{ring} is not near {least}"
    );
}

#[test]
fn the_same_run_gives_the_same_bits() {
    let again = run(settings(), &["ddp:ring"], None);
    assert_eq!(again[0].weights_hash, RIGHT[1].weights_hash);
    assert_eq!(again[0].losses, RIGHT[1].losses);
}

#[test]
fn modes_pass_at_other_world_sizes_uneven_batches_and_without_overlap() {
    for (world, batch, overlap) in [(1, 96, true), (3, 94, true), (4, 94, false), (8, 7, true)] {
        let mut settings = settings();
        settings.train.steps = 18;
        settings.run.world_size = world;
        settings.train.global_batch_size = batch;
        settings.ddp.overlap = overlap;
        for report in run(settings, &["ddp:ring", "ddp:tree"], None) {
            assert_eq!(
                report.verdict,
                Verdict::Pass,
                "{world} {batch}: {:?}",
                report.failures
            );
            assert_eq!(report.world_size, world);
        }
    }
}

#[test]
fn in_f64_modes_agree_to_a_ten_billionth() {
    let mut settings = settings();
    settings.model.dtype = Precision::F64;
    for report in run(settings, &["ddp:ring", "ddp:tree"], None) {
        assert_eq!(report.verdict, Verdict::Pass, "{:?}", report.failures);
        assert!(report.max_abs_diff <= 1e-10);
        // Losses in f32 would agree to no better than 1e-8.
        assert!(report.max_abs_diff < 1e-12, "{:e}", report.max_abs_diff);
    }
}

fn broken(fault: Fault) -> ModeReport {
    let mut settings = settings();
    fault.prepare(&mut settings).unwrap();
    let report = run(settings, &["ddp:ring"], Some(fault)).remove(0);
    assert_eq!(report.verdict, Verdict::Fail, "{fault:?}");
    report
}

#[test]
fn a_sum_for_the_mean_fails() {
    let report = broken(Fault::SumForMean);
    assert!(report.max_abs_diff > 1e-2 && report.bits_equal_ranks);
}

#[test]
fn no_all_reduce_fails() {
    let report = broken(Fault::NoAllReduce);
    assert!(!report.bits_equal_ranks && report.max_abs_diff > 1e-5);
    assert!(
        report
            .failures
            .iter()
            .any(|failure| failure.contains("reduced nothing"))
    );
}

#[test]
fn a_plain_mean_over_uneven_parts_fails() {
    let report = broken(Fault::PlainMean);
    assert!(report.max_abs_diff > 1e-5 && report.bits_equal_ranks);
    assert_eq!(report.failures.len(), 1, "{:?}", report.failures);
}

#[test]
fn the_full_batch_on_every_rank_fails_though_its_losses_are_right() {
    let report = broken(Fault::FullBatch);
    assert!(report.max_abs_diff <= 1e-5);
    let expected = "ranks trained 384 rows in step 1, the global batch has 96";
    assert_eq!(report.failures, [expected]);
}

#[test]
fn a_report_is_one_json_object_with_these_keys() {
    for report in RIGHT.iter() {
        let json = serde_json::to_value(report).unwrap();
        let keys: BTreeSet<&str> = json
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let expected = [
            "mode",
            "world_size",
            "steps",
            "losses",
            "final_loss",
            "max_abs_diff",
            "bits_equal_ranks",
            "weights_hash",
            "exact",
            "partial_bytes",
            "buckets",
            "bytes_per_rank",
            "bytes_formula",
            "hidden",
            "algorithm",
            "verdict",
        ];
        assert_eq!(keys, BTreeSet::from(expected));
        assert_eq!(json["verdict"], "pass");
    }
}

/// Few steps, each of which shows; world sizes that close their shards and one that does not.
fn exact(shards: usize) -> Settings {
    let mut settings = Settings::exact();
    settings.ddp.micro_shards = shards;
    settings.train.steps = 12;
    settings.compare.world_sizes = vec![1, 2, 3, 4];
    settings.settle()
}

const EXACT: [&str; 5] = [
    "single",
    "ddp:ring",
    "ddp:tree",
    "ddp:halving",
    "ddp:direct",
];

#[test]
fn with_micro_shards_every_bit_is_the_single_processs_at_every_world_size() {
    for (optimizer, dtype) in [
        (OptimizerKind::Adam, Precision::F32),
        (OptimizerKind::Momentum, Precision::F64),
    ] {
        let mut settings = exact(8);
        settings.optim.kind = optimizer;
        settings.optim.lr = 0.01;
        settings.model.dtype = dtype;
        settings.ddp.max_grad_norm = 0.5;
        // In 94 rows shards are of 11 and 12, and the last batch of an epoch leaves them short.
        settings.train.global_batch_size = 94;
        settings.train.steps = 17;
        let reports = run(settings, &EXACT, None);
        assert_eq!(reports.len(), 1 + 4 * 4);
        for report in &reports[1..] {
            let (mode, world) = (&report.mode, report.world_size);
            assert_eq!(
                report.verdict,
                Verdict::Pass,
                "{mode} {world}: {:?}",
                report.failures
            );
            assert!(report.exact);
            assert_eq!(report.losses, reports[0].losses);
            assert_eq!(report.weights_hash, reports[0].weights_hash);
            let ran = report.algorithm.as_deref().unwrap();
            assert_eq!(ran == "blocks", world == 3, "{mode} {world}: {ran}");
        }
    }
}

#[test]
fn one_bit_in_one_step_fails_the_exact_verdict_and_is_found() {
    let mut settings = exact(4);
    settings.compare.world_sizes = vec![2];
    let reports = run(settings.clone(), &["ddp:tree"], Some(Fault::OneBit));
    assert_eq!(reports[0].verdict, Verdict::Fail);
    let failure = &reports[0].failures[0];
    assert!(
        failure.contains("after step 5, in layers.0.weight, element ") && failure.contains(": 0x"),
        "{failure}"
    );
    // No tolerance shows it.
    settings.compare.exact = false;
    let reports = run(settings, &["ddp:tree"], Some(Fault::OneBit));
    assert_eq!(
        reports[0].verdict,
        Verdict::Pass,
        "{:?}",
        reports[0].failures
    );
}

#[test]
fn other_sums_than_the_tree_fail_the_exact_verdict() {
    // Without the one order of sums, the ring adds in another.
    let mut settings = exact(4);
    settings.collectives.deterministic = false;
    settings.compare.world_sizes = vec![4];
    let task = Task::new(settings).unwrap();
    let error = compare(&task, &["ddp:ring".parse().unwrap()], None, |_| ()).unwrap_err();
    assert!(error.to_string().contains("deterministic"), "{error}");
}

#[test]
fn accumulated_micro_batches_train_like_one_batch() {
    let mut settings = settings();
    settings.train.accumulate = 3;
    settings.run.world_size = 2;
    for report in run(settings, &["ddp:ring", "ddp:tree"], None) {
        assert_eq!(report.verdict, Verdict::Pass, "{:?}", report.failures);
    }
}
