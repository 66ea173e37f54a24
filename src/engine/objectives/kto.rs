//! Kahneman-Tversky optimization (Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization",
//! eqs. 7 and 8) of one answer that is labeled desirable or not. Never touches a device.
//!
//! With x = policy - reference, in log-probabilities summed over the answer's tokens, and the baseline z, which is a
//! constant with respect to the weights:
//!
//! ```text
//! desirable     desirable_weight (1 - sigmoid(beta (x - z)))
//! otherwise     undesirable_weight (1 - sigmoid(beta (z - x)))
//! z             max(0, mean of x over prompts with the answers of other rows)
//! ```
use super::dpo::sigmoid;

/// The settings of the loss.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Kto {
    /// How strongly the policy is kept near the reference; above 0.
    pub beta: f64,
    /// Factors of the losses of desirable and of other answers.
    pub desirable_weight: f64,
    pub undesirable_weight: f64,
}

/// A labeled answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LabeledAnswer {
    /// Log-probability of the policy, minus the reference's.
    pub ratio: f64,
    pub desirable: bool,
}

/// The loss of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AnswerLoss {
    pub loss: f64,
    /// With respect to the policy's log-probability.
    pub gradient: f64,
    /// `beta * (policy - reference)`.
    pub reward: f64,
}

impl Kto {
    pub(super) fn of(&self, answer: &LabeledAnswer, baseline: f64) -> AnswerLoss {
        let &Kto { beta, desirable_weight, undesirable_weight } = self;
        let (weight, sign) = if answer.desirable { (desirable_weight, 1.0) } else { (undesirable_weight, -1.0) };
        let gain = sign * beta * (answer.ratio - baseline);
        let lost = sigmoid(-gain);
        AnswerLoss {
            loss: weight * lost,
            gradient: -sign * beta * weight * lost * sigmoid(gain),
            reward: beta * answer.ratio,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_the_slopes_of_the_losses() {
        let kto = Kto { beta: 0.7, desirable_weight: 1.5, undesirable_weight: 0.5 };
        for (ratio, desirable) in [(0.3, true), (-2.0, true), (0.3, false), (4.0, false)] {
            let at = |by: f64| kto.of(&LabeledAnswer { ratio: ratio + by, desirable }, 0.4).loss;
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            let gradient = kto.of(&LabeledAnswer { ratio, desirable }, 0.4).gradient;
            assert!((slope - gradient).abs() < 1e-8, "{ratio} {desirable}: {gradient}, finite difference {slope}");
        }
    }
}
