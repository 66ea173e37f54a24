//! A rank's shards of each unit: masters, compute-dtype copies or codes, and reduced gradients, one shard per part.
//! Never communicates.
use super::flat::{Flat, Unit, UnitPart};
use super::kept::Kept;
use super::replicas::Replicas;
use super::{Offload, PackedShard, Shard};
use crate::base::fp8::Fp8Shape;
use crate::base::{DType, Result};
use crate::device::{Buf, Device, View, ViewMut};
use crate::nn::Storage;
use std::ops::Range;

/// What a rank owns of a matrix that is gathered in 8 bits: elements from `at` on of the rows of blocks that they are
/// in, and where the scales of those are among all.
pub(super) struct CodedMatrix<'a> {
    pub shape: Fp8Shape,
    pub at: usize,
    pub x: View<'a>,
    pub bytes: ViewMut<'a>,
    pub scales: Range<usize>,
}

/// The shards of one unit.
pub(super) struct UnitShards {
    /// One per part of the unit.
    parts: Vec<ShardBufs>,
}

struct ShardBufs {
    storage: Storage,
    kept: Kept,
    /// `None` in a frozen part.
    grad: Option<Buf>,
}

impl UnitShards {
    /// Allocates the shards of every unit. `dtypes`: of computation and of masters.
    pub fn new(
        dev: &dyn Device,
        flat: &Flat,
        dtypes: (DType, DType),
        offload: Offload,
        replicas: &Replicas,
    ) -> Result<Vec<UnitShards>> {
        let shard = |part: &UnitPart| {
            let grad = || replicas.grad(dev, offload, part.shard);
            let kept = Kept::new(dev, part.shard, part.storage, dtypes, offload)?;
            let grad = part.storage.is_trained().then(grad).transpose()?;
            Ok(ShardBufs { storage: part.storage, kept, grad })
        };
        let of = |unit: &Unit| Ok(UnitShards { parts: unit.parts.iter().map(shard).collect::<Result<_>>()? });
        flat.units.iter().map(of).collect()
    }
    /// The buffers that gathers read, by [`Storage::buffer`].
    pub fn gathered(&self) -> [Option<View<'_>>; Storage::BUFFERS.len()] {
        let mut weights = [None; Storage::BUFFERS.len()];
        self.parts.iter().for_each(|part| weights[part.storage.buffer()] = Some(part.kept.compute()));
        weights
    }
    /// The weights as [`UnitShards::gathered`], and the gradient, where a rank has whole parts: at most one trains.
    pub fn in_place(&mut self) -> ([Option<View<'_>>; Storage::BUFFERS.len()], Option<ViewMut<'_>>) {
        let (mut weights, mut gradient) = ([None; Storage::BUFFERS.len()], None);
        for ShardBufs { storage, kept, grad } in &mut self.parts {
            weights[storage.buffer()] = Some(kept.compute());
            gradient = grad.as_mut().map(Buf::view_mut).or(gradient);
        }
        (weights, gradient)
    }
    /// The reduced gradients of the trainable parts; none where the whole unit is frozen.
    pub fn grads(&mut self) -> impl Iterator<Item = ViewMut<'_>> {
        self.parts.iter_mut().filter_map(|s| s.grad.as_mut()).map(Buf::view_mut)
    }
    /// Visits what is gathered in 8 bits, of the units of `flat` that belong to `rank`.
    pub fn visit_coded(
        all: &mut [UnitShards],
        flat: &Flat,
        rank: usize,
        f: &mut dyn FnMut(CodedMatrix<'_>) -> Result<()>,
    ) -> Result<()> {
        for (part, shard) in
            flat.units.iter().zip(all).flat_map(|(cut, shards)| cut.parts.iter().zip(&mut shards.parts))
        {
            let Some((from, mut codes)) = shard.kept.coding() else { continue };
            let owned = part.owned(rank);
            for segment in &part.layout.segments {
                let (start, end) = (segment.start.max(owned.start), segment.range().end.min(owned.end));
                let Storage::Coded(place) = segment.storage else { continue };
                if start >= end {
                    continue;
                }
                let (shape, blocks, first) = segment.fp8_shape().bands(&(start - segment.start..end - segment.start));
                let own = start - owned.start..end - owned.start;
                f(CodedMatrix {
                    shape,
                    at: start - segment.start - first,
                    x: from.slice(own.clone()),
                    bytes: codes.reborrow().slice(own),
                    scales: place.scales + blocks.start..place.scales + blocks.end,
                })?;
            }
        }
        Ok(())
    }
    /// Visits the shards of all units, which belong to `rank`.
    pub fn visit(
        all: &mut [UnitShards],
        flat: &Flat,
        rank: usize,
        f: &mut dyn FnMut(Shard<'_>) -> Result<()>,
    ) -> Result<()> {
        for (unit, (cut, shards)) in flat.units.iter().zip(all).enumerate() {
            let parts = cut.parts.iter().zip(&mut shards.parts);
            for (part, ShardBufs { kept, grad, .. }) in parts.filter(|(part, _)| part.storage != Storage::Nf4) {
                f(Shard {
                    unit,
                    layout: &part.layout,
                    start: part.owned(rank).start,
                    master: kept.master.view_mut(),
                    param: kept.param.as_mut().map(Buf::view_mut),
                    grad: grad.as_mut().map(Buf::view_mut),
                })?;
            }
        }
        Ok(())
    }
    /// The same for packed shards.
    pub fn visit_packed(
        all: &mut [UnitShards],
        flat: &Flat,
        rank: usize,
        f: &mut dyn FnMut(PackedShard<'_>) -> Result<()>,
    ) -> Result<()> {
        let units = flat.units.iter().zip(all).flat_map(|(cut, shards)| cut.parts.iter().zip(&mut shards.parts));
        units.filter(|(part, _)| part.storage == Storage::Nf4).try_for_each(|(part, ShardBufs { kept, .. })| {
            f(PackedShard { layout: &part.layout, start: part.owned(rank).start, bytes: kept.master.view_mut() })
        })
    }
}
