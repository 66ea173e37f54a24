//! A store that notes what the model does with it, beside what a recording group notes.
use flatshard::base::{Category, DType, Result};
use flatshard::comm::recorder::{Entry, Log};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Mesh, MeshSizes, Tag};
use flatshard::device::Device;
use flatshard::nn::{Grads, Layout, ParamStore, Pass, Weights};
use flatshard::store::{Offload, Piece, Store};
use flatshard::strategy::Strategy;
use std::sync::Arc;

/// Notes and started operations in order, each as purpose and number: `gather3 use2 norm0`.
pub fn words(log: &Log) -> String {
    let shown = |e: &Entry| !matches!(e.seam, Some(Seam::Alloc | Seam::Wait | Seam::Release | Seam::WaitSent));
    let entries = log.entries();
    let words: Vec<String> =
        entries.iter().filter(|e| shown(e)).map(|e| format!("{}{}", e.tag.what, e.tag.unit)).collect();
    words.join(" ")
}

/// A strategy whose store notes `use3` when layer 3's weights are handed out, `grads3` when its gradient buffer is.
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
    fn offload(&self) -> Offload {
        self.inner.offload()
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(WatchedStore { inner: self.inner.store(dev, mesh, layouts)?, log: self.log.clone() }))
    }
    fn planned(&self, layouts: &[Layout], mesh: &MeshSizes) -> Vec<(Category, usize)> {
        self.inner.planned(layouts, mesh)
    }
    fn owned(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        self.inner.owned(layouts, mesh)
    }
}

struct WatchedStore {
    inner: Box<dyn Store>,
    log: Log,
}

impl WatchedStore {
    fn note(&self, what: &'static str, layer: usize) {
        self.log.note(Tag::new(what, layer));
    }
}

impl ParamStore for WatchedStore {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let log = self.log.clone();
        let weights = self.inner.acquire(layer, pass)?;
        log.note(Tag::new("use", layer));
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
    fn weights_updated(&mut self) -> Result<()> {
        self.inner.weights_updated()
    }
}
