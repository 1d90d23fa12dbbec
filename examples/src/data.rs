//! Rows to train on: read from files, embedded, or made up.

mod csv;
mod dataset;
mod digits;
mod error;
mod idx;
mod iris;
mod matrix;
mod synthetic;

pub use csv::read_csv;
pub use dataset::{DataSet, Samples};
pub use digits::{digits, mnist_folder};
pub use error::DataError;
pub use idx::{IdxImages, idx_images, idx_labels};
pub use iris::{article_start, iris, parse_iris};
pub use matrix::Matrix;
pub use synthetic::synthetic;
