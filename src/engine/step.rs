//! One rank's engine: decoder, activations, store, optimizer, norm. Never loops over a data set and never writes files.
//!
//! All ranks of the mesh make the same calls with the same number of micro-batches. Ranks of sp and tp get the same
//! micro-batch and take their part of it.
use super::bytes::PlannedRank;
use super::load::{ExpertLoad, LoadTally};
use super::objectives::{
    Policy, PreferenceMeans, RolloutMeans, SUMS, StepMeans, StepObjective, StepTotals, StudentMeans, TeacherModel,
};
use super::options::EngineOptions;
use super::sampler::Sampler;
use super::staging::BatchStaging;
use super::summed::Summed;
use super::watched::{Watched, Watchers, timed};
use crate::base::history::{History, InUse};
use crate::base::rng::{Rng, philox};
use crate::base::timeline::{Lane, Timeline};
use crate::base::{Category, DType, Result};
use crate::comm::mesh::{Mesh, MeshSizes};
use crate::comm::{Axis, CommUse, Reduce, Tag};
use crate::data::MicroBatch;
use crate::device::{Buf, Device, View};
use crate::nn::{Checkpointing, Decoder, Groups, Layout, Micro, ParamStore, Spec, Split, Tuning, Workspace};
use crate::optim::{GradNorm, LossScaler, Optimizer, Rule};
use crate::store::{self, Store, initialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the loop decides about a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// From 1; part of the dropout key.
    pub number: u64,
    pub lr: f32,
    /// What the loss is divided by: [`super::Objective::divisor`] of all micro-batches of all ranks, such as their
    /// tokens with loss, from [`Engine::global_count`].
    pub tokens: u64,
}

impl Step {
    // Without any loss tokens, loss and gradient are 0, not 0/0.
    fn tokens(&self) -> u64 {
        self.tokens.max(1)
    }
}

/// The result of a step, the same on every rank.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepReport {
    /// Mean over the step's tokens, pairs or labeled answers, before the update.
    pub loss: f64,
    /// Means over the step's pairs or labeled answers, of a preference objective.
    pub preference: Option<PreferenceMeans>,
    /// Means over the step's rollouts, with [`super::Objective::Grpo`].
    pub rollouts: Option<RolloutMeans>,
    /// Means over the step's samples, with a teacher that corrects them.
    pub student: Option<StudentMeans>,
    /// The load of a mixture of experts.
    pub experts: Option<ExpertLoad>,
    /// Norm of the whole gradient, before clipping and without the loss scale.
    pub grad_norm: f32,
    /// The norm was not finite, so no weight was updated.
    pub skipped: bool,
    /// The scale of the loss, with a scaler.
    pub loss_scale: Option<f32>,
    /// The step was skipped, and the loss scale cannot get smaller.
    pub stuck: bool,
}

/// How a rank's host time divides over a step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PassTimes {
    /// Up to the loss, whose gradient is computed with it.
    pub forward: Duration,
    /// From there until gradients are reduced.
    pub backward: Duration,
    /// Gradient norm and update.
    pub optimizer: Duration,
}

/// One rank's training state: model, parameter store, optimizer. Created by every rank of a mesh with the same options.
pub struct Engine {
    pub(super) dev: Arc<dyn Device>,
    pub(super) mesh: Mesh,
    pub(super) decoder: Decoder,
    pub(super) workspace: Workspace,
    pub(super) store: Box<dyn Store>,
    optimizer: Optimizer,
    summed: Summed,
    norm: GradNorm,
    scaler: Option<LossScaler>,
    pub(super) staging: BatchStaging,
    /// Makes decoders for texts that are sampled.
    writer: (Spec, Tuning, Split),
    /// The decoder's logits are the model's, divided by this.
    pub(super) temperature: f32,
    /// With [`EngineOptions::samples`].
    pub(super) sampler: Option<Sampler>,
    pub(super) objective: StepObjective,
    /// f64 ([`StepObjective::sums`]), to be summed over ranks.
    pub(super) sums: Buf,
    /// f64 (1), of which ranks take the largest, if the objective has such a number.
    largest: Option<Buf>,
    numbers: Numbers,
    dropout: Rng,
    watchers: Watchers,
    /// Times of the last step.
    passes: PassTimes,
    /// Factor of the load-balancing loss.
    aux_coef: f64,
    load: LoadTally,
}

/// Per-step numbers, uploaded once before the step and read by kernels from device memory, so that every step makes
/// identical calls (as CUDA graphs need). f32: the loss scale, the inverse of its power-of-two factor, the
/// factor of a micro-batch's load-balancing loss, then the optimizer's constants.
struct Numbers {
    host: Vec<f32>,
    buf: Buf,
}

impl Numbers {
    const BEFORE: usize = 3;

    fn len(rule: &Rule, layouts: &[Layout]) -> usize {
        Numbers::BEFORE + rule.constants_of(layouts)
    }
    fn new(dev: &dyn Device, len: usize) -> Result<Numbers> {
        Ok(Numbers { host: vec![0.0; len], buf: dev.alloc(DType::F32, len, Category::Other)? })
    }
    fn upload(&mut self, dev: &dyn Device, before: [f32; Numbers::BEFORE], constants: &[f32]) -> Result<()> {
        let (scales, own) = self.host.split_at_mut(Numbers::BEFORE);
        scales.copy_from_slice(&before);
        own.copy_from_slice(constants);
        dev.upload(bytemuck::cast_slice(&self.host), self.buf.view_mut())
    }
    fn loss_scale(&self) -> View<'_> {
        self.buf.view().slice(0..1)
    }
    fn unscale(&self) -> View<'_> {
        self.buf.view().slice(1..2)
    }
    fn aux_scale(&self) -> View<'_> {
        self.buf.view().slice(2..3)
    }
    fn constants(&self) -> View<'_> {
        self.buf.view().slice(Numbers::BEFORE..self.buf.len())
    }
}

impl EngineOptions {
    /// Bytes that [`Engine::new`] allocates on `rank`, in the order of [`crate::base::CATEGORIES`], with all ranks on
    /// one host.
    pub fn bytes(&self, mesh: &MeshSizes, rank: usize) -> Result<Vec<(Category, usize)>> {
        let planned = PlannedRank { mesh: *mesh, rank, sharing: mesh.world(), stage: 0, gpu: false };
        planned.bytes(|dev, mesh| Engine::unfilled(dev, mesh, self))
    }
}

impl Engine {
    /// Allocates everything a step needs and initializes the weights.
    ///
    /// # Errors
    /// [`Error::Input`](crate::base::Error::Input) names the invalid field of `options` or of its `spec`.
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, options: &EngineOptions) -> Result<Engine> {
        let mut engine = Engine::unfilled(dev.clone(), mesh, options)?;
        initialize(&mut *engine.store, options.seed, &*dev)?;
        Ok(engine)
    }

    /// Like [`Engine::new`], with zero weights: for callers that fill them, or need no values.
    pub fn unfilled(dev: Arc<dyn Device>, mesh: &Mesh, options: &EngineOptions) -> Result<Engine> {
        let split = options.split(&mesh.sizes, &mesh.coords);
        let decoder = options.decoder(&mesh.sizes, &mesh.coords)?;
        let mut store = store::allocate(&*options.strategy, dev.clone(), mesh, decoder.layouts())?;
        let objective = options.step_objective(&dev, mesh, &split)?;
        let alloc = |len| mesh.group(Axis::Loss).alloc(DType::F64, len, CommUse::Reduced, Category::Other);
        Ok(Engine {
            workspace: decoder.workspace(&*dev, &Groups::of(mesh), &options.workspace(&split))?,
            optimizer: Optimizer::new(&*dev, mesh, decoder.layouts(), &mut *store, options.rule, options.seed)?,
            summed: Summed::new(mesh, decoder.layouts())?,
            norm: GradNorm::new(&*dev, mesh, options.grad_clip, options.strategy.offload())?,
            scaler: options.scaler.map(LossScaler::new),
            staging: BatchStaging::new(&*dev, options.tokens, &decoder)?,
            numbers: Numbers::new(&*dev, Numbers::len(&options.rule, decoder.layouts()))?,
            sums: alloc(objective.sums())?,
            sampler: options.sampler(&dev, mesh)?,
            writer: options.writer(&mesh.sizes, &mesh.coords),
            temperature: options.objective.temperature(),
            largest: objective.has_largest().then(|| alloc(1)).transpose()?,
            objective,
            dropout: Rng::named(options.seed, "dropout"),
            watchers: Watchers {
                blocks: options.spec.layers,
                recomputes: options.checkpoint != Checkpointing::Off,
                ..Watchers::default()
            },
            passes: PassTimes::default(),
            aux_coef: options.aux_coef,
            load: LoadTally::new(&options.spec),
            dev,
            mesh: mesh.clone(),
            decoder,
            store,
        })
    }

    /// One optimizer step over this rank's micro-batches. Their number is the same on every rank, and the one the store
    /// was made for.
    ///
    /// # Errors
    /// A micro-batch of more than [`EngineOptions::tokens`]; a rank that failed. A non-finite gradient is not an error:
    /// the report says that the step was skipped.
    pub fn train_step(&mut self, batches: &[MicroBatch], step: &Step) -> Result<StepReport> {
        self.begin_step(batches, step)?;
        self.end_step(step, None)
    }

    /// Everything of a step except its report: on a GPU the work is enqueued when this returns.
    pub fn begin_step(&mut self, batches: &[MicroBatch], step: &Step) -> Result<()> {
        self.set_baseline(batches)?;
        let by = self.scaler.as_ref().map_or(1.0, LossScaler::scale);
        let loss_scale = (by as f64 / step.tokens() as f64) as f32;
        let (dev, watchers, timeline) = (&*self.dev, &self.watchers, &self.watchers.timeline);
        // The load-balancing loss is the mean of the micro-batches', each of all ranks.
        let aux_scale = (by as f64 * self.aux_coef / batches.len().max(1) as f64) as f32;
        self.numbers.upload(dev, [loss_scale, 1.0 / by, aux_scale], self.optimizer.constants(step.lr))?;
        self.load.begin(batches.len());
        let mut passes = PassTimes::default();
        for (index, batch) in batches.iter().enumerate() {
            self.store.begin_micro_batch(index == 0, index + 1 == batches.len())?;
            let key = |rank| dropout_key(self.dropout, step.number, index, rank);
            let (key, shared) = (key(self.mesh.group(Axis::Loss).rank()), key(self.mesh.group(Axis::Dp).rank()));
            let staged = timed(dev, timeline, (Lane::Data, "upload"), || {
                self.staging.upload_keys(dev, |words| self.decoder.dropout_keys(key, shared, words))?;
                self.staging.upload(dev, batch)
            })?;
            let started = Instant::now();
            let (loss_scale_at, aux_scale) = (self.numbers.loss_scale(), self.numbers.aux_scale());
            let micro = Micro { loss_scale: loss_scale_at, dropout_keys: staged.keys, aux_scale };
            let (decoder, ws) = (&self.decoder, &mut self.workspace);
            let policy = &mut Policy { dev, decoder, store: &mut *self.store, ws };
            let mut minimized = self.objective.begin(dev, policy, batch, &staged, loss_scale as f64)?;
            let mut watched;
            let store: &mut dyn ParamStore = match watchers.any() {
                true => {
                    watched = Watched::new(&mut *self.store, dev, watchers);
                    &mut watched
                }
                false => &mut *self.store,
            };
            let between = decoder.train(dev, store, &staged.batch, ws, &micro, minimized.minimized())?;
            minimized.end()?;
            self.objective.end(dev)?;
            passes.forward += between - started;
            passes.backward += between.elapsed();
        }
        let trained = Instant::now();
        let store = &mut *self.store;
        if let Some(history) = watchers.history() {
            history.used("optimizer", None, InUse::default());
        }
        timed(dev, timeline, (Lane::Store, "finish gradients"), || store.finish_grads())?;
        timed(dev, timeline, (Lane::Store, "sum over tp"), || self.summed.reduce(dev, store))?;
        let reduced = Instant::now();
        let measure = || self.norm.measure(dev, store, self.numbers.unscale());
        timed(dev, timeline, (Lane::Optimizer, "norm"), measure)?;
        let update = || self.optimizer.step(dev, store, self.numbers.constants(), self.norm.scale());
        timed(dev, timeline, (Lane::Optimizer, "update"), update)?;
        (passes.backward, passes.optimizer) = (passes.backward + (reduced - trained), reduced.elapsed());
        self.passes = passes;
        self.reduce_totals()
    }
    /// Reduces the objective's totals over ranks.
    fn reduce_totals(&mut self) -> Result<()> {
        let (dev, StepTotals { sums, count, largest }) = (&*self.dev, self.objective.take_totals());
        let first = usize::from(self.objective.has_device_loss());
        if first > 0 {
            self.workspace.move_loss(dev, self.sums.view_mut().slice(0..first))?;
        }
        if count > 0 {
            dev.upload(bytemuck::cast_slice(&sums[..count]), self.sums.view_mut().slice(first..first + count))?;
        }
        if let Some(buf) = &mut self.largest {
            dev.upload(bytemuck::bytes_of(&largest), buf.view_mut())?;
            let ticket =
                self.mesh.group(Axis::Loss).all_reduce(Tag::new("mismatch", 0), buf.view_mut(), Reduce::Max)?;
            self.mesh.group(Axis::Loss).wait(ticket)?;
        }
        self.reduce("loss", first + count)
    }

    /// Waits for the step: the only host synchronization. Downloads the loss and the norm, and `extra` along with them.
    pub fn end_step(&mut self, step: &Step, extra: Option<(View, &mut [u8])>) -> Result<StepReport> {
        let (mut sums, mut largest, mut grad_norm) = ([0f64; SUMS], [0f64], [0f32]);
        let len = if self.sums.len() == sums.len() { sums.len() } else { 1 };
        let norm = (self.norm.norm(), bytemuck::cast_slice_mut(&mut grad_norm));
        let sum = (self.sums.view().slice(0..len), bytemuck::cast_slice_mut(&mut sums[..len]));
        let most = self.largest.as_ref().map(|buf| (buf.view(), bytemuck::cast_slice_mut(&mut largest)));
        match (most, extra) {
            (None, None) => self.dev.download_all(&mut [norm, sum])?,
            (Some(more), None) | (None, Some(more)) => self.dev.download_all(&mut [norm, sum, more])?,
            (Some(most), Some(extra)) => self.dev.download_all(&mut [norm, sum, most, extra])?,
        }
        let ([grad_norm], [largest]) = (grad_norm, largest);
        let loss = sums[0] / step.tokens() as f64;
        let StepMeans { preference, rollouts, student } = self.objective.means(sums, largest, loss);
        let experts = self.load.take(&*self.dev, &mut self.workspace)?;
        let skipped = !grad_norm.is_finite();
        if !skipped {
            self.optimizer.count();
        }
        let scale = self.scaler.as_ref().map(LossScaler::scale);
        let stuck = skipped && self.scaler.as_ref().is_none_or(LossScaler::exhausted);
        if let Some(scaler) = &mut self.scaler {
            scaler.update(!skipped);
        }
        Ok(StepReport { loss, preference, rollouts, student, experts, grad_norm, skipped, loss_scale: scale, stuck })
    }

    /// The decoder of texts that are sampled.
    pub(super) fn writer(&self) -> Result<Decoder> {
        let (spec, tuning, split) = &self.writer;
        Ok(Decoder::split(spec.clone(), tuning, split)?.at_temperature(self.temperature))
    }
    /// Times of the last step; None if the device computes asynchronously.
    pub fn pass_times(&self) -> Option<PassTimes> {
        self.dev.is_synchronous().then_some(self.passes)
    }
    /// Records later steps on `timeline`.
    pub fn on_timeline(&mut self, timeline: Timeline) {
        self.watchers.timeline = timeline;
    }
    /// Records the memory use of later steps, while the history is enabled.
    pub fn on_history(&mut self, history: &History) -> Result<()> {
        (self.watchers.history, self.watchers.saved) = (Some(history.clone()), self.workspace.saved_for()?);
        Ok(())
    }

    /// The frozen reference model and its store, to load weights into.
    pub fn reference(&mut self) -> Option<(&Decoder, &mut dyn Store)> {
        self.objective.judged()?.reference()
    }

    /// The teacher and its store, to load weights into.
    pub fn teacher(&mut self) -> Option<(&Decoder, &mut dyn Store)> {
        self.objective.teacher().map(TeacherModel::model)
    }

    /// Weights and optimizer state, shard by shard, for checkpoints.
    pub fn state(&mut self) -> (&mut dyn Store, &mut Optimizer) {
        (&mut *self.store, &mut self.optimizer)
    }
    /// The loss scaler, the same on every rank.
    pub fn scaler(&mut self) -> Option<&mut LossScaler> {
        self.scaler.as_mut()
    }
    /// Steps that updated the weights.
    pub fn updates(&self) -> u64 {
        self.optimizer.steps()
    }
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.dev
    }
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }
}

/// A distinct key for each step, micro-batch and rank of `loss`. Only ranks of tp share masks, because they compute the
/// same tokens.
fn dropout_key(rng: Rng, step: u64, micro: usize, rank: usize) -> u64 {
    let [a, b, ..] = philox(rng.key(), [step as u32, (step >> 32) as u32, micro as u32, rank as u32]);
    a as u64 | (b as u64) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_micro_batch_of_every_rank_and_step_has_its_own_dropout() {
        let mut keys = HashSet::new();
        for seed in [1, 2] {
            let rng = Rng::named(seed, "dropout");
            for step in [1, 2, 1 << 32, 1 << 33] {
                for (micro, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    assert!(keys.insert(dropout_key(rng, step, micro, rank)), "step {step} micro {micro} rank {rank}");
                }
            }
        }
    }
}
