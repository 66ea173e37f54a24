//! The calls of a `Collective` as values, and a group that runs a hook around each: the basis of the recorder and the
//! delays. Never changes what a call does.
use super::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Times};
use crate::base::{Category, DType, Result};
use crate::device::{Buf, View, ViewMut};
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Seam {
    /// 0 is reserved for memory that was never written.
    Alloc = 1,
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
    SendRecv,
    AllToAll,
    Barrier,
    Wait,
    Release,
    WaitSent,
}

impl Seam {
    pub const ALL: [Seam; 11] = [
        Seam::Alloc,
        Seam::AllGather,
        Seam::ReduceScatter,
        Seam::AllReduce,
        Seam::Broadcast,
        Seam::SendRecv,
        Seam::AllToAll,
        Seam::Barrier,
        Seam::Wait,
        Seam::Release,
        Seam::WaitSent,
    ];
    pub fn name(self) -> &'static str {
        match self {
            Seam::Alloc => "alloc",
            Seam::AllGather => "all_gather",
            Seam::ReduceScatter => "reduce_scatter",
            Seam::AllReduce => "all_reduce",
            Seam::Broadcast => "broadcast",
            Seam::SendRecv => "send_recv",
            Seam::AllToAll => "all_to_all",
            Seam::Barrier => "barrier",
            Seam::Wait => "wait",
            Seam::Release => "release",
            Seam::WaitSent => "wait_sent",
        }
    }
}

/// An operation's tag, and its bytes: of the full buffer (gather, reduce_scatter), of the buffer, sent (send_recv), or
/// received from other ranks (all_to_all).
#[derive(Clone, Copy)]
pub struct Started {
    pub tag: Tag,
    pub bytes: usize,
}

/// Elements of an all_to_all that come from other ranks.
pub(in crate::comm) fn received(me: usize, recvs: &[Range<usize>]) -> usize {
    recvs.iter().enumerate().filter(|(rank, _)| *rank != me).map(|(_, part)| part.len()).sum()
}

pub trait Hook: Send + Sync {
    /// Before an operation, a barrier or an allocation.
    fn before(&self, seam: Seam, started: Started);
    fn after(&self, seam: Seam, started: Started, ticket: Option<Ticket>);
    /// Before and after a wait or a release.
    fn before_wait(&self, seam: Seam, ticket: Ticket);
    fn after_wait(&self, seam: Seam, ticket: Ticket);
}

pub struct Hooked<H> {
    inner: Arc<dyn Collective>,
    hook: H,
}

impl<H: Hook> Hooked<H> {
    pub fn with(inner: Arc<dyn Collective>, hook: H) -> Hooked<H> {
        Hooked { inner, hook }
    }
    fn start(&self, seam: Seam, tag: Tag, bytes: usize, call: impl FnOnce() -> Result<Ticket>) -> Result<Ticket> {
        let started = Started { tag, bytes };
        self.hook.before(seam, started);
        let ticket = call()?;
        self.hook.after(seam, started, Some(ticket));
        Ok(ticket)
    }
    fn finish(&self, seam: Seam, ticket: Ticket, call: impl FnOnce() -> Result<()>) -> Result<()> {
        self.hook.before_wait(seam, ticket);
        call()?;
        self.hook.after_wait(seam, ticket);
        Ok(())
    }
}

impl<H: Hook> Collective for Hooked<H> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn axis(&self) -> Axis {
        self.inner.axis()
    }
    fn alloc(&self, dtype: DType, len: usize, usage: CommUse, category: Category) -> Result<Buf> {
        let started = Started { tag: Tag::new("alloc", 0), bytes: len * dtype.size() };
        self.hook.before(Seam::Alloc, started);
        let buf = self.inner.alloc(dtype, len, usage, category)?;
        self.hook.after(Seam::Alloc, started, None);
        Ok(buf)
    }
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket> {
        self.start(Seam::AllGather, tag, full.bytes(), || self.inner.all_gather(tag, shard, full))
    }
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let bytes = full.bytes();
        self.start(Seam::ReduceScatter, tag, bytes, || self.inner.reduce_scatter(tag, full, shard, accumulate))
    }
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket> {
        self.start(Seam::AllReduce, tag, buf.bytes(), || self.inner.all_reduce(tag, buf, op))
    }
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket> {
        self.start(Seam::Broadcast, tag, buf.bytes(), || self.inner.broadcast(tag, buf, root))
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket> {
        self.start(Seam::SendRecv, tag, send.bytes(), || self.inner.send_recv(tag, to, send, from, recv))
    }
    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket> {
        let bytes = received(self.rank(), recvs) * recv.dtype().size();
        self.start(Seam::AllToAll, tag, bytes, || self.inner.all_to_all(tag, send, sends, recv, recvs))
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        let started = Started { tag, bytes: 0 };
        self.hook.before(Seam::Barrier, started);
        self.inner.barrier(tag)?;
        self.hook.after(Seam::Barrier, started, None);
        Ok(())
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.finish(Seam::Wait, ticket, || self.inner.wait(ticket))
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        self.finish(Seam::Release, ticket, || self.inner.release(ticket))
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.finish(Seam::WaitSent, ticket, || self.inner.wait_sent(ticket))
    }
    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
    fn times(&self, ticket: Ticket) -> Times {
        self.inner.times(ticket)
    }
}
