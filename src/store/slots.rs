//! Staging slots of the sharded stores: weights are gathered into them, and full gradients wait in them to be reduced.
//! Never decides when: the store does.
//!
//! [Note: slots] Slots are allocated once and live as long as the store; nothing that a collective uses is freed in
//! flight. The map from units to slots is static ([`flat::slot`]), so units that share a slot only need to be separated
//! in time. Two rules ensure that:
//! - a weight slot is given to another unit only after this rank has released the present one, and the group writes
//!   into it only after every rank has;
//! - a gradient slot is written again only after the reduction that reads it has finished (`wait_sent`). Where
//!   gradients are cast for reduction, the same holds for the slots of their copies.
//!
//! A weight slot keeps its unit after release until the slot is needed or the weights change. So with two slots, the
//! last two units of a forward pass are still unsharded when backward begins, and the first two when the next
//! micro-batch does; with one slot per unit nothing is gathered twice in a step.
use super::flat::{self, Flat, Home, Unit};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Collective, CommUse, Tag, Ticket};
use crate::device::{Buf, Device, View, ViewMut};
use crate::nn::{Storage, Weights};

/// Number of slots that the non-root units rotate through.
pub(super) struct Cycles {
    pub weights: usize,
    pub grads: usize,
    /// The reduce dtype if it is not f32; gradients are then copied into [`WIRES`] slots of their own.
    pub wire: Option<DType>,
}

/// One is in flight while the next is filled.
const WIRES: usize = 2;

/// A gathered unit.
struct Unsharded {
    unit: usize,
    /// Gathers of its parts, in the order of [`Storage::BUFFERS`].
    gathers: [Option<Gather>; Storage::BUFFERS.len()],
    /// Between acquire and release: must not be replaced.
    in_use: bool,
}

#[derive(Clone, Copy)]
struct Gather {
    ticket: Ticket,
    /// Awaited: compute may read it.
    ready: bool,
}

impl Gather {
    fn wait(&mut self, group: &dyn Collective) -> Result<()> {
        match std::mem::replace(&mut self.ready, true) {
            true => Ok(()),
            false => group.wait(self.ticket),
        }
    }
    /// Returns the buffer. A gather that was prefetched but not needed is awaited.
    fn end(mut self, group: &dyn Collective) -> Result<()> {
        self.wait(group)?;
        group.release(self.ticket)
    }
}

struct WeightSlot {
    /// A buffer for each kind of part that its units have.
    bufs: [Option<Buf>; Storage::BUFFERS.len()],
    unsharded: Option<Unsharded>,
}

pub(super) struct WeightSlots {
    slots: Vec<WeightSlot>,
    cycle: usize,
}

impl WeightSlots {
    pub fn new(group: &dyn Collective, flat: &Flat, cycle: usize, dtype: DType) -> Result<WeightSlots> {
        let empty = || WeightSlot { bufs: [const { None }; Storage::BUFFERS.len()], unsharded: None };
        let mut slots: Vec<WeightSlot> = Vec::new();
        slots.resize_with(flat.slots(cycle, |_| 0).len(), empty);
        for (i, storage) in Storage::BUFFERS.into_iter().enumerate() {
            for (slot, len) in slots.iter_mut().zip(flat.slots(cycle, |unit| unit.padded(storage))) {
                let alloc = || group.alloc(storage.dtype(dtype), len, CommUse::Gathered, Category::Slots);
                slot.bufs[i] = (len > 0).then(alloc).transpose()?;
            }
        }
        Ok(WeightSlots { slots, cycle })
    }
    /// Starts to gather `unit` unless its slot already holds it. `shards`: this rank's shards of its parts.
    pub fn unshard(
        &mut self,
        group: &dyn Collective,
        unit: usize,
        shards: [Option<View>; Storage::BUFFERS.len()],
    ) -> Result<()> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        match &slot.unsharded {
            Some(unsharded) if unsharded.unit == unit => {}
            Some(unsharded) if unsharded.in_use => {
                let what = format!("unit {unit} needs the slot of unit {}, which is still acquired", unsharded.unit);
                return Err(Error::op("gather", what));
            }
            _ => slot.clear(group)?,
        }
        let WeightSlot { bufs, unsharded } = slot;
        let unsharded =
            unsharded.get_or_insert(Unsharded { unit, gathers: [None; Storage::BUFFERS.len()], in_use: false });
        for ((buf, shard), gather) in bufs.iter_mut().zip(shards).zip(&mut unsharded.gathers) {
            let (Some(buf), Some(shard), None) = (buf, shard, &gather) else { continue };
            let full = buf.view_mut().slice(0..shard.len() * group.size());
            let ticket = group.all_gather(Tag::new("gather", unit), shard, full)?;
            *gather = Some(Gather { ticket, ready: false });
        }
        Ok(())
    }
    /// Waits for a gather in flight, and holds the unit until [`WeightSlots::reshard`].
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
    /// The weights of a layer whose unit is unsharded. `scales`: of codes.
    pub fn weights<'a>(&'a self, flat: &'a Flat, scales: Option<View<'a>>, layer: usize) -> Result<Weights<'a>> {
        let Home { unit, layout } = flat.home(layer);
        if !self.is_unsharded(*unit) {
            return Err(Error::op("weights", format!("unit {unit} is not acquired")));
        }
        let bufs = &self.slots[flat::slot(*unit, self.cycle)].bufs;
        Weights::new(bufs.each_ref().map(|buf| buf.as_ref().map(Buf::view)), scales, layout)
    }
    /// Drops all gathered weights, because the masters changed.
    pub fn clear(&mut self, group: &dyn Collective) -> Result<()> {
        self.slots.iter_mut().try_for_each(|slot| slot.clear(group))
    }
    /// Drops gathered trainable weights, which the optimizer updated. Frozen ones stay.
    pub fn clear_trained(&mut self, group: &dyn Collective) -> Result<()> {
        for unsharded in self.slots.iter_mut().filter_map(|slot| slot.unsharded.as_mut()) {
            unsharded.in_use = false;
            let all = unsharded.gathers.iter_mut().zip(Storage::BUFFERS);
            let stale = all.filter(|(_, storage)| storage.is_trained()).filter_map(|(gather, _)| gather.take());
            stale.into_iter().try_for_each(|gather| gather.end(group))?;
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
    /// `None` if all of its units are frozen.
    buf: Option<Buf>,
    reducing: Option<Reducing>,
}

struct Reducing {
    /// The transfers of the unit's trainable parts.
    tickets: [Option<Ticket>; 2],
    /// Awaited: this rank's shards are complete. Peers may still be reading the slot.
    landed: bool,
}

pub(super) struct GradSlots {
    /// f32 buffers that layers accumulate into; reduced directly if there are no wires.
    slots: Vec<GradSlot>,
    cycle: usize,
    /// Copies in the reduce dtype.
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
    /// The unit's full gradient for writing, after any reduction that reads the slot has finished. A frozen unit (`len`
    /// 0) has none and waits for nothing.
    pub fn writable(&mut self, group: &dyn Collective, unit: usize, len: usize) -> Result<Option<ViewMut<'_>>> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        if len == 0 {
            return Ok(None);
        }
        slot.finish(group)?;
        Ok(slot.buf.as_mut().map(|buf| buf.view_mut().slice(0..len)))
    }
    /// Starts `shards (+)= this rank's shards of the sum over ranks`. `shards`: of the unit's trainable parts, in
    /// order.
    pub fn reduce_scatter(
        &mut self,
        dev: &dyn Device,
        group: &dyn Collective,
        unit: usize,
        shards: [Option<ViewMut>; 2],
        accumulate: bool,
    ) -> Result<()> {
        let frozen = || Error::op("reduce", format!("unit {unit} is frozen"));
        let full = 0..shards.iter().flatten().map(ViewMut::len).sum::<usize>() * group.size();
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
        let mut full = travels.buf.as_mut().ok_or_else(frozen)?.view_mut().slice(full);
        let mut tickets = [None; 2];
        for (shard, ticket) in shards.into_iter().flatten().zip(&mut tickets) {
            let (part, rest) = full.split_at(shard.len() * group.size());
            *ticket = Some(group.reduce_scatter(Tag::new("reduce", unit), part, shard, accumulate)?);
            full = rest;
        }
        travels.reducing = Some(Reducing { tickets, landed: false });
        Ok(())
    }
    /// Waits until the slot's last reduction has written its shard.
    pub fn wait_reduced(&mut self, group: &dyn Collective, unit: usize) -> Result<()> {
        match self.wires.get_mut(flat::slot(unit, WIRES)) {
            Some(wire) => wire.wait_reduced(group),
            None => self.slots[flat::slot(unit, self.cycle)].wait_reduced(group),
        }
    }
    /// Waits until every reduction has written its shard.
    pub fn finish(&mut self, group: &dyn Collective) -> Result<()> {
        self.slots.iter_mut().chain(&mut self.wires).try_for_each(|slot| slot.finish(group))
    }
}

impl GradSlot {
    fn wait_reduced(&mut self, group: &dyn Collective) -> Result<()> {
        match &mut self.reducing {
            Some(Reducing { tickets, landed }) if !*landed => {
                *landed = true;
                tickets.iter().flatten().try_for_each(|ticket| group.wait(*ticket))
            }
            _ => Ok(()),
        }
    }
    fn finish(&mut self, group: &dyn Collective) -> Result<()> {
        self.wait_reduced(group)?;
        let tickets = self.reducing.take().into_iter().flat_map(|reducing| reducing.tickets).flatten();
        tickets.into_iter().try_for_each(|ticket| group.wait_sent(ticket))
    }
}
