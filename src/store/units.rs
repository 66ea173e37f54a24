//! What stores that cut units over ranks have in common: this rank's shards, the slots for gathered weights and full
//! gradients, the replicas of it all, and what is done with them. Never decides when: that is the store's schedule.
use super::flat::Flat;
use super::replicas::Replicas;
use super::shards::UnitShards;
use super::slots::{Cycles, GradSlots, WeightSlots};
use super::{Offload, Shard};
use crate::base::{DType, Result};
use crate::comm::{Collective, Mesh};
use crate::device::Device;
use crate::nn::{Grads, Weights};
use std::sync::Arc;

/// How a store cuts: from it follows every byte.
pub(super) struct UnitPlan {
    pub flat: Flat,
    pub cycles: Cycles,
    pub dtype: DType,
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
    /// Place of the micro-batch in its step.
    pub first: bool,
    pub last: bool,
}

impl ShardedUnits {
    pub fn new(dev: Arc<dyn Device>, mesh: &Mesh, plan: UnitPlan) -> Result<ShardedUnits> {
        let UnitPlan { flat, cycles, dtype, offload } = plan;
        let group = mesh.fsdp.clone();
        let replicas = Replicas::new(mesh, flat.units.len());
        let shards = UnitShards::new(&*dev, &flat, dtype, offload, &replicas)?;
        let weights = {
            let _for = dev.meter().purpose("gathered weights");
            WeightSlots::new(&*group, &flat, cycles.weights, dtype)?
        };
        let grads = {
            let _for = dev.meter().purpose("whole gradients");
            GradSlots::new(&*dev, &*group, &flat, &cycles)?
        };
        Ok(ShardedUnits { shards, weights, grads, dev, group, replicas, flat, first: true, last: true })
    }

    pub fn is_unsharded(&self, unit: usize) -> bool {
        self.weights.is_unsharded(unit)
    }
    /// Starts the gather of a unit's weights, unless they are there.
    pub fn unshard(&mut self, unit: usize) -> Result<()> {
        self.weights.unshard(&*self.group, unit, self.shards[unit].gathered())
    }
    /// Waits for them.
    pub fn wait(&mut self, unit: usize) -> Result<()> {
        self.weights.wait(&*self.group, unit)
    }
    /// This pass needs them no more.
    pub fn reshard(&mut self, unit: usize) -> Result<()> {
        self.weights.reshard(unit)
    }
    pub fn weights(&self, layer: usize) -> Result<Weights<'_>> {
        self.weights.weights(&self.flat, layer)
    }
    /// What is gathered is stale: all of it, or what learns.
    pub fn clear(&mut self) -> Result<()> {
        self.weights.clear(&*self.group)
    }
    pub fn clear_trained(&mut self) -> Result<()> {
        self.weights.clear_trained(&*self.group)
    }

    pub fn begin_micro_batch(&mut self, first: bool, last: bool) {
        (self.first, self.last) = (first, last);
        if first {
            self.shards.iter_mut().for_each(|s| s.collecting = false);
        }
    }
    /// A slot for the unit's full gradient, zeroed at its first use.
    fn collect(&mut self, unit: usize) -> Result<()> {
        let len = self.flat.units[unit].trained();
        self.grads.collect(&*self.dev, &*self.group, unit, len, &mut self.shards[unit].collecting)
    }
    /// [`crate::nn::ParamStore::grads`].
    pub fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let unit = self.flat.home(layer).unit;
        self.collect(unit)?;
        let flat = self.grads.writable(&*self.group, unit, self.flat.units[unit].trained())?;
        let weights = self.weights.weights(&self.flat, layer)?;
        Ok((weights, Grads { flat, layout: weights.layout }))
    }
    /// The unit whose gradient is complete with that of `layer`: backward visits a unit's first layer last.
    pub fn completed_by(&self, layer: usize) -> Option<usize> {
        let unit = self.flat.home(layer).unit;
        (layer == self.flat.units[unit].layers.start).then_some(unit)
    }
    /// The unit's full gradient is whole: what had none in this micro-batch counts as zero.
    pub fn complete(&mut self, unit: usize) -> Result<()> {
        self.collect(unit)?;
        self.shards[unit].collecting = false;
        Ok(())
    }
    /// Starts the unit's reduce-scatter; false where all of it is frozen.
    pub fn reduce_scatter(&mut self, unit: usize, accumulate: bool) -> Result<bool> {
        let Some(grad) = self.shards[unit].grad() else { return Ok(false) };
        self.grads.reduce_scatter(&*self.dev, &*self.group, unit, grad, accumulate)?;
        Ok(true)
    }
    /// Starts the sum over replicas of what was reduced, once that has landed.
    pub fn sum_replicas(&mut self, unit: usize) -> Result<()> {
        self.grads.wait_reduced(&*self.group, unit)?;
        self.shards[unit].grad().map_or(Ok(()), |grad| self.replicas.sum(unit, grad))
    }
    /// Every reduce-scatter that was started has landed.
    pub fn wait_reductions(&mut self) -> Result<()> {
        self.grads.finish(&*self.group)
    }
    /// [`super::Store::for_each_shard`].
    pub fn visit(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        UnitShards::visit(&mut self.shards, &self.flat, self.group.rank(), f)
    }
}
