//! `bench verify`: every collective by every algorithm against what gloo made of the
//! same inputs.
use std::{fs, path::PathBuf};

use clap::Args;
use collectives::Collective;

use super::{
    BenchError,
    output::Output,
    reference::{ANSWERS, RECORDED, Recording, Rule, Tally, Way},
    row::name,
    table::{Columns, short},
};

/// How to verify.
#[derive(Args, Clone, Debug)]
pub struct VerifyFlags {
    /// One order for every sum, whatever the algorithm
    #[arg(long)]
    pub deterministic: bool,
    /// The cases of 4 to 20 MiB a rank too, which take some ten seconds more
    #[arg(long)]
    pub large: bool,
    /// Another recording than that of the repository
    #[arg(long)]
    pub recording: Option<PathBuf>,
}

/// Verifies; true if every case holds.
///
/// # Errors
///
/// If a recording cannot be read.
pub fn verify(flags: &VerifyFlags) -> Result<bool, BenchError> {
    let cases = match &flags.recording {
        None => Recording::parse(RECORDED)?,
        Some(path) => {
            let bytes = fs::read(path);
            Recording::parse(&bytes.map_err(|error| {
                BenchError::usage(format!("cannot read {}: {error}", path.display()))
            })?)?
        }
    }
    .cases;
    let out = Output::new(None)?;
    let order = if flags.deterministic {
        ", deterministic"
    } else {
        ""
    };
    out.say(format!(
        "# {} recorded cases against gloo{order}",
        cases.len()
    ));
    let mut ways = Way::all();
    ways.retain(|way| way.deterministic == flags.deterministic);
    let mut tally = Tally::default();
    let mut left_out = 0;
    for case in &cases {
        match Collective::PLANNED.contains(&case.collective) {
            _ if case.is_large() && !flags.large => left_out += 1,
            true => tally.add(case, &ways),
            // There is nothing to choose.
            false => tally.add(case, &ways[..1]),
        }
    }
    say_table(&out, &tally);
    for (refused, what) in [
        (true, "and so do we, by a typed error"),
        (
            false,
            "and we offer; compared with a plain fold in rank order",
        ),
    ] {
        out.say(format!("# gloo refuses, {what}:"));
        for answer in ANSWERS.iter().filter(|answer| answer.refused == refused) {
            let count = tally.answered.get(answer.what).unwrap_or(&0);
            out.say(format!("#   {count:4}  {}", answer.what));
        }
    }
    out.say(format!(
        "# {} of {} cases run{}",
        cases.len() - left_out,
        cases.len(),
        match left_out {
            0 => String::new(),
            count => format!("; not run: {count} of 4 to 20 MiB a rank, which --large adds"),
        },
    ));
    out.say(match tally.faults.len() {
        0 => "# every case holds".to_owned(),
        _ => tally.first_faults(),
    });
    Ok(tally.faults.is_empty() && !tally.lines.is_empty())
}

fn say_table(out: &Output, tally: &Tally) {
    let columns = Columns::new([
        ("collective", 14),
        ("asked", 9),
        ("ran", 15),
        ("cases", 5),
        ("largest diff", 12),
        ("sent/rank(B)", 12),
        ("of which(B)", 12),
        ("formula(B)", 12),
        ("verdict", 7),
    ]);
    out.say(
        "# sent/rank: all cases, average over ranks, as counted; of which: cases where the least bytes are \
         due,\n# formula: those, 2T(N-1)/N for all_reduce, T(N-1)/N for reduce_scatter and all_gather",
    );
    out.say(format!("{}  held to", columns.heading()));
    for ((collective, way, ran), line) in &tally.lines {
        let asked = match Collective::PLANNED.contains(collective) {
            true => way.algorithm.name(),
            false => "-",
        };
        let rules: Vec<_> = line.runs.keys().map(Rule::to_string).collect();
        let known = |bytes: f64| {
            if line.least > 0.0 {
                format!("{bytes:.0}")
            } else {
                "-".to_owned()
            }
        };
        let difference = match line.difference {
            0.0 => "0".to_owned(),
            difference if difference < 1e-3 => format!("{difference:.2e}"),
            difference => short(difference),
        };
        let cells = [
            name(*collective).to_owned(),
            asked.to_owned(),
            ran.clone(),
            line.runs.values().sum::<usize>().to_string(),
            difference,
            format!("{:.0}", line.sent),
            known(line.sent_least),
            known(line.least),
            if line.failed == 0 { "ok" } else { "FAILED" }.to_owned(),
        ];
        out.say(format!("{}  {}", columns.line(&cells), rules.join(", ")));
    }
}
