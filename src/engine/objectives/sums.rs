//! Sums and means over pairs, or labeled answers. Never computes a loss.
/// Sums over pairs, or labeled answers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PreferenceSums {
    pub loss: f64,
    /// Rewards of the chosen, or desirable, answers; and how many these are.
    pub chosen: f64,
    pub chosen_count: f64,
    /// The same of the other answers.
    pub rejected: f64,
    pub rejected_count: f64,
    /// Pairs whose chosen answer has the larger reward.
    pub accurate: f64,
    /// Log-ratios of prompts with the answers of other rows; and how many these are.
    pub divergence: f64,
    pub mismatched: f64,
}

impl PreferenceSums {
    pub(in crate::engine) const LEN: usize = 8;

    pub(in crate::engine) fn to_array(self) -> [f64; PreferenceSums::LEN] {
        let PreferenceSums { loss, chosen, chosen_count, rejected, rejected_count, .. } = self;
        [loss, chosen, chosen_count, rejected, rejected_count, self.accurate, self.divergence, self.mismatched]
    }
    pub(in crate::engine) fn from_array(sums: [f64; PreferenceSums::LEN]) -> PreferenceSums {
        let [loss, chosen, chosen_count, rejected, rejected_count, accurate, divergence, mismatched] = sums;
        PreferenceSums { loss, chosen, chosen_count, rejected, rejected_count, accurate, divergence, mismatched }
    }
    /// Means over the answers; not numbers without any.
    pub fn means(&self) -> PreferenceMeans {
        let labeled = self.mismatched > 0.0;
        PreferenceMeans {
            reward_chosen: self.chosen / self.chosen_count,
            reward_rejected: self.rejected / self.rejected_count,
            reward_accuracy: (!labeled).then_some(self.accurate / self.chosen_count),
            kl: labeled.then_some(self.kl()),
        }
    }
    /// The estimate of the KL divergence of the policy from the reference; 0 without any answers.
    pub fn kl(&self) -> f64 {
        (self.divergence / self.mismatched.max(1.0)).max(0.0)
    }
}

impl std::ops::AddAssign for PreferenceSums {
    fn add_assign(&mut self, other: PreferenceSums) {
        let (mut sums, other) = (self.to_array(), other.to_array());
        sums.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
        *self = PreferenceSums::from_array(sums);
    }
}

/// Means over pairs, or labeled answers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PreferenceMeans {
    pub reward_chosen: f64,
    pub reward_rejected: f64,
    /// Share of the pairs whose chosen answer has the larger reward; of pairs.
    pub reward_accuracy: Option<f64>,
    /// KTO's baseline; of labeled answers.
    pub kl: Option<f64>,
}
