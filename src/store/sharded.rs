//! Manual FSDP: every rank owns 1/N of each unit's weights, gradient and optimizer state; full weights and full
//! gradients exist only in staging slots (see [Note: slots] in `slots`). Never knows which layer a unit holds.
//!
//! Bytes of a rank, for P padded parameters over N ranks, root R, largest other unit U (bf16; f32 in brackets):
//!
//! ```text
//! params     (4 + 2) P/N   [4 P/N]       f32 master, and the bf16 copy that is gathered [the master is]
//! grads       4 P/N                      reduced
//! optimizer   8 P/N                      AdamW's two moments (kept by `optim`)
//! slots       2 (R + 2U)   [4 (R + 2U)]  weights, FULL_SHARD; SHARD_GRAD_OP: 2P [4P], a slot a unit
//!           + 4 (R + 2U)                 gradients; 4P when they are accumulated before the one reduction
//! ```
//!
//! Gradients that travel in 2 bytes (`reduce_dtype`) are copied to slots of their own, 2 (R + 2U): the f32 ones are
//! free at once, so that one is enough beside the root's, 4 (R + U).
//!
//! In shared memory the weight slots exist once on a host, and each rank counts its Nth of them. Frozen parameters cost
//! their params and weight slots only; beside adapters, which are all that is saved, 2 P/N [4 P/N] and weight slots.
//!
//! Schedule. `acquire(u)` starts the gather of u (unless it is there), then that of the unit which comes next, and only
//! then waits for u: so communication of the next unit runs under the computation of the current one. At most two
//! gathers are ever in flight (`limit_all_gathers`); without that limit three units are gathered ahead, in four slots.
//! Backward of u ends with the start of its reduce-scatter, which runs under the backward of u - 1.
//!
//! HYBRID_SHARD: the shards above are spread over one replica's ranks, and each is summed over the replicas
//! (dp_replicate) once a step: when the last reduce-scatter of u has landed, its all-reduce starts and runs under the
//! backward of u - 2.
use super::flat::{Flat, Wrap};
use super::kept::narrow;
use super::slots::Cycles;
use super::units::{ShardedUnits, UnitPlan};
use super::{Offload, Shard, Store, Strategy};
use crate::base::{DType, Result};
use crate::comm::Mesh;
use crate::device::Device;
use crate::nn::{Grads, Layout, ParamStore, Pass, Weights};
use std::sync::Arc;

/// When the gather of the next unit starts in the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackwardPrefetch {
    /// Before the current unit's gradient is computed.
    #[default]
    Pre,
    /// After it.
    Post,
    /// Not before it is needed.
    None,
}

#[derive(Clone, PartialEq, Debug)]
pub struct ShardedOptions {
    /// What is gathered and computed with: f32, bf16 or f16. Masters and gradients are f32.
    pub dtype: DType,
    /// What gradients travel in between the ranks of a replica: f32, or bf16 or f16, each rank's rounded once. Sums are
    /// f32 whatever it is, and so is what replicas exchange.
    pub reduce_dtype: DType,
    pub wrap: Wrap,
    /// FULL_SHARD: two weight slots take turns, so a unit is gathered for forward and again for backward. Otherwise
    /// SHARD_GRAD_OP: each unit has its slot and is gathered once in a step, whatever the number of micro-batches.
    pub reshard: bool,
    pub forward_prefetch: bool,
    pub backward_prefetch: BackwardPrefetch,
    /// Micro-batches in a step: as many as every step is then given.
    pub grad_accum: usize,
    /// Reduce-scatter every micro-batch through two slots, rather than accumulate full gradients and reduce once:
    /// `grad_accum` times the traffic for 4 (P - R - 2U) bytes less.
    pub sync_each_batch: bool,
    /// Gathers run one unit ahead, two in flight at most. Otherwise [`AHEAD`] units, with a weight slot for each and
    /// one more.
    pub limit_all_gathers: bool,
    pub offload: Offload,
}

/// FULL_SHARD in f32, a unit for each block, all prefetches on, one micro-batch in a step.
impl Default for ShardedOptions {
    fn default() -> ShardedOptions {
        ShardedOptions {
            dtype: DType::F32,
            reduce_dtype: DType::F32,
            wrap: Wrap::Transformer,
            reshard: true,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            grad_accum: 1,
            sync_each_batch: false,
            limit_all_gathers: true,
            offload: Offload::Nothing,
        }
    }
}

/// Units that gathers run ahead without a limit: that hides one which takes longer than a unit computes, for twice the
/// slots.
pub const AHEAD: usize = 3;

impl ShardedOptions {
    /// Units whose gathers start before the current one is used.
    fn ahead(&self) -> usize {
        if self.limit_all_gathers { 1 } else { AHEAD }
    }
    fn plan(&self, layouts: &[Layout], ranks: usize) -> UnitPlan {
        let flat = Flat::new(layouts, self.wrap, ranks);
        let cycles = self.cycles(flat.units.len(), ranks);
        UnitPlan { flat, cycles, dtype: self.dtype, offload: self.offload }
    }
    /// Slots that the units other than the root take turns in: the current one and those ahead, or one each.
    fn cycles(&self, units: usize, ranks: usize) -> Cycles {
        let wire = narrow(self.reduce_dtype, ranks);
        // What a copy of travels is free at once.
        let grads = if wire.is_some() { 1 } else { 2 };
        Cycles {
            weights: if self.reshard { 1 + self.ahead() } else { units },
            grads: if self.accumulates() { units } else { grads },
            wire,
        }
    }
    /// Full gradients are summed over micro-batches before the one reduction of the step.
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
    /// The unit whose reduce-scatter was the last to start, when its shard is to be summed over replicas next.
    landing: Option<usize>,
}

impl Sharded {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout], options: &ShardedOptions) -> Result<Sharded> {
        let units = ShardedUnits::new(dev, mesh, options.plan(layouts, mesh.fsdp.size()))?;
        Ok(Sharded { options: options.clone(), units, landing: None })
    }

    /// Starts to gather what this pass uses next.
    fn unshard_ahead(&mut self, mut unit: usize, pass: Pass) -> Result<()> {
        for _ in 0..self.options.ahead() {
            let Some(next) = self.units.flat.next(unit, pass) else { break };
            self.units.unshard(next)?;
            unit = next;
        }
        Ok(())
    }

    /// Starts the sum over replicas of the unit that was reduced last: once a step, and not before the next unit's
    /// gradient is complete, so that nothing waits for the reduce-scatter in between.
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
            return Ok(()); // not unsharded: below the lowest layer that learns, backward acquires nothing
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
    fn name(&self) -> &'static str {
        if self.options.reshard { "fsdp (full shard)" } else { "fsdp (shard grad op)" }
    }
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
    fn weights_changed(&mut self) -> Result<()> {
        self.units.clear()
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.units.clear_trained()
    }
}
