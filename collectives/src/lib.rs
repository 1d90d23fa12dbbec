//! Collective operations among the ranks of a world: plans decided before
//! anything moves, carried out over any transport.
//!
//! ```
//! use collectives::{Algorithm, CommunicatorConfig, ReduceOp, launch};
//! let config = CommunicatorConfig::new().with_algorithm(Algorithm::Ring);
//! let sums = launch::spawn(4, &config, |mut communicator| {
//!     let mut gradient = vec![communicator.rank() as f32; 1000];
//!     communicator.all_reduce(&mut gradient, ReduceOp::Mean)?;
//!     let moved = communicator.stats().total();
//!     assert_eq!(moved.bytes_sent, moved.predicted_sent);
//!     Ok::<_, collectives::Error>(gradient[0])
//! }).unwrap();
//! assert_eq!(sums, [1.5; 4]);
//! ```
//!
//! Floors, each importing from its own or below: [`Place`], [`Partition`],
//! [`Plan`] and [`Algorithm`] are pure arithmetic; [`transport`] moves bytes;
//! an executor runs any plan over any transport; [`Communicator`] adds deadlines,
//! fingerprints and statistics; [`CommStream`] runs it on a thread of its own; and
//! [`launch`] makes worlds.
//!
//! Every wait ends: in the right values on every rank, or in an [`Error`] that
//! names the ranks at fault.
//!
//! Each call is a span of [`tracing`], named by the operation, target `lockstep`: who
//! listens sees when it ran on which rank, by which algorithm and over how many bytes.
//! A subscriber that was set for the caller's thread alone is set on the threads of
//! [`launch`] and [`CommStream`] too.
//!
//! Buffers are slices of plain numbers, and so contiguous: a strided view cannot be
//! passed by accident.
mod algorithm;
mod board;
mod communicator;
mod config;
mod element;
mod error;
mod executor;
mod fingerprint;
pub mod launch;
mod partition;
mod place;
pub mod schedule;
pub mod simulated;
mod stats;
mod stream;
mod trace;
pub mod transport;
pub mod tuning;

pub use algorithm::{Algorithm, Flow, Route, Shape, Traffic};
pub use board::{Board, Fate};
pub use communicator::{Communicator, Within};
pub use config::{Choice, CommunicatorConfig, Rule};
pub use element::{DType, Element, Operator, ReduceOp};
pub use error::{At, Error, Late, Result};
pub use fingerprint::{Call, Collective, Fingerprint};
pub use half::{bf16, f16};
pub use partition::{Partition, Parts};
pub use place::Place;
pub use schedule::Plan;
pub use stats::{Key, Row, Stats};
pub use stream::{CommStream, Work};
