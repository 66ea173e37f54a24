//! What is learned: answers, or preferences between them. Never computes a loss.
use super::names::ObjectiveName;
use super::value::number;
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Objective")]
pub struct ObjectiveSettings {
    /// What is minimized. sft: the loss of tokens; dpo: direct preference optimization of pairs (rows with a prompt, a
    /// chosen and a rejected answer), where batch sizes count pairs; rm: a reward model of pairs
    #[arg(long)]
    pub objective: Option<ObjectiveName>,
    /// How strongly the policy is kept near the reference model
    #[arg(long)]
    pub beta: Option<f64>,
    /// Probability that the two answers of a pair are confused, in [0, 0.5)
    #[arg(long, value_name = "P")]
    pub label_smoothing: Option<f64>,
    /// IPO's loss instead of DPO's: (difference of the log-ratios - 1 / (2 beta))^2
    #[arg(long)]
    pub ipo: Option<bool>,
    /// Add this times the mean token loss of the chosen answers
    #[arg(long, value_name = "COEF")]
    pub nll_loss_coef: Option<f64>,
    /// Reference model, a Hugging Face directory with the vocabulary of the trained model [default: the initial
    /// weights; with LoRA, the model without its adapters]
    #[arg(long, value_name = "DIR")]
    pub ref_pretrain: Option<PathBuf>,
    /// Row field with the prompt of a pair: text or messages
    #[arg(long, value_name = "KEY")]
    pub prompt_key: Option<String>,
    /// Row field with the preferred answer: text, messages, or a whole conversation
    #[arg(long, value_name = "KEY")]
    pub chosen_key: Option<String>,
    /// Row field with the other answer
    #[arg(long, value_name = "KEY")]
    pub rejected_key: Option<String>,
    /// Reward models: row field with a number by which the chosen score should exceed the other [default: none]
    #[arg(long, value_name = "KEY")]
    pub margin_key: Option<String>,
}

impl ObjectiveSettings {
    pub fn check(&self) -> Result<()> {
        number("beta", self.beta, |x| x > 0.0, "above 0")?;
        number("label_smoothing", self.label_smoothing, |x| (0.0..0.5).contains(&x), "in [0, 0.5)")?;
        number("nll_loss_coef", self.nll_loss_coef, |x| x >= 0.0, "0 or more")
    }
    /// Rows are pairs.
    pub fn has_pairs(&self) -> bool {
        matches!(self.objective, Some(ObjectiveName::Dpo | ObjectiveName::Rm))
    }
    /// The model is a reward model.
    pub fn scores(&self) -> bool {
        self.objective == Some(ObjectiveName::Rm)
    }
}
