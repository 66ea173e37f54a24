//! Floor 7: one rank's training engine. A [`Strategy`] decides how parameters are stored; [`Engine`] is everything else
//! a rank needs for a step, the same for all strategies. Never knows flags, files or the loop.
mod bytes; // what a rank will hold, by category
mod work; // what a step computes, moves and receives
mod staging; // the device's copy of a micro-batch
mod labeled; // the rows of a micro-batch that the head reads
mod summed; // gradients that are partial sums over tp
mod load; // how evenly experts are used
mod objectives; // what a run minimizes
mod options; // what an engine trains, and how
mod watched; // a store with observers: timeline and memory
mod step; // one rank's step
mod scorer; // a reference model, once over a data set
mod evaluate; // losses without gradients, sums over ranks
mod draw; // a token from logits
mod sampler; // many texts at once
mod generate; // text generation

pub use crate::store::Strategy;
pub use bytes::PlannedRank;
pub use draw::Sampling;
pub use generate::{Generator, GeneratorOptions};
pub use load::ExpertLoad;
pub use objectives::{
    Dpo, Grpo, GrpoLoss, Kto, Objective, PreferenceMeans, PreferenceSums, ReferenceModel, Rm, RolloutMeans, StepCounts,
    StudentMeans, Teaching,
};
pub use options::EngineOptions;
pub use sampler::{Prompt, Sampled, SampledText, SamplerSize};
pub use scorer::ReferenceScorer;
pub use step::{Engine, PassTimes, Step, StepReport};
pub use work::{StepCounter, StepWork, WORKING_SETS, rehearse};
