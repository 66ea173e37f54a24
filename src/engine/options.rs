//! What an engine trains, and how, as plain values. Never allocates.
use super::objectives::{Objective, PreferenceLoss};
use crate::base::{Error, Result};
use crate::comm::Mesh;
use crate::comm::mesh::{Coords, MeshSizes};
use crate::device::Device;
use crate::nn::{Checkpointing, Cuts, Decoder, Slice, SpImpl, Spec, Split, Tuning, WorkspaceOptions};
use crate::optim::{Rule, ScalerOptions};
use crate::store::{ShardedOptions, Strategy};
use std::sync::Arc;

/// What an engine trains, and how; the same on every rank.
#[derive(Clone)]
pub struct EngineOptions {
    /// The model. Its sizes have no default.
    pub spec: Spec,
    /// Which tensors are trained, and their learning rates.
    pub tuning: Tuning,
    /// How parameters, gradients and optimizer state are distributed over ranks, and their dtypes.
    pub strategy: Arc<dyn Strategy>,
    /// What is minimized.
    pub objective: Objective,
    /// The reference model of a preference objective, whose frozen weights are sharded like the model's. None: the
    /// model without its adapters.
    pub reference: Option<Spec>,
    /// The optimizer.
    pub rule: Rule,
    /// Maximum global gradient norm; 0 disables clipping.
    pub grad_clip: f32,
    /// For f16 compute or reduction: the loss is scaled, and a step whose gradient overflows is skipped.
    pub scaler: Option<ScalerOptions>,
    /// Maximum tokens per micro-batch, which the ranks of sp share.
    pub tokens: usize,
    /// Activation checkpointing.
    pub checkpoint: Checkpointing,
    /// For initial weights and dropout.
    pub seed: u64,
    /// Megatron sequence parallelism: norms and residuals are sharded over tp along the tokens.
    pub sequence_parallel: bool,
    /// Which tensors are split over tp.
    pub cuts: Cuts,
    /// How the ranks of sp attend to each other's tokens.
    pub sp_impl: SpImpl,
    /// Factor of the load-balancing loss of a mixture of experts; 0 disables it.
    pub aux_coef: f64,
}

/// Everything but the model: FSDP in f32, AdamW, gradient norm clipped to 1, micro-batches of up to 2048 tokens.
impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            spec: Spec::default(),
            tuning: Tuning::default(),
            strategy: Arc::new(ShardedOptions::default()),
            objective: Objective::Sft,
            reference: None,
            rule: Rule::default(),
            grad_clip: 1.0,
            scaler: None,
            tokens: 2048,
            checkpoint: Checkpointing::Off,
            seed: 0,
            sequence_parallel: false,
            cuts: Cuts::ALL,
            sp_impl: SpImpl::Ring,
            aux_coef: 0.0,
        }
    }
}

impl EngineOptions {
    pub(super) fn workspace(&self, split: &Split) -> WorkspaceOptions {
        let (tokens, dtype) = (self.tokens.div_ceil(split.sp.of), self.strategy.dtype());
        WorkspaceOptions { tokens, dtype, checkpoint: self.checkpoint, train: true }
    }
    pub(super) fn split(&self, mesh: &MeshSizes, at: &Coords) -> Split {
        Split {
            tp: Slice { index: at.tp, of: mesh.tp },
            sp: Slice { index: at.sp, of: mesh.sp },
            sequence_parallel: self.sequence_parallel,
            cuts: self.cuts,
            sp_impl: self.sp_impl,
        }
    }
    /// The part of the model on the rank at `at`.
    pub fn decoder(&self, mesh: &MeshSizes, at: &Coords) -> Result<Decoder> {
        Decoder::split(self.spec.clone(), &self.tuning, &self.split(mesh, at))
    }
    /// What a preference objective needs besides the model; None without one.
    pub(super) fn preference(
        &self,
        dev: &Arc<dyn Device>,
        mesh: &Mesh,
        split: &Split,
    ) -> Result<Option<PreferenceLoss>> {
        let is_scored = matches!(self.objective, Objective::Rm(_));
        if is_scored != self.spec.score {
            return Err(Error::input(
                "objective: a reward model has a score head (`score`), and other models have logits",
            ));
        }
        if self.objective == Objective::Sft {
            return Ok(None);
        }
        if !is_scored && self.reference.is_none() && self.tuning.lora.is_none() {
            return Err(Error::input(
                "objective: without adapters a preference objective needs a `reference` model, whose base would be the \
                 trained model itself",
            ));
        }
        let frozen = self.reference.as_ref().map(|spec| (spec, split));
        if let Some(spec) = &self.reference
            && split.grid_of(spec) != split.grid_of(&self.spec)
        {
            return Err(Error::input(format!(
                "sp-impl ulysses: the reference model has {} heads and the trained one {}, so that ring-attn-size {} would \
                 give their ranks different tokens; choose a ring-attn-size of at most either, or sp-impl ring",
                spec.heads, self.spec.heads, split.sp.of
            )));
        }
        PreferenceLoss::new(dev, mesh, self.objective, frozen, &*self.strategy, self.tokens).map(Some)
    }
}
