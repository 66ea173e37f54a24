//! Merges adapters into the weights of their base model. Never writes a model: saving comes afterwards.
use super::adapter::{AdapterTensors, LowRank};
use super::checkpointer::Checkpointer;
use super::disk::CHUNK;
use super::layout::{Share, runs};
use crate::base::Result;
use crate::device::Device;
use crate::nn::{Layout, Spec};
use crate::store::{Store, assign, values as read_values};
use std::collections::BTreeMap;
use std::path::Path;

/// What an adapter has changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merged {
    /// Tensors that a product was added to.
    pub adapters: usize,
    /// Tensors that were replaced.
    pub whole: usize,
}

/// Checks that the adapter in `dir` belongs to this model and can be merged into it. Reads headers and small files
/// only.
pub fn inspect_adapter(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<()> {
    AdapterTensors::open(dir, spec, layouts).map(drop)
}

impl Checkpointer {
    /// Replaces the weights that the adapter in `dir` stores whole, and adds its products to those in the store, W +
    /// scale B A, in f32. Every rank updates its own shards. A tensor that the model does not have is an error, and
    /// changes nothing.
    pub fn merge(&mut self, dir: &Path, store: &mut dyn Store) -> Result<Merged> {
        let opened = AdapterTensors::open(dir, &self.spec, &self.layouts).and_then(|tensors| {
            let products = tensors.changes.iter().map(|(name, change)| Ok((name.clone(), tensors.product(change)?)));
            let products = products.collect::<Result<BTreeMap<String, Option<LowRank>>>>()?;
            Ok((tensors, products))
        });
        let (tensors, products) = self.exchange.agree(&*self.dev, "open the adapter", opened)?;
        let (mut chunk, mut rounded, mut bytes) = (vec![0f32; CHUNK / 4], Vec::new(), Vec::new());
        let dev: &dyn Device = &*self.dev;
        let merged = store.for_each_shard(&mut |mut shard| {
            for run in runs(shard.layout, shard.start, shard.master.len(), Share::ALL) {
                let Some(change) = tensors.changes.get(&run.segment.name) else { continue };
                let product = products.get(&run.segment.name).and_then(Option::as_ref);
                for from in (0..run.range.len()).step_by(CHUNK / 4) {
                    let n = (run.range.len() - from).min(CHUNK / 4);
                    let start = run.range.start + from;
                    let values = &mut chunk[..n];
                    if change.whole.is_none() {
                        read_values(dev, shard.master.as_view().slice(start..start + n), &mut rounded, values)?;
                    }
                    for (part, place) in run.segment.stretches(run.at + from..run.at + from + n) {
                        let values = &mut values[part.start - run.at - from..part.end - run.at - from];
                        if let Some(whole) = &change.whole {
                            tensors.read(whole, place, values, &mut bytes)?;
                        }
                        if let Some(product) = product {
                            product.add(place, values);
                        }
                    }
                    assign(dev, values, &mut rounded, shard.master.reborrow().slice(start..start + n))?;
                }
            }
            match shard.param {
                Some(param) => dev.copy(shard.master.as_view(), param),
                None => Ok(()),
            }
        });
        let merged = merged.and_then(|()| store.weights_changed());
        self.exchange.agree(&*self.dev, "merge the adapter", merged)?;
        let adapters = products.values().flatten().count();
        let whole = tensors.changes.values().filter(|change| change.whole.is_some()).count();
        Ok(Merged { adapters, whole })
    }
}
