//! The choice of an objective. Never touches a device.
use super::dpo::{Dpo, PairLoss, PairValues};
use super::grpo::Grpo;
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
    /// Group relative policy optimization of samples with rewards.
    Grpo(Grpo),
}

/// What is in a step, over all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepCounts {
    /// Rows of the data set.
    pub rows: u64,
    /// Sequences of these rows.
    pub sequences: u64,
    /// Tokens with loss.
    pub tokens: u64,
}

impl Objective {
    /// What the step's summed loss is divided by.
    pub fn divisor(&self, step: &StepCounts) -> u64 {
        match self {
            Objective::Sft => step.tokens,
            Objective::Dpo(_) | Objective::Rm(_) | Objective::Kto(_) => step.rows,
            Objective::Grpo(grpo) => grpo.divisor(step.sequences, step.tokens),
        }
    }
    /// What logits are divided by, of the policy and the reference.
    pub(in crate::engine) fn temperature(&self) -> f32 {
        if let Objective::Grpo(grpo) = self { grpo.temperature } else { 1.0 }
    }
    /// The policy is compared with a reference model.
    pub(in crate::engine) fn compares(&self) -> bool {
        match self {
            Objective::Sft | Objective::Rm(_) => false,
            Objective::Dpo(_) | Objective::Kto(_) => true,
            Objective::Grpo(grpo) => grpo.compares(),
        }
    }
    /// Sequences have scores instead of log-probabilities.
    pub(super) fn scores(&self) -> bool {
        matches!(self, Objective::Rm(_))
    }
    /// The loss of a pair; None if the objective has no pairs.
    pub(super) fn of(&self, pair: &PairValues) -> Option<PairLoss> {
        match self {
            Objective::Sft | Objective::Kto(_) | Objective::Grpo(_) => None,
            Objective::Dpo(dpo) => Some(dpo.of(pair)),
            Objective::Rm(rm) => Some(rm.of(pair)),
        }
    }
}
