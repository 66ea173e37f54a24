//! Manual FSDP: every rank owns 1/N of each unit's weights, gradient and optimizer state. Unsharded weights and
//! gradients exist only in staging slots (see [Note: slots] in `slots`). Never knows which layers a unit holds.
//!
//! Bytes per rank, for P padded parameters over N ranks, root R, largest other unit U (bf16; f32 in brackets):
//!
//! ```text
//! params     (4 + 2) P/N   [4 P/N]       f32 master, and the bf16 copy that is gathered [the master is]
//! grads       4 P/N                      reduced
//! optimizer   8 P/N                      AdamW's two moments (kept by `optim`)
//! slots       2 (R + kU)   [4 (R + kU)]  weights, FULL_SHARD; SHARD_GRAD_OP: 2P [4P], a slot a unit
//!           + 4 (R + 2U)                 gradients; 4P when they are accumulated before the one reduction
//! ```
//!
//! FULL_SHARD has k = 2 weight slots, and more if `max_live` allows. A slot keeps its unit until another needs it, so
//! the last k units of forward are still unsharded when backward begins, and are not gathered again: with one
//! micro-batch, a step of n units and the root has 2 n - k + 1 all_gathers.
//!
//! Gradients reduced in 2 bytes (`reduce_dtype`) are copied to slots of their own, 2 (R + 2U). The f32 slot is then
//! free at once, so one suffices besides the root's: 4 (R + U).
//!
//! Matrices in FP8 (see `coded`) have a byte in place of the copy, and in gathers.
//!
//! A rank that is alone (N = 1) has no slots: layers compute with its shards, which are whole, and add to their
//! gradients, so that nothing is gathered, reduced or copied. Not where gradients are offloaded.
//!
//! Micro-batches are summed on each rank, and the ranks' sums once at the boundary. With `sync_each_batch` the ranks
//! are summed first, micro-batch by micro-batch: the same sum in another order, as in ZeRO-2 and ZeRO-3. A rank that is
//! alone always has the first order.
//!
//! With `masters` in bf16 there is no copy: params are 2 P/N. Moments in bf16 take 4 P/N, in 8 bits 2.03 P/N.
//!
//! In shared memory the weight slots exist once per host, and each rank counts 1/N of them. Frozen parameters cost only
//! params and weight slots. With adapters, when only those are saved, frozen params cost 2 P/N [4 P/N] plus weight
//! slots.
//!
//! Schedule. `acquire(u)` starts the all_gather of u (unless it is unsharded), then that of the next unit, and only
//! then waits for u. So the next unit's communication overlaps the current unit's computation. At most two all_gathers
//! are in flight (`limit_all_gathers`); without that limit three units are gathered ahead, into four slots. Backward of
//! u ends by starting its reduce_scatter, which overlaps the backward of u - 1.
//!
//! HYBRID_SHARD: the shards above are spread over one replica's ranks, and each is summed over the replicas
//! (dp_replicate) once per step. When the last reduce_scatter of u has finished, its all_reduce starts and overlaps the
//! backward of u - 2.
use super::flat::{Flat, Wrap};
use super::kept::narrow;
use super::slots::Cycles;
use super::units::{ShardedUnits, UnitPlan};
use super::{Offload, PackedShard, Shard, Store, Strategy, apart};
use crate::base::{DType, Result};
use crate::comm::{Axis, Mesh};
use crate::device::Device;
use crate::nn::{Grads, Layout, ParamStore, Pass, Weights};
use std::sync::Arc;

/// When backward starts the all_gather of the next unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackwardPrefetch {
    /// Before the current unit's gradients are computed.
    #[default]
    Pre,
    /// After the current unit's gradients are computed.
    Post,
    /// Not until it is needed.
    None,
}

#[derive(Clone, PartialEq, Debug)]
pub struct ShardedOptions {
    /// Compute dtype, in which weights are gathered: f32, bf16 or f16. Gradients are f32.
    pub dtype: DType,
    /// Dtype of master weights: f32; or bf16 if that is the compute dtype, and then they are what is gathered.
    pub masters: DType,
    /// Dtype of gradients in the reduce_scatter within a replica: f32, bf16 or f16, rounded once on each rank. Sums,
    /// and all_reduces between replicas, are always f32.
    pub reduce_dtype: DType,
    pub wrap: Wrap,
    /// True (FULL_SHARD): units rotate through weight slots, so each is gathered for forward and, unless it still is in
    /// its slot, again for backward. False (SHARD_GRAD_OP): each unit has its own slot and is gathered once per step,
    /// whatever the number of micro-batches.
    pub reshard: bool,
    /// FULL_SHARD: maximum unsharded parameters, root included, at least those of the units in use and prefetched. Room
    /// for more keeps the last units of forward unsharded for backward.
    pub max_live: usize,
    pub forward_prefetch: bool,
    pub backward_prefetch: BackwardPrefetch,
    /// Micro-batches per step. Every step must have this number.
    pub grad_accum: usize,
    /// Reduce-scatter every micro-batch through two slots instead of accumulating full gradients and reducing once:
    /// `grad_accum` times the traffic for 4 (P - R - 2U) fewer bytes.
    pub sync_each_batch: bool,
    /// Gather one unit ahead, with at most two in flight. Otherwise [`AHEAD`] units ahead, with a weight slot for each
    /// and one more.
    pub limit_all_gathers: bool,
    pub offload: Offload,
}

/// FULL_SHARD in f32, one unit per block, all prefetches on, one micro-batch per step.
impl Default for ShardedOptions {
    fn default() -> ShardedOptions {
        ShardedOptions {
            dtype: DType::F32,
            masters: DType::F32,
            reduce_dtype: DType::F32,
            wrap: Wrap::Transformer,
            reshard: true,
            max_live: 0,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            grad_accum: 1,
            sync_each_batch: false,
            limit_all_gathers: true,
            offload: Offload::Nothing,
        }
    }
}

/// Units gathered ahead when there is no limit. This hides an all_gather that takes longer than a unit's computation,
/// at the cost of twice the slots.
pub const AHEAD: usize = 3;

impl ShardedOptions {
    /// Weight slots that prefetching takes: the current unit's, and one for each unit ahead.
    fn moving(&self) -> usize {
        1 + self.ahead()
    }
    /// Weight slots that the non-root units rotate through.
    fn live(&self, flat: &Flat) -> usize {
        if self.reshard { self.fitting(flat).max(self.moving()) } else { flat.units.len() }
    }
    /// Non-root units that `max_live` allows to be unsharded at once.
    fn fitting(&self, flat: &Flat) -> usize {
        flat.fitting(self.max_live).min(flat.units.len() - 1)
    }
    /// Whether `max_live` saves an all_gather.
    pub fn keeps_more(&self, layouts: &[Layout]) -> bool {
        apart(layouts).iter().any(|layouts| self.fitting(&Flat::new(layouts, self.wrap, 1)) > self.moving())
    }
    /// Values of `max_live` that keep one unit more than prefetching takes, two more, and so on up to all.
    pub fn keeping_more(&self, layouts: &[Layout]) -> Vec<usize> {
        let limits = |layouts: &Vec<Layout>| {
            let flat = Flat::new(layouts, self.wrap, 1);
            (self.moving() + 1..flat.units.len()).map(|units| flat.live(units)).collect::<Vec<_>>()
        };
        let mut limits: Vec<usize> = apart(layouts).iter().flat_map(limits).collect();
        limits.sort_unstable();
        limits
    }
    /// Number of units whose all_gathers start before the current one is used.
    fn ahead(&self) -> usize {
        if self.limit_all_gathers { 1 } else { AHEAD }
    }
    fn plan(&self, layouts: &[Layout], ranks: usize) -> UnitPlan {
        let flat = Flat::new(layouts, self.wrap, ranks);
        let cycles = self.cycles(&flat, ranks);
        UnitPlan { flat, cycles, dtype: self.dtype, masters: self.masters, offload: self.offload }
    }
    fn cycles(&self, flat: &Flat, ranks: usize) -> Cycles {
        let wire = narrow(self.reduce_dtype, ranks);
        // When a copy is reduced, the f32 slot is free at once.
        let grads = if wire.is_some() { 1 } else { 2 };
        Cycles { weights: self.live(flat), grads: if self.accumulates() { flat.units.len() } else { grads }, wire }
    }
    /// Whether full gradients are summed over micro-batches before the step's one reduction.
    fn accumulates(&self) -> bool {
        self.grad_accum > 1 && !self.sync_each_batch
    }
}

impl Strategy for ShardedOptions {
    fn name(&self) -> &'static str {
        "fsdp"
    }
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn masters(&self) -> DType {
        self.masters
    }
    fn offload(&self) -> Offload {
        self.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Sharded::new(dev, mesh, layouts, self)?))
    }
}

pub struct Sharded {
    options: ShardedOptions,
    units: ShardedUnits,
    /// The unit whose reduce_scatter started last, if its shard is to be summed over replicas next.
    landing: Option<usize>,
}

impl Sharded {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout], options: &ShardedOptions) -> Result<Sharded> {
        let units = ShardedUnits::new(dev, mesh, options.plan(layouts, mesh.group(Axis::Fsdp).size()))?;
        Ok(Sharded { options: options.clone(), units, landing: None })
    }

    /// Starts the all_gathers of the units that this pass uses next.
    fn unshard_ahead(&mut self, mut unit: usize, pass: Pass) -> Result<()> {
        for _ in 0..self.options.ahead() {
            let Some(next) = self.units.flat.next(unit, pass) else { break };
            self.units.unshard(next)?;
            unit = next;
        }
        Ok(())
    }

    /// Starts the sum over replicas for the unit reduced last. It runs once per step, after the next unit's gradient is
    /// complete, so that nothing waits for the reduce_scatter in between.
    fn sum_replicas(&mut self) -> Result<()> {
        self.landing.take().map_or(Ok(()), |unit| self.units.sum_replicas(unit))
    }
}

impl ParamStore for Sharded {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let unit = self.units.flat.home(layer).unit;
        if !self.units.is_unsharded(unit) {
            self.units.unshard(unit)?;
            let ahead = match pass {
                Pass::Backward => self.options.backward_prefetch == BackwardPrefetch::Pre,
                Pass::Forward | Pass::Evaluate => self.options.forward_prefetch,
            };
            if ahead {
                self.unshard_ahead(unit, pass)?;
            }
            self.units.wait(unit)?;
        }
        self.units.weights(layer)
    }

    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        let unit = self.units.flat.home(layer).unit;
        if !self.units.flat.closes(layer, pass) || !self.units.is_unsharded(unit) {
            return Ok(()); // backward acquires nothing below the lowest trainable layer
        }
        self.units.reshard(unit)?;
        match pass == Pass::Backward && self.options.backward_prefetch == BackwardPrefetch::Post {
            true => self.unshard_ahead(unit, pass),
            false => Ok(()),
        }
    }

    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        self.units.grads(layer)
    }

    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        let accumulates = self.options.accumulates();
        let Some(unit) = self.units.completed_by(layer).filter(|_| self.units.last || !accumulates) else {
            return Ok(());
        };
        self.units.complete(unit)?;
        self.sum_replicas()?;
        let reducing = self.units.reduce_scatter(unit, !accumulates && !self.units.first)?;
        self.landing = Some(unit).filter(|_| reducing && self.units.last && self.units.replicas.any());
        Ok(())
    }
}

impl Store for Sharded {
    fn units(&self) -> usize {
        self.units.flat.units.len()
    }
    fn replicated(&self) -> bool {
        false
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.units.begin_micro_batch(first, last);
        Ok(())
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.sum_replicas()?;
        self.units.wait_reductions()?;
        self.units.replicas.finish()
    }
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        self.units.visit(f)
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        self.units.visit_packed(f)
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.units.clear()
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.units.clear_trained()
    }
}
