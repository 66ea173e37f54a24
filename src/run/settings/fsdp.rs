//! How the model is spread over ranks: the engine, its units and when they are gathered. Never builds one.
use super::names::*;
use crate::base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[command(next_help_heading = "FSDP")]
pub struct FsdpSettings {
    /// Family of sharding engines; with zero-stage or deepspeed it is zero
    #[arg(long)]
    pub backend: Option<BackendName>,
    /// Flat units, gathered ahead; or tensor by tensor, each waited for: what manual is checked against
    #[arg(long)]
    pub fsdp_impl: Option<FsdpImpl>,
    /// FULL_SHARD reshards after forward, HYBRID_SHARD too, on each host by itself; SHARD_GRAD_OP after backward;
    /// NO_SHARD keeps all
    #[arg(long)]
    pub sharding: Option<ShardingName>,
    /// What one unit is: a decoder block, blocks up to wrap-min-params, or the whole model
    #[arg(long)]
    pub auto_wrap: Option<WrapName>,
    /// auto-wrap size: smallest unit
    #[arg(long, value_name = "PARAMETERS")]
    pub wrap_min_params: Option<usize>,
    /// When backward asks for the next unit: before this one's gradient, after it, or when needed
    #[arg(long)]
    pub backward_prefetch: Option<PrefetchName>,
    /// Forward asks for the next unit before it computes this one
    #[arg(long)]
    pub forward_prefetch: Option<bool>,
    /// Gather one unit ahead, two at a time; off: three ahead, in twice the slots
    #[arg(long)]
    pub limit_all_gathers: Option<bool>,
    /// Each tensor has its own decay, rate and freezing; off: a unit is one tensor to the optimizer, norms decay too
    #[arg(long)]
    pub use_orig_params: Option<bool>,
    /// Recompute blocks in backward: all but their inputs, or (selective) all but those and attention's outputs
    #[arg(long)]
    pub activation_checkpoint: Option<CheckpointName>,
    /// Every Nth block only; the others keep all [default: 1]
    #[arg(long, value_name = "N")]
    pub activation_checkpoint_every: Option<usize>,
    /// In host memory: parameters, gradients and optimizer; or gradients and optimizer; or that alone. Updates run
    /// there
    #[arg(long)]
    pub cpu_offload: Option<OffloadName>,
    /// Reduce gradients after each micro-batch (less memory) instead of once a step (less communication)
    #[arg(long)]
    pub sync_each_batch: Option<bool>,
    /// Backend zero partitions 1: optimizer states, 2: gradients too, 3: parameters too [default: 2]
    #[arg(long, value_name = "1|2|3")]
    pub zero_stage: Option<u8>,
    /// DeepSpeed configuration: every key is honoured or refused; "auto" leaves it to flags [default: none]
    #[arg(long, value_name = "FILE.json")]
    pub deepspeed: Option<PathBuf>,
    /// Whether that file leaves out clipping: derived.
    #[arg(skip)]
    pub deepspeed_unclipped: Option<bool>,
}

impl FsdpSettings {
    pub fn check(&self) -> Result<()> {
        if let Some(stage) = self.zero_stage.filter(|stage| !(1..=3).contains(stage)) {
            return Err(Error::input(format!(
                "zero_stage is {stage}: it must be 1, 2 or 3 (stage 0 is what run_ddp does, or --sharding NO_SHARD)"
            )));
        }
        match (self.activation_checkpoint_every, self.activation_checkpoint) {
            (Some(every), Some(CheckpointName::Off)) => Err(Error::input(format!(
                "--activation-checkpoint-every {every} says how many blocks are computed again, and --activation-checkpoint is \
                 off: add --activation-checkpoint full or selective"
            ))),
            _ => Ok(()),
        }
    }
}
