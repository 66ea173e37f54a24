//! What all layers of a pass share: the device, the batch, the dropout keys, and the two collectives that tp ranks use
//! inside a layer. Never owns a buffer, never decides what is sharded.
//!
//! Backward mirrors what tp ranks do in forward: before a column-parallel product its input is made *whole*; after a
//! row-parallel product the ranks' outputs are *summed*. Without sequence parallelism the rows are whole already and a
//! sum is an all_reduce: two per block and direction. With it (Korthikanti et al. 2022, "Reducing Activation
//! Recomputation in Large Transformer Models") each rank holds a shard of the rows between products: whole is an
//! all_gather, a sum is a reduce_scatter. A gathered input is not saved: the weight gradient gathers it again. A
//! recomputed block repeats the collectives that lead to saved values: the first branch's sum (both, where a branch
//! ends in a norm), and with sequence parallelism the all_gathers in front of both.
use super::spec::Spec;
use super::split::{Groups, Split};
use super::tensor::Tensor;
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use crate::comm::{Reduce, Tag, Ticket};
use crate::device::ops::{CopyColumns, Dropout, DropoutRows, PagedRows};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

/// One micro-batch on the device: concatenated documents, N tokens in all.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// (N) u32.
    pub tokens: View<'a>,
    /// (N) i32, already shifted: the target at position i, or [`crate::device::IGNORE`].
    pub targets: View<'a>,
    /// (N) u32: each token's position in its document.
    pub positions: View<'a>,
    /// (S + 1) u32, with a ring: the first row of each document of the whole batch, then the end. Empty without.
    pub cu_seqlens: View<'a>,
    /// (N, 2) u32: each row's document, as [`documents_of_rows`](crate::device::ops::documents_of_rows) says, of all
    /// ranks' rows with Ulysses. Empty with a ring, whose passes have ranges of their own.
    pub documents: View<'a>,
    /// (sp ranks, N) u32: each rank's row numbers in the whole batch. None: this rank holds all rows.
    pub rows: Option<View<'a>>,
    /// How many of the N rows, at the end, are no tokens: they make the ranks' numbers of rows equal.
    pub padding: usize,
    /// Set if few enough rows have a target that the head had better skip the others.
    pub labeled: Option<LabeledRows<'a>>,
}

/// The M rows that have a target.
#[derive(Clone, Copy)]
pub struct LabeledRows<'a> {
    /// Their numbers, ascending.
    pub host: &'a [u32],
    /// (M) u32: the same on the device.
    pub rows: View<'a>,
    /// (N) u32: each row's index among them; M for a row without a target.
    pub places: View<'a>,
    /// (M) i32: their targets.
    pub targets: View<'a>,
}

impl LabeledRows<'_> {
    /// The index among these rows of the first that is not before `row`.
    pub(super) fn index(&self, row: usize) -> usize {
        self.host.partition_point(|&of| (of as usize) < row)
    }
}

impl Batch<'_> {
    /// Returns N after checking that all lengths agree and fit a workspace of `capacity` tokens. `targets` may be empty
    /// if no loss is computed.
    pub(super) fn rows(&self, capacity: usize, with_targets: bool) -> Result<usize> {
        let n = self.tokens.len();
        let targets = if with_targets { n } else { self.targets.len() };
        if n == 0 || n > capacity || self.positions.len() != n || self.targets.len() != targets {
            return Err(Error::op(
                "batch",
                format!(
                    "{n} tokens, {} targets and {} positions do not fit together or exceed the workspace's {capacity} tokens",
                    self.targets.len(),
                    self.positions.len()
                ),
            ));
        }
        Ok(n)
    }
    /// The sp rank that holds `row` of the whole batch, and its row number there. Waits for the device.
    pub(super) fn place(&self, dev: &dyn Device, row: usize) -> Result<(usize, usize)> {
        let (n, absent) = (self.tokens.len(), || Error::op("batch", format!("no row {row}")));
        let Some(rows) = self.rows else { return if row < n { Ok((0, row)) } else { Err(absent()) } };
        let mut all = vec![0u32; rows.len()];
        dev.download(rows, bytemuck::cast_slice_mut(&mut all))?;
        all.iter().position(|&r| r as usize == row).map(|at| (at / n, at % n)).ok_or_else(absent)
    }
}

/// The place of a dropout inside a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropoutSite {
    Embedding,
    Attention,
    Mlp,
}

/// Dropout keys of a micro-batch, two words each: by layer, then by [`DropoutSite`]. They change with each micro-batch,
/// so they live in device memory instead of kernel arguments.
pub struct DropoutKeys;

impl DropoutKeys {
    const SITES: [DropoutSite; 3] = [DropoutSite::Embedding, DropoutSite::Attention, DropoutSite::Mlp];

    /// Words for `layers` layers, including the root.
    pub fn words(layers: usize) -> usize {
        2 * DropoutKeys::SITES.len() * layers
    }
    fn at(layer: usize, place: DropoutSite) -> Range<usize> {
        let at = 2 * (DropoutKeys::SITES.len() * layer + place as usize);
        at..at + 2
    }
    /// Keys of the adapters, two words each, from the hashes of their module names.
    pub fn fill_named(key: u64, names: &[u64], words: &mut [u32]) {
        for (name, words) in names.iter().zip(words.chunks_exact_mut(2)) {
            let key = Rng::new(key, *name).key();
            words.copy_from_slice(&[key as u32, (key >> 32) as u32]);
        }
    }
    /// Derives all keys from the micro-batch's `key`.
    pub fn fill(key: u64, words: &mut [u32]) {
        for (layer, of_layer) in words.chunks_exact_mut(DropoutKeys::words(1)).enumerate() {
            for (place, words) in DropoutKeys::SITES.into_iter().zip(of_layer.chunks_exact_mut(2)) {
                let key = Rng::new(key, (layer as u64) << 8 | place as u64).key();
                words.copy_from_slice(&[key as u32, (key >> 32) as u32]);
            }
        }
    }
}

/// Dropout of an adapter's input. The mask depends on the token of the micro-batch and the channel of the whole input,
/// so ranks of tp and sp draw the same mask.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdapterDropout {
    pub p: f32,
    /// Index of the adapter's key.
    pub key: usize,
    /// This rank's first channel.
    pub first: usize,
}

/// Which table a layer rotates with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnTable {
    /// That of most layers, (P, D).
    Usual,
    /// That of layers with a window, if they differ; or the growth of queries.
    Local,
    /// No rotation, (P, head_dim): cosines are 1, sines 0.
    None,
}

#[derive(Clone, Copy)]
pub struct Cx<'a> {
    pub dev: &'a dyn Device,
    pub groups: &'a Groups,
    /// This rank's share of the layer's work.
    pub split: Split,
    pub batch: Batch<'a>,
    /// Tokens of this batch: rows of every activation except the residual stream, of which this rank holds
    /// [`Cx::rows`].
    pub n: usize,
    /// Tables of rotations, f32: see [`TurnTable`]; empty if unused.
    pub tables: [View<'a>; 3],
    /// The weights of norms that have none; empty if unused.
    pub ones: View<'a>,
    /// Factor of a branch's output.
    pub residual: f32,
    /// Dropout probability and the micro-batch's keys ([`DropoutKeys`]); none in evaluation.
    pub dropout: Option<(f32, View<'a>)>,
    /// Two words per adapter with dropout; none in evaluation.
    pub adapter_keys: Option<View<'a>>,
    pub layer: usize,
    /// Recomputation: attention's outputs were saved in forward.
    pub attended: bool,
    /// Adapters are applied; without them the layers compute what the base model does.
    pub adapted: bool,
    /// (E) f32: the gradient of the auxiliary loss with respect to each token's routing probabilities.
    pub balance: Option<View<'a>>,
    /// Set if keys and values go to the cache, so that the sequences can continue.
    pub paged: Option<&'a [PagedRows<'a>]>,
    /// The model of all ranks together.
    pub spec: &'a Spec,
}

/// All rows of a tensor that is sharded over ranks, readable until [`Cx::release`].
pub struct Whole<'a> {
    pub rows: View<'a>,
    ticket: Option<Ticket>,
}

impl Cx<'_> {
    /// Whether a branch's last product feeds the residual stream directly, without a sum over ranks, dropout or a
    /// factor.
    pub fn straight(&self, cut: bool) -> bool {
        self.dropout.is_none() && self.residual == 1.0 && self.split.part(cut).of == 1
    }
    /// The same for a branch whose output has a factor of its own.
    pub fn times(&self, factor: f32) -> Self {
        Cx { residual: self.residual * factor, ..*self }
    }
    /// What becomes of a branch's output before it is added to the residual, in place, the same for forward and
    /// backward: dropout, then a factor.
    pub fn leave(&self, place: DropoutSite, mut x: ViewMut) -> Result<()> {
        self.drop(place, x.reborrow())?;
        if self.residual == 1.0 { Ok(()) } else { self.dev.scale(self.residual, x) }
    }
    /// In place, the same for forward and backward: the mask is a function of (key, layer, place, index).
    pub fn drop(&self, place: DropoutSite, x: ViewMut) -> Result<()> {
        let Some((p, keys)) = self.dropout else { return Ok(()) };
        self.dev.dropout(Dropout { p, key: keys.slice(DropoutKeys::at(self.layer, place)), x })
    }
    /// An adapter's dropout over rows of `width` elements, the same for forward and backward: assigns `y`, or adds to
    /// it with `accumulate`. The mask is a function of (key, token of the micro-batch, channel of the whole row).
    pub(super) fn drop_channels(
        &self,
        mask: &AdapterDropout,
        width: usize,
        x: View,
        y: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        let Some(keys) = self.adapter_keys else {
            return Err(Error::op("adapter", "dropout is on but its keys are missing"));
        };
        let key = keys.slice(2 * mask.key..2 * mask.key + 2);
        let own = self.split.sp.index * self.n;
        let rows = self.batch.rows.map(|rows| rows.slice(own..own + self.n));
        self.dev.dropout_rows(DropoutRows { p: mask.p, key, rows, width, first: mask.first, x, y, accumulate })
    }
    /// The gradient of a branch's output from that of the residual stream: `dy` itself, or a copy in `masked` that is
    /// masked or scaled.
    pub fn branch_grad<'b>(&self, place: DropoutSite, dy: View<'b>, masked: &'b mut Tensor) -> Result<View<'b>> {
        if self.dropout.is_none() && self.residual == 1.0 {
            return Ok(dy);
        }
        self.dev.copy(dy, masked.rows_mut(self.rows()))?;
        self.leave(place, masked.rows_mut(self.rows()))?;
        Ok(masked.rows(self.rows()))
    }

    /// Rows that are tokens; fewer than `n` if the last ones pad.
    pub fn tokens(&self) -> usize {
        self.n - self.batch.padding
    }
    /// Rows of the residual stream on this rank.
    pub fn rows(&self) -> usize {
        self.split.rows(self.n)
    }
    /// Rows on all tp ranks: `n`, plus padding with sequence parallelism.
    fn padded(&self) -> usize {
        if self.split.sequence() { self.rows() * self.split.tp.of } else { self.n }
    }

    /// Gathers (N, C) from this rank's rows `x` into `all`.
    pub fn whole<'a>(&self, x: View<'a>, all: &'a mut Tensor) -> Result<Whole<'a>> {
        if !self.split.sequence() {
            return Ok(Whole { rows: x, ticket: None });
        }
        let ticket = self.gather(x, all)?;
        Ok(Whole { rows: all.rows(self.n), ticket: Some(ticket) })
    }
    /// Replaces this rank's rows in `x` by all rows (N, C), which go through `all`.
    pub fn make_whole(&self, x: &mut Tensor, all: &mut Tensor) -> Result<()> {
        if !self.split.sequence() {
            return Ok(());
        }
        let ticket = self.gather(x.rows(self.rows()), all)?;
        self.dev.copy(all.rows(self.n), x.rows_mut(self.n))?;
        self.groups.tp.release(ticket)
    }
    fn gather(&self, x: View, all: &mut Tensor) -> Result<Ticket> {
        let tp = &self.groups.tp;
        let ticket = tp.all_gather(Tag::new("tp gather", self.layer), x, all.rows_mut(self.padded()))?;
        tp.wait(ticket)?;
        Ok(ticket)
    }
    /// Ends the reading of the rows.
    pub fn release(&self, whole: Whole) -> Result<()> {
        whole.ticket.map_or(Ok(()), |ticket| self.groups.tp.release(ticket))
    }

    /// Copies `width` columns of each row: from a column of the source on, to one of the destination. Of each side: its
    /// rows, their width, and the column.
    pub fn copy_columns(
        &self,
        [rows, width]: [usize; 2],
        (src, src_row, from): (View, usize, usize),
        (dst, dst_row, to): (ViewMut, usize, usize),
    ) -> Result<()> {
        let (src, end) = (src.slice(from..src.len()), dst.len());
        self.dev.copy_columns(CopyColumns { rows, width, src_row, dst_row, src, dst: dst.slice(to..end) })
    }

    /// Assigns this rank's rows of `y`. If the work is `cut`, they are the sum over tp of what `part` writes to (N, C),
    /// staged in `parts`; otherwise what `part` writes.
    pub fn sum(
        &self,
        cut: bool,
        parts: &mut Tensor,
        y: ViewMut,
        part: impl FnOnce(ViewMut) -> Result<()>,
    ) -> Result<()> {
        if self.split.part(cut).of == 1 {
            return part(y);
        }
        let (tp, n, padded) = (&self.groups.tp, self.n, self.padded());
        part(parts.rows_mut(n))?;
        if self.split.sequence() {
            // Zero the padding rows, so that their sums are zero too.
            self.dev.zero(parts.band_mut(&(n..padded)))?;
            let ticket = tp.reduce_scatter(Tag::new("tp sum", self.layer), parts.rows_mut(padded), y, false)?;
            tp.wait(ticket)?;
            return tp.wait_sent(ticket);
        }
        let ticket = tp.all_reduce(Tag::new("tp sum", self.layer), parts.rows_mut(n), Reduce::Sum)?;
        tp.wait(ticket)?;
        self.dev.copy(parts.rows(n), y)?;
        tp.wait_sent(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Category, DType, Meter};
    use crate::device::cpu::CpuDevice;
    use std::sync::Arc;

    /// Every layer, site and key has its own mask, and the same one each time.
    #[test]
    fn masks_differ() {
        let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(Meter::default()));
        let groups = Groups::solo(&dev);
        let nothing = dev.alloc(DType::U32, 0, Category::Other).unwrap();
        let view = nothing.view();
        let (tokens, targets, positions, cu_seqlens, documents) = (view, view, view, view, view);
        let batch = Batch { tokens, targets, positions, cu_seqlens, documents, rows: None, padding: 0, labeled: None };
        let mut x = dev.alloc(DType::F32, 256, Category::Other).unwrap();
        let mut keys = dev.alloc(DType::U32, DropoutKeys::words(3), Category::Other).unwrap();
        let mut mask = |layer, place, key| {
            x.view_mut().host::<f32>("test").unwrap().fill(1.0);
            DropoutKeys::fill(key, keys.view_mut().host::<u32>("test").unwrap());
            let dropout = Some((0.5, keys.view()));
            let (dev, groups, split) = (&*dev, &groups, Split::NONE);
            let cx = Cx {
                dev,
                groups,
                split,
                batch,
                n: 0,
                tables: [view; 3],
                ones: view,
                residual: 1.0,
                dropout,
                adapter_keys: None,
                layer,
                attended: false,
                adapted: true,
                balance: None,
                paged: None,
                spec: &Spec::default(),
            };
            cx.drop(place, x.view_mut()).unwrap();
            x.view().host::<f32>("test").unwrap().to_vec()
        };
        let mut masks = Vec::new();
        for key in [1, 2] {
            for layer in 0..3 {
                for place in [DropoutSite::Embedding, DropoutSite::Attention, DropoutSite::Mlp] {
                    let drawn = mask(layer, place, key);
                    assert!(drawn == mask(layer, place, key));
                    assert!(!masks.contains(&drawn), "layer {layer}, {place:?}, key {key}");
                    masks.push(drawn);
                }
            }
        }
    }
}
