//! The part of `experiments` that others can call: the planner. Never the binary's other verbs.
#[macro_use]
mod say;

pub mod plan;
