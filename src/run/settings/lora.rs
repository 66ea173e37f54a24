//! LoRA adapters and merging them into a model. Never trains or merges.
use super::value::{number, one_or_many, size};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "LoRA")]
pub struct LoraSettings {
    /// Rank of LoRA adapters; the base model is frozen [default: none, train the full model]
    #[arg(long = "lora-rank", value_name = "N")]
    pub rank: Option<usize>,
    /// Adapter to go on training, a directory or a name of the hub; it decides rank, alpha and modules [default: none,
    /// a new one]
    #[arg(long = "lora-adapter", value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// LoRA scaling: adapters are multiplied by alpha / rank [default: lora-rank]
    #[arg(long = "lora-alpha", value_name = "ALPHA")]
    pub alpha: Option<f64>,
    /// Dropout probability on the input of the adapters, in [0, 1) [default: that of --lora-adapter, else 0]
    #[arg(long = "lora-dropout", id = "lora_dropout", value_name = "P")] // `dropout` is the model's
    pub dropout: Option<f64>,
    /// Modules to adapt, by the ends of their names, or as one regular expression for whole names, or all-linear
    /// [default: q_proj v_proj]
    #[arg(long = "lora-target-modules", num_args = 1.., value_name = "MODULE")]
    #[serde(deserialize_with = "one_or_many")]
    pub target_modules: Option<Vec<String>>,
    /// QLoRA: hold the matrices that --lora-rank freezes in 4 bits (NF4, double quantization)
    #[arg(long = "load-in-4bit", id = "load_in_4bit")]
    pub load_in_4bit: Option<bool>,
    /// Merge this adapter, a directory or a name of the hub, into the model of --pretrain, else the one that it names,
    /// write the result to --save-hf, then exit [default: none]
    #[arg(long = "lora-merge", value_name = "DIR")]
    pub merge: Option<PathBuf>,
    /// Derived: the adapter is written as it is.
    #[arg(skip)]
    #[serde(skip)]
    pub is_alone: bool,
}

impl LoraSettings {
    pub fn check(&self) -> Result<()> {
        size("lora_rank", self.rank)?;
        number("lora_dropout", self.dropout, |x| (0.0..1.0).contains(&x), "in [0, 1)")
    }
}
