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

const MODES: [&str; 8] = [
    "single",
    "ddp:ring",
    "ddp:tree",
    "ddp:naive",
    "ddp:auto",
    "zero:1",
    "zero:2",
    "zero:3",
];

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
            "traffic",
            "held_bytes",
            "held_formula",
            "peak_formula",
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

#[test]
fn every_stage_has_every_bit_of_ddp_by_the_tree() {
    let tree = &RIGHT[2];
    for report in &RIGHT[5..] {
        assert_eq!(report.losses, tree.losses, "{}", report.mode);
        assert_eq!(report.weights_hash, tree.weights_hash, "{}", report.mode);
    }
    // Also where it is not among the modes.
    let alone = run(settings(), &["zero:2"], None).remove(0);
    assert_eq!(alone.verdict, Verdict::Pass, "{:?}", alone.failures);
    assert_eq!(alone.weights_hash, tree.weights_hash);
}

/// Bytes that all ranks sent, by collective.
fn bytes(report: &ModeReport) -> [u64; 4] {
    let kinds = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"];
    let of = |kind| {
        let mut rows = report.traffic.iter();
        let row = rows.find(|row| row.collective == kind).unwrap();
        assert_eq!(row.bytes, row.bytes_formula, "{} {kind}", report.mode);
        row.bytes
    };
    kinds.map(of)
}

#[test]
fn every_stage_moves_what_its_formula_says_by_each_collective() {
    let (parameters, steps) = (64 * 128 + 128 + 128 * 10 + 10, STEPS as u64);
    // Samples and loss, a count for each of four tensors, and one more.
    let tails = 5 + 4 + 1;
    // The second layer's weight, and the bias that shares its bucket: the first layer's weight, and
    // the last bias, are not needed in the backward pass.
    let again = 128 * 10 + 128;
    // Each of 4 ranks tells the others by an f64 whether its part is numbers.
    let told = 3 * 4 * 8;
    // A unit is (N-1)/N on each of N ranks: 3 times in all.
    let unit = 3 * 4;
    for (at, per_step) in [
        (1, [2 * unit * (parameters + tails), 0, 0, 0]),
        (
            5,
            [2 * unit * (parameters + tails), 0, unit * parameters, 0],
        ),
        (
            6,
            [
                2 * unit * tails,
                unit * parameters,
                unit * parameters + told,
                0,
            ],
        ),
        (
            7,
            [
                2 * unit * tails,
                unit * parameters,
                unit * (parameters + again) + told,
                0,
            ],
        ),
    ] {
        let expected = per_step.map(|bytes| steps * bytes);
        assert_eq!(bytes(&RIGHT[at]), expected, "{}", RIGHT[at].mode);
    }
    let units: Vec<f64> = RIGHT
        .iter()
        .map(|report| report.traffic.iter().map(|row| row.units).sum())
        .collect();
    // 2, 3, 2, and up to 3 units, and a little for the tails.
    for (at, due) in [(1, 2.0), (2, 2.0), (5, 3.0), (6, 2.0)] {
        assert!((due..due + 0.01).contains(&units[at]), "{units:?}");
    }
    assert!(units[7] < 3.0, "{units:?}");
}

#[test]
fn every_stage_holds_what_its_formula_says() {
    let mut settings = settings();
    settings.optim.kind = OptimizerKind::Adam;
    settings.optim.lr = 0.01;
    settings.train.steps = 3;
    let reports = run(settings, &["ddp:tree", "zero:1", "zero:2", "zero:3"], None);
    let parameters = 64 * 128 + 128 + 128 * 10 + 10;
    // Rank 0's parts of buckets of 10, 1408 and 8192.
    let part = 3 + 352 + 2048;
    let tails = 10;
    let expected = [
        16 * parameters,
        8 * parameters + 4 * tails + 8 * part,
        4 * parameters + 12 * part,
        16 * part,
    ];
    for (report, expected) in reports.iter().zip(expected) {
        assert_eq!(report.verdict, Verdict::Pass, "{:?}", report.failures);
        let held = (report.held_bytes, report.held_formula);
        assert_eq!(held, (expected, expected), "{}", report.mode);
        assert!(report.peak_formula >= expected);
    }
}

#[test]
fn sharded_modes_pass_by_every_algorithm_at_other_world_sizes_and_settings() {
    let modes = [
        "zero:1:naive",
        "zero:2:tree",
        "zero:3:halving",
        "zero:1:auto",
        "zero:2:direct",
        "zero:3:tree",
    ];
    // Of 7 rows on 8 ranks one has none, and of three micro-batches a rank stage 3 fills two up.
    for (world, batch, accumulate, overlap) in [
        (1, 96, 1, true),
        (3, 94, 3, true),
        (5, 94, 1, false),
        (8, 7, 3, true),
    ] {
        let mut settings = settings();
        settings.train.steps = 9;
        settings.run.world_size = world;
        settings.train.global_batch_size = batch;
        settings.train.accumulate = accumulate;
        settings.ddp.overlap = overlap;
        if batch == 94 {
            // In one bucket, and each parameter by itself.
            settings.ddp.bucket_cap_mb = if overlap { 25.0 } else { 0.0 };
            settings.ddp.max_grad_norm = if overlap { 0.0 } else { 0.3 };
        }
        for report in run(settings, &modes, None) {
            let (mode, failures) = (&report.mode, &report.failures);
            assert_eq!(
                report.verdict,
                Verdict::Pass,
                "{mode} {world}: {failures:?}"
            );
            assert_eq!(report.world_size, world);
        }
    }
}

#[test]
fn with_micro_shards_every_stage_has_every_bit_of_the_single_process() {
    for (optimizer, dtype) in [
        (OptimizerKind::Adam, Precision::F32),
        (OptimizerKind::Momentum, Precision::F64),
    ] {
        let mut settings = exact(8);
        settings.compare.world_sizes = vec![1, 2, 4, 8];
        settings.optim.kind = optimizer;
        settings.optim.lr = 0.01;
        settings.model.dtype = dtype;
        settings.ddp.max_grad_norm = 0.5;
        settings.train.global_batch_size = 94;
        settings.train.steps = 17;
        let reports = run(settings, &["single", "zero:1", "zero:2", "zero:3"], None);
        assert_eq!(reports.len(), 1 + 3 * 4);
        for report in &reports[1..] {
            let (mode, world, failures) = (&report.mode, report.world_size, &report.failures);
            assert_eq!(
                report.verdict,
                Verdict::Pass,
                "{mode} {world}: {failures:?}"
            );
            assert!(report.exact);
            assert_eq!(report.losses, reports[0].losses);
            assert_eq!(report.weights_hash, reports[0].weights_hash);
        }
    }
}

#[test]
fn micro_shards_that_do_not_close_have_the_same_bits_at_stages_1_and_2() {
    let mut settings = exact(8);
    settings.compare.world_sizes = vec![3];
    for report in run(settings, &["zero:1", "zero:2"], None) {
        assert_eq!(report.verdict, Verdict::Pass, "{:?}", report.failures);
        assert_eq!(report.algorithm.as_deref(), Some("blocks"));
    }
}

#[test]
fn one_bit_fails_a_sharded_mode_though_nothing_is_exact() {
    let mut settings = settings();
    settings.train.steps = 8;
    for mode in ["zero:1", "zero:2"] {
        let report = run(settings.clone(), &[mode], Some(Fault::OneBit)).remove(0);
        assert_eq!(report.verdict, Verdict::Fail);
        let failure = &report.failures[0];
        assert!(failure.contains("other bits than ddp:tree"), "{failure}");
    }
    // No weight is there to be changed at stage 3.
    settings.compare.modes = vec!["zero:3".to_owned()];
    let error = Fault::OneBit.prepare(&mut settings).unwrap_err();
    assert!(error.to_string().contains("stage 3"), "{error}");
}

#[test]
fn each_fault_fails_at_every_stage() {
    for fault in [
        Fault::SumForMean,
        Fault::NoAllReduce,
        Fault::PlainMean,
        Fault::FullBatch,
    ] {
        let mut settings = settings();
        settings.train.steps = 6;
        fault.prepare(&mut settings).unwrap();
        for report in run(settings, &["zero:1", "zero:2", "zero:3"], Some(fault)) {
            assert_eq!(report.verdict, Verdict::Fail, "{fault:?}, {}", report.mode);
        }
    }
}
