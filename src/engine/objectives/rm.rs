//! The loss of reward models: the Bradley-Terry likelihood of a pair (Ouyang et al. 2022, "Training language models to
//! follow instructions with human feedback"), -log sigmoid(chosen - rejected - margin), of the scores at the last
//! tokens. Without a margin it is log(1 + exp(rejected - chosen)). Never touches a device.
use super::dpo::{PairLoss, PairValues, sigmoid, softplus};

/// A reward model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rm;

impl Rm {
    pub(super) fn of(&self, pair: &PairValues) -> PairLoss {
        let [chosen, rejected] = pair.policy;
        let short = rejected - chosen + pair.margin;
        let slope = -sigmoid(short);
        PairLoss { loss: softplus(short), gradient: [slope, -slope], rewards: pair.policy }
    }
}
