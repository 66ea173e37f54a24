//! A rank's shards of each unit: masters, compute-dtype copies and reduced gradients, one shard per part. Never
//! communicates.
use super::flat::{Flat, Unit, UnitPart};
use super::kept::Kept;
use super::replicas::Replicas;
use super::{Offload, Shard};
use crate::base::{DType, Result};
use crate::device::{Buf, Device, View, ViewMut};

/// The shards of one unit.
pub(super) struct UnitShards {
    /// One per part of the unit.
    parts: Vec<ShardBufs>,
}

struct ShardBufs {
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
            Ok(ShardBufs { kept, grad: part.trainable.then(grad).transpose()? })
        };
        let of = |unit: &Unit| Ok(UnitShards { parts: unit.parts.iter().map(shard).collect::<Result<_>>()? });
        flat.units.iter().map(of).collect()
    }
    /// The buffers that gathers read: trainable part, frozen part.
    pub fn gathered(&self) -> [Option<View<'_>>; 2] {
        [true, false].map(|trainable| {
            let shard = self.parts.iter().find(|s| s.grad.is_some() == trainable)?;
            Some(shard.kept.compute())
        })
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
            for (part, ShardBufs { kept, grad }) in cut.parts.iter().zip(&mut shards.parts) {
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
}
