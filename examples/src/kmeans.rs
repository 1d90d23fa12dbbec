//! KMeans over ranks, as in the AllReduce article: each rank holds a part of
//! the rows, and one all-reduce of k * (d + 1) f64 an iteration is all that
//! moves.

mod agree;
mod fit;

pub use agree::KMeansError;
pub use fit::{KMeansFit, KMeansIteration, KMeansOptions, fit};
