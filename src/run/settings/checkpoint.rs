//! Where checkpoints and the final model go, and which checkpoint a run resumes from. Never writes or reads one.
use super::names::PrecisionName;
use super::value::{bytes, set};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Checkpoint")]
pub struct CheckpointSettings {
    /// Where checkpoints go: DIR/step-00000100, and DIR/latest names the newest [default: none]
    #[arg(long, value_name = "DIR")]
    pub ckpt_dir: Option<PathBuf>,
    /// Steps between checkpoints; 0: at the end only
    #[arg(long, value_name = "STEPS")]
    pub save_every: Option<u64>,
    /// Newest checkpoints to keep; 0: all
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// Go on from the newest checkpoint of ckpt-dir where there is one, or from this one [default: none]
    #[arg(long, value_name = "auto|DIR")]
    pub resume: Option<String>,
    /// Write the final model alone, as a Hugging Face directory [default: none]
    #[arg(long, value_name = "DIR")]
    pub save_hf: Option<PathBuf>,
    /// Let save-hf replace a model that this run did not write; never the one that it starts from
    #[arg(long)]
    pub overwrite: Option<bool>,
    /// Write the checkpoints between steps while training goes on, from a copy in memory
    #[arg(long)]
    pub async_save: Option<bool>,
    /// Largest file of a model or an optimizer, as 5GB or 200MB (one tensor at least)
    #[arg(long, value_name = "SIZE")]
    pub max_shard_size: Option<String>,
    /// What save-hf writes; checkpoints are always fp32
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
