//! Sizes of the mesh's axes. Never arranges ranks.
use super::names::{RingName, SpName};
use super::value::count;
use crate::base::Result;
use serde::{Deserialize, Serialize};

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "Parallel")]
pub struct ParallelSettings {
    /// Tensor-parallel size: ranks that share each layer
    #[arg(long, value_name = "N")]
    pub tp_size: Option<usize>,
    /// Expert-parallel size: ranks that share the experts of a mixture; divides the ranks that shard the parameters
    #[arg(long, value_name = "N")]
    pub ep_size: Option<usize>,
    /// Overlap the exchange of tokens between ranks that share experts: in two halves, each while the experts of the
    /// other compute
    #[arg(long)]
    pub moe_overlap: Option<bool>,
    /// Use the tensor-parallel plan of the Hugging Face configuration
    #[arg(long)]
    pub use_hf_tp_plan: Option<bool>,
    /// Sequence-parallel size: ranks that share each sequence; sequences are padded as needed
    #[arg(long, value_name = "N")]
    pub ring_attn_size: Option<usize>,
    /// How ranks that share a sequence attend. ring: pass keys and values from rank to rank; ulysses: exchange heads
    /// for tokens, so that each rank attends with some of the heads to whole sequences
    #[arg(long)]
    pub sp_impl: Option<SpName>,
    /// Communication of ring attention. ring: pass keys and values from rank to rank; allgather: gather them at once
    /// (short sequences, few key/value heads)
    #[arg(long)]
    pub ring_impl: Option<RingName>,
    /// Megatron sequence parallel: shard norms and residuals along tokens within tp
    #[arg(long)]
    pub sequence_parallel: Option<bool>,
    /// Replicas of the sharded model (HSDP) [default: 1; HYBRID_SHARD: one per host; ddp: all ranks]
    #[arg(long, value_name = "N")]
    pub dp_replicate_size: Option<usize>,
}

impl ParallelSettings {
    pub fn check(&self) -> Result<()> {
        count("tp_size", self.tp_size)?;
        count("ring_attn_size", self.ring_attn_size)?;
        count("ep_size", self.ep_size)?;
        count("dp_replicate_size", self.dp_replicate_size)
    }
}
