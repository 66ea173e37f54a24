//! A store that records the model's calls, next to those of a recording group.
use flatshard::base::{DType, Result};
use flatshard::comm::recorder::{Entry, Log};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Mesh, Tag};
use flatshard::device::Device;
use flatshard::engine::Strategy;
use flatshard::nn::{Grads, Layout, ParamStore, Pass, Weights};
use flatshard::store::{Offload, PackedShard, Shard, Store};
use std::sync::Arc;

/// Notes and started operations in order, each as purpose and number: `gather3 use2 norm0`.
pub fn words(log: &Log) -> String {
    let shown = |e: &Entry| !matches!(e.seam, Some(Seam::Alloc | Seam::Wait | Seam::Release | Seam::WaitSent));
    let entries = log.entries();
    let words: Vec<String> =
        entries.iter().filter(|e| shown(e)).map(|e| format!("{}{}", e.tag.what, e.tag.unit)).collect();
    words.join(" ")
}

/// Told of `use` when a layer's weights were handed out, of `grads` when its gradient buffer is about to be: which, and
/// the layer.
pub type Told = Arc<dyn Fn(&'static str, usize) + Send + Sync>;

/// A strategy whose store tells what the model does with it; `told` makes the listener of a rank's store.
pub struct Watched {
    pub inner: Arc<dyn Strategy>,
    pub told: Arc<dyn Fn(&Mesh) -> Told + Send + Sync>,
}

impl Watched {
    /// Its store notes `use3` when layer 3's weights are handed out, `grads3` when its gradient buffer is.
    pub fn noting(inner: Arc<dyn Strategy>, log: &Log) -> Watched {
        let log = log.clone();
        let told = move |_: &Mesh| -> Told {
            let log = log.clone();
            Arc::new(move |what, layer| log.note(Tag::new(what, layer)))
        };
        Watched { inner, told: Arc::new(told) }
    }
}

impl Strategy for Watched {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn dtype(&self) -> DType {
        self.inner.dtype()
    }
    fn offload(&self) -> Offload {
        self.inner.offload()
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(WatchedStore { inner: self.inner.store(dev, mesh, layouts)?, told: (self.told)(mesh) }))
    }
}

struct WatchedStore {
    inner: Box<dyn Store>,
    told: Told,
}

impl ParamStore for WatchedStore {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let weights = self.inner.acquire(layer, pass)?;
        (self.told)("use", layer);
        Ok(weights)
    }
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        self.inner.release(layer, pass)
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        (self.told)("grads", layer);
        self.inner.grads(layer)
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        self.inner.grads_ready(layer)
    }
}

impl Store for WatchedStore {
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
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        self.inner.for_each_shard(f)
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        self.inner.for_each_packed(f)
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.inner.weights_changed()
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.inner.weights_updated()
    }
}
