//! Manual FSDP: every rank owns 1/N of each unit's weights, gradient and optimizer state; full weights and full gradients
//! exist only in staging slots (see [Note: slots] in `slots`). Never knows which layer a unit holds.
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
//! Gradients that travel in 2 bytes (`reduce_dtype`) are copied to slots of their own, 2 (R + 2U): the f32 ones are free at
//! once, so that one is enough beside the root's, 4 (R + U).
//!
//! In shared memory the weight slots exist once on a host, and each rank counts its Nth of them. Frozen parameters cost
//! their params and weight slots only.
//!
//! Schedule. `acquire(u)` starts the gather of u (unless it is there), then that of the unit which comes next, and only
//! then waits for u: so communication of the next unit runs under the computation of the current one. At most two gathers
//! are ever in flight (`limit_all_gathers`); without that limit three units are gathered ahead, in four slots. Backward of u
//! ends with the start of its reduce-scatter, which runs under the backward of u - 1.
//!
//! HYBRID_SHARD: the shards above are spread over one replica's ranks, and each is summed over the replicas (dp_replicate)
//! once a step: when the last reduce-scatter of u has landed, its all-reduce starts and runs under the backward of u - 2.
use super::flat::{Flat, Wrap};
use super::kept::narrow;
use super::replicas::Replicas;
use super::shards::Shards;
use super::slots::{self, Cycles, GradSlots, WeightSlots};
use super::{Offload, Piece, Store};
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, Mesh};
use crate::device::Device;
use crate::nn::{Grads, Layout, ParamStore, Pass, Weights};
use std::sync::Arc;

/// When the gather of the next unit starts in the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackwardPrefetch {
    /// Before the current unit's gradient is computed.
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
    /// What gradients travel in between the ranks of a replica: f32, or bf16 or f16, each rank's rounded once. Sums are f32
    /// whatever it is, and so is what replicas exchange.
    pub reduce_dtype: DType,
    pub wrap: Wrap,
    /// FULL_SHARD: two weight slots take turns, so a unit is gathered for forward and again for backward. Otherwise
    /// SHARD_GRAD_OP: each unit has its slot and is gathered once in a step, whatever the number of micro-batches.
    pub reshard: bool,
    pub forward_prefetch: bool,
    pub backward_prefetch: BackwardPrefetch,
    /// Micro-batches in a step.
    pub grad_accum: usize,
    /// Reduce-scatter every micro-batch through two slots, rather than accumulate full gradients and reduce once:
    /// `grad_accum` times the traffic for 4 (P - R - 2U) bytes less.
    pub sync_each_batch: bool,
    /// Gathers run one unit ahead, two in flight at most. Otherwise [`AHEAD`] units, with a weight slot for each and one more.
    pub limit_all_gathers: bool,
    pub offload: Offload,
}

/// Units that gathers run ahead without a limit: that hides one which takes longer than a unit computes, for twice the slots.
pub const AHEAD: usize = 3;

impl ShardedOptions {
    /// Units whose gathers start before the current one is used.
    fn ahead(&self) -> usize {
        if self.limit_all_gathers { 1 } else { AHEAD }
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

pub struct Sharded {
    dev: Arc<dyn Device>,
    group: Arc<dyn Collective>,
    replicas: Replicas,
    options: ShardedOptions,
    flat: Flat,
    shards: Vec<Shards>,
    weights: WeightSlots,
    grads: GradSlots,
    /// The unit whose reduce-scatter was the last to start, when its shard is to be summed over replicas next.
    landing: Option<usize>,
    /// Place of the micro-batch in its step.
    first: bool,
    last: bool,
}

impl Sharded {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout], options: &ShardedOptions) -> Result<Sharded> {
        let group = mesh.fsdp.clone();
        let flat = Flat::new(layouts, options.wrap, group.size());
        let replicas = Replicas::new(mesh, flat.units.len());
        let cycles = options.cycles(flat.units.len(), group.size());
        Ok(Sharded {
            shards: Shards::new(&*dev, &flat, options.dtype, options.offload, &replicas)?,
            weights: WeightSlots::new(&*group, &flat, cycles.weights, options.dtype)?,
            grads: GradSlots::new(&*dev, &*group, &flat, &cycles)?,
            landing: None,
            dev,
            group,
            replicas,
            options: options.clone(),
            flat,
            first: true,
            last: true,
        })
    }

    /// Bytes that `new` will allocate on a rank.
    pub fn planned(layouts: &[Layout], options: &ShardedOptions, ranks: usize) -> Vec<(Category, usize)> {
        let flat = Flat::new(layouts, options.wrap, ranks);
        let cycles = options.cycles(flat.units.len(), ranks);
        let shards = Shards::planned(&flat, options.dtype, options.offload);
        [shards, slots::planned(&flat, &cycles, options.dtype, ranks)].concat()
    }

    /// Bytes of the gathered slots that a rank holds alone, beyond its share of those that ranks of a host hold together.
    pub fn gathered_apart(layouts: &[Layout], options: &ShardedOptions, ranks: usize) -> usize {
        let flat = Flat::new(layouts, options.wrap, ranks);
        slots::gathered_apart(&flat, &options.cycles(flat.units.len(), ranks), options.dtype, ranks)
    }

    /// Elements that a rank owns and trains, padding included.
    pub fn owned(layouts: &[Layout], options: &ShardedOptions, ranks: usize) -> usize {
        Flat::new(layouts, options.wrap, ranks).trained_shard()
    }

    fn gather(&mut self, unit: usize) -> Result<()> {
        self.weights.start(&*self.group, unit, self.shards[unit].gathered())
    }

    /// Starts to gather what this pass uses next.
    fn gather_ahead(&mut self, mut unit: usize, pass: Pass) -> Result<()> {
        for _ in 0..self.options.ahead() {
            let Some(next) = self.flat.next(unit, pass) else { break };
            self.gather(next)?;
            unit = next;
        }
        Ok(())
    }

    /// Starts the sum over replicas of the unit that was reduced last: once a step, and not before the next unit's gradient
    /// is complete, so that nothing waits for the reduce-scatter in between.
    fn replicate(&mut self) -> Result<()> {
        let Some(unit) = self.landing.take() else { return Ok(()) };
        self.grads.land(&*self.group, unit)?;
        self.shards[unit].grad().map_or(Ok(()), |grad| self.replicas.sum(unit, grad))
    }

    fn collect(&mut self, unit: usize) -> Result<()> {
        let len = self.flat.units[unit].trained();
        self.grads.collect(&*self.dev, &*self.group, unit, len, &mut self.shards[unit].collecting)
    }
}

impl ParamStore for Sharded {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let unit = self.flat.home(layer).unit;
        if !self.weights.is_open(unit) {
            self.gather(unit)?;
            let ahead = match pass {
                Pass::Backward => self.options.backward_prefetch == BackwardPrefetch::Pre,
                Pass::Forward | Pass::Evaluate => self.options.forward_prefetch,
            };
            if ahead {
                self.gather_ahead(unit, pass)?;
            }
            self.weights.open(&*self.group, unit)?;
        }
        self.weights.layer(&self.flat, layer)
    }

    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        let unit = self.flat.home(layer).unit;
        if !self.flat.closes(layer, pass) || !self.weights.is_open(unit) {
            return Ok(()); // not open: below the lowest layer that learns, backward acquires nothing
        }
        self.weights.close(unit)?;
        match pass == Pass::Backward && self.options.backward_prefetch == BackwardPrefetch::Post {
            true => self.gather_ahead(unit, pass),
            false => Ok(()),
        }
    }

    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let unit = self.flat.home(layer).unit;
        self.collect(unit)?;
        let flat = self.grads.writable(&*self.group, unit, self.flat.units[unit].trained())?;
        let weights = self.weights.layer(&self.flat, layer)?;
        Ok((weights, Grads { flat, layout: weights.layout }))
    }

    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        let unit = self.flat.home(layer).unit;
        let complete = layer == self.flat.units[unit].layers.start; // backward visits it last
        if !complete || (self.options.accumulates() && !self.last) {
            return Ok(());
        }
        self.collect(unit)?; // a unit without gradient in this micro-batch counts as zero
        self.replicate()?;
        let accumulate = !self.options.accumulates() && !self.first;
        let shards = &mut self.shards[unit];
        shards.collecting = false;
        let Some(grad) = shards.grad() else { return Ok(()) }; // frozen
        self.grads.reduce(&*self.dev, &*self.group, unit, grad, accumulate)?;
        self.landing = Some(unit).filter(|_| self.last && self.replicas.any());
        Ok(())
    }
}

impl Store for Sharded {
    fn name(&self) -> &'static str {
        if self.options.reshard { "fsdp (full shard)" } else { "fsdp (shard grad op)" }
    }
    fn units(&self) -> usize {
        self.flat.units.len()
    }
    fn replicated(&self) -> bool {
        false
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        (self.first, self.last) = (first, last);
        if first {
            self.shards.iter_mut().for_each(|s| s.collecting = false);
        }
        Ok(())
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.replicate()?;
        self.grads.finish(&*self.group)?;
        self.replicas.finish()
    }
    fn for_each_piece(&mut self, f: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        Shards::visit(&mut self.shards, &self.flat, self.group.rank(), f)
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.weights.clear(&*self.group)
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.weights.clear_trained(&*self.group)
    }
}
