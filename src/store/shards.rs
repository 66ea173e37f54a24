//! A rank's shards of each unit: masters, compute-dtype copies and reduced gradients, one shard per part. Never
//! communicates.
use super::flat::{Flat, PartHolds, Unit, UnitPart};
use super::kept::Kept;
use super::replicas::Replicas;
use super::{Offload, PackedShard, Shard};
use crate::base::{DType, Result};
use crate::device::{Buf, Device, View, ViewMut};

/// The shards of one unit.
pub(super) struct UnitShards {
    /// One per part of the unit.
    parts: Vec<ShardBufs>,
}

struct ShardBufs {
    holds: PartHolds,
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
            let kept = Kept::new(dev, part.shard, part.keep, dtypes, offload)?;
            let grad = (part.holds == PartHolds::Trained).then(grad).transpose()?;
            Ok(ShardBufs { holds: part.holds, kept, grad })
        };
        let of = |unit: &Unit| Ok(UnitShards { parts: unit.parts.iter().map(shard).collect::<Result<_>>()? });
        flat.units.iter().map(of).collect()
    }
    /// The buffers that gathers read, in the order of [`PartHolds::ALL`].
    pub fn gathered(&self) -> [Option<View<'_>>; 3] {
        PartHolds::ALL.map(|holds| Some(self.parts.iter().find(|s| s.holds == holds)?.kept.compute()))
    }
    /// The reduced gradient; `None` where the whole unit is frozen.
    pub fn grad(&mut self) -> Option<ViewMut<'_>> {
        self.parts.iter_mut().find_map(|s| s.grad.as_mut()).map(Buf::view_mut)
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
            for (part, ShardBufs { kept, grad, .. }) in parts.filter(|(part, _)| part.holds != PartHolds::Packed) {
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
        units.filter(|(part, _)| part.holds == PartHolds::Packed).try_for_each(|(part, ShardBufs { kept, .. })| {
            f(PackedShard { layout: &part.layout, start: part.owned(rank).start, bytes: kept.master.view_mut() })
        })
    }
}
