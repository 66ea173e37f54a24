//! An opened adapter, and what becomes of the weights that it changes. Never writes a weight: [`super::merge`] does in
//! a store, and exports do in files.
use super::adapter::{AdapterTensors, BASE_LAYER, Change, LowRank};
use super::elements::widen;
use super::layout::{FileTensor, Share};
use super::source::{OpenedFiles, TensorSource};
use super::state;
use crate::base::Result;
use crate::device::Device;
use crate::nn::{Layout, Segment, Spec};
use crate::store::{Store, VisitValues};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

/// What an adapter has changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merged {
    /// Tensors that a product was added to.
    pub adapters: usize,
    /// Tensors that were replaced, as a whole or in single rows.
    pub whole: usize,
}

/// An opened adapter: first its whole tensors replace the model's, then its products are added, W + scale B A, in f32.
/// DoRA then scales the rows.
pub struct Merging {
    tensors: AdapterTensors,
    pub products: BTreeMap<String, LowRank>,
    /// What the store's packed matrices were quantized from.
    pub base: Option<TensorSource>,
    bytes: RefCell<Vec<u16>>,
}

impl Merging {
    /// Reads the products of the adapter in `dir`. Its files may be removed afterwards.
    pub fn open(dir: &Path, spec: &Spec, layouts: &[Layout]) -> Result<Merging> {
        if let Some(checksums) = state::checksums(dir)? {
            OpenedFiles::safetensors(dir, "adapter_model")?.all().verify(&checksums).map_err(state::meant)?;
        }
        let tensors = AdapterTensors::open(dir, spec, layouts)?;
        let mut products: BTreeMap<String, LowRank> = tensors.stacked()?.into_iter().collect();
        for (name, change) in &tensors.changes {
            products.extend(tensors.product(change)?.map(|product| (name.clone(), product)));
        }
        Ok(Merging { tensors, products, base: None, bytes: RefCell::default() })
    }

    pub fn merged(&self) -> Merged {
        let whole =
            self.tensors.changes.values().filter(|change| change.whole.is_some() || change.rows.is_some()).count();
        Merged { adapters: self.products.len(), whole }
    }

    /// A tensor that takes new values. PEFT saves an embedding with an adapter next to it, as the base model has it.
    pub fn whole(&self) -> Option<&str> {
        let is_new = |whole: &FileTensor| !whole.name.contains(BASE_LAYER);
        let new = |change: &Change| change.whole.as_ref().is_some_and(is_new) || change.rows.is_some();
        self.tensors.changes.iter().find(|(_, change)| new(change)).map(|(name, _)| &name[..])
    }
    /// Whether the adapter changes this tensor.
    pub fn changes(&self, segment: &Segment) -> bool {
        self.tensors.changes.contains_key(&segment.name)
    }

    /// Changes `values`, which are those of this rank's part of `segment` from its element `first` on.
    pub fn add(&self, segment: &Segment, first: usize, values: &mut [f32]) -> Result<()> {
        let Some(change) = self.tensors.changes.get(&segment.name) else { return Ok(()) };
        for (part, place) in segment.stretches(first..first + values.len()) {
            let values = &mut values[part.start - first..part.end - first];
            if let Some(whole) = &change.whole {
                self.tensors.read(whole, place, values, &mut self.bytes.borrow_mut())?;
            }
            if let Some(rows) = &change.rows {
                self.replace(rows, &change.tokens, place, values)?;
            }
            if let Some(product) = self.products.get(&segment.name) {
                product.add(place, values);
            }
        }
        Ok(())
    }

    /// Replaces what `values`, from element `place` of a table on, hold of single rows.
    fn replace(
        &self,
        rows: &FileTensor,
        tokens: &BTreeMap<usize, usize>,
        place: usize,
        values: &mut [f32],
    ) -> Result<()> {
        let (columns, end) = (rows.shape[1], place + values.len());
        for (&token, &row) in tokens.range(place / columns..end.div_ceil(columns)) {
            let of_token = token * columns..(token + 1) * columns;
            let (from, to) = (of_token.start.max(place), of_token.end.min(end));
            let values = &mut values[from - place..to - place];
            let stored = row * columns + from - of_token.start;
            self.tensors.read(rows, stored, values, &mut self.bytes.borrow_mut())?;
        }
        Ok(())
    }

    /// Visits the changed values of the store's packed matrices. Of replicas, the first visits all.
    pub fn each_packed(
        &self,
        dev: &dyn Device,
        share: Share,
        store: &mut dyn Store,
        visit: &mut VisitValues<'_>,
    ) -> Result<()> {
        let Some(base) = self.base.as_ref().filter(|_| share.index == 0) else { return Ok(()) };
        let mut bytes = Vec::new();
        let mut read = |segment: &Segment, place: usize, values: &mut [f32], _own: bool| {
            let tensor = &base.tensors.list[base.tensors.find(0, &segment.name)?];
            widen(base.elements(tensor, place, values.len(), &mut bytes)?, tensor.dtype, values);
            Ok(())
        };
        store.for_each_packed(&mut |shard| {
            shard.values(dev, &|segment| share.has(segment), &mut read, &mut |segment, at, values| {
                self.add(segment, at, values)?;
                visit(segment, at, values)
            })
        })
    }
}
