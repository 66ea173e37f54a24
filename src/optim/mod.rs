//! Floor 5: from a summed gradient to new weights: the exact norm, clipping, AdamW, SGD and Muon, learning-rate
//! schedules, f16 loss scaling. Never knows about strategies, layers or files.
pub mod clip; // global gradient norm and clip factor
mod owners; // which rank orthogonalizes which matrix
mod newton_schulz; // the iteration of one matrix
mod moments; // state, and the ranges that are updated together
mod muon; // exchange, iteration and update of all matrices
pub mod optimizer; // the rules, their state, AdamW and SGD
pub mod schedule; // learning-rate schedules
pub mod scaler; // f16 loss scaling

pub use clip::GradNorm;
pub use moments::{Converted, Moments, StoredSlice};
pub use optimizer::{Optimizer, Rule};
pub use scaler::{LossScaler, ScalerOptions};
pub use schedule::{DecayShape, Schedule, Warmup};
