//! The experts of sparse blocks in a store of their own, next to the store of everything else: two stores of the same
//! strategy, each with its own schedule, slots and group. So experts, which are spread over ep as wholes, are sharded
//! over fewer ranks than the rest, and neither schedule has exceptions. Never gathers, reduces or schedules anything
//! itself.
//!
//! Limits of a strategy on unsharded parameters, prefetching and buckets hold for either store.
use super::{PackedShard, Shard, Store, Strategy};
use crate::base::Result;
use crate::comm::Mesh;
use crate::device::Device;
use crate::nn::{Grads, Layout, ParamStore, Pass, ROOT, Weights};
use std::sync::Arc;

/// The store of a model in `strategy`. Collective, as [`Strategy::store`].
pub fn allocate(
    strategy: &dyn Strategy,
    dev: Arc<dyn Device>,
    mesh: &Mesh,
    layouts: &[Layout],
) -> Result<Box<dyn Store>> {
    match &apart(layouts)[..] {
        [dense, experts] => Ok(Box::new(Apart {
            first: dense.len(),
            dense: strategy.store(dev.clone(), mesh, dense)?,
            experts: strategy.store(dev, &mesh.of_experts(), experts)?,
        })),
        _ => strategy.store(dev, mesh, layouts),
    }
}

/// The layers of each store: all, or without the experts and the experts, after an empty root.
pub fn apart(layouts: &[Layout]) -> Vec<Vec<Layout>> {
    let (experts, dense): (Vec<_>, Vec<_>) = layouts.iter().cloned().partition(|layout| layout.experts);
    match experts.is_empty() {
        true => vec![dense],
        false => vec![dense, [Layout::default()].into_iter().chain(experts).collect()],
    }
}

struct Apart {
    /// The first layer of experts.
    first: usize,
    dense: Box<dyn Store>,
    experts: Box<dyn Store>,
}

impl Apart {
    /// The store that has `layer`, and its number there.
    fn of(&mut self, layer: usize) -> (&mut dyn Store, usize) {
        match layer.checked_sub(self.first) {
            Some(index) => (&mut *self.experts, 1 + index),
            None => (&mut *self.dense, layer),
        }
    }
    fn both(&mut self) -> [&mut dyn Store; 2] {
        [&mut *self.dense, &mut *self.experts]
    }
    /// Calls `f` of the store that has `layer`. The root ends a pass of both.
    fn end(&mut self, layer: usize, f: impl Fn(&mut dyn Store, usize) -> Result<()>) -> Result<()> {
        let (store, own) = self.of(layer);
        f(store, own)?;
        if layer == ROOT { f(&mut *self.experts, ROOT) } else { Ok(()) }
    }
}

impl ParamStore for Apart {
    fn acquire(&mut self, layer: usize, pass: Pass) -> Result<Weights<'_>> {
        let (store, layer) = self.of(layer);
        store.acquire(layer, pass)
    }
    fn release(&mut self, layer: usize, pass: Pass) -> Result<()> {
        self.end(layer, |store, layer| store.release(layer, pass))
    }
    fn grads(&mut self, layer: usize) -> Result<(Weights<'_>, Grads<'_>)> {
        let (store, layer) = self.of(layer);
        store.grads(layer)
    }
    fn grads_ready(&mut self, layer: usize) -> Result<()> {
        self.end(layer, |store, layer| store.grads_ready(layer))
    }
}

impl Store for Apart {
    fn units(&self) -> usize {
        self.dense.units() + self.experts.units()
    }
    fn replicated(&self) -> bool {
        self.dense.replicated()
    }
    fn begin_micro_batch(&mut self, first: bool, last: bool) -> Result<()> {
        self.both().into_iter().try_for_each(|store| store.begin_micro_batch(first, last))
    }
    fn finish_grads(&mut self) -> Result<()> {
        self.both().into_iter().try_for_each(|store| store.finish_grads())
    }
    /// The units of the experts follow the others.
    fn for_each_shard(&mut self, f: &mut dyn FnMut(Shard<'_>) -> Result<()>) -> Result<()> {
        self.dense.for_each_shard(f)?;
        let before = self.dense.units();
        self.experts.for_each_shard(&mut |shard| f(Shard { unit: before + shard.unit, ..shard }))
    }
    fn for_each_packed(&mut self, f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>) -> Result<()> {
        self.both().into_iter().try_for_each(|store| store.for_each_packed(f))
    }
    fn weights_changed(&mut self) -> Result<()> {
        self.both().into_iter().try_for_each(|store| store.weights_changed())
    }
    fn weights_updated(&mut self) -> Result<()> {
        self.both().into_iter().try_for_each(|store| store.weights_updated())
    }
}
