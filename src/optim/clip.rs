//! The true global norm of the step's gradient, and the factor that clips by it. Never touches the gradient: the factor
//! goes into the optimizer's pass.
//!
//! The sum of squares is kept exactly ([`Device::sum_squares`]), so it depends neither on the order of the shards nor
//! on where they are cut: every strategy, wrap and number of ranks that computes the same gradient clips by the same
//! bits. Each element counts once: of replicas each sums over its own shards, and a tensor that every rank of tp has
//! whole is the first one's.
use crate::base::{Category, DType, Meter, Result};
use crate::comm::{Collective, CommUse, Mesh, Reduce, Tag};
use crate::device::cpu::CpuDevice;
use crate::device::ops::{ClipScale, SumSquares};
use crate::device::{Buf, Device, LIMBS, Place, View, ViewMut};
use crate::nn::{Segment, Tp};
use crate::store::{Offload, Shard, Store};
use std::sync::Arc;

pub struct GradNorm {
    /// Ranks of fsdp own different parts of a gradient where it is sharded, ranks of tp always.
    fsdp: Arc<dyn Collective>,
    tp: Arc<dyn Collective>,
    /// 0: no clipping.
    max_norm: f32,
    /// f64 (LIMBS), reduced over the groups.
    acc: Buf,
    /// f32 (2): clip factor, norm.
    out: Buf,
    /// Where gradients are offloaded, who sums their squares, and what into: the host reads its memory faster than a
    /// device does through a bus, and adds to the same bits.
    host: Option<(CpuDevice, Buf)>,
}

impl GradNorm {
    /// `max_norm` 0 measures without clipping.
    pub fn new(dev: &dyn Device, mesh: &Mesh, max_norm: f32, offload: Offload) -> Result<GradNorm> {
        let (fsdp, tp) = (mesh.fsdp.clone(), mesh.tp.clone());
        let acc = fsdp.alloc(DType::F64, LIMBS, CommUse::Reduced, Category::Other)?;
        let own = (offload >= Offload::Gradients).then(|| dev.alloc_host(DType::F64, LIMBS)).transpose()?;
        let host = own.filter(|own| own.view().place() == Place::Mapped);
        let host = host.map(|own| (CpuDevice::new(Meter::default()), own));
        Ok(GradNorm { fsdp, tp, max_norm, acc, out: dev.alloc(DType::F32, 2, Category::Other)?, host })
    }

    /// Has the device find the norm of `unscale` f32 (1) times the whole reduced gradient, before clipping: the same
    /// bits on every rank. Not finite where any element of the gradient is not.
    pub fn measure(&mut self, dev: &dyn Device, store: &mut dyn Store, unscale: View) -> Result<()> {
        let first = self.tp.rank() == 0;
        match &mut self.host {
            None => sum(dev, store, first, &mut self.acc)?,
            Some((cpu, own)) => {
                dev.synchronize()?; // every reduction has landed
                sum(cpu, store, first, own)?;
                dev.copy(own.view(), self.acc.view_mut())?;
            }
        }
        // Limbs add without rounding, so one sum after the other is the sum over both axes.
        let over = [(!store.replicated(), &self.fsdp), (true, &self.tp)];
        for (_, group) in over.into_iter().filter(|(cut, group)| *cut && group.size() > 1) {
            let ticket = group.all_reduce(Tag::new("norm", 0), self.acc.view_mut(), Reduce::Sum)?;
            group.wait(ticket)?;
        }
        let (acc, out) = (self.acc.view(), self.out.view_mut());
        dev.clip_scale(ClipScale { acc, max_norm: self.max_norm, unscale, out })
    }
    /// The last measured norm: f32 (1).
    pub fn norm(&self) -> View<'_> {
        self.out.view().slice(1..2)
    }
    /// The factor that belongs to it, `unscale` in it: f32 (1), where the optimizer reads it. Not finite where the norm
    /// is not.
    pub fn scale(&self) -> View<'_> {
        self.out.view().slice(0..1)
    }
}

/// Assigns the sum over this rank's shards; of ranks of tp, the `first` counts what all of them have.
fn sum(dev: &dyn Device, store: &mut dyn Store, first: bool, acc: &mut Buf) -> Result<()> {
    dev.zero(acc.view_mut())?;
    store.for_each_shard(&mut |shard| match first {
        true => {
            shard.grad.map_or(Ok(()), |grad| dev.sum_squares(SumSquares { x: grad.as_view(), acc: acc.view_mut() }))
        }
        false => sum_cut(dev, shard, acc.view_mut()),
    })
}

/// Adds the squares of the tensors that tp cuts.
fn sum_cut(dev: &dyn Device, mut shard: Shard, mut acc: ViewMut) -> Result<()> {
    let is_cut = |segment: &Segment| matches!(segment.tp, Tp::Cut { .. });
    let alike = shard.layout.segments.chunk_by(|a, b| is_cut(a) == is_cut(b));
    for segments in alike.filter(|segments| is_cut(&segments[0])) {
        let owned = shard.owned(segments[0].start..segments[segments.len() - 1].range().end);
        if let (Some(grad), Some(owned)) = (&mut shard.grad, owned) {
            dev.sum_squares(SumSquares { x: grad.as_view().slice(owned), acc: acc.reborrow() })?;
        }
    }
    Ok(())
}
