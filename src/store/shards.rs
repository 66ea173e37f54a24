//! What a rank owns of each unit where units are cut over the ranks: masters, their copy, and the reduced gradient, a
//! shard a part. Never communicates.
use super::flat::{Flat, Part, Unit};
use super::kept::Kept;
use super::replicas::Replicas;
use super::{Offload, Piece};
use crate::base::{DType, Result};
use crate::device::{Buf, Device, View, ViewMut};

/// Of one unit.
pub(super) struct Shards {
    /// One a part of the unit.
    parts: Vec<Shard>,
    /// The unit's full gradient buffer was zeroed for the sum that it is collecting.
    pub collecting: bool,
}

struct Shard {
    kept: Kept,
    /// None in a frozen part.
    grad: Option<Buf>,
}

impl Shards {
    /// Of every unit.
    pub fn new(
        dev: &dyn Device,
        flat: &Flat,
        dtype: DType,
        offload: Offload,
        replicas: &Replicas,
    ) -> Result<Vec<Shards>> {
        let shard = |part: &Part| {
            let grad = || replicas.grad(dev, offload, part.shard);
            let kept = Kept::new(dev, part.shard, part.keep, dtype, offload)?;
            Ok(Shard { kept, grad: part.trainable.then(grad).transpose()? })
        };
        let of =
            |unit: &Unit| Ok(Shards { parts: unit.parts.iter().map(shard).collect::<Result<_>>()?, collecting: false });
        flat.units.iter().map(of).collect()
    }
    /// What is gathered: of the trainable part, of the frozen one.
    pub fn gathered(&self) -> [Option<View<'_>>; 2] {
        [true, false].map(|trainable| {
            let shard = self.parts.iter().find(|s| s.grad.is_some() == trainable)?;
            Some(shard.kept.compute())
        })
    }
    /// The reduced gradient; none where the whole unit is frozen.
    pub fn grad(&mut self) -> Option<ViewMut<'_>> {
        self.parts.iter_mut().find_map(|s| s.grad.as_mut()).map(Buf::view_mut)
    }
    /// Visits the pieces of `rank`, which these are, of all units.
    pub fn visit(
        all: &mut [Shards],
        flat: &Flat,
        rank: usize,
        f: &mut dyn FnMut(Piece<'_>) -> Result<()>,
    ) -> Result<()> {
        for (unit, (cut, shards)) in flat.units.iter().zip(all).enumerate() {
            for (part, Shard { kept, grad }) in cut.parts.iter().zip(&mut shards.parts) {
                f(Piece {
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
