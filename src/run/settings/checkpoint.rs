//! Where checkpoints and the final model go, and which checkpoint a run resumes from. Never writes or reads one.
use super::names::PrecisionName;
use super::value::{StepInterval, bytes, set};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Checkpoint")]
pub struct CheckpointSettings {
    /// Checkpoint directory: DIR/step-00000100, and DIR/latest names the newest [default: none]
    #[arg(long, value_name = "DIR")]
    pub ckpt_dir: Option<PathBuf>,
    /// Steps between checkpoints; 0: only at the end; epoch: those of one pass over the training split
    #[arg(long, value_name = "STEPS|epoch")]
    pub save_every: Option<StepInterval>,
    /// Also save a checkpoint after each evaluation with the lowest loss so far; DIR/best names it
    #[arg(long)]
    pub save_on_best: Option<bool>,
    /// Number of newest checkpoints to keep, and the best one with save-on-best; 0: all
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// Resume from the newest checkpoint in ckpt-dir if there is one (auto), from the one DIR/best names (best), or
    /// from this directory [default: none]
    #[arg(long, value_name = "auto|best|DIR")]
    pub resume: Option<String>,
    /// Export the final model to this Hugging Face directory [default: none]
    #[arg(long, value_name = "DIR")]
    pub save_hf: Option<PathBuf>,
    /// Let save-hf replace a model from another run; the model the run starts from is never replaced
    #[arg(long)]
    pub overwrite: Option<bool>,
    /// Write checkpoints in the background, from a copy in memory, while training continues
    #[arg(long)]
    pub async_save: Option<bool>,
    /// Largest file of a model or optimizer, such as 5GB or 200MB (a tensor is never split)
    #[arg(long, value_name = "SIZE")]
    pub max_shard_size: Option<String>,
    /// Dtype of the save-hf export; checkpoints are always fp32
    #[arg(long)]
    pub save_dtype: Option<PrecisionName>,
}

impl CheckpointSettings {
    pub fn check(&self) -> Result<()> {
        self.max_file_bytes().map(drop)
    }
    pub fn max_file_bytes(&self) -> Result<u64> {
        bytes("max_shard_size", &set(&self.max_shard_size, "checkpoint.max_shard_size")?)
    }
}
