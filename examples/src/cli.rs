//! The command lines of both programs, as flags over settings.

mod kmeans;
mod memory;
mod mlp;

pub use kmeans::KMeansCli;
pub use memory::MemoryFlags;
pub use mlp::{CompareFlags, MlpCli, MlpCommand, TrainFlags};

use std::path::Path;

use crate::config::read_tuning;
use crate::{ConfigError, Flag};

/// Collects the flags that were given.
#[derive(Default)]
struct Flags(Vec<Flag>);

impl Flags {
    fn add(
        &mut self,
        name: &'static str,
        key: &'static str,
        value: Option<impl Into<serde_json::Value>>,
    ) {
        if let Some(value) = value {
            let value = value.into();
            self.0.push(Flag { name, key, value });
        }
    }

    /// A number that is none, which JSON cannot hold, goes on as its name, for
    /// the setting to refuse.
    fn number(&mut self, name: &'static str, key: &'static str, value: Option<f64>) {
        match value {
            Some(value) if !value.is_finite() => self.add(name, key, Some(value.to_string())),
            _ => self.add(name, key, value),
        }
    }

    /// What `auto` goes by, from a file.
    fn tuning(&mut self, path: Option<&Path>) -> Result<(), ConfigError> {
        let rows = path.map(read_tuning).transpose()?;
        self.add("--tuning", "collectives.tuning", rows);
        Ok(())
    }

    /// One algorithm for all collectives, all-reduce too, whatever a file says
    /// of it.
    fn algorithm(&mut self, name: Option<String>) {
        let none = name.as_ref().map(|_| serde_json::Value::Null);
        self.add("--algorithm", "collectives.all_reduce", none);
        self.add("--algorithm", "collectives.algorithm", name);
    }
}
