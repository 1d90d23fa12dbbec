//! ddp as a user sees it; one binary, since Burn is slow to link.
mod buckets;
mod equivalence;
mod exact;
mod failures;
mod hooks;
mod loops;
mod memory;
mod overlap;
mod parameters;
mod reducer;
mod replicas;
mod sampler;
mod support;
