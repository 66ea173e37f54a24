//! What is learned: answers, preferences between them, or rewards. Never computes a loss.
use super::names::{LossName, ObjectiveName};
use super::value::{count, number, one_or_many};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Objective")]
pub struct ObjectiveSettings {
    /// What is minimized. sft: the loss of tokens; dpo: direct preference optimization of pairs (rows with a prompt, a
    /// chosen and a rejected answer), where batch sizes count pairs; rm: a reward model of pairs; kto: Kahneman-Tversky
    /// optimization of rows with a prompt, an answer and a label; grpo: group relative policy optimization of
    /// samples, drawn with --reward or recorded in --rollouts, where batch sizes count groups; distill: what --teacher
    /// says of the tokens of rows, or with --on-policy of the model's own samples
    #[arg(long)]
    pub objective: Option<ObjectiveName>,
    /// How strongly the policy is kept near the reference model. GRPO: factor of the KL divergence from it; 0, the
    /// default there, needs no reference model
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
    /// KTO: factor of the losses of desirable answers
    #[arg(long, value_name = "W")]
    pub desirable_weight: Option<f64>,
    /// KTO: factor of the losses of other answers
    #[arg(long, value_name = "W")]
    pub undesirable_weight: Option<f64>,
    /// GRPO: recorded rollouts, files, directories or names of the hub, whose rows have prompt_ids and samples, each
    /// of which has ids, logprobs and a reward [default: none]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    #[serde(deserialize_with = "one_or_many")]
    pub rollouts: Option<Vec<String>>,
    /// GRPO: sample --group-size texts of each prompt of --dataset, and judge them by these. exact: the row's `answer`;
    /// number: its last number; regex:PATTERN; json; json-schema:FILE; length:TOKENS; anything else is a command that
    /// reads a JSON line for each sample and writes its reward [default: none]
    #[arg(long, num_args = 1.., value_name = "REWARD")]
    #[serde(deserialize_with = "one_or_many")]
    pub reward: Option<Vec<String>>,
    /// GRPO: factors of the rewards, whose sum counts [default: 1 each]
    #[arg(long, num_args = 1.., value_name = "W")]
    pub reward_weights: Option<Vec<f64>>,
    /// GRPO: a reward's command has this time for a sample, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub reward_timeout: Option<f64>,
    /// Append the samples that are drawn, with their rewards, to this file, as --rollouts reads them; further
    /// data-parallel ranks have files next to it [default: none]
    #[arg(long, value_name = "FILE")]
    pub record_rollouts: Option<PathBuf>,
    /// GRPO: how token losses are averaged. grpo: over each sample's tokens, then over samples; dapo: over all tokens
    /// of the step; dr_grpo: by samples times --max-new-tokens, and advantages are not divided by the deviation of
    /// rewards
    #[arg(long)]
    pub loss_type: Option<LossName>,
    /// GRPO: a token's probability ratio has no gradient further than this below 1
    #[arg(long, value_name = "E")]
    pub clip_low: Option<f64>,
    /// GRPO: a token's probability ratio has no gradient further than this above 1
    #[arg(long, value_name = "E")]
    pub clip_high: Option<f64>,
    /// Optimizer steps on the samples of a step before the next ones
    #[arg(long, value_name = "N")]
    pub updates_per_rollout: Option<usize>,
    /// Reference model, a Hugging Face directory or a name of the hub, with the vocabulary of the trained model
    /// [default: the initial weights; with LoRA, the model without its adapters]
    #[arg(long, value_name = "DIR")]
    pub ref_pretrain: Option<PathBuf>,
    /// Compute the reference model's log-probabilities once, before training, and keep them next to the tokens; then
    /// the model is not held in memory
    #[arg(long)]
    pub precompute_ref_logps: Option<bool>,
    /// Learn from this model too (distillation): a Hugging Face directory or a name of the hub, with the vocabulary
    /// of the trained model [default: no teacher]
    #[arg(long, value_name = "DIR")]
    pub teacher: Option<PathBuf>,
    /// Distillation: sample --group-size texts of each prompt of --dataset, and learn from what the teacher says of
    /// them: the divergence of the student from the teacher (reverse KL)
    #[arg(long)]
    pub on_policy: Option<bool>,
    /// Distillation: share of the divergence from the teacher in the loss, in (0, 1]; the rest is the loss of the
    /// labels
    #[arg(long, value_name = "A")]
    pub distill_alpha: Option<f64>,
    /// Distillation: logits are divided by it in the divergence
    #[arg(long, value_name = "T")]
    pub distill_temperature: Option<f64>,
    /// Row field with the prompt: text or messages
    #[arg(long, value_name = "KEY")]
    pub prompt_key: Option<String>,
    /// Row field with the preferred answer: text, messages, or a whole conversation
    #[arg(long, value_name = "KEY")]
    pub chosen_key: Option<String>,
    /// Row field with the other answer
    #[arg(long, value_name = "KEY")]
    pub rejected_key: Option<String>,
    /// Reward models: row field with a number by which the chosen score should exceed the other [default:
    /// margin, where rows have it]
    #[arg(long, value_name = "KEY")]
    pub margin_key: Option<String>,
    /// KTO: row field that is true, or 1, if the answer is desirable; --output-key names the answer
    #[arg(long, value_name = "KEY")]
    pub label_key: Option<String>,
}

impl ObjectiveSettings {
    pub fn check(&self) -> Result<()> {
        match self.is_grpo() {
            true => number("beta", self.beta, |x| x >= 0.0, "0 or more")?,
            false => number("beta", self.beta, |x| x > 0.0, "above 0")?,
        }
        number("clip_low", self.clip_low, |x| x > 0.0 && x < 1.0, "in (0, 1)")?;
        number("clip_high", self.clip_high, |x| x > 0.0, "above 0")?;
        count("updates_per_rollout", self.updates_per_rollout)?;
        for &weight in self.reward_weights.iter().flatten() {
            number("reward_weights", Some(weight), f64::is_finite, "finite")?;
        }
        number("reward_timeout", self.reward_timeout, |x| x > 0.0 && x <= 1e6, "above 0, at most 1e6")?;
        number("label_smoothing", self.label_smoothing, |x| (0.0..0.5).contains(&x), "in [0, 0.5)")?;
        number("nll_loss_coef", self.nll_loss_coef, |x| x >= 0.0, "0 or more")?;
        number("distill_alpha", self.distill_alpha, |x| x > 0.0 && x <= 1.0, "in (0, 1]")?;
        number("distill_temperature", self.distill_temperature, |x| x > 0.0, "above 0")?;
        number("desirable_weight", self.desirable_weight, |x| x >= 0.0, "0 or more")?;
        number("undesirable_weight", self.undesirable_weight, |x| x >= 0.0, "0 or more")
    }
    /// Rows are pairs.
    pub fn has_pairs(&self) -> bool {
        matches!(self.objective, Some(ObjectiveName::Dpo | ObjectiveName::Rm))
    }
    /// The policy is compared with a reference model.
    pub fn has_reference(&self) -> bool {
        let compares = self.is_grpo() && self.beta.is_some_and(|beta| beta > 0.0);
        compares || matches!(self.objective, Some(ObjectiveName::Dpo | ObjectiveName::Kto))
    }
    pub fn is_grpo(&self) -> bool {
        self.objective == Some(ObjectiveName::Grpo)
    }
    /// The run samples what it learns from.
    pub fn samples(&self) -> bool {
        self.is_rewarded() || self.on_policy == Some(true)
    }
    /// Samples of the policy are judged.
    pub fn is_rewarded(&self) -> bool {
        self.is_grpo() && self.reward.is_some()
    }
    /// Rows are groups of samples.
    pub fn has_groups(&self) -> bool {
        self.is_grpo() || self.samples()
    }
    /// The model is a reward model.
    pub fn scores(&self) -> bool {
        self.objective == Some(ObjectiveName::Rm)
    }
}
