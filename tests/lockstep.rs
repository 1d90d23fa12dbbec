//! One binary for what no single crate can prove alone.
mod checkpoints;
mod gloo;
mod loops;
