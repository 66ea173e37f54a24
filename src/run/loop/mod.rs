//! One rank's run, from its device to the last checkpoint. Never parses and never validates.

/// Checks that ranks run the same program with the same configuration on the same data.
pub mod same;
/// Checks that output directories are shared by all ranks.
pub mod shared;
/// Checks that replicas are bitwise equal.
pub mod verify;
/// The vote of all ranks before a step, one step ahead.
pub mod agree;
/// Signals and the time limit.
pub mod stops;
/// Algorithms of matrix products, before the first step.
pub mod tune;
/// Initial weights and moments.
pub mod load;
mod reference; // log-probabilities of the reference model
/// Held-out loss and the final sample.
pub mod evaluation;
/// What the run has made.
pub mod export;
/// What its parts share.
pub mod context;
/// The training loop.
pub mod trainer;
/// One rank from device to exit.
pub mod rank;

pub use rank::run;
