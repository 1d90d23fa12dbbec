//! What was compared, how, and what came of it.
use std::collections::BTreeMap;

use collectives::{Algorithm, Collective};

use super::{Case, Outcome, Rule, Way, answer, check};

/// The cases so far. A comparison that runs on nothing proves nothing, so it counts.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Cases whose outputs gloo gave.
    pub compared: BTreeMap<Collective, usize>,
    /// Cases of which it gave a hash.
    pub large: usize,
    /// Cases that it refused, by [kind](super::Answer::what).
    pub answered: BTreeMap<&'static str, usize>,
    /// Runs by operation, by what was asked for, and by the name of what ran
    /// (of what was refused, what would have).
    pub lines: BTreeMap<(Collective, Way, String), Line>,
    /// What is wrong.
    pub faults: Vec<String>,
}

/// What the runs of one kind came to. Bytes are averages of a rank, all runs together.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Runs by the rule that held them.
    pub runs: BTreeMap<Rule, usize>,
    /// The largest difference between an element and gloo's.
    pub difference: f64,
    /// Bytes sent.
    pub sent: f64,
    /// Bytes sent where the least is known.
    pub sent_least: f64,
    /// The least there.
    pub least: f64,
    /// Runs with a fault.
    pub failed: usize,
}

impl Tally {
    /// Carries out and compares `cases` in each way.
    pub fn of<'a>(cases: impl IntoIterator<Item = &'a Case>, ways: &[Way]) -> Self {
        let mut tally = Self::default();
        cases.into_iter().for_each(|case| tally.add(case, ways));
        tally
    }

    /// Carries out and compares `case` in each way.
    pub fn add(&mut self, case: &Case, ways: &[Way]) {
        match answer(case) {
            Some(answer) => *self.answered.entry(answer.what).or_default() += 1,
            None if case.is_large() => self.large += 1,
            None => *self.compared.entry(case.collective).or_default() += 1,
        }
        for outcome in check(case, ways) {
            let ran = match (outcome.route, case.collective) {
                (Some(route), _) => route.to_string(),
                (None, Collective::SendRecv) => "-".to_owned(),
                (None, planned) if Collective::PLANNED.contains(&planned) => {
                    outcome.way.algorithm.to_string()
                }
                (None, _) => Algorithm::Direct.to_string(),
            };
            let key = (case.collective, outcome.way, ran);
            self.lines.entry(key).or_default().add(case, &outcome);
            let (way, rule) = (outcome.way, outcome.rule);
            let fault = outcome
                .fault
                .map(|what| format!("{} by {way} ({rule}): {what}", case.name));
            self.faults.extend(fault);
        }
    }

    /// Runs by the rule that held them.
    pub fn runs(&self) -> BTreeMap<Rule, usize> {
        let mut all = BTreeMap::new();
        for (rule, runs) in self.lines.values().flat_map(|line| &line.runs) {
            *all.entry(*rule).or_default() += runs;
        }
        all
    }

    /// The first faults, and how many there are.
    pub fn first_faults(&self) -> String {
        let first = self.faults.iter().take(20);
        let lines = first.map(|fault| format!("# FAILED {fault}\n"));
        format!(
            "{}# {} FAILED",
            lines.collect::<String>(),
            self.faults.len()
        )
    }
}

impl Line {
    fn add(&mut self, case: &Case, outcome: &Outcome) {
        *self.runs.entry(outcome.rule).or_default() += 1;
        self.difference = self.difference.max(outcome.difference);
        let sent = outcome.sent as f64 / case.world as f64;
        self.sent += sent;
        if let Some(least) = outcome.least {
            self.sent_least += sent;
            self.least += least;
        }
        self.failed += usize::from(outcome.fault.is_some());
    }
}
