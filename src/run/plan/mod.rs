//! From settings to a [`Plan`]: read -> check -> derive -> fit. All validation is here and in the settings, before any
//! rank starts: what a plan says is right, and the loop checks nothing again.

/// What device `auto` is.
pub mod device;
/// What moves data between ranks.
pub mod carrier;
/// The axes of the mesh.
pub mod mesh;
/// All of a run's ranks.
pub mod ranks;
/// Sequences of a step.
pub mod batch;
/// The model's shapes.
pub mod model;
/// Options of backend zero.
pub mod zero;
/// What is cut over tp.
pub mod tensor;
/// The engine's options.
pub mod engine;
/// Options of sharding against each other.
pub mod knobs;
/// Bytes of a rank.
pub mod bytes;
/// Tokenizer and data set.
pub mod data;
/// Which rows are held out.
pub mod split;
/// Steps and learning rates.
pub mod schedule;
/// How checkpoints are written.
pub mod save;
/// Which checkpoint the run resumes from.
pub mod resume;
/// The best checkpoint and early stopping.
pub mod evaluations;
/// What follows a failure.
pub mod restarts;
/// What W&B reads.
pub mod wandb;
/// Which steps are traced.
pub mod profile;
/// Settings against each other and against the places that they name.
pub mod check;
/// What a plan knows and settings do not.
pub mod facts;
/// All of it: a training run.
pub mod training;
/// What the kernel says about memory.
pub mod memory;
/// Whether this host has room.
pub mod fit;
/// A plan without data, for any machine: what a planner asks.
pub mod outline;

pub use training::Plan;
