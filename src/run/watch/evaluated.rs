//! The result of an evaluation, as a line and as an event. Never evaluates.
use super::report;
use crate::engine::{Objective, PairMeans};
use serde::Serialize;
use serde_json::{Value, json};

/// Means over pairs, under the names of the objective.
#[derive(Serialize, Clone, Debug)]
pub struct PairRecord {
    pub reward_chosen: f64,
    pub reward_rejected: f64,
    /// Of a policy, whose rewards are log-ratios.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_accuracy: Option<f64>,
    /// Of a reward model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

impl PairRecord {
    pub fn new(means: &PairMeans, objective: &Objective) -> PairRecord {
        let &PairMeans { reward_chosen, reward_rejected, reward_accuracy } = means;
        let (own, scored) = match objective {
            Objective::Rm(_) => (None, Some(reward_accuracy)),
            _ => (Some(reward_accuracy), None),
        };
        PairRecord { reward_chosen, reward_rejected, reward_accuracy: own, accuracy: scored }
    }
}

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
    /// The event's fields, of which the reporter adds time and comparison.
    pub(super) fn json(&self, step: u64, objective: &Objective) -> Value {
        let (loss, count) = (self.loss(), self.count);
        let Some(means) = &self.pairs else {
            return json!({"step": step, "loss": loss, "perplexity": loss.exp(), "tokens": count});
        };
        let mut event = json!({"step": step, "loss": loss, "perplexity": null, "tokens": null, "pairs": count});
        if let (Some(event), Value::Object(means)) = (event.as_object_mut(), json!(PairRecord::new(means, objective))) {
            event.extend(means);
        }
        event
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
