//! What people run: an MLP trained data-parallel, and KMeans over all-reduce.
//!
//! The binaries `mlp` and `kmeans` are thin; everything they do is here, so
//! that tests do it too.

mod data;
mod fingerprint;
mod random;

mod config;

mod kmeans;
mod model;
mod optimizer;

mod report;

pub use config::{
    Compare, ConfigError, Data, Flag, KMeansData, KMeansRun, KMeansSettings, Model, Optim,
    OptimizerKind, Precision, Preset, Run, Settings, Train, print, resolve,
};
pub use data::{
    DataError, DataSet, IdxImages, Matrix, Samples, article_start, digits, idx_images, idx_labels,
    iris, mnist_folder, parse_iris, read_csv, synthetic,
};
pub use fingerprint::fingerprint;
pub use kmeans::{KMeansError, KMeansFit, KMeansIteration, KMeansOptions, fit};
pub use model::Mlp;
pub use optimizer::optimizer;
pub use random::SplitMix64;
pub use report::{Curve, Table, curves_csv, curves_svg, grouped};
