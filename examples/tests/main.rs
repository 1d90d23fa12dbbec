//! The claims of the examples, in one binary, since Burn is slow to link.

mod bench;
mod compare;
mod config;
mod data;
mod kmeans;
mod programs;
mod report;
mod sharded;
mod trace;
