//! ddp as a user sees it; one binary, since Burn is slow to link.
mod buckets;
mod edges;
mod equivalence;
mod exact;
mod failures;
mod hooks;
mod loops;
mod memory;
mod misuse;
mod models;
#[cfg(feature = "ndarray")]
mod ndarray;
mod optimizers;
mod overlap;
mod parameters;
mod positive;
mod reducer;
mod replicas;
mod sampler;
mod steady;
mod support;
