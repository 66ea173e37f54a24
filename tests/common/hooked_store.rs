//! A store with a hook in the visit of its shards, through which checkpoints are written and read.
use flatshard::base::Result;
use flatshard::nn::{Grads, ParamStore, Pass, Weights};
use flatshard::store::{PackedShard, Shard, Store};

/// How shards are visited: the store below, and what is done with each shard.
pub type Visit = fn(&mut dyn Store, &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()>;

pub struct HookedStore {
    pub store: Box<dyn Store>,
    pub visit: Visit,
}

impl ParamStore for HookedStore {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        self.store.acquire(layer, pass)
    }
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        self.store.release(layer, pass)
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        self.store.grads(layer)
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        self.store.grads_ready(layer)
    }
}
impl Store for HookedStore {
    fn units(&self) -> usize {
        self.store.units()
    }
    fn replicated(&self) -> bool {
        self.store.replicated()
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.store.begin_micro_batch(first, last)
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.store.finish_grads()
    }
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        (self.visit)(&mut *self.store, f)
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        self.store.for_each_packed(f)
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.store.weights_changed()
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.store.weights_updated()
    }
}
