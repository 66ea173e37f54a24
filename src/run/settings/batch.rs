//! Sequences in a step. Never relates them to ranks.
use super::value::{count, size};
use crate::base::Result;
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Batch")]
pub struct BatchSettings {
    /// Sequences in a micro-batch of a data-parallel rank
    #[arg(long, value_name = "SEQUENCES")]
    pub batch_size: Option<usize>,
    /// Micro-batches of a rank in an optimizer step
    #[arg(long, value_name = "N")]
    pub grad_accum: Option<usize>,
    /// Sequences in an optimizer step of all ranks: gives batch-size or grad-accum where one is left out [default:
    /// none]
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
