//! A group that dawdles: seeded delays before and after chosen calls, so that tests meet the orders of events that a quiet
//! machine never shows. Never changes what a call does.
use super::seam::Seam;
use super::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket};
use crate::base::rng::Rng;
use crate::base::{Category, DType, Result};
use crate::device::{Buf, View, ViewMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub struct Delayed {
    inner: Arc<dyn Collective>,
    rng: Rng,
    drawn: AtomicU64,
    seams: Vec<Seam>,
    longest: Duration,
}

impl Delayed {
    /// Delays up to `longest`, on average a quarter of it, at each of `seams`. Ranks with equal seeds are delayed
    /// differently.
    pub fn new(inner: Arc<dyn Collective>, seed: u64, seams: &[Seam], longest: Duration) -> Delayed {
        let rng = Rng::new(seed, (inner.axis() as u64) << 32 | inner.rank() as u64);
        Delayed { inner, rng, drawn: AtomicU64::new(0), seams: seams.to_vec(), longest }
    }
    fn dawdle(&self) {
        let x = self.rng.uniform(self.drawn.fetch_add(1, Relaxed));
        // Half of the time not at all: being first matters as much as being late.
        std::thread::sleep(self.longest.mul_f64((2.0 * x - 1.0).max(0.0)));
    }
    fn at<T>(&self, seam: Seam, call: impl FnOnce() -> T) -> T {
        if !self.seams.contains(&seam) {
            return call();
        }
        self.dawdle();
        let result = call();
        self.dawdle();
        result
    }
}

impl Collective for Delayed {
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
        self.at(Seam::Alloc, || self.inner.alloc(dtype, len, usage, category))
    }
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket> {
        self.at(Seam::AllGather, || self.inner.all_gather(tag, shard, full))
    }
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        self.at(Seam::ReduceScatter, || self.inner.reduce_scatter(tag, full, shard, accumulate))
    }
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket> {
        self.at(Seam::AllReduce, || self.inner.all_reduce(tag, buf, op))
    }
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket> {
        self.at(Seam::Broadcast, || self.inner.broadcast(tag, buf, root))
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket> {
        self.at(Seam::SendRecv, || self.inner.send_recv(tag, to, send, from, recv))
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        self.at(Seam::Barrier, || self.inner.barrier(tag))
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.at(Seam::Wait, || self.inner.wait(ticket))
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        self.at(Seam::Release, || self.inner.release(ticket))
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.at(Seam::WaitSent, || self.inner.wait_sent(ticket))
    }
    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}
