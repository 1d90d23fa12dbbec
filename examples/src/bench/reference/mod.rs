//! What PyTorch's gloo backend made of recorded inputs, and the comparison with it.
//!
//! The recording lies in the repository, so nobody needs Python to compare. `bench verify`
//! and the tests hold the same cases to the same rules; a case takes two lines:
//!
//! ```
//! use examples::bench::reference::{Recording, Way, check};
//! let recording = Recording::committed();
//! let outcomes = check(&recording.cases[0], &Way::all());
//! assert!(outcomes.iter().all(|outcome| outcome.fault.is_none()));
//! ```
mod answer;
mod bytes;
mod call;
mod case;
mod check;
mod expected;
mod generator;
mod recording;
mod rule;
mod tally;
mod way;

pub use answer::{ANSWERS, Answer, answer};
pub use case::{Case, Inputs, Outputs};
pub use check::{Outcome, check};
pub use generator::{inputs, unit};
pub use recording::{RECORDED, Recording, ReferenceError, draft};
pub use rule::Rule;
pub use tally::{Line, Tally};
pub use way::Way;
