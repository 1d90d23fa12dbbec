//! One binary for what no single crate can prove alone.
mod gloo;
mod loops;
