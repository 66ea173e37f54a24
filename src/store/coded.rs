//! Matrices in FP8 on their way to the gathers: after every update a rank casts its shards to bytes, and gathers move
//! those. Never decides what is in FP8, and never expands anything.
//!
//! A shard ends anywhere in a block of 128 x 128, and a block's scale follows from all of its elements. The scale grows
//! with the magnitude, so each rank computes the scales of what it has, and the largest over the ranks are those of the
//! whole blocks: one all_reduce of 4 bytes for each block of the model, of which every rank keeps the result. So codes
//! and scales are those of the gathered weight ([`crate::nn`] rounds it itself where it is gathered in bf16), whatever
//! the sharding. Masters are rounded to bf16 first, as a copy of them would be.
use super::flat::Flat;
use super::shards::UnitShards;
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, CommUse, Reduce, Tag};
use crate::device::ops::{Encode, RaiseScales};
use crate::device::{Buf, Device, View};

/// The scales of all units.
pub(super) struct CodedScales(Buf);

impl CodedScales {
    /// None if nothing is gathered in 8 bits.
    pub fn new(group: &dyn Collective, flat: &Flat) -> Result<Option<CodedScales>> {
        let alloc = || group.alloc(DType::F32, flat.scales, CommUse::Reduced, Category::Slots);
        Ok((flat.scales > 0).then(alloc).transpose()?.map(CodedScales))
    }
    pub fn view(&self) -> View<'_> {
        self.0.view()
    }
    /// Casts this rank's shards. Collective.
    pub fn cast(
        &mut self,
        dev: &dyn Device,
        group: &dyn Collective,
        flat: &Flat,
        shards: &mut [UnitShards],
    ) -> Result<()> {
        let rank = group.rank();
        dev.zero(self.0.view_mut())?;
        UnitShards::visit_coded(shards, flat, rank, &mut |own| {
            let scales = self.0.view_mut().slice(own.scales);
            dev.raise_scales(RaiseScales { shape: own.shape, at: own.at, x: own.x, scales })
        })?;
        group.wait(group.all_reduce(Tag::new("scales", 0), self.0.view_mut(), Reduce::Max)?)?;
        UnitShards::visit_coded(shards, flat, rank, &mut |own| {
            let scales = self.0.view().slice(own.scales);
            dev.encode(Encode { shape: own.shape, at: own.at, x: own.x, scales, bytes: own.bytes })
        })
    }
}
