//! A group and a store that pass everything through, and meanwhile record it or delay it.
use flatshard::base::{Category, DType, Result};
use flatshard::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket};
use flatshard::device::{Buf, Device, View, ViewMut};
use flatshard::nn::{Grads, Layout, ParamStore, Pass, Weights};
use flatshard::store::{Piece, Store};
use flatshard::strategy::Strategy;
use std::sync::{Arc, Mutex};

/// Words in the order in which they happened on one rank: see [`Probe`].
pub type Log = Arc<Mutex<Vec<String>>>;

/// Called with the name of each operation of a group before it goes through: where delays come from.
pub type Hook = Arc<dyn Fn(&'static str) + Send + Sync>;

/// A group that writes `what` and unit of each operation that it starts: `gather3`, `reduce1`, `norm0`.
pub struct Probe {
    pub inner: Arc<dyn Collective>,
    pub log: Log,
    pub hook: Hook,
}

impl Probe {
    pub fn group(inner: Arc<dyn Collective>, log: Log, hook: Hook) -> Arc<dyn Collective> {
        Arc::new(Probe { inner, log, hook })
    }
    fn start(&self, op: &'static str, tag: Tag) {
        self.log.lock().unwrap().push(format!("{}{}", tag.what, tag.unit));
        (self.hook)(op);
    }
}

/// The places where a delay can change who is ahead.
pub const SEAMS: [&str; 6] = ["all_gather", "reduce_scatter", "all_reduce", "wait", "release", "wait_sent"];

impl Collective for Probe {
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
        self.inner.alloc(dtype, len, usage, category)
    }
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket> {
        self.start("all_gather", tag);
        self.inner.all_gather(tag, shard, full)
    }
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        self.start("reduce_scatter", tag);
        self.inner.reduce_scatter(tag, full, shard, accumulate)
    }
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket> {
        self.start("all_reduce", tag);
        self.inner.all_reduce(tag, buf, op)
    }
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket> {
        self.start("broadcast", tag);
        self.inner.broadcast(tag, buf, root)
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket> {
        self.start("send_recv", tag);
        self.inner.send_recv(tag, to, send, from, recv)
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        self.start("barrier", tag);
        self.inner.barrier(tag)
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        (self.hook)("wait");
        self.inner.wait(ticket)
    }
    fn release(&self, ticket: Ticket) -> Result<()> {
        (self.hook)("release");
        self.inner.release(ticket)
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        (self.hook)("wait_sent");
        self.inner.wait_sent(ticket)
    }
    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

/// A strategy whose store writes `use3` when layer 3's weights are handed out, `grads3` when its gradient buffer is.
pub struct Watched {
    pub inner: Arc<dyn Strategy>,
    pub log: Log,
}

impl Strategy for Watched {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn dtype(&self) -> DType {
        self.inner.dtype()
    }
    fn store(&self, dev: Arc<dyn Device>, group: Arc<dyn Collective>, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(WatchedStore { inner: self.inner.store(dev, group, layouts)?, log: self.log.clone() }))
    }
    fn planned(&self, layouts: &[Layout], ranks: usize) -> Vec<(Category, usize)> {
        self.inner.planned(layouts, ranks)
    }
    fn owned(&self, layouts: &[Layout], ranks: usize) -> usize {
        self.inner.owned(layouts, ranks)
    }
}

struct WatchedStore {
    inner: Box<dyn Store>,
    log: Log,
}

impl WatchedStore {
    fn note(&self, what: &str, layer: usize) {
        self.log.lock().unwrap().push(format!("{what}{layer}"));
    }
}

impl ParamStore for WatchedStore {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let log = self.log.clone();
        let weights = self.inner.acquire(layer, pass)?;
        log.lock().unwrap().push(format!("use{layer}"));
        Ok(weights)
    }
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        self.inner.release(layer, pass)
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        self.note("grads", layer);
        self.inner.grads(layer)
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        self.inner.grads_ready(layer)
    }
}

impl Store for WatchedStore {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn units(&self) -> usize {
        self.inner.units()
    }
    fn replicated(&self) -> bool {
        self.inner.replicated()
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.inner.begin_micro_batch(first, last)
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.inner.finish_grads()
    }
    fn for_each_piece(&mut self, f: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        self.inner.for_each_piece(f)
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.inner.weights_changed()
    }
}
