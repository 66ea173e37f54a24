//! The axes of the mesh. Never arranges ranks.
use super::names::RingName;
use super::value::count;
use crate::base::Result;
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Parallel")]
pub struct ParallelSettings {
    /// Ranks that share each layer (tensor parallelism)
    #[arg(long, value_name = "N")]
    pub tp_size: Option<usize>,
    /// Take the tensor-parallel plan of the Hugging Face configuration
    #[arg(long)]
    pub use_hf_tp_plan: Option<bool>,
    /// Ranks that share each sequence (ring attention), of any length: what does not divide is padded
    #[arg(long, value_name = "N")]
    pub ring_attn_size: Option<usize>,
    /// How keys and values reach those ranks: block by block, or all at once (short sequences, few key/value heads)
    #[arg(long)]
    pub ring_impl: Option<RingName>,
    /// Norms and residuals cut over the tensor-parallel ranks
    #[arg(long)]
    pub sequence_parallel: Option<bool>,
    /// Replicas of each set of shards [default: 1; HYBRID_SHARD: one a host; ddp: all ranks]
    #[arg(long, value_name = "N")]
    pub dp_replicate_size: Option<usize>,
}

impl ParallelSettings {
    pub fn check(&self) -> Result<()> {
        count("tp_size", self.tp_size)?;
        count("ring_attn_size", self.ring_attn_size)?;
        count("dp_replicate_size", self.dp_replicate_size)
    }
}
