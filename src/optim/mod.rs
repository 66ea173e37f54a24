//! Floor 5: from a summed gradient to new weights: the exact norm, clipping, AdamW and SGD, learning-rate schedules,
//! the loss scale of f16. Never knows of strategies, layers or files.
pub mod clip; // the norm of all gradients
pub mod optimizer; // AdamW and SGD
pub mod schedule; // learning rates
pub mod scaler; // the loss scale of f16

pub use clip::GradNorm;
pub use optimizer::{Optimizer, Rule};
pub use scaler::{LossScaler, ScalerOptions};
pub use schedule::{DecayShape, Schedule, Warmup};
