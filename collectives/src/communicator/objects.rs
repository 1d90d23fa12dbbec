//! Values of any type that serde knows, by way of bytes.
//!
//! The format is postcard: it names no types and runs no code on the reading side.
use serde::{Serialize, de::DeserializeOwned};

use super::Communicator;
use crate::{Collective, Error, Result};

impl Communicator {
    /// Gives every rank the value of `root`; the other ranks give `None`.
    ///
    /// Two broadcasts: the length in bytes, then the bytes.
    ///
    /// ```
    /// use collectives::{CommunicatorConfig, launch};
    /// let names = launch::spawn(3, &CommunicatorConfig::new(), |mut communicator| {
    ///     let mine = (communicator.rank() == 1).then(|| "one".to_owned());
    ///     communicator.broadcast_object(mine, 1)
    /// }).unwrap();
    /// assert_eq!(names, ["one"; 3]);
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the root gives no value or one that cannot be written;
    /// [`Error::Object`] if the bytes are no such value.
    pub fn broadcast_object<V: Serialize + DeserializeOwned>(
        &mut self,
        value: Option<V>,
        root: usize,
    ) -> Result<V> {
        let mut bytes = vec![];
        if self.rank() == root {
            bytes = self.write(value.as_ref(), Some(root))?;
        }
        let mut len = [bytes.len() as u64];
        self.broadcast(&mut len, root)?;
        if self.rank() != root {
            bytes = self.zeros(Collective::Broadcast, len[0], root)?;
        }
        self.broadcast(&mut bytes, root)?;
        match value {
            Some(value) if self.rank() == root => Ok(value),
            _ => self.read(Collective::Broadcast, &bytes, root),
        }
    }

    /// Gives every rank the values of all ranks, in rank order.
    ///
    /// Two all_gathers: the lengths in bytes, then the bytes.
    ///
    /// # Errors
    ///
    /// As [`broadcast_object`](Self::broadcast_object).
    pub fn all_gather_object<V: Serialize + DeserializeOwned>(
        &mut self,
        value: &V,
    ) -> Result<Vec<V>> {
        let bytes = self.write(Some(value), None)?;
        let mut lens = vec![0; self.world_size()];
        self.all_gather(&[bytes.len() as u64], &mut lens)?;
        let counts: Vec<_> = lens.iter().map(|&len| len as usize).collect();
        let largest = (0..lens.len()).max_by_key(|&rank| lens[rank]).unwrap_or(0);
        let total = lens.iter().copied().fold(0, u64::saturating_add);
        let mut all = self.zeros(Collective::AllGather, total, largest)?;
        self.all_gather_v(&bytes, &counts, &mut all)?;
        let mut rest = &all[..];
        counts
            .iter()
            .enumerate()
            .map(|(rank, &count)| {
                let (own, others) = rest.split_at(count);
                rest = others;
                self.read(Collective::AllGather, own, rank)
            })
            .collect()
    }

    fn write<V: Serialize>(&mut self, value: Option<&V>, root: Option<usize>) -> Result<Vec<u8>> {
        let written = match value {
            Some(value) => postcard::to_allocvec(value).map_err(|error| error.to_string()),
            None => Err("it gives none".to_owned()),
        };
        written.map_err(|what| {
            let collective = if root.is_some() {
                Collective::Broadcast
            } else {
                Collective::AllGather
            };
            let call = self.call::<u8>(collective, None, root, 0);
            self.refuse(call, format!("this rank's object cannot be sent: {what}"))
        })
    }

    fn read<V: DeserializeOwned>(
        &mut self,
        collective: Collective,
        bytes: &[u8],
        peer: usize,
    ) -> Result<V> {
        let what = match postcard::take_from_bytes(bytes) {
            Ok((value, [])) => return Ok(value),
            Ok((_, rest)) => format!("{} of its {} bytes are left over", rest.len(), bytes.len()),
            Err(error) => error.to_string(),
        };
        Err(self.unreadable(collective, bytes.len(), peer, what))
    }

    /// Room for `len` bytes; more than there is would end the process.
    fn zeros(&mut self, collective: Collective, len: u64, peer: usize) -> Result<Vec<u8>> {
        let (len, mut bytes) = (len as usize, vec![]);
        match bytes.try_reserve_exact(len) {
            Ok(()) => {
                bytes.resize(len, 0);
                Ok(bytes)
            }
            Err(_) => {
                let what = format!("there is no room for {len} bytes");
                Err(self.unreadable(collective, len, peer, what))
            }
        }
    }

    fn unreadable(
        &mut self,
        collective: Collective,
        len: usize,
        peer: usize,
        what: String,
    ) -> Error {
        let root = (collective == Collective::Broadcast).then_some(peer);
        let call = self.call::<u8>(collective, None, root, len);
        let at = self.at(self.fingerprint(call, self.issued, None));
        self.stop(Error::Object { at, peer, what })
    }
}
