//! One rank's run, from its device to the last checkpoint. Never parses and never validates.

/// Ranks run one program with one configuration on the same data.
pub mod same;
/// A directory that all ranks write into is one and the same.
pub mod shared;
/// Replicas hold the same bits.
pub mod verify;
/// What ranks agree on before a step, one step ahead.
pub mod agree;
/// Signals and the time limit.
pub mod stops;
/// Weights and moments to begin with.
pub mod load;
/// Held-out loss and the final sample.
pub mod evaluation;
/// `--lora-merge`.
pub mod merge;
/// The training loop.
pub mod trainer;
/// One rank from device to exit.
pub mod rank;

pub use rank::run;
