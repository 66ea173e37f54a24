//! From settings to a [`Plan`]: read -> check -> derive -> fit. All validation is here and in the settings, before any
//! rank starts: what a plan says is right, and the loop checks nothing again.

/// Devices, mesh and carrier of the ranks.
pub mod device;
pub mod carrier;
pub mod mesh;
pub mod ranks;
/// Sequences of a step.
pub mod batch;
/// The model, the engine's options and the bytes that they take.
pub mod model;
pub mod zero;
pub mod tensor;
pub mod engine;
pub mod knobs;
pub mod bytes;
/// The data, how they are split, and for how many steps.
pub mod data;
pub mod split;
pub mod schedule;
/// Checkpoints, faults and traces.
pub mod save;
pub mod resume;
pub mod restarts;
pub mod profile;
/// Settings against each other and against the places that they name.
pub mod check;
/// All of it: a training run.
pub mod training;
/// What this host has room for.
pub mod memory;
pub mod fit;
/// A plan without data, for any machine: what a planner asks.
pub mod outline;

pub use training::Plan;
