//! What every layer of one pass shares: the device, the batch, the keys of its masks, and the two things that ranks of
//! tp do together in a layer. Never owns a buffer, never decides what is cut.
//!
//! What ranks of tp do in forward, they do the other way round in backward: where a column-cut product begins, its
//! input is made *whole*; where a row-cut one ends, the ranks' parts are *summed*. Without sequence parallelism whole
//! rows are there already and a sum is an all-reduce: two a block and direction. With it (Korthikanti et al. 2022,
//! "Reducing Activation Recomputation in Large Transformer Models") a rank has its part of the rows outside: whole is
//! an all-gather, a sum a reduce-scatter. A gathered input is not kept: the weight gradient gathers it again. A block
//! that is computed again for its backward pass repeats what leads to what is kept: the first branch's sum (both where
//! a branch ends in a norm), and with sequence parallelism the gathers in front of both.
use super::split::{Groups, Split};
use super::tensor::Tensor;
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use crate::comm::{Reduce, Tag, Ticket};
use crate::device::ops::{Dropout, DropoutRows};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

/// One micro-batch on the device: documents one after the other, N tokens in all.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// (N) u32.
    pub tokens: View<'a>,
    /// (N) i32, already shifted: what position i predicts, or [`crate::device::IGNORE`].
    pub targets: View<'a>,
    /// (N) u32: each token's place in its document.
    pub positions: View<'a>,
    /// (S + 1) u32: where documents start, then N; of the whole batch where a ring has cut it.
    pub cu_seqlens: View<'a>,
    /// (ranks of sp, N) u32: the rows of the whole batch that each of them has. None: all rows are here.
    pub rows: Option<View<'a>>,
}

impl Batch<'_> {
    /// N, after checking that everything is as long as it and fits a workspace of `capacity` tokens. `targets` may be
    /// empty where no loss is asked for.
    pub(super) fn rows(&self, capacity: usize, with_targets: bool) -> Result<usize> {
        let n = self.tokens.len();
        let targets = if with_targets { n } else { self.targets.len() };
        if n == 0 || n > capacity || self.positions.len() != n || self.targets.len() != targets {
            return Err(Error::op(
                "batch",
                format!(
                    "{n} tokens, {} targets, {} positions in a workspace of {capacity} tokens",
                    self.targets.len(),
                    self.positions.len()
                ),
            ));
        }
        Ok(n)
    }
    /// The rank of sp that has `row` of the whole batch, and as which of its rows. Waits for the device.
    pub(super) fn place(&self, dev: &dyn Device, row: usize) -> Result<(usize, usize)> {
        let (n, absent) = (self.tokens.len(), || Error::op("batch", format!("no row {row}")));
        let Some(rows) = self.rows else { return if row < n { Ok((0, row)) } else { Err(absent()) } };
        let mut all = vec![0u32; rows.len()];
        dev.download(rows, bytemuck::cast_slice_mut(&mut all))?;
        all.iter().position(|&r| r as usize == row).map(|at| (at / n, at % n)).ok_or_else(absent)
    }
}

/// Where in a layer a dropout stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropoutSite {
    Embedding,
    Attention,
    Mlp,
}

/// The keys of a micro-batch's masks, two words each: by layer, then by [`DropoutSite`]. They change with each
/// micro-batch, so they lie in memory and not in the arguments of an operation.
pub struct DropoutKeys;

impl DropoutKeys {
    const SITES: [DropoutSite; 3] = [DropoutSite::Embedding, DropoutSite::Attention, DropoutSite::Mlp];

    /// Words of `layers` layers, the root one of them.
    pub fn words(layers: usize) -> usize {
        2 * DropoutKeys::SITES.len() * layers
    }
    fn at(layer: usize, place: DropoutSite) -> Range<usize> {
        let at = 2 * (DropoutKeys::SITES.len() * layer + place as usize);
        at..at + 2
    }
    /// Those of adapters, by the hash of their modules' names, in two words each.
    pub fn fill_named(key: u64, names: &[u64], words: &mut [u32]) {
        for (name, words) in names.iter().zip(words.chunks_exact_mut(2)) {
            let key = Rng::new(key, *name).key();
            words.copy_from_slice(&[key as u32, (key >> 32) as u32]);
        }
    }
    /// All of them, from that of the micro-batch.
    pub fn fill(key: u64, words: &mut [u32]) {
        for (layer, of_layer) in words.chunks_exact_mut(DropoutKeys::words(1)).enumerate() {
            for (place, words) in DropoutKeys::SITES.into_iter().zip(of_layer.chunks_exact_mut(2)) {
                let key = Rng::new(key, (layer as u64) << 8 | place as u64).key();
                words.copy_from_slice(&[key as u32, (key >> 32) as u32]);
            }
        }
    }
}

/// Dropout of an adapter's input: a mask by token of the micro-batch and channel of the whole input, so that ranks of
/// tp and sp draw one mask.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdapterDropout {
    pub p: f32,
    /// Which of the adapters' keys is its own.
    pub key: usize,
    /// This rank's first channel.
    pub first: usize,
}

/// Where a batch stands in its sequence: how many tokens of it came before, and how many there may be.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    pub tokens: usize,
    pub room: usize,
}

impl Past {
    /// An error unless `n` more tokens may come: all at first, then one by one.
    pub fn check(&self, n: usize) -> Result<()> {
        let Past { tokens, room } = *self;
        match (tokens == 0 || n == 1) && tokens + n <= room {
            true => Ok(()),
            false => Err(Error::op("go on", format!("{n} tokens after {tokens}, with room for {room}"))),
        }
    }
}

#[derive(Clone, Copy)]
pub struct Cx<'a> {
    pub dev: &'a dyn Device,
    pub groups: &'a Groups,
    /// This rank's part of the layer's work.
    pub split: Split,
    pub batch: Batch<'a>,
    /// Tokens of this batch: rows of every activation but the residual stream's, of which this rank has [`Cx::rows`].
    pub n: usize,
    /// Rotation tables (P, head_dim) f32: of most layers, and of those that turn locally; empty where there are none.
    pub tables: [View<'a>; 2],
    /// Probability and the micro-batch's keys ([`DropoutKeys`]); none when evaluating.
    pub dropout: Option<(f32, View<'a>)>,
    /// Two words for each adapter with dropout; none when evaluating.
    pub adapter_keys: Option<View<'a>>,
    pub layer: usize,
    /// A recomputation finds attention's outputs where the forward pass left them.
    pub attended: bool,
    /// Where keys and values are kept, so that the sequence can go on.
    pub past: Option<Past>,
}

/// All rows of what ranks have parts of, readable until [`Cx::release`].
pub struct Whole<'a> {
    pub rows: View<'a>,
    ticket: Option<Ticket>,
}

impl Cx<'_> {
    /// Whether nothing comes between a branch's last product and the residual stream: no sum over ranks and no dropout.
    pub fn straight(&self, cut: bool) -> bool {
        self.dropout.is_none() && self.split.part(cut).of == 1
    }
    /// In place, forward and backward alike: the mask is a function of (key, layer, place, index).
    pub fn drop(&self, place: DropoutSite, x: ViewMut) -> Result<()> {
        let Some((p, keys)) = self.dropout else { return Ok(()) };
        self.dev.dropout(Dropout { p, key: keys.slice(DropoutKeys::at(self.layer, place)), x })
    }
    /// An adapter's dropout, forward and backward alike, over rows of `width` elements: assigns `y`, or adds to it with
    /// `accumulate`. The mask is a function of (key, token of the micro-batch, channel of the whole row).
    pub(super) fn drop_channels(
        &self,
        mask: &AdapterDropout,
        width: usize,
        x: View,
        y: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        let Some(keys) = self.adapter_keys else { return Err(Error::op("adapter", "dropout without its keys")) };
        let key = keys.slice(2 * mask.key..2 * mask.key + 2);
        let own = self.split.sp.index * self.n;
        let rows = self.batch.rows.map(|rows| rows.slice(own..own + self.n));
        self.dev.dropout_rows(DropoutRows { p: mask.p, key, rows, width, first: mask.first, x, y, accumulate })
    }
    /// The gradient of a branch from that of the residual stream: `dy` itself, or a masked copy of it in `masked`.
    pub fn branch_grad<'b>(&self, place: DropoutSite, dy: View<'b>, masked: &'b mut Tensor) -> Result<View<'b>> {
        if self.dropout.is_none() {
            return Ok(dy);
        }
        self.dev.copy(dy, masked.rows_mut(self.rows()))?;
        self.drop(place, masked.rows_mut(self.rows()))?;
        Ok(masked.rows(self.rows()))
    }

    /// Rows of the residual stream that this rank has.
    pub fn rows(&self) -> usize {
        self.split.rows(self.n)
    }
    /// Those of all ranks of tp together: `n`, and with sequence parallelism what fills the last rank's part up.
    fn padded(&self) -> usize {
        if self.split.sequence() { self.rows() * self.split.tp.of } else { self.n }
    }

    /// (N, C) from this rank's rows `x`, by way of `all`.
    pub fn whole<'a>(&self, x: View<'a>, all: &'a mut Tensor) -> Result<Whole<'a>> {
        if !self.split.sequence() {
            return Ok(Whole { rows: x, ticket: None });
        }
        let tp = &self.groups.tp;
        let ticket = tp.all_gather(Tag::new("tp gather", self.layer), x, all.rows_mut(self.padded()))?;
        tp.wait(ticket)?;
        Ok(Whole { rows: all.rows(self.n), ticket: Some(ticket) })
    }
    /// The rows are read no more.
    pub fn release(&self, whole: Whole) -> Result<()> {
        whole.ticket.map_or(Ok(()), |ticket| self.groups.tp.release(ticket))
    }

    /// Assigns this rank's rows of `y`: where the work is `cut`, the sum over tp of what `part` assigns to (N, C), by
    /// way of `parts`; otherwise what `part` assigns.
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
            // Rows of no token: 0 in what is summed, so they are in what becomes of it.
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

    /// Every layer, place and key has a mask of its own, and the same one each time.
    #[test]
    fn masks_differ() {
        let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(Meter::default()));
        let groups = Groups::solo(&dev);
        let nothing = dev.alloc(DType::U32, 0, Category::Other).unwrap();
        let view = nothing.view();
        let batch = Batch { tokens: view, targets: view, positions: view, cu_seqlens: view, rows: None };
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
                tables: [view; 2],
                dropout,
                adapter_keys: None,
                layer,
                attended: false,
                past: None,
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
