//! The calls of a `Collective`: check operands, determine whether peers can access them in place, start. Never waits
//! unless the call says so.
use super::buffer::ShmBuffer;
use super::group::{ShmGroup, Until};
use super::hub::Hub;
use super::op::{OpStep, ShmOp};
use super::record::{Desc, PairParts};
use crate::base::{Category, DType, Error, Result};
use crate::comm::operands::CheckedCall;
use crate::comm::seam::{Seam, received};
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Times};
use crate::device::cpu::sum::Sources;
use crate::device::{self, Buf, View, ViewMut};
use std::ops::Range;
use std::sync::Arc;

/// An operand located in a buffer of the group.
pub(in crate::comm) struct FoundBuffer {
    pub buffer: Arc<ShmBuffer>,
    /// The operands of all ranks.
    pub sources: Sources,
    /// The place, the same number on all ranks.
    pub place: u64,
}

impl ShmGroup {
    fn refuse(&self, kind: Seam, tag: Tag, what: String) -> Error {
        self.hub.error(kind.name(), tag, what)
    }
    /// The buffer, of any usage and of this or another group, that contains `bytes` at `start`.
    pub(in crate::comm) fn find(&self, start: *const u8, bytes: usize) -> Option<(FoundBuffer, CommUse, bool)> {
        let buffer = self.hub.seat.find(start, bytes)?;
        let at = start as usize - buffer.range().start;
        let sources = Sources::new(buffer.of(0).wrapping_add(at).cast_const(), buffer.stride());
        let (usage, ours, place) = (buffer.usage(), buffer.group() == self.hub.id, buffer.place(at));
        Some((FoundBuffer { buffer, sources, place }, usage, ours))
    }
    /// Locates an operand in the group's buffers of that usage. Writing to memory that all ranks share is refused,
    /// except by a gather, because ranks would overwrite each other.
    pub(in crate::comm) fn place(
        &self,
        kind: Seam,
        tag: Tag,
        view: &mut ViewMut,
        usage: CommUse,
    ) -> Result<Option<FoundBuffer>> {
        if view.is_empty() {
            return Ok(None);
        }
        match self.find(view.as_mut_ptr().cast_const(), view.bytes()) {
            Some((found, theirs, true)) if theirs == usage => Ok(Some(found)),
            Some((_, CommUse::Gathered, _)) => {
                let what =
                    "writes to a Gathered buffer, which all ranks of its group share: only that group's all_gather may";
                Err(self.refuse(kind, tag, what.into()))
            }
            _ => Ok(None),
        }
    }
    /// Whether an operation needs no mailbox: peers can access the buffer, or there are none.
    fn direct(&self, found: &Option<FoundBuffer>) -> bool {
        found.is_some() || self.hub.size() == 1
    }
    /// Ranks copy with CPU instructions; GPU memory needs another kind of group.
    fn check_host(&self, kind: Seam, tag: Tag, places: &[device::buf::Place]) -> Result<()> {
        match places.iter().all(|&place| place != device::buf::Place::Device) {
            true => Ok(()),
            false => Err(self.refuse(kind, tag, "the shared-memory group cannot access GPU memory".into())),
        }
    }
    /// The call, for operand checks.
    fn check(&self, kind: Seam, tag: Tag) -> CheckedCall<'_> {
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
        let kind = Seam::AllGather;
        self.check_host(kind, tag, &[shard.place(), full.place()])?;
        self.check(kind, tag).same(shard.dtype(), full.dtype())?;
        self.check(kind, tag).shards(shard.len(), full.len())?;
        let found = self.place(kind, tag, &mut full, CommUse::Gathered)?;
        let mut op = ShmOp::new(kind, tag, shard.dtype(), shard.len(), OpStep::Mail);
        op.desc.place = found.as_ref().map_or(Desc::STAGED, |found| found.place);
        (op.src, op.dst, op.keep) = (shard.as_ptr(), full.as_mut_ptr(), [Some(shard.keep()), Some(full.keep())]);
        if self.direct(&found) {
            op.step = OpStep::Write;
            op.dst = op.dst.wrapping_add(self.hub.me * shard.bytes());
            op.into = found.map(|found| (found.buffer, 0));
        }
        self.start(op, shard.bytes() * (self.size() - 1))
    }

    fn reduce_scatter(&self, tag: Tag, mut full: ViewMut, mut shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let kind = Seam::ReduceScatter;
        self.check_host(kind, tag, &[full.place(), shard.place()])?;
        self.check(kind, tag).scattered(full.dtype(), shard.dtype())?;
        self.check(kind, tag).shards(shard.len(), full.len())?;
        self.place(kind, tag, &mut shard, CommUse::Reduced)?;
        let found = self.place(kind, tag, &mut full, CommUse::Reduced)?;
        let mut op = ShmOp::new(kind, tag, full.dtype(), shard.len(), OpStep::Mail);
        op.desc.place = found.as_ref().map_or(Desc::STAGED, |found| found.place);
        (op.accumulate, op.dst_dtype) = (accumulate, shard.dtype());
        (op.src, op.dst, op.keep) = (full.as_mut_ptr(), shard.as_mut_ptr(), [Some(full.keep()), Some(shard.keep())]);
        if self.direct(&found) {
            op.step = OpStep::Reduce;
            let sources = found.map_or(Sources::new(op.src, 0), |found| found.sources);
            op.sources = sources.offset(self.hub.me * full.bytes() / self.size());
        }
        self.start(op, full.bytes() / self.size() * (self.size() - 1))
    }

    fn all_reduce(&self, tag: Tag, mut buf: ViewMut, reduce: Reduce) -> Result<Ticket> {
        let kind = Seam::AllReduce;
        self.check_host(kind, tag, &[buf.place()])?;
        self.check(kind, tag).reducible(buf.dtype(), reduce)?;
        let found = self.place(kind, tag, &mut buf, CommUse::Reduced)?;
        let mut op = ShmOp::new(kind, tag, buf.dtype(), buf.len(), OpStep::Mail);
        op.desc.place = found.as_ref().map_or(Desc::STAGED, |found| found.place);
        op.desc.arg = reduce as u8;
        op.reduce = reduce;
        (op.src, op.dst, op.keep) = (buf.as_mut_ptr(), buf.as_mut_ptr(), [Some(buf.keep()), None]);
        if self.direct(&found) {
            op.step = OpStep::Reduce;
            op.sources = found.map_or(Sources::new(op.src, 0), |found| found.sources);
        }
        self.start(op, 2 * buf.bytes() * (self.size() - 1) / self.size())
    }

    fn broadcast(&self, tag: Tag, mut buf: ViewMut, root: usize) -> Result<Ticket> {
        let kind = Seam::Broadcast;
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
        let kind = Seam::SendRecv;
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
            && let Some((found, CommUse::Reduced, true)) = self.find(send.as_ptr(), send.bytes())
        {
            op.desc.place = found.place;
        }
        self.start(op, if from == self.rank() { 0 } else { recv.bytes() })
    }

    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        mut recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket> {
        let (kind, call) = (Seam::AllToAll, self.check(Seam::AllToAll, tag));
        self.check_host(kind, tag, &[send.place(), recv.place()])?;
        call.same(send.dtype(), recv.dtype())?;
        call.parts(self.rank(), (send.len(), sends), (recv.len(), recvs))?;
        self.place(kind, tag, &mut recv, CommUse::Reduced)?;
        let keep = [Some(send.keep()), Some(recv.keep())];
        let op = self.pairs_op(tag, send.dtype(), (send.as_ptr(), send.len()), (recv.as_mut_ptr(), recv.len()), keep);
        let bytes = received(self.rank(), recvs) * recv.dtype().size();
        self.start_pairs(op, bytes, |peer| PairParts::new(&sends[peer], &recvs[peer]))
    }

    fn barrier(&self, tag: Tag) -> Result<()> {
        let ticket = self.start(ShmOp::new(Seam::Barrier, tag, DType::U8, 0, OpStep::Meet), 0)?;
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
