//! How `--generate` picks tokens. Never picks one.
use super::value::{count, number, one_or_many, set};
use crate::base::{Error, Result};
use crate::engine::Sampling;
use serde::{Deserialize, Serialize};

/// How `--generate` picks tokens.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Generate")]
pub struct GenerateSettings {
    /// Maximum tokens to generate; an end-of-text token stops earlier
    #[arg(long, value_name = "TOKENS")]
    pub max_new_tokens: Option<usize>,
    /// Sampling temperature, which divides the logits of GRPO's loss too; 0: greedy
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Sample from the N most likely tokens; 0: all
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// System prompt of --chat, and of --generate where a chat template applies [default: the template's]
    #[arg(long, value_name = "TEXT")]
    pub system_prompt: Option<String>,
    /// Sample from the smallest set of tokens with this total probability; 1: all
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// Sample from the tokens with at least this share of the most likely token's probability; 0: all
    #[arg(long, value_name = "P")]
    pub min_p: Option<f64>,
    /// End a text at any of these strings, which are left out [default: none]
    #[arg(long, num_args = 1.., value_name = "TEXT")]
    #[serde(deserialize_with = "one_or_many")]
    pub stop: Option<Vec<String>>,
    /// Samples of each prompt
    #[arg(long, value_name = "G")]
    pub group_size: Option<usize>,
}

impl GenerateSettings {
    /// How tokens are drawn, at step 0.
    pub fn sampling(&self, seed: u64) -> Result<Sampling> {
        Ok(Sampling {
            temperature: set(&self.temperature, "generate.temperature")? as f32,
            top_k: set(&self.top_k, "generate.top_k")?,
            top_p: set(&self.top_p, "generate.top_p")? as f32,
            min_p: set(&self.min_p, "generate.min_p")? as f32,
            seed,
            step: 0,
        })
    }
    pub fn check(&self) -> Result<()> {
        count("max_new_tokens", self.max_new_tokens)?;
        number("temperature", self.temperature, |x| x >= 0.0, "0 or more")?;
        number("min_p", self.min_p, |x| (0.0..=1.0).contains(&x), "in [0, 1]")?;
        count("group_size", self.group_size)?;
        if self.stop.iter().flatten().any(String::is_empty) {
            return Err(Error::input("stop: an empty string ends every text at once; remove it"));
        }
        number("top_p", self.top_p, |x| x > 0.0 && x <= 1.0, "above 0, at most 1")
    }
}
