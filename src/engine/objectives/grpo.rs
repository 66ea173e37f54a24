//! Group relative policy optimization (Shao et al. 2024, "DeepSeekMath", eq. 3) of one sampled token, with the losses
//! of DAPO (Yu et al. 2025, eq. 8: asymmetric clipping, mean over all tokens) and Dr. GRPO (Liu et al. 2025, section
//! 3.2: neither the deviation of rewards nor the length of a sample divides). Never touches a device.
//!
//! With r = exp(policy - old), in log-probabilities of the token at the samples' temperature, where `old` is the one
//! that it was sampled with, and A the advantage of its sample:
//!
//! ```text
//! token   -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A) + beta (exp(d) - d - 1)      d: reference - policy
//! grpo    mean over samples of the mean over a sample's tokens
//! dapo    mean over all tokens
//! dr_grpo sum over tokens / (samples * longest)
//! A       (reward - mean of the group) / (deviation of the group + 1e-4); dr_grpo: reward - mean of the group
//! ```
//!
//! These are the formulas of TRL 1.16's `GRPOTrainer._compute_loss` (trl/trainer/grpo_trainer.py) with importance
//! sampling by token, except that the means are those of the whole optimizer step.

/// How token losses are averaged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrpoLoss {
    Grpo,
    Dapo,
    DrGrpo {
        /// A constant: the most tokens that a sample could have.
        longest: u64,
    },
}

/// The settings of the loss.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Grpo {
    pub loss: GrpoLoss,
    /// Factor of the KL divergence from the reference; at 0 there is no reference.
    pub beta: f64,
    /// How far the ratio may fall below 1, and exceed it, with a gradient.
    pub clip_low: f64,
    pub clip_high: f64,
    /// The policy and the reference are the models with logits divided by this, as samples are drawn.
    pub temperature: f32,
}

/// Log-probabilities of a sampled token, and the advantage of its sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampledToken {
    pub policy: f64,
    pub old: f64,
    pub reference: f64,
    pub advantage: f64,
}

/// The loss of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SampledLoss {
    pub loss: f64,
    /// With respect to the policy's log-probability.
    pub gradient: f64,
    /// The estimate of the divergence from the reference (k3); 0 without one.
    pub kl: f64,
    /// The ratio is outside, where the advantage pushes it: it has no gradient.
    pub clipped: bool,
}

/// Added to deviations before they divide.
const EPSILON: f64 = 1e-4;

impl Grpo {
    pub(super) fn compares(&self) -> bool {
        self.beta != 0.0
    }
    /// What the sum of a step's weighted token losses is divided by.
    pub(super) fn divisor(&self, samples: u64, tokens: u64) -> u64 {
        match self.loss {
            GrpoLoss::Grpo => samples,
            GrpoLoss::Dapo => tokens,
            GrpoLoss::DrGrpo { longest } => samples.saturating_mul(longest),
        }
    }
    /// The weight of each of a sample's tokens in that sum.
    pub(super) fn weight(&self, tokens: u64) -> f64 {
        if self.loss == GrpoLoss::Grpo { 1.0 / tokens.max(1) as f64 } else { 1.0 }
    }
    /// Appends the advantages of a group's samples. A sample that is alone has none.
    pub fn advantages(&self, rewards: &[f32], out: &mut Vec<f64>) {
        let n = rewards.len() as f64;
        let mean = rewards.iter().map(|&reward| reward as f64).sum::<f64>() / n;
        let off = |&reward: &f32| reward as f64 - mean;
        let variance = rewards.iter().map(|reward| off(reward).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        let scale = match self.loss {
            GrpoLoss::DrGrpo { .. } => 1.0,
            GrpoLoss::Grpo | GrpoLoss::Dapo => 1.0 / (variance.sqrt() + EPSILON),
        };
        out.extend(rewards.iter().map(|reward| off(reward) * scale));
    }
    pub(super) fn of(&self, token: &SampledToken) -> SampledLoss {
        let &SampledToken { policy, old, reference, advantage } = token;
        let ratio = (policy - old).exp();
        let clipped = advantage > 0.0 && ratio > 1.0 + self.clip_high || advantage < 0.0 && ratio < 1.0 - self.clip_low;
        let (mut loss, mut gradient) = match (clipped, advantage == 0.0) {
            (_, true) => (0.0, 0.0), // also where the ratio overflows
            (true, _) => (-ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantage, 0.0),
            (false, _) => (-ratio * advantage, -ratio * advantage),
        };
        let mut kl = 0.0;
        if self.compares() {
            let apart = reference - policy;
            kl = apart.exp() - apart - 1.0;
            loss += self.beta * kl;
            gradient += self.beta * (1.0 - apart.exp());
        }
        SampledLoss { loss, gradient, kl, clipped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grpo(loss: GrpoLoss, beta: f64) -> Grpo {
        Grpo { loss, beta, clip_low: 0.2, clip_high: 0.3, temperature: 1.0 }
    }

    #[test]
    fn gradients_are_the_slopes_of_the_losses() {
        for (ratio, advantage, clipped) in [
            (1.0, 0.7, false),
            (1.2, 0.7, false),
            (1.5, 0.7, true),
            (0.5, 0.7, false),
            (1.0, -0.7, false),
            (1.5, -0.7, false),
            (0.5, -0.7, true),
            (1.5, 0.0, false),
        ] {
            let (grpo, old) = (grpo(GrpoLoss::Dapo, 0.1), -1.5);
            let at = |by: f64| {
                let policy = old + f64::ln(ratio) + by;
                grpo.of(&SampledToken { policy, old, reference: -1.0, advantage })
            };
            let slope = (at(1e-5).loss - at(-1e-5).loss) / 2e-5;
            let SampledLoss { gradient, clipped: is_clipped, .. } = at(0.0);
            assert!((slope - gradient).abs() < 1e-8, "{ratio} {advantage}: {gradient}, finite difference {slope}");
            assert_eq!(is_clipped, clipped, "{ratio} {advantage}");
        }
    }

    #[test]
    fn equal_rewards_and_samples_that_are_alone_have_no_advantage() {
        let of = |loss, rewards: &[f32]| {
            let mut out = Vec::new();
            grpo(loss, 0.0).advantages(rewards, &mut out);
            out
        };
        assert_eq!(of(GrpoLoss::Grpo, &[0.1; 3]), [0.0; 3]);
        assert_eq!(of(GrpoLoss::Dapo, &[5.0]), [0.0]);
        assert_eq!(of(GrpoLoss::DrGrpo { longest: 8 }, &[0.0, 1.0, 5.0]), [-2.0, -1.0, 3.0]);
        let scaled = of(GrpoLoss::Grpo, &[0.0, 2.0]);
        assert_eq!(scaled, [-1.0, 1.0].map(|off| off / (2f64.sqrt() + 1e-4)));
        let overflown = SampledToken { policy: 0.0, old: -1e4, reference: 0.0, advantage: 0.0 };
        assert_eq!(grpo(GrpoLoss::Grpo, 0.0).of(&overflown).loss, 0.0);
    }
}
