//! Sequences in a step. Never relates them to ranks.
use super::value::{count, size};
use crate::base::Result;
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Batch")]
pub struct BatchSettings {
    /// Sequences per micro-batch on each data-parallel rank
    #[arg(long, value_name = "SEQUENCES")]
    pub batch_size: Option<usize>,
    /// Micro-batches per rank in each optimizer step
    #[arg(long, value_name = "N")]
    pub grad_accum: Option<usize>,
    /// Global batch: sequences per optimizer step over all ranks; sets batch-size or grad-accum, whichever is not given
    /// [default: batch-size * grad-accum * data-parallel ranks]
    #[arg(long, value_name = "SEQUENCES")]
    pub train_batch_size: Option<usize>,
}

impl BatchSettings {
    pub fn check(&self) -> Result<()> {
        count("batch_size", self.batch_size)?;
        count("grad_accum", self.grad_accum)?;
        size("train_batch_size", self.train_batch_size)
    }
}
