//! Sums and means over pairs, labeled answers, or sampled tokens. Never computes a loss.
use super::students::StudentMeans;
use serde::Serialize;

/// Numbers of a step that are summed over ranks.
pub(in crate::engine) const SUMS: usize = 8;

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
    pub(in crate::engine) fn to_array(self) -> [f64; SUMS] {
        let PreferenceSums { loss, chosen, chosen_count, rejected, rejected_count, .. } = self;
        [loss, chosen, chosen_count, rejected, rejected_count, self.accurate, self.divergence, self.mismatched]
    }
    pub(in crate::engine) fn from_array(sums: [f64; SUMS]) -> PreferenceSums {
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

/// Sums over sampled tokens and their samples.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RolloutSums {
    /// Weighted token losses.
    pub loss: f64,
    pub kl: f64,
    pub clipped: f64,
    pub tokens: f64,
    pub reward: f64,
    pub reward_squares: f64,
    pub samples: f64,
    pub entropy: f64,
}

impl RolloutSums {
    pub(in crate::engine) fn to_array(self) -> [f64; SUMS] {
        let RolloutSums { loss, kl, clipped, tokens, reward, reward_squares, samples, entropy } = self;
        [loss, kl, clipped, tokens, reward, reward_squares, samples, entropy]
    }
    fn from_array(sums: [f64; SUMS]) -> RolloutSums {
        let [loss, kl, clipped, tokens, reward, reward_squares, samples, entropy] = sums;
        RolloutSums { loss, kl, clipped, tokens, reward, reward_squares, samples, entropy }
    }
}

/// What is known of a step's rollouts.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct RolloutMeans {
    /// Mean over all samples, and their standard deviation (n - 1 in the denominator; 0 for one).
    pub reward_mean: f64,
    pub reward_std: f64,
    /// Mean over tokens of the estimated divergence from the reference, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Share of the tokens without a gradient because their ratio is clipped.
    pub clip_fraction: f64,
    /// Mean over tokens of the policy's entropy, in nats; None on devices that do not compute it, and over tp.
    pub entropy: Option<f64>,
    pub completion_tokens: u64,
    /// Largest difference between a recorded log-probability and the policy's.
    pub logprob_mismatch: f64,
}

impl RolloutMeans {
    pub(in crate::engine) fn of(sums: [f64; SUMS], mismatch: f64, compares: bool, measures: bool) -> RolloutMeans {
        let RolloutSums { kl, clipped, tokens, reward, reward_squares, samples, entropy, .. } =
            RolloutSums::from_array(sums);
        let mean = reward / samples;
        let variance = (reward_squares - reward * mean) / (samples - 1.0).max(1.0);
        RolloutMeans {
            reward_mean: mean,
            reward_std: variance.max(0.0).sqrt(),
            kl: compares.then_some(kl / tokens),
            clip_fraction: clipped / tokens,
            entropy: measures.then_some(entropy / tokens),
            completion_tokens: tokens as u64,
            logprob_mismatch: mismatch,
        }
    }
}

/// What is known of a step over all ranks.
#[derive(Default)]
pub(in crate::engine) struct StepMeans {
    pub preference: Option<PreferenceMeans>,
    pub rollouts: Option<RolloutMeans>,
    pub student: Option<StudentMeans>,
}
