//! The result of an evaluation, as a line and as an event; what else is known of judged answers. Never evaluates.
use super::report;
use crate::engine::{Objective, PreferenceMeans};
use serde::Serialize;
use serde_json::{Value, json};

/// Means over pairs or labeled answers, under the names of the objective.
#[derive(Serialize, Clone, Debug)]
pub struct PreferenceRecord {
    pub reward_chosen: f64,
    pub reward_rejected: f64,
    /// The difference.
    pub reward_margin: f64,
    /// The accuracy of a policy, whose rewards are log-ratios.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_accuracy: Option<f64>,
    /// The accuracy of a reward model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The estimate of the policy's distance from the reference, of labeled answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
}

impl PreferenceRecord {
    pub fn new(means: &PreferenceMeans, objective: &Objective) -> PreferenceRecord {
        let &PreferenceMeans { reward_chosen, reward_rejected, reward_accuracy, kl } = means;
        let (reward_accuracy, accuracy) = match objective {
            Objective::Rm(_) => (None, reward_accuracy),
            _ => (reward_accuracy, None),
        };
        let reward_margin = reward_chosen - reward_rejected;
        PreferenceRecord { reward_chosen, reward_rejected, reward_margin, reward_accuracy, accuracy, kl }
    }
}

/// What the model wrote after a prompt of `--sample-prompts`.
#[derive(Serialize, Clone, Debug)]
pub struct PromptSample {
    pub prompt: String,
    pub text: String,
    /// `stop`, or `length` if a limit cut it.
    pub finish: &'static str,
    pub tokens: usize,
    /// Where texts are judged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f32>,
}

/// Losses of the evaluated rows, of all ranks.
pub struct Evaluated {
    pub sum: f64,
    /// What they are of: tokens, pairs or labeled answers.
    pub count: u64,
    /// Means over the pairs or labeled answers, of a preference objective.
    pub preference: Option<PreferenceMeans>,
}

impl Evaluated {
    /// The mean; not a number if there was nothing to evaluate.
    pub fn loss(&self) -> f64 {
        self.sum / self.count as f64
    }
    /// The event's fields, of which the reporter adds time and comparison.
    pub(super) fn json(&self, step: u64, objective: &Objective) -> Value {
        let (loss, count) = (self.loss(), self.count);
        let Some(means) = &self.preference else {
            return json!({"step": step, "loss": loss, "perplexity": loss.exp(), "tokens": count});
        };
        let what = if matches!(objective, Objective::Kto(_)) { "samples" } else { "pairs" };
        let mut event = json!({"step": step, "loss": loss, "perplexity": null, "tokens": null, what: count});
        let means = json!(PreferenceRecord::new(means, objective));
        if let (Some(event), Value::Object(means)) = (event.as_object_mut(), means) {
            event.extend(means);
        }
        event
    }
}

impl std::fmt::Display for Evaluated {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let (loss, count) = (self.loss(), report::count(self.count));
        match self.preference {
            None => match loss.exp() {
                many if many >= 1e6 => write!(f, "loss {loss:.4}  perplexity {many:.2e}  tokens {count}"),
                few => write!(f, "loss {loss:.4}  perplexity {few:.2}  tokens {count}"),
            },
            Some(PreferenceMeans { reward_chosen, reward_rejected, reward_accuracy, kl }) => {
                let accuracy = reward_accuracy.map_or(String::new(), |share| format!("accuracy {share:.4}  "));
                let kl = kl.map_or(String::new(), |kl| format!("kl {kl:.4}  "));
                let what = if kl.is_empty() { "pairs" } else { "samples" };
                // Without any answer of a label there is no mean.
                let mean = |x: f64| if x.is_nan() { "none".to_string() } else { format!("{x:.4}") };
                let rewards = format_args!("rewards {} {}", mean(reward_chosen), mean(reward_rejected));
                let margin = mean(reward_chosen - reward_rejected);
                write!(f, "loss {loss:.4}  {accuracy}{kl}{rewards}  margin {margin}  {what} {count}")
            }
        }
    }
}
