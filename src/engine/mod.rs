//! Floor 7: one rank's training engine. A [`Strategy`] decides how parameters are kept; [`Engine`] is everything else
//! that a rank needs for a step, and is the same for all of them. Never knows flags, files or the loop.
mod bytes; // what a rank will hold, by category
mod staging; // the device's copy of a micro-batch
mod summed; // gradients that ranks of tp compute a part of each
mod watched; // a store that is watched: marks, memory, recomputation
mod step; // one rank's step
mod generate; // text from a model

pub use crate::store::Strategy;
pub use bytes::PlannedRank;
pub use generate::{Generator, GeneratorOptions, Sampling};
pub use step::{Engine, EngineOptions, PassTimes, Step, StepReport};
