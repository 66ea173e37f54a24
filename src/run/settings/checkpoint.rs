//! Where checkpoints and the final model go, and which checkpoint a run resumes from. Never writes or reads one.
use super::names::{FloatName, GgufName};
use super::value::{StepInterval, bytes, set};
use crate::base::Result;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Checkpoint")]
pub struct CheckpointSettings {
    /// Directory of checkpoints, such as DIR/step-00000100 [default: none]
    #[arg(long, value_name = "DIR")]
    pub ckpt_dir: Option<PathBuf>,
    /// Steps between checkpoints; 0: only at the end; epoch: once per pass over the training split
    #[arg(long, value_name = "STEPS|epoch")]
    pub save_every: Option<StepInterval>,
    /// Also save a checkpoint after each evaluation with the lowest loss so far; DIR/best names it
    #[arg(long)]
    pub save_on_best: Option<bool>,
    /// At the end, load the checkpoint that save-on-best kept: exports are of it
    #[arg(long)]
    pub load_best: Option<bool>,
    /// Number of newest checkpoints to keep, plus the best one with save-on-best; 0: all
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// Resume from ckpt-dir's newest checkpoint if there is one (auto), its best one (best), or this directory
    /// [default: none]
    #[arg(long, value_name = "auto|best|DIR")]
    pub resume: Option<String>,
    /// Export the final Hugging Face model, adapters merged [default: none]
    #[arg(long, value_name = "DIR")]
    pub save_hf: Option<PathBuf>,
    /// Save the trained adapters alone, as PEFT reads them [default: none]
    #[arg(long, value_name = "DIR")]
    pub save_adapter: Option<PathBuf>,
    /// Export the final model with its tokenizer to this GGUF file, for llama.cpp and Ollama [default: none]
    #[arg(long, value_name = "FILE")]
    pub save_gguf: Option<PathBuf>,
    /// Type of the matrices in the save-gguf file; norms and biases are always fp32 [default: f16; of an adapter alone,
    /// fp32]
    #[arg(long)]
    pub gguf_type: Option<GgufName>,
    /// Only write the model of --pretrain to save-hf and save-gguf, without training, then exit
    #[arg(long)]
    pub export: Option<bool>,
    /// Let save-hf and save-adapter replace what another run wrote, and save-gguf a file; the model the run starts from
    /// is never replaced
    #[arg(long)]
    pub overwrite: Option<bool>,
    /// Write checkpoints in the background, from a copy in memory, while training continues
    #[arg(long)]
    pub async_save: Option<bool>,
    /// Maximum size of a model or optimizer file, such as 5GB or 200MB (a tensor is never split)
    #[arg(long, value_name = "SIZE")]
    pub max_shard_size: Option<String>,
    /// Dtype of the save-hf export; checkpoints and adapters are always fp32
    #[arg(long)]
    pub save_dtype: Option<FloatName>,
}

impl CheckpointSettings {
    pub fn check(&self) -> Result<()> {
        self.max_file_bytes().map(drop)
    }
    pub fn max_file_bytes(&self) -> Result<u64> {
        bytes("max_shard_size", &set(&self.max_shard_size, "checkpoint.max_shard_size")?)
    }
}
