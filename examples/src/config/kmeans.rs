//! The settings of `kmeans`.

use std::path::PathBuf;

use collectives::CommunicatorConfig;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::mlp::{check_world_size, not_negative, printable};

/// Everything `kmeans fit` can be told, one field a section of the TOML file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KMeansSettings {
    /// `[run]`
    pub run: KMeansRun,
    /// `[data]`
    pub data: KMeansData,
    /// `[collectives]`
    pub collectives: CommunicatorConfig,
}

/// `[run]`: who computes, and how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KMeansRun {
    /// Ranks, one thread each.
    pub world_size: usize,
    /// Clusters; unset takes as many as the start has rows.
    pub k: Option<usize>,
    /// Stop when no centroid moved farther than this.
    pub epsilon: f64,
    /// Stop after this many iterations in any case.
    pub max_iter: usize,
}

/// `[data]`: what is clustered, and from where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KMeansData {
    /// A CSV file of numbers without a header; empty for the embedded Iris.
    pub file: PathBuf,
    /// A CSV file of starting centroids; empty for the article's, which fit
    /// the embedded Iris only.
    pub init: PathBuf,
}

impl Default for KMeansSettings {
    /// The embedded Iris from the article's start; epsilon and max_iter as
    /// Alink's KMeans has them.
    fn default() -> Self {
        Self {
            run: KMeansRun {
                world_size: 4,
                k: None,
                epsilon: 1e-4,
                max_iter: 50,
            },
            data: KMeansData {
                file: PathBuf::new(),
                init: PathBuf::new(),
            },
            collectives: CommunicatorConfig::default(),
        }
    }
}

impl KMeansSettings {
    /// Refuses what has the right type and makes no sense.
    ///
    /// # Errors
    /// [`ConfigError::Value`], naming the first such key and what is allowed.
    pub fn check(&self) -> Result<(), ConfigError> {
        check_world_size("run.world_size", self.run.world_size)?;
        if self.run.k == Some(0) {
            return Err(ConfigError::value("run.k", 0, "1 to the number of rows"));
        }
        if self.run.max_iter == 0 {
            return Err(ConfigError::value("run.max_iter", 0, "1 or more"));
        }
        printable("run.k", self.run.k.unwrap_or_default() as u64)?;
        printable("run.max_iter", self.run.max_iter as u64)?;
        not_negative("run.epsilon", self.run.epsilon)?;
        self.collectives
            .validate()
            .map_err(ConfigError::of_collectives)
    }
}
