//! The part of `experiments` that others can call: the planner. Never the binary's other verbs.
pub mod plan;
