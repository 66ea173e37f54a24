//! Groups of which only one rank exists: a collective moves nothing and takes its time on the clock. The engine sees a
//! world of any size and is its first rank. Never communicates.
use super::clock::{Clock, Seconds, SimStream};
use super::links::{Collected, Placement};
use super::machine::MachineModel;
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::comm::operands::CheckedCall;
use flatshard::comm::{Axis, Collective, CommStats, CommUse, Member, Reduce, Tag, Ticket};
use flatshard::device::{Buf, View, ViewMut, unbacked};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// State of a planned world, shared by the device and the groups of its single rank.
#[derive(Clone)]
pub struct PlannedWorld {
    pub machine: Arc<dyn MachineModel>,
    pub clock: Arc<Clock>,
    pub meter: Meter,
    pub ranks: usize,
    pub per_node: usize,
}

/// Rank 0's membership.
pub struct PlannedMember {
    world: PlannedWorld,
    /// Groups with the same ranks share a stream, as in NCCL.
    streams: Mutex<Vec<(Vec<usize>, SimStream)>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PlannedMember {
    pub fn new(world: PlannedWorld) -> PlannedMember {
        PlannedMember { world, streams: Mutex::default() }
    }
    fn stream(&self, ranks: &[usize]) -> SimStream {
        if self.world.machine.inline() {
            return SimStream::Compute;
        }
        let mut streams = lock(&self.streams);
        if let Some((_, stream)) = streams.iter().find(|(there, _)| there == ranks) {
            return *stream;
        }
        streams.push((ranks.to_vec(), self.world.clock.group()));
        streams[streams.len() - 1].1
    }
}

impl Member for PlannedMember {
    fn set_timeout(&self, _: std::time::Duration) {}
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        self.world.ranks
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        let placement = Placement::of(&ranks, self.world.per_node);
        let stream = self.stream(&ranks);
        Ok(Arc::new(PlannedGroup { world: self.world.clone(), axis, placement, stream, calls: Mutex::default() }))
    }
    fn abort(&self) {}
    fn failed(&self) -> Option<usize> {
        None
    }
}

struct PlannedGroup {
    world: PlannedWorld,
    axis: Axis,
    placement: Placement,
    stream: SimStream,
    calls: Mutex<PlannedCalls>,
}

#[derive(Default)]
struct PlannedCalls {
    next: u64,
    under_way: HashMap<u64, PendingCollective>,
    stats: CommStats,
}

struct PendingCollective {
    end: Seconds,
    /// Resets of the clock before it began.
    resets: u64,
    what: Collected,
    bytes: u64,
    tag: Tag,
}

impl PlannedGroup {
    fn call(&self, what: Collected, tag: Tag) -> CheckedCall<'static> {
        CheckedCall { rank: 0, op: what.name(), group: self.axis.name(), size: self.placement.ranks, tag }
    }
    /// `bytes`: size of the full buffer.
    fn start(&self, what: Collected, tag: Tag, bytes: usize) -> Result<Ticket> {
        let PlannedWorld { machine, clock, .. } = &self.world;
        let (bytes, mut calls) = (bytes as u64, lock(&self.calls));
        let seconds = machine.collective(what, bytes, self.placement);
        let end = clock.start(self.stream, (tag.what, tag.unit), machine.launch(), seconds);
        calls.stats.bytes += what.received(bytes, self.placement.ranks);
        calls.stats.ops += 1;
        calls.stats.in_flight_s += seconds;
        let ticket = calls.next;
        calls.next += 1;
        calls.under_way.insert(ticket, PendingCollective { end, resets: clock.resets(), what, bytes, tag });
        Ok(Ticket(ticket))
    }
}

impl Collective for PlannedGroup {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        self.placement.ranks
    }
    fn axis(&self) -> Axis {
        self.axis
    }
    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf> {
        let bytes = len * dtype.size();
        let counted = if self.world.machine.inline() { usage.counted(bytes, self.placement.ranks) } else { bytes };
        unbacked::alloc(dtype, len, self.world.meter.lease(category, counted))
    }
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket> {
        let call = self.call(Collected::AllGather, tag);
        call.same(shard.dtype(), full.dtype())?;
        call.shards(shard.len(), full.len())?;
        self.start(Collected::AllGather, tag, full.bytes())
    }
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, _: bool) -> Result<Ticket> {
        self.call(Collected::ReduceScatter, tag).shards(shard.len(), full.len())?;
        self.start(Collected::ReduceScatter, tag, full.bytes())
    }
    fn all_reduce(&self, tag: Tag, buf: ViewMut, _: Reduce) -> Result<Ticket> {
        self.start(Collected::AllReduce, tag, buf.bytes())
    }
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket> {
        self.call(Collected::Broadcast, tag).rank(root)?;
        self.start(Collected::Broadcast, tag, buf.bytes())
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket> {
        let call = self.call(Collected::SendRecv, tag);
        call.rank(to)?;
        call.rank(from)?;
        self.start(Collected::SendRecv, tag, send.bytes().max(recv.bytes()))
    }
    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket> {
        let call = self.call(Collected::AllToAll, tag);
        call.same(send.dtype(), recv.dtype())?;
        call.parts(0, (send.len(), sends), (recv.len(), recvs))?;
        let received: usize = recvs[1..].iter().map(Range::len).sum();
        self.start(Collected::AllToAll, tag, received * recv.dtype().size())
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        let ticket = self.start(Collected::Barrier, tag, 0)?;
        self.wait(ticket)?;
        self.world.clock.sync();
        Ok(())
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        let PlannedWorld { machine, clock, .. } = &self.world;
        let calls = lock(&self.calls);
        let Some(PendingCollective { end, resets, what, bytes, tag }) = calls.under_way.get(&ticket.0) else {
            return Err(Error::op("wait", format!("ticket {} of group {}", ticket.0, self.axis.name())));
        };
        match machine.inline() {
            true => clock.stand((tag.what, tag.unit), machine.finish(*what, *bytes, self.placement)),
            false if *resets < clock.resets() => {}
            false => clock.wait(*end),
        }
        Ok(())
    }
    fn release(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    /// A GPU's compute stream waits only for the end, which it may already have waited for.
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        match lock(&self.calls).under_way.get(&ticket.0) {
            Some(of) if !self.world.machine.inline() && of.resets == self.world.clock.resets() => {
                self.world.clock.wait(of.end)
            }
            _ => {}
        }
        Ok(())
    }
    fn stats(&self) -> CommStats {
        lock(&self.calls).stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::machine::{GPUS, Rated};

    #[test]
    fn what_was_in_flight_at_a_reset_has_ended() {
        let (machine, clock) = (Arc::new(Rated { gpu: GPUS[0], tf32: false }), Arc::new(Clock::new(false)));
        let world = PlannedWorld { machine, clock, meter: Meter::default(), ranks: 8, per_node: 8 };
        let group = PlannedMember::new(world.clone()).group(Axis::Dp, (0..8).collect()).unwrap();
        let mut buf = group.alloc(DType::F32, 1 << 20, CommUse::Reduced, Category::Slots).unwrap();
        let mut exposed = |resets: bool| {
            world.clock.compute("a step", 0.0, 100.0, 1);
            let ticket = group.all_reduce(Tag::new("gradients", 0), buf.view_mut(), Reduce::Sum).unwrap();
            if resets {
                world.clock.reset();
            }
            group.wait(ticket).unwrap();
            world.clock.totals().exposed
        };
        assert_eq!(exposed(true), 0.0);
        assert!(exposed(false) > 0.0);
    }
}
