//! The result of an evaluation, as a line and as an event. Never evaluates.
use super::report;
use crate::engine::PairMeans;
use serde_json::{Value, json};

/// Losses of the evaluated rows, of all ranks.
pub struct Evaluated {
    pub sum: f64,
    /// What they are of: tokens, or pairs.
    pub count: u64,
    /// Means over the pairs, of a preference objective.
    pub pairs: Option<PairMeans>,
}

impl Evaluated {
    /// The mean; not a number if there was nothing to evaluate.
    pub fn loss(&self) -> f64 {
        self.sum / self.count as f64
    }
    pub(super) fn json(&self) -> Value {
        let (loss, count) = (self.loss(), self.count);
        match self.pairs {
            None => json!({"loss": loss, "perplexity": loss.exp(), "tokens": count}),
            Some(PairMeans { reward_chosen, reward_rejected, reward_accuracy }) => json!({
                "loss": loss, "perplexity": null, "tokens": null, "pairs": count, "reward_chosen": reward_chosen,
                "reward_rejected": reward_rejected, "reward_accuracy": reward_accuracy,
            }),
        }
    }
}

impl std::fmt::Display for Evaluated {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let (loss, count) = (self.loss(), report::count(self.count));
        match self.pairs {
            None => write!(f, "loss {loss:.4}  perplexity {:.2}  tokens {count}", loss.exp()),
            Some(PairMeans { reward_chosen, reward_rejected, reward_accuracy }) => write!(
                f,
                "loss {loss:.4}  accuracy {reward_accuracy:.4}  rewards {reward_chosen:.4} {reward_rejected:.4}  pairs {count}"
            ),
        }
    }
}
