//! A group that writes down every call: how tests count operations and see their order. Never changes what a call does.
use super::seam::Seam;
use super::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket};
use crate::base::{Category, DType, Result};
use crate::device::{Buf, View, ViewMut};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One call, or a note of the test's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// `None`: a note.
    pub seam: Option<Seam>,
    /// The group's; [`Axis::World`] for a note.
    pub axis: Axis,
    /// Of the operation that was started, or that is waited for.
    pub tag: Tag,
    /// Of the full buffer (gather, reduce-scatter), of the buffer, or sent. 0 for waits and releases.
    pub bytes: usize,
}

/// What happened on one rank, in order. Clones share it, so the groups of a rank can write into one log.
#[derive(Clone, Default, Debug)]
pub struct Log(Arc<Mutex<Vec<Entry>>>);

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Log {
    /// Something that the group does not see, e.g. the use of a unit by compute.
    pub fn note(&self, tag: Tag) {
        lock(&self.0).push(Entry { seam: None, axis: Axis::World, tag, bytes: 0 });
    }
    pub fn entries(&self) -> Vec<Entry> {
        lock(&self.0).clone()
    }
    pub fn clear(&self) {
        lock(&self.0).clear();
    }
    pub fn count(&self, seam: Seam) -> usize {
        lock(&self.0).iter().filter(|e| e.seam == Some(seam)).count()
    }
    /// Where the first call `seam` of an operation with this tag is, from entry `from` on.
    pub fn find(&self, from: usize, seam: Seam, tag: Tag) -> Option<usize> {
        let found = |e: &Entry| e.seam == Some(seam) && e.tag == tag;
        lock(&self.0).iter().skip(from).position(found).map(|i| i + from)
    }
}

pub struct Recorder {
    inner: Arc<dyn Collective>,
    log: Log,
    tags: Mutex<HashMap<u64, Tag>>,
}

impl Recorder {
    pub fn new(inner: Arc<dyn Collective>, log: Log) -> Recorder {
        Recorder { inner, log, tags: Mutex::default() }
    }
    fn add(&self, seam: Seam, tag: Tag, bytes: usize) {
        lock(&self.log.0).push(Entry { seam: Some(seam), axis: self.inner.axis(), tag, bytes });
    }
    /// Written down before the call: an operation that never returns is in the log.
    fn start(&self, seam: Seam, tag: Tag, bytes: usize, call: impl FnOnce() -> Result<Ticket>) -> Result<Ticket> {
        self.add(seam, tag, bytes);
        let ticket = call()?;
        lock(&self.tags).insert(ticket.0, tag);
        Ok(ticket)
    }
    fn finish(&self, seam: Seam, ticket: Ticket) {
        let tag = lock(&self.tags).get(&ticket.0).copied();
        self.add(seam, tag.unwrap_or(Tag::new("unknown ticket", ticket.0 as usize)), 0);
    }
}

impl Collective for Recorder {
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
        self.add(Seam::Alloc, Tag::new("alloc", 0), len * dtype.size());
        self.inner.alloc(dtype, len, usage, category)
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
    fn barrier(&self, tag: Tag) -> Result<()> {
        self.add(Seam::Barrier, tag, 0);
        self.inner.barrier(tag)
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.finish(Seam::Wait, ticket);
        self.inner.wait(ticket)
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        self.finish(Seam::Release, ticket);
        self.inner.release(ticket)
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.finish(Seam::WaitSent, ticket);
        self.inner.wait_sent(ticket)
    }
    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}
