//! Direct preference optimization (Rafailov et al. 2023) of one pair, with its variants: conservative labels (Mitchell
//! 2023, "A note on DPO with noisy preferences"), IPO (Azar et al. 2023, eq. 17), and the chosen answer's likelihood as
//! a regularizer (Pang et al. 2024). Never touches a device.
//!
//! With x = (policy - reference) of the chosen answer minus that of the rejected one, in log-probabilities summed over
//! the answer's tokens:
//!
//! ```text
//! dpo   -(1 - s) log sigmoid(beta x) - s log sigmoid(-beta x)      s: label smoothing
//! ipo   (x - 1 / (2 beta))^2
//! both  + nll_coef * -(policy of the chosen answer) / (its tokens)
//! ```

/// The settings of the loss.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dpo {
    /// How strongly the policy is kept near the reference; above 0.
    pub beta: f64,
    /// Probability that a label is wrong, in [0, 0.5).
    pub label_smoothing: f64,
    pub ipo: bool,
    /// Coefficient of the chosen answer's mean token loss.
    pub nll_coef: f64,
}

/// Log-probabilities, or scores, of a pair's answers: chosen, rejected.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairValues {
    pub policy: [f64; 2],
    pub reference: [f64; 2],
    /// Tokens of the chosen answer.
    pub tokens: u64,
    /// How much better the chosen answer is.
    pub margin: f64,
}

/// The loss of a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PairLoss {
    pub loss: f64,
    /// With respect to the policy's values.
    pub gradient: [f64; 2],
    /// DPO's `beta * (policy - reference)`, or scores.
    pub rewards: [f64; 2],
}

impl Dpo {
    pub(super) fn of(&self, pair: &PairValues) -> PairLoss {
        let &Dpo { beta, label_smoothing: wrong, ipo, nll_coef } = self;
        let [chosen, rejected] = [0, 1].map(|i| pair.policy[i] - pair.reference[i]);
        let x = chosen - rejected;
        let (loss, slope) = if ipo {
            let off = x - 0.5 / beta;
            (off * off, 2.0 * off)
        } else {
            let loss = (1.0 - wrong) * softplus(-beta * x) + wrong * softplus(beta * x);
            (loss, beta * (wrong * sigmoid(beta * x) - (1.0 - wrong) * sigmoid(-beta * x)))
        };
        let share = nll_coef / pair.tokens.max(1) as f64;
        PairLoss {
            loss: loss - share * pair.policy[0],
            gradient: [slope - share, -slope],
            rewards: [beta * chosen, beta * rejected],
        }
    }
}

/// log(1 + exp(x)), without overflow.
pub(super) fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

pub(super) fn sigmoid(x: f64) -> f64 {
    (-softplus(-x)).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_the_slopes_of_the_losses() {
        let base = PairValues { policy: [-7.0, -5.5], reference: [-6.25, -6.0], tokens: 5, margin: 0.0 };
        for (label_smoothing, ipo, nll_coef) in
            [(0.0, false, 0.0), (0.1, false, 0.3), (0.0, true, 0.0), (0.0, true, 2.0)]
        {
            let dpo = Dpo { beta: 0.7, label_smoothing, ipo, nll_coef };
            for i in 0..2 {
                let at = |by: f64| {
                    let mut pair = base;
                    pair.policy[i] += by;
                    dpo.of(&pair).loss
                };
                let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                let gradient = dpo.of(&base).gradient[i];
                assert!((slope - gradient).abs() < 1e-8, "{dpo:?} {i}: {gradient}, finite difference {slope}");
            }
        }
    }

    #[test]
    fn extreme_pairs_stay_finite() {
        let dpo = Dpo { beta: 0.5, label_smoothing: 0.0, ipo: false, nll_coef: 0.0 };
        let of = |x: f64| dpo.of(&PairValues { policy: [x, 0.0], reference: [0.0; 2], tokens: 1, margin: 0.0 });
        assert_eq!(of(-1e5).loss, 5e4);
        assert_eq!(of(1e5).loss, 0.0);
        assert_eq!((of(-1e5).gradient, of(1e5).gradient), ([-0.5, 0.5], [0.0, 0.0]));
    }
}
