//! One collective, size and world, measured in rounds by every contender.
use collectives::{Algorithm, CommunicatorConfig};

use super::{BenchError, Job, Measured, Setting, measure};

/// Times that grow round by round.
pub(super) struct Spot {
    pub(super) job: Job,
    pub(super) ranks: usize,
    /// By contender; nothing before the first round.
    pub(super) measured: Vec<Measured>,
}

impl Spot {
    pub(super) fn new(job: Job, ranks: usize) -> Self {
        Self {
            job,
            ranks,
            measured: vec![],
        }
    }

    /// One round more, as `setting` says, but among this spot's ranks.
    pub(super) fn measure(
        &mut self,
        setting: Setting,
        contenders: &[CommunicatorConfig],
    ) -> Result<(), BenchError> {
        let ranks = self.ranks;
        let round = measure(&self.job, &Setting { ranks, ..setting }, contenders)?;
        self.measured = match self.measured.is_empty() {
            true => round,
            false => {
                let pairs = self.measured.drain(..).zip(round);
                pairs.map(|(before, now)| before.and(now)).collect()
            }
        };
        Ok(())
    }
}

/// Settings for each algorithm, and else the usual ones.
pub(super) fn contenders(algorithms: &[Algorithm]) -> Vec<CommunicatorConfig> {
    let by = |&algorithm| CommunicatorConfig::new().with_algorithm(algorithm);
    algorithms.iter().map(by).collect()
}
