//! Merges adapters into the weights of their base model: in a store, or while an export writes it. Never decides where
//! a model is saved.
use super::adapter::AdapterTensors;
use super::checkpointer::Checkpointer;
use super::dirs;
use super::disk::{self, CHUNK};
use super::layout::{Share, runs};
use super::merging::{Merged, Merging};
use super::source::TensorSource;
use crate::base::{Error, Result};
use crate::comm::Mesh;
use crate::device::Device;
use crate::nn::{Layout, Segment, Spec, is_adapter};
use crate::optim::Moments;
use crate::store::{Store, assign, values as read_values};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Checks that the adapter in `dir` belongs to this model and can be merged into it. Reads headers and small files
/// only.
pub fn inspect_adapter(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<()> {
    AdapterTensors::open(dir, spec, layouts).map(drop)
}

impl Checkpointer {
    /// Replaces the weights that the adapter in `dir` stores whole, and adds its products to those in the store. Every
    /// rank updates its own shards. A tensor that the model does not have is an error, and changes nothing.
    pub fn merge(&mut self, dir: &Path, store: &mut dyn Store) -> Result<Merged> {
        let opened = Merging::open(dir, &self.spec, &self.layouts);
        let mut merging = self.exchange.agree(&*self.dev, "open the adapter", opened)?;
        self.normalize(&mut merging, store)?;
        let (mut chunk, mut rounded) = (vec![0f32; CHUNK / 4], Vec::new());
        let dev: &dyn Device = &*self.dev;
        let merged = store.for_each_shard(&mut |mut shard| {
            let stored = runs(shard.layout, shard.start, shard.master.len(), Share::ALL);
            for run in stored.filter(|run| merging.changes(run.segment)) {
                for (range, at) in run.chunks(CHUNK / 4) {
                    let values = &mut chunk[..range.len()];
                    read_values(dev, shard.master.as_view().slice(range.clone()), &mut rounded, values)?;
                    merging.add(run.segment, at, values)?;
                    assign(dev, values, &mut rounded, shard.master.reborrow().slice(range))?;
                }
            }
            match shard.param {
                Some(param) => dev.copy(shard.master.as_view(), param),
                None => Ok(()),
            }
        });
        let merged = merged.and_then(|()| store.weights_changed());
        self.exchange.agree(&*self.dev, "merge the adapter", merged)?;
        Ok(merging.merged())
    }

    /// DoRA: computes the norms of the rows of W + scale B A, whose elements are spread over the ranks. Collective,
    /// but nothing without DoRA.
    fn normalize(&mut self, merging: &mut Merging, store: &mut dyn Store) -> Result<()> {
        let mut squares: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, product) in merging.products.iter().filter(|(_, product)| product.scaled() > 0) {
            squares.insert(name.clone(), vec![0.0; product.scaled()]);
        }
        if squares.is_empty() {
            return Ok(());
        }
        let (share, mut chunk, mut rounded) = (self.share(store), vec![0f32; CHUNK / 4], Vec::new());
        let dev: &dyn Device = &*self.dev;
        let visited = store.for_each_shard(&mut |shard| {
            for run in runs(shard.layout, shard.start, shard.master.len(), share) {
                let name = &run.segment.name;
                let (Some(squares), Some(product)) = (squares.get_mut(name), merging.products.get(name)) else {
                    continue;
                };
                for (range, at) in run.chunks(CHUNK / 4) {
                    let values = &mut chunk[..range.len()];
                    read_values(dev, shard.master.as_view().slice(range), &mut rounded, values)?;
                    merging.add(run.segment, at, values)?;
                    for (part, place) in run.segment.stretches(at..at + values.len()) {
                        for (i, value) in values[part.start - at..part.end - at].iter().enumerate() {
                            squares[product.output(place + i)] += f64::from(*value).powi(2);
                        }
                    }
                }
            }
            Ok(())
        });
        self.exchange.agree(dev, "compute DoRA's norms", visited)?;
        let most = self.plan.tensors.list.len();
        for (name, squares) in &mut squares {
            for part in squares.chunks_mut(most) {
                let mine = Ok(part.iter().map(|sum| sum.to_bits()).collect());
                part.fill(0.0);
                for theirs in self.exchange.share(dev, "compute DoRA's norms", mine, part.len())? {
                    part.iter_mut().zip(theirs).for_each(|(sum, bits)| *sum += f64::from_bits(bits));
                }
            }
            if let Some(row) = squares.iter().position(|sum| *sum == 0.0) {
                return Err(Error::input(format!(
                    "{name}: row {row} of the matrix with its adapter is zero, or in 4 bits, which DoRA does not scale. \
                     Use the base model that the adapter was trained on, without `load_in_4bit`"
                )));
            }
            if let Some(product) = merging.products.get_mut(name) {
                product.normalize(squares);
            }
        }
        Ok(())
    }

    /// A checkpointer of the model without its adapters, whose exports have the store's adapters merged into the
    /// weights that they were trained on: where those are in 4 bits, into what the 4 bits of the model in `base` stand
    /// for. The adapters pass through a temporary directory next to `near`. Collective.
    pub fn merging(&mut self, mesh: &Mesh, base: &Path, near: &Path, store: &mut dyn Store) -> Result<Checkpointer> {
        let nonces = self.exchange.share(&*self.dev, "make room for the adapter", Ok(vec![dirs::nonce()]), 1)?;
        let dir = disk::parent(near).join(dirs::unfinished("adapter", nonces[0][0]));
        self.save_hf(&dir, Dtype::F32, store)?;
        let mut layouts = self.layouts.clone();
        layouts.iter_mut().for_each(|layout| layout.segments.retain(|segment| !is_adapter(segment)));
        let opened = Merging::open(&dir, &self.spec, &layouts).and_then(|mut merging| {
            if layouts.iter().flat_map(|layout| &layout.segments).any(Segment::is_packed) {
                merging.base = Some(TensorSource::model(base, &self.spec, &layouts)?);
            }
            Ok(merging)
        });
        let opened = self.exchange.agree(&*self.dev, "open the adapter", opened);
        let removed = match self.rank() {
            0 => fs::remove_dir_all(&dir).map_err(|e| Error::io("remove", &dir, e)),
            _ => Ok(()),
        };
        let merging = self.exchange.agree(
            &*self.dev,
            "remove the temporary adapter",
            opened.and_then(|opened| {
                removed?;
                Ok(opened)
            }),
        )?;
        let mut merged = Checkpointer::new(self.dev.clone(), mesh, &self.spec, &layouts, Moments::NONE)?
            .with_files_of(self.max_file_bytes);
        merged.carry(self.tower.clone());
        merged.accompany(self.companions.clone().without_adapter());
        merged.on_disk(self.disk.clone());
        merged.exports = self.exports.clone();
        merged.merging = Some(merging);
        Ok(merged)
    }
}
