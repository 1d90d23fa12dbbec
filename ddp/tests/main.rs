//! ddp as a user sees it; one binary, since Burn is slow to link.
mod buckets;
mod equivalence;
mod failures;
mod memory;
mod overlap;
mod parameters;
mod reducer;
mod replicas;
mod sampler;
mod support;
