//! The choice of an objective. Never computes.
use super::dpo::Dpo;

/// What a run minimizes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Objective {
    /// The cross entropy of tokens: the mean over all tokens with loss of a step.
    #[default]
    Sft,
    /// Direct preference optimization: the mean over all pairs of a step.
    Dpo(Dpo),
}
