//! How the model is sharded: the engine, its units and when they are gathered. Never builds an engine.
use super::names::*;
use super::value::bytes;
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "FSDP")]
pub struct FsdpSettings {
    /// Sharding engine: fsdp (flat units) or zero (DeepSpeed's buckets); zero-stage and deepspeed imply zero
    #[arg(long)]
    pub backend: Option<BackendName>,
    /// FSDP implementation. manual: flat units, prefetched; reference: one tensor at a time, no overlap, the oracle for
    /// manual
    #[arg(long)]
    pub fsdp_impl: Option<FsdpImpl>,
    /// When parameters are resharded. FULL_SHARD: after forward; SHARD_GRAD_OP: after backward; HYBRID_SHARD:
    /// FULL_SHARD within each host, replicated across hosts; NO_SHARD: never
    #[arg(long)]
    pub sharding: Option<ShardingName>,
    /// Unit of sharding and gathering. transformer: one decoder block; size: consecutive blocks with at least
    /// wrap-min-params; none: the whole model
    #[arg(long)]
    pub auto_wrap: Option<WrapName>,
    /// With auto-wrap size: minimum parameters per unit
    #[arg(long, value_name = "PARAMETERS")]
    pub wrap_min_params: Option<usize>,
    /// When backward unshards the next unit: before the current gradient is computed (PRE), after it (POST), or on
    /// demand (NONE)
    #[arg(long)]
    pub backward_prefetch: Option<PrefetchName>,
    /// Unshard the next unit before computing the current one in forward
    #[arg(long)]
    pub forward_prefetch: Option<bool>,
    /// Unshard at most one unit ahead (two slots); off: three ahead, in twice the slots
    #[arg(long)]
    pub limit_all_gathers: Option<bool>,
    /// FULL_SHARD and HYBRID_SHARD: keep the last units of forward unsharded for backward while at most this many
    /// parameters are unsharded, embeddings and head included [default: those of the units in use and prefetched]
    #[arg(long, value_name = "PARAMETERS")]
    pub max_live_parameters: Option<usize>,
    /// Limit on the planned bytes of a rank on its device, such as 20GB. FULL_SHARD and HYBRID_SHARD keep as many of
    /// the last units of forward unsharded for backward as fit, unless max-live-parameters is set [default: none]
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Keep each tensor's own weight decay, learning rate and freezing; off: the optimizer sees one tensor per unit,
    /// and norms decay too
    #[arg(long)]
    pub use_orig_params: Option<bool>,
    /// Recompute activations in backward. full: keep only block inputs; selective: keep attention outputs too
    #[arg(long)]
    pub activation_checkpoint: Option<CheckpointName>,
    /// With activation-checkpoint: recompute only every Nth block [default: 1]
    #[arg(long, value_name = "N")]
    pub activation_checkpoint_every: Option<usize>,
    /// Offload to host memory, where updates then run: `parameters` (implies gradients and optimizer), `gradients`
    /// (implies optimizer) or `optimizer`
    #[arg(long)]
    pub cpu_offload: Option<OffloadName>,
    /// Reduce gradients after every micro-batch (less memory) instead of once per step (less communication)
    #[arg(long)]
    pub sync_each_batch: Option<bool>,
    /// ZeRO stage. 1: shard optimizer states; 2: gradients too; 3: parameters too [default: 2]
    #[arg(long, value_name = "1|2|3")]
    pub zero_stage: Option<u8>,
    /// DeepSpeed configuration file; every key is honored or refused, "auto" defers to the flags [default: none]
    #[arg(long, value_name = "FILE.json")]
    pub deepspeed: Option<PathBuf>,
    /// Derived: the DeepSpeed file has no `gradient_clipping`.
    #[arg(skip)]
    pub deepspeed_unclipped: Option<bool>,
}

impl FsdpSettings {
    pub fn check(&self) -> Result<()> {
        if let Some(stage) = self.zero_stage.filter(|stage| !(1..=3).contains(stage)) {
            return Err(Error::input(format!(
                "zero_stage is {stage}: it must be 1, 2 or 3 (instead of stage 0, use run_ddp or --sharding NO_SHARD)"
            )));
        }
        self.budget().map(drop)
    }
    /// `memory_budget` in bytes.
    pub fn budget(&self) -> Result<Option<u64>> {
        self.memory_budget.as_deref().map(|text| bytes("memory_budget", text)).transpose()
    }
}
