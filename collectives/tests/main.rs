//! Every plan played, every call run live, every fault provoked.
mod barrier;
mod config;
mod faults;
mod fingerprint;
mod launch;
mod live;
mod memory;
mod partition;
mod plans;
mod stats;
mod stream;
mod world;
