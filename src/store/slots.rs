//! Staging slots of the sharded store: where full weights are gathered, and where full gradients wait to be reduced.
//! Never decides when: that is the store.
//!
//! [Note: slots] Slots are allocated once and live as long as the store; nothing that a collective touches is ever
//! freed. Which unit uses which slot is fixed ([`flat::slot`]), so only time has to be kept apart, and two rules do
//! that:
//! - a weight slot is given to another unit only when this rank has released its present one, and the group writes into
//!   it only when every rank has;
//! - a gradient slot is written again only when the reduction that reads it is over (`wait_sent`); where gradients
//!   travel in a narrower dtype, that holds for the slots of their copies.
//!
//! A weight slot keeps its unit after the release until the slot is needed or the weights change. So with two slots the
//! last two units of a forward pass are still there when backward begins, and the first two for the next micro-batch;
//! with a slot a unit nothing is gathered twice in a step.
use super::flat::{self, Flat, Home, Unit};
use super::kept;
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Collective, CommUse, Tag, Ticket};
use crate::device::{Buf, Device, View, ViewMut};
use crate::nn::Weights;

/// Slots that the units other than the root take turns in.
pub(super) struct Cycles {
    pub weights: usize,
    pub grads: usize,
    /// What gradients travel in, where that is not f32: copied into [`WIRES`] slots of their own.
    pub wire: Option<DType>,
}

/// One travels while the next one is filled.
const WIRES: usize = 2;

/// A gathered unit.
struct Unsharded {
    unit: usize,
    /// Of its trainable and of its frozen tensors.
    gathers: [Option<Gather>; 2],
    /// Between acquire and release: must not be replaced.
    in_use: bool,
}

#[derive(Clone, Copy)]
struct Gather {
    ticket: Ticket,
    /// Waited for: readable by compute.
    ready: bool,
}

impl Gather {
    fn wait(&mut self, group: &dyn Collective) -> Result<()> {
        match std::mem::replace(&mut self.ready, true) {
            true => Ok(()),
            false => group.wait(self.ticket),
        }
    }
    /// Gives the buffer back; one that was started ahead and then not needed is waited for.
    fn end(mut self, group: &dyn Collective) -> Result<()> {
        self.wait(group)?;
        group.release(self.ticket)
    }
}

struct WeightSlot {
    /// For trainable and for frozen tensors, where its units have them.
    bufs: [Option<Buf>; 2],
    unsharded: Option<Unsharded>,
}

pub(super) struct WeightSlots {
    slots: Vec<WeightSlot>,
    cycle: usize,
}

impl WeightSlots {
    pub fn new(group: &dyn Collective, flat: &Flat, cycle: usize, dtype: DType) -> Result<WeightSlots> {
        let buf = |len: usize| match len {
            0 => Ok(None),
            len => group.alloc(dtype, len, CommUse::Gathered, Category::Slots).map(Some),
        };
        let lens = flat.slots(cycle, Unit::trained).into_iter().zip(flat.slots(cycle, Unit::frozen));
        let slot = |(trained, frozen)| Ok(WeightSlot { bufs: [buf(trained)?, buf(frozen)?], unsharded: None });
        Ok(WeightSlots { slots: lens.map(slot).collect::<Result<_>>()?, cycle })
    }
    /// Starts to gather `unit` unless it is in its slot. `shards`: this rank's, of its trainable tensors and of
    /// its frozen ones.
    pub fn unshard(&mut self, group: &dyn Collective, unit: usize, shards: [Option<View>; 2]) -> Result<()> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        match &slot.unsharded {
            Some(unsharded) if unsharded.unit == unit => {}
            Some(unsharded) if unsharded.in_use => {
                let what = format!("unit {unit} needs the slot of unit {}, which was not released", unsharded.unit);
                return Err(Error::op("gather", what));
            }
            _ => slot.clear(group)?,
        }
        let WeightSlot { bufs, unsharded } = slot;
        let unsharded = unsharded.get_or_insert(Unsharded { unit, gathers: [None, None], in_use: false });
        for ((buf, shard), gather) in bufs.iter_mut().zip(shards).zip(&mut unsharded.gathers) {
            let (Some(buf), Some(shard), None) = (buf, shard, &gather) else { continue };
            let full = buf.view_mut().slice(0..shard.len() * group.size());
            let ticket = group.all_gather(Tag::new("gather", unit), shard, full)?;
            *gather = Some(Gather { ticket, ready: false });
        }
        Ok(())
    }
    /// Makes a started unit readable and keeps it until [`WeightSlots::reshard`].
    pub fn wait(&mut self, group: &dyn Collective, unit: usize) -> Result<()> {
        let unsharded = self.unsharded(unit)?;
        unsharded.in_use = true;
        unsharded.gathers.iter_mut().flatten().try_for_each(|gather| gather.wait(group))
    }
    pub fn is_unsharded(&self, unit: usize) -> bool {
        let unsharded = &self.slots[flat::slot(unit, self.cycle)].unsharded;
        unsharded.as_ref().is_some_and(|h| h.unit == unit && h.in_use)
    }
    pub fn reshard(&mut self, unit: usize) -> Result<()> {
        self.unsharded(unit)?.in_use = false;
        Ok(())
    }
    /// What a layer of an unsharded unit computes with.
    pub fn weights<'a>(&'a self, flat: &'a Flat, layer: usize) -> Result<Weights<'a>> {
        let Home { unit, layout } = flat.home(layer);
        if !self.is_unsharded(*unit) {
            return Err(Error::op("weights", format!("unit {unit} is not acquired")));
        }
        let bufs = &self.slots[flat::slot(*unit, self.cycle)].bufs;
        kept::weights(*unit, bufs.each_ref().map(|buf| buf.as_ref().map(Buf::view)), layout)
    }
    /// Forgets everything: the weights have changed.
    pub fn clear(&mut self, group: &dyn Collective) -> Result<()> {
        self.slots.iter_mut().try_for_each(|slot| slot.clear(group))
    }
    /// Forgets what learns: the optimizer has updated it. Frozen tensors stay where they are.
    pub fn clear_trained(&mut self, group: &dyn Collective) -> Result<()> {
        for unsharded in self.slots.iter_mut().filter_map(|slot| slot.unsharded.as_mut()) {
            unsharded.in_use = false;
            unsharded.gathers[0].take().map_or(Ok(()), |gather| gather.end(group))?;
        }
        Ok(())
    }
    fn unsharded(&mut self, unit: usize) -> Result<&mut Unsharded> {
        let unsharded = self.slots[flat::slot(unit, self.cycle)].unsharded.as_mut().filter(|h| h.unit == unit);
        unsharded.ok_or_else(|| Error::op("weights", format!("unit {unit} was never gathered")))
    }
}

impl WeightSlot {
    fn clear(&mut self, group: &dyn Collective) -> Result<()> {
        let gathers = self.unsharded.take().into_iter().flat_map(|unsharded| unsharded.gathers).flatten();
        gathers.into_iter().try_for_each(|gather| gather.end(group))
    }
}

struct GradSlot {
    /// None where all of its units are frozen.
    buf: Option<Buf>,
    reducing: Option<Reducing>,
}

struct Reducing {
    ticket: Ticket,
    /// Waited for: this rank's shard is complete. Peers may still read the slot.
    landed: bool,
}

pub(super) struct GradSlots {
    /// f32, which layers add into. They travel themselves, where there are no wires.
    slots: Vec<GradSlot>,
    cycle: usize,
    /// Copies in the dtype of reduction.
    wires: Vec<GradSlot>,
}

impl GradSlots {
    pub fn new(dev: &dyn Device, group: &dyn Collective, flat: &Flat, cycles: &Cycles) -> Result<GradSlots> {
        let cycle = cycles.grads;
        let slots = |cycle: usize, buf: &dyn Fn(usize) -> Result<Buf>| {
            let slot = |len| Ok(GradSlot { buf: (len > 0).then(|| buf(len)).transpose()?, reducing: None });
            flat.slots(cycle, Unit::trained).into_iter().map(slot).collect::<Result<Vec<_>>>()
        };
        let travelling = |dtype| move |len| group.alloc(dtype, len, CommUse::Reduced, Category::Slots);
        Ok(match cycles.wire {
            None => GradSlots { slots: slots(cycle, &travelling(DType::F32))?, cycle, wires: vec![] },
            Some(dtype) => GradSlots {
                slots: slots(cycle, &|len| dev.alloc(DType::F32, len, Category::Slots))?,
                cycle,
                wires: slots(WIRES, &travelling(dtype))?,
            },
        })
    }
    /// The unit's full gradient, to be written: waits until a reduction that reads the slot is over. A frozen unit
    /// (`len` 0) has none, and nothing to wait for.
    pub fn writable(&mut self, group: &dyn Collective, unit: usize, len: usize) -> Result<Option<ViewMut<'_>>> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        if len == 0 {
            return Ok(None);
        }
        slot.finish(group)?;
        Ok(slot.buf.as_mut().map(|buf| buf.view_mut().slice(0..len)))
    }
    /// Zeroes the unit's full gradient when it starts to collect a sum, of one micro-batch or of several; `collecting`
    /// says that it has begun.
    pub fn collect(
        &mut self,
        dev: &dyn Device,
        group: &dyn Collective,
        unit: usize,
        len: usize,
        collecting: &mut bool,
    ) -> Result<()> {
        match std::mem::replace(collecting, true) {
            true => Ok(()),
            false => self.writable(group, unit, len)?.map_or(Ok(()), |full| dev.zero(full)),
        }
    }
    /// Starts `shard (+)= this rank's part of the sum over ranks`.
    pub fn reduce_scatter(
        &mut self,
        dev: &dyn Device,
        group: &dyn Collective,
        unit: usize,
        shard: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        let (frozen, full) = (|| Error::op("reduce", format!("unit {unit} is frozen")), 0..shard.len() * group.size());
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        let travels = match self.wires.get_mut(flat::slot(unit, WIRES)) {
            None => slot,
            Some(wire) => {
                wire.finish(group)?;
                let (from, to) = (slot.buf.as_ref().ok_or_else(frozen)?, wire.buf.as_mut().ok_or_else(frozen)?);
                dev.copy(from.view().slice(full.clone()), to.view_mut().slice(full.clone()))?;
                wire
            }
        };
        let full = travels.buf.as_mut().ok_or_else(frozen)?.view_mut().slice(full);
        let ticket = group.reduce_scatter(Tag::new("reduce", unit), full, shard, accumulate)?;
        travels.reducing = Some(Reducing { ticket, landed: false });
        Ok(())
    }
    /// The reduction that was started last in the unit's slot has landed in its shard.
    pub fn wait_reduced(&mut self, group: &dyn Collective, unit: usize) -> Result<()> {
        match self.wires.get_mut(flat::slot(unit, WIRES)) {
            Some(wire) => wire.wait_reduced(group),
            None => self.slots[flat::slot(unit, self.cycle)].wait_reduced(group),
        }
    }
    /// Every reduction has landed in its shard.
    pub fn finish(&mut self, group: &dyn Collective) -> Result<()> {
        self.slots.iter_mut().chain(&mut self.wires).try_for_each(|slot| slot.finish(group))
    }
}

impl GradSlot {
    fn wait_reduced(&mut self, group: &dyn Collective) -> Result<()> {
        match &mut self.reducing {
            Some(Reducing { ticket, landed }) if !*landed => {
                *landed = true;
                group.wait(*ticket)
            }
            _ => Ok(()),
        }
    }
    fn finish(&mut self, group: &dyn Collective) -> Result<()> {
        self.wait_reduced(group)?;
        self.reducing.take().map_or(Ok(()), |reducing| group.wait_sent(reducing.ticket))
    }
}
