//! What groups of another kind do with the ranks of a host. A group over several hosts: its worker thread meets the
//! host's other ranks here, finds buffers that all of them can access, and waits until these may be written. A group of
//! GPUs over IPC: its ranks meet before they wait for each other's streams. Never communicates with another host.
use super::buffer::ShmBuffer;
use super::group::{ShmGroup, Until};
use super::op::{KeepAlive, OpStep, ShmOp};
use super::record::{Desc, PairParts};
use crate::base::{DType, Result};
use crate::comm::seam::Seam;
use crate::comm::{CommUse, Tag, Ticket};
use std::time::Duration;

/// What a rank sends to another rank of its host, receives, or both.
pub(in crate::comm) struct Passed {
    pub dtype: DType,
    /// Source, elements, receiver.
    pub send: Option<(*const u8, usize, usize)>,
    /// Destination, elements, sender.
    pub recv: Option<(*mut u8, usize, usize)>,
    pub keep: KeepAlive,
}

impl ShmGroup {
    /// Returns when all ranks have arrived with the same operation.
    pub(in crate::comm) fn meet(&self, kind: Seam, tag: Tag, desc: Desc) -> Result<()> {
        let mut op = ShmOp::new(kind, tag, DType::U8, 0, OpStep::Meet);
        op.desc = desc;
        let ticket = self.start(op, 0)?;
        self.wait_until(ticket, Until::Complete)
    }
    /// Like [`ShmGroup::meet`], of ranks that each give and take these elements of each other (an all_to_all).
    pub(in crate::comm) fn meet_pairs(&self, tag: Tag, dtype: DType, pairs: &[PairParts]) -> Result<()> {
        let mut op = ShmOp::new(Seam::AllToAll, tag, dtype, 0, OpStep::Meet);
        (op.desc.to, op.desc.from) = (Desc::NOBODY, Desc::NOBODY);
        let ticket = self.start_pairs(op, 0, |peer| pairs[peer])?;
        self.wait_until(ticket, Until::Complete)
    }
    /// Waits until all ranks have come here too, or for that long, or until one has failed. Returns whether all have.
    /// Nothing may follow.
    pub(in crate::comm) fn part(&self, at_most: Duration) -> bool {
        self.hub.seat.timeout.set(at_most);
        let tag = Tag::new("end", 0);
        self.meet(Seam::Barrier, tag, Desc::new(Seam::Barrier, tag, DType::U8, 0)).is_ok()
    }
    /// World rank of a member.
    pub(in crate::comm) fn world_rank(&self, member: usize) -> usize {
        self.hub.name(member)
    }
    /// Returns when all ranks have released the buffer's contents before this one.
    pub(in crate::comm) fn vacated(&self, kind: Seam, tag: Tag, buffer: &ShmBuffer, content: u64) -> Result<()> {
        self.call(|inner| self.until(inner, Until::Vacant(buffer, content), kind.name(), tag))
    }
    /// This rank no longer reads these contents.
    pub(in crate::comm) fn vacate(&self, buffer: &ShmBuffer, content: u64) {
        buffer.release(content);
        self.hub.ring();
    }
    /// Copies `bytes` at member `root`'s `at` to the other members' `at`. Returns when this rank has them.
    ///
    /// # Safety
    /// `at` is valid for that many bytes, which only this call touches until it returns.
    pub(in crate::comm) unsafe fn spread(&self, tag: Tag, at: *mut u8, bytes: usize, root: usize) -> Result<()> {
        if self.hub.size() == 1 {
            return Ok(());
        }
        let mut op = ShmOp::new(Seam::Broadcast, tag, DType::U8, bytes, OpStep::Mail);
        op.desc.to = root as u32;
        (op.src, op.dst) = (at, at);
        let ticket = self.start(op, 0)?;
        self.wait_until(ticket, Until::Complete)
    }
    /// Starts the sends between ranks of the host. Ranks that neither send nor receive must take part too.
    pub(in crate::comm) fn pass(&self, tag: Tag, passed: Passed) -> Result<Ticket> {
        let (source, sent, to) =
            passed.send.map_or((std::ptr::null(), 0, Desc::NOBODY), |(p, n, to)| (p, n, to as u32));
        let mut op = ShmOp::new(Seam::SendRecv, tag, passed.dtype, sent, OpStep::Mail);
        (op.desc.to, op.desc.from, op.src, op.keep) = (to, Desc::NOBODY, source, passed.keep);
        if let Some((target, wanted, from)) = passed.recv {
            (op.dst, op.desc.recv_len, op.desc.from) = (target, wanted as u64, from as u32);
        }
        let bytes = sent * passed.dtype.size();
        if bytes > 0
            && let Some((found, CommUse::Reduced, true)) = self.find(source, bytes)
        {
            op.desc.place = found.place;
        }
        self.start(op, 0)
    }
    /// Starts an all_to_all of the host's ranks, from and to these addresses and lengths. One pair per rank.
    pub(in crate::comm) fn trade(
        &self,
        tag: Tag,
        dtype: DType,
        send: (*const u8, usize),
        recv: (*mut u8, usize),
        pairs: &[PairParts],
    ) -> Result<Ticket> {
        self.start_pairs(self.pairs_op(tag, dtype, send, recv, [None, None]), 0, |peer| pairs[peer])
    }
    /// Returns when received data has arrived and sent data may be overwritten.
    pub(in crate::comm) fn finish(&self, ticket: Ticket) -> Result<()> {
        self.wait_until(ticket, Until::Complete)?;
        self.wait_until(ticket, Until::Sent)
    }
}
