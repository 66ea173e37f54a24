//! What the stores that shard units have in common: this rank's shards, the slots for unsharded weights and gradients,
//! the replicas, and the operations on them. Never decides when: that is the store's schedule.
use super::begun::Begun;
use super::flat::Flat;
use super::replicas::Replicas;
use super::shards::UnitShards;
use super::slots::{Cycles, GradSlots, WeightSlots};
use super::{Offload, PackedShard, Shard};
use crate::base::{DType, Result};
use crate::comm::{Collective, Mesh};
use crate::device::Device;
use crate::nn::{Grads, Weights};
use std::ops::Range;
use std::sync::Arc;

/// How a store shards; every byte count follows from it.
pub(super) struct UnitPlan {
    pub flat: Flat,
    pub cycles: Cycles,
    pub dtype: DType,
    pub masters: DType,
    pub offload: Offload,
}

pub(super) struct ShardedUnits {
    dev: Arc<dyn Device>,
    group: Arc<dyn Collective>,
    pub replicas: Replicas,
    pub flat: Flat,
    shards: Vec<UnitShards>,
    weights: WeightSlots,
    grads: GradSlots,
    begun: Begun,
    /// Per unit, [`Flat::gaps`] of its gradient.
    gaps: Vec<Vec<Range<usize>>>,
    /// Position of the micro-batch in its step.
    pub first: bool,
    pub last: bool,
}

impl ShardedUnits {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, plan: UnitPlan) -> Result<ShardedUnits> {
        let UnitPlan { flat, cycles, dtype, masters, offload } = plan;
        let group = mesh.fsdp.clone();
        let replicas = Replicas::new(mesh, flat.units.len());
        let shards = UnitShards::new(&*dev, &flat, (dtype, masters), offload, &replicas)?;
        let weights = {
            let _for = dev.meter().purpose("gathered weights");
            WeightSlots::new(&*group, &flat, cycles.weights, dtype)?
        };
        let grads = {
            let _for = dev.meter().purpose("whole gradients");
            GradSlots::new(&*dev, &*group, &flat, &cycles)?
        };
        let gaps = (0..flat.units.len()).map(|unit| flat.gaps(unit, cycles.grads)).collect();
        let begun = Begun::new(flat.layouts());
        Ok(ShardedUnits { shards, weights, grads, begun, gaps, dev, group, replicas, flat, first: true, last: true })
    }

    pub fn is_unsharded(&self, unit: usize) -> bool {
        self.weights.is_unsharded(unit)
    }
    /// Starts the all_gather of a unit's weights unless they are unsharded already.
    pub fn unshard(&mut self, unit: usize) -> Result<()> {
        self.weights.unshard(&*self.group, unit, self.shards[unit].gathered())
    }
    /// Waits for the unit's all_gather.
    pub fn wait(&mut self, unit: usize) -> Result<()> {
        self.weights.wait(&*self.group, unit)
    }
    /// Releases the unit for the rest of this pass.
    pub fn reshard(&mut self, unit: usize) -> Result<()> {
        self.weights.reshard(unit)
    }
    pub fn weights(&self, layer: usize) -> Result<Weights<'_>> {
        self.weights.weights(&self.flat, layer)
    }
    /// Drops gathered weights that are stale: all, or only the trainable ones.
    pub fn clear(&mut self) -> Result<()> {
        self.weights.clear(&*self.group)
    }
    pub fn clear_trained(&mut self) -> Result<()> {
        self.weights.clear_trained(&*self.group)
    }

    pub fn begin_micro_batch(&mut self, first: bool, last: bool) {
        (self.first, self.last) = (first, last);
        if first {
            self.begun.reset();
        }
    }
    /// [`crate::nn::ParamStore::grads`].
    pub fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let unit = self.flat.home(layer).unit;
        let mut flat = self.grads.writable(&*self.group, unit, self.flat.units[unit].trained())?;
        if let Some(flat) = &mut flat {
            self.begun.clear(&*self.dev, self.flat.units[unit].layers.clone(), flat.reborrow())?;
        }
        let weights = self.weights.weights(&self.flat, layer)?;
        Ok((weights, self.begun.grads(&*self.dev, layer, flat, weights.layout)))
    }
    /// The unit whose gradient is complete once that of `layer` is: backward visits a unit's first layer last.
    pub fn completed_by(&self, layer: usize) -> Option<usize> {
        let unit = self.flat.home(layer).unit;
        (layer == self.flat.units[unit].layers.start).then_some(unit)
    }
    /// Completes the unit's full gradient: what no layer wrote becomes zero.
    pub fn complete(&mut self, unit: usize) -> Result<()> {
        let len = self.flat.units[unit].trained();
        let Some(mut flat) = self.grads.writable(&*self.group, unit, len)? else { return Ok(()) };
        // Where kernels are launched, the first contribution has zeroed them with all else.
        for gap in self.gaps[unit].iter().filter(|_| !self.dev.launches_kernels()) {
            self.dev.zero(flat.reborrow().slice(gap.clone()))?;
        }
        let layers = self.flat.units[unit].layers.clone();
        self.begun.complete(&*self.dev, layers, flat, |layer| &self.flat.home(layer).layout)
    }
    /// Starts the unit's reduce_scatter. Returns false if the whole unit is frozen.
    pub fn reduce_scatter(&mut self, unit: usize, accumulate: bool) -> Result<bool> {
        let Some(grad) = self.shards[unit].grad() else { return Ok(false) };
        self.grads.reduce_scatter(&*self.dev, &*self.group, unit, grad, accumulate)?;
        Ok(true)
    }
    /// Starts the sum over replicas once the unit's reduce_scatter has finished.
    pub fn sum_replicas(&mut self, unit: usize) -> Result<()> {
        self.grads.wait_reduced(&*self.group, unit)?;
        self.shards[unit].grad().map_or(Ok(()), |grad| self.replicas.sum(unit, grad))
    }
    /// Waits for every reduce_scatter that was started.
    pub fn wait_reductions(&mut self) -> Result<()> {
        self.grads.finish(&*self.group)
    }
    /// [`super::Store::for_each_shard`].
    pub fn visit(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        UnitShards::visit(&mut self.shards, &self.flat, self.group.rank(), f)
    }
    /// [`super::Store::for_each_packed`].
    pub fn visit_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        UnitShards::visit_packed(&mut self.shards, &self.flat, self.group.rank(), f)
    }
}
