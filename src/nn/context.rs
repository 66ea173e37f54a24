//! What every layer of one pass shares: the device, the batch, the keys of its masks. Never owns a buffer.
use super::cache::Past;
use super::parallel::{Groups, Split};
use super::ring::Around;
use super::workspace::Tensor;
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use crate::device::{Attention, Device, View, ViewMut};
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
pub enum Place {
    Embedding,
    Attention,
    Mlp,
}

/// The keys of a micro-batch's masks, two words each: by layer, then by [`Place`]. They change with each micro-batch, so they lie in
/// memory and not in the arguments of an operation.
pub struct Keys;

impl Keys {
    const PLACES: [Place; 3] = [Place::Embedding, Place::Attention, Place::Mlp];

    /// Words of `layers` layers, the root one of them.
    pub fn words(layers: usize) -> usize {
        2 * Keys::PLACES.len() * layers
    }
    fn at(layer: usize, place: Place) -> Range<usize> {
        let at = 2 * (Keys::PLACES.len() * layer + place as usize);
        at..at + 2
    }
    /// All of them, from that of the micro-batch.
    pub fn fill(key: u64, words: &mut [u32]) {
        for (layer, of_layer) in words.chunks_exact_mut(Keys::words(1)).enumerate() {
            for (place, words) in Keys::PLACES.into_iter().zip(of_layer.chunks_exact_mut(2)) {
                let key = Rng::new(key, (layer as u64) << 8 | place as u64).key();
                words.copy_from_slice(&[key as u32, (key >> 32) as u32]);
            }
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
    /// Probability and the micro-batch's keys ([`Keys`]); none when evaluating.
    pub dropout: Option<(f32, View<'a>)>,
    pub layer: usize,
    /// A recomputation finds attention's outputs where the forward pass left them.
    pub attended: bool,
    /// Where keys and values are kept, so that the sequence can go on.
    pub past: Option<Past>,
}

impl Cx<'_> {
    /// The ring that keys and values go around, where rows are cut over it.
    pub fn around<'b>(&'b self, shape: &'b Attention) -> Option<Around<'b>> {
        let (dev, group, ring) = (self.dev, &*self.groups.sp, self.split.ring);
        self.batch.rows.map(|_| Around { dev, group, ring, shape, layer: self.layer })
    }
    /// Whether nothing comes between a branch's last product and the residual stream: no sum over ranks and no dropout.
    pub fn straight(&self, cut: bool) -> bool {
        self.dropout.is_none() && self.split.part(cut).of == 1
    }
    /// In place, forward and backward alike: the mask is a function of (key, layer, place, index).
    pub fn drop(&self, place: Place, x: ViewMut) -> Result<()> {
        let Some((p, keys)) = self.dropout else { return Ok(()) };
        self.dev.dropout(p, keys.slice(Keys::at(self.layer, place)), x)
    }
    /// The gradient of a branch from that of the residual stream: `dy` itself, or a masked copy of it in `masked`.
    pub fn branch_grad<'b>(&self, place: Place, dy: View<'b>, masked: &'b mut Tensor) -> Result<View<'b>> {
        if self.dropout.is_none() {
            return Ok(dy);
        }
        self.dev.copy(dy, masked.rows_mut(self.rows()))?;
        self.drop(place, masked.rows_mut(self.rows()))?;
        Ok(masked.rows(self.rows()))
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
        let mut keys = dev.alloc(DType::U32, Keys::words(3), Category::Other).unwrap();
        let mut mask = |layer, place, key| {
            x.view_mut().host::<f32>("test").unwrap().fill(1.0);
            Keys::fill(key, keys.view_mut().host::<u32>("test").unwrap());
            let dropout = Some((0.5, keys.view()));
            let (dev, groups, split) = (&*dev, &groups, Split::NONE);
            let cx =
                Cx { dev, groups, split, batch, n: 0, tables: [view; 2], dropout, layer, attended: false, past: None };
            cx.drop(place, x.view_mut()).unwrap();
            x.view().host::<f32>("test").unwrap().to_vec()
        };
        let mut masks = Vec::new();
        for key in [1, 2] {
            for layer in 0..3 {
                for place in [Place::Embedding, Place::Attention, Place::Mlp] {
                    let drawn = mask(layer, place, key);
                    assert!(drawn == mask(layer, place, key));
                    assert!(!masks.contains(&drawn), "layer {layer}, {place:?}, key {key}");
                    masks.push(drawn);
                }
            }
        }
    }
}
