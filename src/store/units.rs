//! What the stores that shard units have in common: this rank's shards, the slots for unsharded weights and gradients,
//! the replicas, and the operations on them. Never decides when: that is the store's schedule.
use super::begun::Begun;
use super::coded::CodedScales;
use super::flat::Flat;
use super::replicas::Replicas;
use super::shards::UnitShards;
use super::slots::{Cycles, GradSlots, WeightSlots};
use super::{Offload, PackedShard, Shard};
use crate::base::{DType, Result};
use crate::comm::{Axis, Collective, Mesh};
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
    /// `None` for a rank alone: layers compute with its shards, which are whole.
    weights: Option<WeightSlots>,
    scales: Option<CodedScales>,
    /// `None` likewise: layers add to the shards' gradients over a step's micro-batches.
    grads: Option<GradSlots>,
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
        let group = mesh.group(Axis::Fsdp).clone();
        let replicas = Replicas::new(mesh, flat.units.iter().map(|unit| unit.parts.len()).sum());
        let alone = group.size() == 1 && !replicas.any() && offload < Offload::Gradients;
        let shards = UnitShards::new(&*dev, &flat, (dtype, masters), offload, &replicas)?;
        let weights = {
            let _for = dev.meter().purpose("gathered weights");
            (!alone).then(|| WeightSlots::new(&*group, &flat, cycles.weights, dtype)).transpose()?
        };
        let scales = CodedScales::new(&*group, &flat)?;
        let grads = {
            let _for = dev.meter().purpose("whole gradients");
            (!alone).then(|| GradSlots::new(&*dev, &*group, &flat, &cycles)).transpose()?
        };
        let cycle = if alone { flat.units.len() } else { cycles.grads };
        let gaps = flat.gaps(cycle);
        let begun = Begun::new(flat.layouts());
        Ok(ShardedUnits {
            shards,
            weights,
            scales,
            grads,
            begun,
            gaps,
            dev,
            group,
            replicas,
            flat,
            first: true,
            last: true,
        })
    }

    pub fn is_unsharded(&self, unit: usize) -> bool {
        self.weights.as_ref().is_none_or(|slots| slots.is_unsharded(unit))
    }
    /// Starts the all_gather of a unit's weights unless they are unsharded already.
    pub fn unshard(&mut self, unit: usize) -> Result<()> {
        let Some(slots) = &mut self.weights else { return Ok(()) };
        slots.unshard(&*self.group, unit, self.shards[unit].gathered())
    }
    /// Waits for the unit's all_gather.
    pub fn wait(&mut self, unit: usize) -> Result<()> {
        self.weights.as_mut().map_or(Ok(()), |slots| slots.wait(&*self.group, unit))
    }
    /// Releases the unit for the rest of this pass.
    pub fn reshard(&mut self, unit: usize) -> Result<()> {
        self.weights.as_mut().map_or(Ok(()), |slots| slots.reshard(unit))
    }
    pub fn weights(&self, layer: usize) -> Result<Weights<'_>> {
        let (home, scales) = (self.flat.home(layer), self.scales.as_ref().map(CodedScales::view));
        match &self.weights {
            Some(slots) => slots.weights(&self.flat, scales, layer),
            None => Weights::new(self.shards[home.unit].gathered(), scales, &home.layout),
        }
    }
    /// Drops gathered weights that are stale, all or only the trainable ones, and casts what is gathered in 8 bits.
    pub fn clear(&mut self) -> Result<()> {
        self.weights.as_mut().map_or(Ok(()), |slots| slots.clear(&*self.group))?;
        self.cast()
    }
    pub fn clear_trained(&mut self) -> Result<()> {
        self.weights.as_mut().map_or(Ok(()), |slots| slots.clear_trained(&*self.group))?;
        self.cast()
    }
    fn cast(&mut self) -> Result<()> {
        let ShardedUnits { dev, group, flat, shards, .. } = self;
        self.scales.as_mut().map_or(Ok(()), |scales| scales.cast(&**dev, &**group, flat, shards))
    }

    pub fn begin_micro_batch(&mut self, first: bool, last: bool) {
        (self.first, self.last) = (first, last);
        if first {
            self.begun.reset();
        }
    }
    /// [`crate::nn::ParamStore::grads`].
    pub fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let (home, scales) = (self.flat.home(layer), self.scales.as_ref().map(CodedScales::view));
        let (shards, own) = self.shards[home.unit].in_place();
        let weights = match &self.weights {
            Some(slots) => slots.weights(&self.flat, scales, layer)?,
            None => Weights::new(shards, scales, &home.layout)?,
        };
        let unit = &self.flat.units[home.unit];
        let mut flat = match &mut self.grads {
            Some(slots) => slots.writable(&*self.group, home.unit, unit.trained())?,
            None => own,
        };
        if let Some(flat) = &mut flat {
            self.begun.clear(&*self.dev, unit.layers.clone(), flat.reborrow())?;
        }
        Ok((weights, self.begun.grads(&*self.dev, layer, flat, weights.layout)))
    }
    /// The unit whose gradient is complete once that of `layer` is: backward visits a unit's first layer last.
    pub fn completed_by(&self, layer: usize) -> Option<usize> {
        let unit = self.flat.home(layer).unit;
        (layer == self.flat.units[unit].layers.start).then_some(unit)
    }
    /// Completes the unit's full gradient, that of the whole step for a rank alone: what no layer wrote becomes zero.
    pub fn complete(&mut self, unit: usize) -> Result<()> {
        let len = self.flat.units[unit].trained();
        let flat = match &mut self.grads {
            Some(slots) => slots.writable(&*self.group, unit, len)?,
            None if self.last => self.shards[unit].in_place().1,
            None => None,
        };
        let Some(mut flat) = flat else { return Ok(()) };
        // Where kernels are launched, the first contribution has zeroed them with all else.
        for gap in self.gaps[unit].iter().filter(|_| !self.dev.launches_kernels()) {
            self.dev.zero(flat.reborrow().slice(gap.clone()))?;
        }
        let layers = self.flat.units[unit].layers.clone();
        self.begun.complete(&*self.dev, layers, flat, |layer| &self.flat.home(layer).layout)
    }
    /// Starts the unit's reduce_scatters. Returns false if the whole unit is frozen.
    pub fn reduce_scatter(&mut self, unit: usize, accumulate: bool) -> Result<bool> {
        let mut grads = self.shards[unit].grads();
        let shards = [grads.next(), grads.next()];
        if shards.iter().all(Option::is_none) {
            return Ok(false);
        }
        let Some(slots) = &mut self.grads else { return Ok(true) };
        slots.reduce_scatter(&*self.dev, &*self.group, unit, shards, accumulate)?;
        Ok(true)
    }
    /// Starts the sums over replicas once the unit's reduce_scatters have finished.
    pub fn sum_replicas(&mut self, unit: usize) -> Result<()> {
        self.grads.as_mut().map_or(Ok(()), |slots| slots.wait_reduced(&*self.group, unit))?;
        self.shards[unit].grads().try_for_each(|grad| self.replicas.sum(unit, grad))
    }
    /// Waits for every reduce_scatter that was started.
    pub fn wait_reductions(&mut self) -> Result<()> {
        self.grads.as_mut().map_or(Ok(()), |slots| slots.finish(&*self.group))
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
