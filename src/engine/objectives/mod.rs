//! What a run minimizes. Fine-tuning's mean over tokens is the decoder's own loss; the others are functions of
//! log-probabilities, of whole sequences or of tokens. Never knows how rows become sequences.
mod dpo; // the loss of a pair
mod rm; // the loss of a reward model
mod kto; // the loss of a labeled answer
mod grpo; // the loss of a sampled token
mod objective; // all of them
mod sums; // sums of a step's pairs, answers or tokens
mod sequences; // log-probabilities in, weights of sequences out
mod rollouts; // log-probabilities in, weights of tokens out
mod reference; // the frozen reference model
mod teaching; // distillation
mod students; // samples that a teacher corrects
mod preference; // a micro-batch of answers, from reference to backward
mod step; // what the engine's loop minimizes

pub use dpo::Dpo;
pub use grpo::{Grpo, GrpoLoss};
pub use kto::Kto;
pub use objective::{Objective, StepCounts};
pub(super) use preference::{Policy, PreferenceLoss};
pub(super) use reference::FrozenModel;
pub use reference::ReferenceModel;
pub use rm::Rm;
pub(super) use sequences::Sequences;
pub(super) use step::{StepObjective, StepTotals};
pub use students::StudentMeans;
pub use sums::{PreferenceMeans, PreferenceSums, RolloutMeans};
pub(super) use sums::{SUMS, StepMeans};
pub(super) use teaching::TeacherModel;
pub use teaching::Teaching;
