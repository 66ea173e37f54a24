//! What an engine trains, and how, as plain values. Never allocates.
use super::objectives::{Objective, PreferenceLoss, ReferenceModel, StepObjective, TeacherModel, Teaching};
use super::sampler::{Sampler, SamplerSize};
use crate::base::{DType, Error, Result};
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
    /// What a preference objective compares with.
    pub reference: ReferenceModel,
    /// Whom the model learns from besides the data, with [`Objective::Sft`].
    pub teacher: Option<Teaching>,
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
    /// Overlaps the exchange of rows between ranks that share experts with these.
    pub moe_overlap: bool,
    /// Factor of the load-balancing loss of a mixture of experts; 0 disables it.
    pub aux_coef: f64,
    /// The engine samples texts between steps ([`Engine::sample`](super::Engine::sample)), so many at once.
    pub samples: Option<SamplerSize>,
}

/// Everything but the model: FSDP in f32, AdamW, gradient norm clipped to 1, micro-batches of up to 2048 tokens.
impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            spec: Spec::default(),
            tuning: Tuning::default(),
            strategy: Arc::new(ShardedOptions::default()),
            objective: Objective::Sft,
            reference: ReferenceModel::Base,
            teacher: None,
            rule: Rule::default(),
            grad_clip: 1.0,
            scaler: None,
            tokens: 2048,
            checkpoint: Checkpointing::Off,
            seed: 0,
            sequence_parallel: false,
            cuts: Cuts::ALL,
            sp_impl: SpImpl::Ring,
            moe_overlap: false,
            aux_coef: 0.0,
            samples: None,
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
            ep: Slice { index: mesh.ep_index(at), of: mesh.ep },
            sequence_parallel: self.sequence_parallel,
            cuts: self.cuts,
            sp_impl: self.sp_impl,
            moe_overlap: self.moe_overlap,
        }
    }
    /// The part of the model on the rank at `at`.
    pub fn decoder(&self, mesh: &MeshSizes, at: &Coords) -> Result<Decoder> {
        if self.tuning.fp8.is_some() && self.strategy.dtype() != DType::Bf16 {
            let dtype = self.strategy.dtype();
            return Err(Error::input(format!(
                "tuning: fp8 rounds operands of products in bf16, and strategy has {dtype}"
            )));
        }
        let decoder = Decoder::split(self.spec.clone(), &self.tuning, &self.split(mesh, at))?;
        Ok(decoder.at_temperature(self.objective.temperature()))
    }
    /// What makes the same decoder for texts that are sampled: ranks of sp each process whole ones.
    pub(super) fn writer(&self, mesh: &MeshSizes, at: &Coords) -> (Spec, Tuning, Split) {
        let Split { tp, ep, cuts, .. } = self.split(mesh, at);
        let spec = Spec { dropout: 0.0, ..self.spec.clone() };
        (spec, self.tuning.clone(), Split { tp, ep, cuts, ..Split::NONE })
    }
    /// The buffers of sampling, if the engine samples.
    pub(super) fn sampler(&self, dev: &Arc<dyn Device>, mesh: &Mesh) -> Result<Option<Sampler>> {
        let Some(size) = &self.samples else { return Ok(None) };
        let (spec, tuning, split) = self.writer(&mesh.sizes, &mesh.coords);
        let decoder = Decoder::split(spec, &tuning, &split)?.at_temperature(self.objective.temperature());
        Sampler::new(&**dev, mesh, decoder, self.strategy.dtype(), size).map(Some)
    }
    /// What steps minimize, with weights of 0 in other models until they are filled.
    pub(super) fn step_objective(&self, dev: &Arc<dyn Device>, mesh: &Mesh, split: &Split) -> Result<StepObjective> {
        let judged = self.preference(dev, mesh, split)?;
        let teacher = self.teacher(dev, mesh, split)?;
        Ok(match (judged, teacher) {
            (Some(judged), _) => StepObjective::Judged(Box::new(judged)),
            (None, Some(teacher)) => StepObjective::Taught(Box::new(teacher)),
            (None, None) => StepObjective::Tokens,
        })
    }
    /// The teacher, if there is one.
    fn teacher(&self, dev: &Arc<dyn Device>, mesh: &Mesh, split: &Split) -> Result<Option<TeacherModel>> {
        let Some(teaching) = &self.teacher else { return Ok(None) };
        let same = teaching.spec.vocab == self.spec.vocab && !teaching.spec.score;
        if !same || self.objective != Objective::Sft {
            return Err(Error::input(
                "teacher: it must have logits of the student's vocabulary, and the objective must be sft",
            ));
        }
        self.same_grid(split, &teaching.spec, "teacher")?;
        let own = self.tokens.div_ceil(split.sp.of);
        TeacherModel::new(dev.clone(), mesh, teaching, split, &*self.strategy, own).map(Some)
    }
    /// Refuses another model whose ranks would hold other tokens.
    fn same_grid(&self, split: &Split, other: &Spec, what: &str) -> Result<()> {
        if split.grid_of(other) == split.grid_of(&self.spec) {
            return Ok(());
        }
        Err(Error::input(format!(
            "sp-impl ulysses: the {what} model has {} heads and the trained one {}, so that ring-attn-size {} would \
             give their ranks different tokens; choose a ring-attn-size of at most either, or sp-impl ring",
            other.heads, self.spec.heads, split.sp.of
        )))
    }
    /// What a preference objective needs besides the model; None without one.
    fn preference(&self, dev: &Arc<dyn Device>, mesh: &Mesh, split: &Split) -> Result<Option<PreferenceLoss>> {
        let is_scored = matches!(self.objective, Objective::Rm(_));
        if is_scored != self.spec.score {
            return Err(Error::input(
                "objective: a reward model has a score head (`score`), and other models have logits",
            ));
        }
        if self.objective == Objective::Sft {
            return Ok(None);
        }
        if self.objective.compares() && self.reference == ReferenceModel::Base && self.tuning.lora.is_none() {
            return Err(Error::input(
                "objective: without adapters a preference objective needs a `reference` model, whose base would be the \
                 trained model itself",
            ));
        }
        if matches!(self.objective, Objective::Grpo(_)) && self.reference == ReferenceModel::Given {
            return Err(Error::input(
                "reference: given log-probabilities are of whole sequences, and the objective's are of tokens",
            ));
        }
        let tuning = match &self.reference {
            ReferenceModel::Frozen(spec) => {
                self.same_grid(split, spec, "reference")?;
                self.tuning_of(spec)
            }
            _ => Tuning::default(),
        };
        let reference = (&self.reference, &tuning);
        PreferenceLoss::new(dev, mesh, self.objective, reference, split, &*self.strategy, self.tokens).map(Some)
    }
    /// How a `reference` model computes: as the base of the trained one, if it has the same shape, so that a policy
    /// that has learned nothing has its bits. Other models compute in the compute dtype.
    pub fn tuning_of(&self, reference: &Spec) -> Tuning {
        let shape = |spec: &Spec| Spec { dropout: 0.0, max_len: 0, ..spec.clone() };
        if shape(reference) == shape(&self.spec) { self.tuning.clone() } else { Tuning::default() }
    }
}
