//! Worlds within a world.
use std::collections::HashSet;

use super::Communicator;
use crate::{Collective, Result, fingerprint::terms, transport::Transport};

impl Communicator {
    /// A communicator among `ranks` of this world, numbered in that order. Every
    /// rank of this world calls it, with the same list; those not in it get `None`.
    ///
    /// The group has links, numbers and deadlines of its own: it may be used from
    /// another thread, at the same time as this communicator and other groups. An
    /// error in the group stops the group alone.
    ///
    /// ```
    /// use collectives::{CommunicatorConfig, ReduceOp, launch};
    /// let sums = launch::spawn(4, &CommunicatorConfig::new(), |mut communicator| {
    ///     let mut mine = [communicator.rank() as f32];
    ///     if let Some(mut evens) = communicator.new_group(&[0, 2])? {
    ///         evens.all_reduce(&mut mine, ReduceOp::Sum)?;
    ///     }
    ///     Ok::<_, collectives::Error>(mine[0])
    /// }).unwrap();
    /// assert_eq!(sums, [2.0, 1.0, 2.0, 3.0]);
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if a rank is none of this world's,
    /// or stands there twice; [`Error::Mismatch`](crate::Error::Mismatch) if lists differ.
    pub fn new_group(&mut self, ranks: &[usize]) -> Result<Option<Self>> {
        let world = self.world_size();
        let mut seen = HashSet::new();
        let fault = match ranks
            .iter()
            .find(|&&rank| rank >= world || !seen.insert(rank))
        {
            Some(&rank) if rank >= world => Some(format!(
                "no rank {rank} to be in a group: ranks are 0 to {}",
                world - 1
            )),
            Some(rank) => Some(format!("rank {rank} stands in the group twice")),
            None => ranks
                .is_empty()
                .then(|| "a group has at least one rank".to_owned()),
        };
        if let Some(what) = fault {
            let call = self.call::<u8>(Collective::Split, None, None, 0);
            return Err(self.refuse(call, what));
        }
        self.meet(Collective::Split, terms(ranks.iter().copied()))?;
        self.join(ranks)
    }

    /// Cuts this world into groups: ranks of one `color` are together, in the order
    /// of their keys, then of their ranks. A rank without color gets none.
    ///
    /// One all_gather of two numbers a rank, then as [`new_group`](Self::new_group).
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn split(&mut self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let mut all = vec![0; 2 * self.world_size()];
        let mine = [color.map_or(-1, i64::from), key];
        self.all_gather(&mine, &mut all)?;
        if color.is_none() {
            // The group's number is this call's: all count alike.
            return Ok(None);
        }
        let mut members: Vec<_> = all
            .chunks_exact(2)
            .enumerate()
            .filter(|(_, theirs)| theirs[0] == mine[0])
            .map(|(rank, theirs)| (theirs[1], rank))
            .collect();
        members.sort_unstable();
        let ranks: Vec<_> = members.into_iter().map(|(_, rank)| rank).collect();
        self.join(&ranks)
    }

    fn join(&mut self, ranks: &[usize]) -> Result<Option<Self>> {
        if !ranks.contains(&self.rank()) {
            return Ok(None);
        }
        let link = self.link.split(self.issued, ranks).map_err(|trouble| {
            let call = self.call::<u8>(Collective::Split, None, None, 0);
            let error = self.explain(trouble, self.fingerprint(call, self.issued, None));
            self.stop(error)
        })?;
        let mut group = Self::new(link, &self.config)?;
        group.group = Some(ranks.into());
        group.timeout = self.timeout;
        Ok(Some(group))
    }
}
