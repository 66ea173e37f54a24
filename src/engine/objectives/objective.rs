//! The choice of an objective. Never touches a device.
use super::dpo::{Dpo, PairLoss, PairValues};
use super::kto::Kto;
use super::rm::Rm;

/// What a run minimizes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Objective {
    /// The cross entropy of tokens: the mean over all tokens with loss of a step.
    #[default]
    Sft,
    /// Direct preference optimization: the mean over all pairs of a step.
    Dpo(Dpo),
    /// A reward model, which needs a [score head](crate::nn::Spec#structfield.score): the mean over all pairs.
    Rm(Rm),
    /// Kahneman-Tversky optimization: the mean over all labeled answers of a step.
    Kto(Kto),
}

impl Objective {
    /// Sequences have scores instead of log-probabilities.
    pub(super) fn scores(&self) -> bool {
        matches!(self, Objective::Rm(_))
    }
    /// The loss of a pair; None if the objective has no pairs.
    pub(super) fn of(&self, pair: &PairValues) -> Option<PairLoss> {
        match self {
            Objective::Sft | Objective::Kto(_) => None,
            Objective::Dpo(dpo) => Some(dpo.of(pair)),
            Objective::Rm(rm) => Some(rm.of(pair)),
        }
    }
}
