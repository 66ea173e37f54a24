//! Staging slots of the sharded store: where full weights are gathered, and where full gradients wait to be reduced.
//! Never decides when: that is `sharded`.
//!
//! [Note: slots] Slots are allocated once and live as long as the store; nothing that a collective touches is ever freed.
//! Which unit uses which slot is fixed ([`flat::slot`]), so only time has to be kept apart, and two rules do that:
//! - a weight slot is given to another unit only when this rank has released its present one, and the group writes into
//!   it only when every rank has;
//! - a gradient slot is written again only when the reduction that reads it is over (`wait_sent`).
//!
//! A weight slot keeps its unit after the release until the slot is needed or the weights change. So with two slots the
//! last two units of a forward pass are still there when backward begins, and the first two for the next micro-batch;
//! with a slot a unit nothing is gathered twice in a step.
use super::flat::{self, Flat};
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Collective, CommUse, Tag, Ticket};
use crate::device::{Buf, View, ViewMut};

/// A gathered unit.
struct Held {
    unit: usize,
    ticket: Ticket,
    /// Waited for: readable by compute.
    ready: bool,
    /// Between acquire and release: must not be replaced.
    open: bool,
}

struct WeightSlot {
    buf: Buf,
    held: Option<Held>,
}

pub(super) struct WeightSlots {
    slots: Vec<WeightSlot>,
    cycle: usize,
}

impl WeightSlots {
    pub fn new(group: &dyn Collective, flat: &Flat, cycle: usize, dtype: DType) -> Result<WeightSlots> {
        let slot = |len| {
            let buf = group.alloc(dtype, len, CommUse::Gathered, Category::Slots)?;
            Ok(WeightSlot { buf, held: None })
        };
        Ok(WeightSlots { slots: flat.slots(cycle).into_iter().map(slot).collect::<Result<_>>()?, cycle })
    }
    /// Starts to gather `unit` unless its slot holds it already. `shard` is this rank's part.
    pub fn start(&mut self, group: &dyn Collective, unit: usize, shard: View) -> Result<()> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        match &slot.held {
            Some(held) if held.unit == unit => return Ok(()),
            Some(held) if held.open => {
                let what = format!("unit {unit} needs the slot of unit {}, which was not released", held.unit);
                return Err(Error::op("gather", what));
            }
            _ => slot.clear(group)?,
        }
        let full = slot.buf.view_mut().slice(0..shard.len() * group.size());
        let ticket = group.all_gather(Tag::new("gather", unit), shard, full)?;
        slot.held = Some(Held { unit, ticket, ready: false, open: false });
        Ok(())
    }
    /// Makes a started unit readable and keeps it until [`WeightSlots::close`].
    pub fn open(&mut self, group: &dyn Collective, unit: usize) -> Result<()> {
        let held = self.held(unit)?;
        if !held.ready {
            group.wait(held.ticket)?;
            held.ready = true;
        }
        held.open = true;
        Ok(())
    }
    pub fn is_open(&self, unit: usize) -> bool {
        let held = &self.slots[flat::slot(unit, self.cycle)].held;
        held.as_ref().is_some_and(|h| h.unit == unit && h.open)
    }
    pub fn close(&mut self, unit: usize) -> Result<()> {
        self.held(unit)?.open = false;
        Ok(())
    }
    /// The full weights of an open unit.
    pub fn view(&self, unit: usize) -> Result<View<'_>> {
        if !self.is_open(unit) {
            return Err(Error::op("weights", format!("unit {unit} is not acquired")));
        }
        Ok(self.slots[flat::slot(unit, self.cycle)].buf.view())
    }
    /// Forgets everything: the weights have changed.
    pub fn clear(&mut self, group: &dyn Collective) -> Result<()> {
        self.slots.iter_mut().try_for_each(|slot| slot.clear(group))
    }
    fn held(&mut self, unit: usize) -> Result<&mut Held> {
        let held = self.slots[flat::slot(unit, self.cycle)].held.as_mut().filter(|h| h.unit == unit);
        held.ok_or_else(|| Error::op("weights", format!("unit {unit} was never gathered")))
    }
}

impl WeightSlot {
    fn clear(&mut self, group: &dyn Collective) -> Result<()> {
        if let Some(held) = self.held.take() {
            if !held.ready {
                group.wait(held.ticket)?; // started ahead, then not needed
            }
            group.release(held.ticket)?;
        }
        Ok(())
    }
}

struct GradSlot {
    buf: Buf,
    reducing: Option<Ticket>,
}

pub(super) struct GradSlots {
    slots: Vec<GradSlot>,
    cycle: usize,
}

impl GradSlots {
    pub fn new(group: &dyn Collective, flat: &Flat, cycle: usize) -> Result<GradSlots> {
        let slot = |len| {
            let buf = group.alloc(DType::F32, len, CommUse::Reduced, Category::Slots)?;
            Ok(GradSlot { buf, reducing: None })
        };
        Ok(GradSlots { slots: flat.slots(cycle).into_iter().map(slot).collect::<Result<_>>()?, cycle })
    }
    /// The unit's full gradient, to be written: waits until a reduction that reads the slot is over.
    pub fn writable(&mut self, group: &dyn Collective, unit: usize, len: usize) -> Result<ViewMut<'_>> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        slot.finish(group)?;
        Ok(slot.buf.view_mut().slice(0..len))
    }
    /// Starts `shard (+)= this rank's part of the sum over ranks`.
    pub fn reduce(&mut self, group: &dyn Collective, unit: usize, shard: ViewMut, accumulate: bool) -> Result<()> {
        let slot = &mut self.slots[flat::slot(unit, self.cycle)];
        let full = slot.buf.view_mut().slice(0..shard.len() * group.size());
        slot.reducing = Some(group.reduce_scatter(Tag::new("reduce", unit), full, shard, accumulate)?);
        Ok(())
    }
    /// Every reduction has landed in its shard.
    pub fn finish(&mut self, group: &dyn Collective) -> Result<()> {
        self.slots.iter_mut().try_for_each(|slot| slot.finish(group))
    }
}

impl GradSlot {
    fn finish(&mut self, group: &dyn Collective) -> Result<()> {
        if let Some(ticket) = self.reducing.take() {
            group.wait(ticket)?;
            group.wait_sent(ticket)?;
        }
        Ok(())
    }
}
