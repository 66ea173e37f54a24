//! The library part of `experiments`: the planner. The other subcommands are in the binary only.
#[macro_use]
mod say;

pub mod plan;
