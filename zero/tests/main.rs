//! zero as a user sees it; one binary, since Burn is slow to link.
mod bits;
mod checkpoint;
mod decisions;
mod loops;
mod matrix;
mod memory;
mod odd;
mod overlap;
mod parts;
mod refusals;
mod resume;
mod run;
#[path = "../../ddp/tests/support.rs"]
#[allow(dead_code, reason = "shared with ddp's tests, which use all of it")]
mod support;
mod traffic;
mod trials;
