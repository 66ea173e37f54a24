//! The calls of a `Collective`: checks the operands, finds out whether peers reach them in place, and starts. Never
//! waits but where the call says so.
use super::buffer::ShmBuffer;
use super::group::{ShmGroup, Until};
use super::hub::Hub;
use super::op::{OpStep, ShmOp};
use super::record::{CollectiveKind, Desc};
use super::sum::Sources;
use crate::base::{Category, DType, Error, Result};
use crate::comm::operands::CheckedCall;
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Times};
use crate::device::{self, Buf, View, ViewMut};
use std::sync::Arc;

/// Where an operand is: in a buffer of the group, from a byte on, or elsewhere.
struct OperandPlace {
    buffer: Option<(Arc<ShmBuffer>, usize)>,
    /// The ranks' operands; elsewhere only this rank's.
    sources: Sources,
}
impl OperandPlace {
    /// Alike on all ranks.
    fn name(&self) -> u64 {
        self.buffer.as_ref().map_or(Desc::STAGED, |(buffer, at)| buffer.place(*at))
    }
}

impl ShmGroup {
    fn refuse(&self, kind: CollectiveKind, tag: Tag, what: String) -> Error {
        self.hub.error(kind.name(), tag, what)
    }
    /// Finds a buffer among those of the group with that usage. Memory that all ranks share is refused unless it is to
    /// be gathered into: ranks would overwrite each other.
    fn place(&self, kind: CollectiveKind, tag: Tag, view: &mut ViewMut, usage: CommUse) -> Result<OperandPlace> {
        let start = view.as_mut_ptr().cast_const();
        let elsewhere = OperandPlace { buffer: None, sources: Sources::new(start, 0) };
        if view.is_empty() {
            return Ok(elsewhere);
        }
        let Some(buffer) = self.hub.seat.find(start, view.bytes()) else { return Ok(elsewhere) };
        if buffer.group() == self.hub.id && buffer.usage() == usage {
            let at = start as usize - buffer.range().start;
            let sources = Sources::new(buffer.of(0).wrapping_add(at), buffer.stride());
            return Ok(OperandPlace { buffer: Some((buffer, at)), sources });
        }
        if buffer.usage() == CommUse::Gathered {
            let what = "writes a Gathered buffer, which all ranks of its group share: only that group's all_gather may";
            return Err(self.refuse(kind, tag, what.into()));
        }
        Ok(elsewhere)
    }
    /// Whether an operation there needs no mailbox: peers reach the buffer, or there are none.
    fn direct(&self, place: &OperandPlace) -> bool {
        place.buffer.is_some() || self.hub.size() == 1
    }
    /// Ranks copy with the host's instructions; GPU memory needs a group of its own.
    fn check_host(&self, kind: CollectiveKind, tag: Tag, places: &[device::buf::Place]) -> Result<()> {
        match places.iter().all(|&place| place != device::buf::Place::Device) {
            true => Ok(()),
            false => Err(self.refuse(kind, tag, "the shared-memory group cannot reach memory of the GPU".into())),
        }
    }
    /// The call as what its operands are checked for.
    fn check(&self, kind: CollectiveKind, tag: Tag) -> CheckedCall<'_> {
        let Hub { axis, me, .. } = &self.hub;
        CheckedCall { rank: self.hub.name(*me), op: kind.name(), group: axis.name(), size: self.hub.size(), tag }
    }
}

impl Collective for ShmGroup {
    fn rank(&self) -> usize {
        self.hub.me
    }
    fn size(&self) -> usize {
        self.hub.size()
    }
    fn axis(&self) -> Axis {
        self.hub.axis
    }

    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf> {
        self.call(|inner| self.alloc_in(inner, dtype, len, usage, category))
    }

    fn all_gather(&self, tag: Tag, shard: View, mut full: ViewMut) -> Result<Ticket> {
        let kind = CollectiveKind::AllGather;
        self.check_host(kind, tag, &[shard.place(), full.place()])?;
        self.check(kind, tag).same(shard.dtype(), full.dtype())?;
        self.check(kind, tag).shards(shard.len(), full.len())?;
        let place = self.place(kind, tag, &mut full, CommUse::Gathered)?;
        let mut op = ShmOp::new(kind, tag, shard.dtype(), shard.len(), OpStep::Mail);
        op.desc.place = place.name();
        (op.src, op.dst, op.keep) = (shard.as_ptr(), full.as_mut_ptr(), [Some(shard.keep()), Some(full.keep())]);
        if self.direct(&place) {
            op.step = OpStep::Write;
            op.dst = op.dst.wrapping_add(self.hub.me * shard.bytes());
            op.into = place.buffer.map(|(buffer, _)| (buffer, 0));
        }
        self.start(op, shard.bytes() * (self.size() - 1))
    }

    fn reduce_scatter(&self, tag: Tag, mut full: ViewMut, mut shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let kind = CollectiveKind::ReduceScatter;
        self.check_host(kind, tag, &[full.place(), shard.place()])?;
        self.check(kind, tag).scattered(full.dtype(), shard.dtype())?;
        self.check(kind, tag).shards(shard.len(), full.len())?;
        self.place(kind, tag, &mut shard, CommUse::Reduced)?;
        let place = self.place(kind, tag, &mut full, CommUse::Reduced)?;
        let mut op = ShmOp::new(kind, tag, full.dtype(), shard.len(), OpStep::Mail);
        op.desc.place = place.name();
        (op.accumulate, op.dst_dtype) = (accumulate, shard.dtype());
        (op.src, op.dst, op.keep) = (full.as_mut_ptr(), shard.as_mut_ptr(), [Some(full.keep()), Some(shard.keep())]);
        if self.direct(&place) {
            op.step = OpStep::Reduce;
            op.sources = place.sources.offset(self.hub.me * full.bytes() / self.size());
        }
        self.start(op, full.bytes() / self.size() * (self.size() - 1))
    }

    fn all_reduce(&self, tag: Tag, mut buf: ViewMut, reduce: Reduce) -> Result<Ticket> {
        let kind = CollectiveKind::AllReduce;
        self.check_host(kind, tag, &[buf.place()])?;
        self.check(kind, tag).reducible(buf.dtype(), reduce)?;
        let place = self.place(kind, tag, &mut buf, CommUse::Reduced)?;
        let mut op = ShmOp::new(kind, tag, buf.dtype(), buf.len(), OpStep::Mail);
        op.desc.place = place.name();
        op.desc.arg = reduce as u8;
        op.reduce = reduce;
        (op.src, op.dst, op.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        if self.direct(&place) {
            op.step = OpStep::Reduce;
            op.sources = place.sources;
        }
        self.start(op, 2 * buf.bytes() * (self.size() - 1) / self.size())
    }

    fn broadcast(&self, tag: Tag, mut buf: ViewMut, root: usize) -> Result<Ticket> {
        let kind = CollectiveKind::Broadcast;
        self.check_host(kind, tag, &[buf.place()])?;
        self.check(kind, tag).rank(root)?;
        self.place(kind, tag, &mut buf, CommUse::Reduced)?;
        let mut op = ShmOp::new(kind, tag, buf.dtype(), buf.len(), OpStep::Mail);
        op.desc.to = root as u32;
        (op.src, op.dst, op.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        if self.size() == 1 {
            op.step = OpStep::Meet;
        }
        self.start(op, if root == self.rank() { 0 } else { buf.bytes() })
    }

    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, mut recv: ViewMut) -> Result<Ticket> {
        let kind = CollectiveKind::SendRecv;
        self.check_host(kind, tag, &[send.place(), recv.place()])?;
        self.check(kind, tag).rank(to)?;
        self.check(kind, tag).rank(from)?;
        self.check(kind, tag).same(send.dtype(), recv.dtype())?;
        if to == self.rank() && from == to && send.len() != recv.len() {
            return Err(self.refuse(kind, tag, format!("{} elements into {}", send.len(), recv.len())));
        }
        self.place(kind, tag, &mut recv, CommUse::Reduced)?;
        let mut op = ShmOp::new(kind, tag, send.dtype(), send.len(), OpStep::Mail);
        (op.desc.to, op.desc.from, op.desc.recv_len) = (to as u32, from as u32, recv.len() as u64);
        (op.src, op.dst, op.keep) = (send.as_ptr(), recv.as_mut_ptr(), [Some(send.keep()), Some(recv.keep())]);
        if !send.is_empty()
            && let Some(buffer) = self.hub.seat.find(send.as_ptr(), send.bytes())
            && (buffer.group(), buffer.usage()) == (self.hub.id, CommUse::Reduced)
        {
            op.desc.place = buffer.place(send.as_ptr() as usize - buffer.range().start);
        }
        self.start(op, if from == self.rank() { 0 } else { recv.bytes() })
    }

    fn barrier(&self, tag: Tag) -> Result<()> {
        let ticket = self.start(ShmOp::new(CollectiveKind::Barrier, tag, DType::U8, 0, OpStep::Meet), 0)?;
        self.wait(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.wait_until(ticket, Until::Complete)
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.wait_until(ticket, Until::Sent)
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        self.call(|inner| self.release_in(inner, ticket))
    }
    fn stats(&self) -> CommStats {
        self.stats_now()
    }
    fn times(&self, ticket: Ticket) -> Times {
        self.times_of(ticket)
    }
}
