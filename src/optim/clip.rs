//! The exact global gradient norm of a step, and the clip factor. Never touches the gradient: the factor is applied in
//! the optimizer's pass.
//!
//! The sum of squares is exact ([`Device::sum_squares`]), so it depends neither on the order of the shards nor on their
//! boundaries: every strategy, wrapping and world size that computes the same gradient clips by the same bits. Each
//! element counts once: each replica sums over its own shards, and only the first tp rank counts a tensor that all tp
//! ranks hold whole.
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Reduce, Tag};
use crate::device::ops::{ClipScale, SumSquares};
use crate::device::{Buf, Device, LIMBS, Place, View, ViewMut};
use crate::nn::Segment;
use crate::store::{Offload, Shard, Store};
use std::sync::Arc;

pub struct GradNorm {
    /// Ranks of fsdp own different shards if gradients are sharded; ranks of tp always do.
    fsdp: Arc<dyn Collective>,
    tp: Arc<dyn Collective>,
    /// 0 disables clipping.
    max_norm: f32,
    /// f64 (LIMBS), summed over the groups.
    acc: Buf,
    /// f32 (2): clip factor, norm.
    out: Buf,
    /// Set if gradients are offloaded: a device to sum their squares, and its accumulator. The host reads its own
    /// memory faster than a device does over the bus, and the result has the same bits.
    host: Option<(Box<dyn Device>, Buf)>,
}

impl GradNorm {
    /// With `max_norm` 0, measures without clipping.
    pub fn new(dev: &dyn Device, mesh: &Mesh, max_norm: f32, offload: Offload) -> Result<GradNorm> {
        let (fsdp, tp) = (mesh.group(Axis::Fsdp).clone(), mesh.group(Axis::Tp).clone());
        let acc = fsdp.alloc(DType::F64, LIMBS, CommUse::Reduced, Category::Other)?;
        let own = (offload >= Offload::Gradients).then(|| dev.alloc_host(DType::F64, LIMBS)).transpose()?;
        let host = own.filter(|own| own.view().place() == Place::Mapped);
        let host = host.map(|own| (dev.on_host(), own));
        Ok(GradNorm { fsdp, tp, max_norm, acc, out: dev.alloc(DType::F32, 2, Category::Other)?, host })
    }

    /// Enqueues the norm of `unscale` (f32, 1) times the whole reduced gradient, before clipping. Every rank gets the
    /// same bits. The norm is not finite if any gradient element is not.
    pub fn measure(&mut self, dev: &dyn Device, store: &mut dyn Store, unscale: View) -> Result<()> {
        let first = self.tp.rank() == 0;
        match &mut self.host {
            None => sum(dev, store, first, &mut self.acc)?,
            Some((cpu, own)) => {
                dev.synchronize()?; // reductions have finished
                sum(&**cpu, store, first, own)?;
                dev.copy(own.view(), self.acc.view_mut())?;
            }
        }
        // Limbs add without rounding, so two successive sums equal one sum over both axes.
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
    /// The clip factor times `unscale`: f32 (1), where the optimizer reads it. Not finite if the norm is not.
    pub fn scale(&self) -> View<'_> {
        self.out.view().slice(0..1)
    }
}

/// Computes the sum over this rank's shards. Among tp ranks, only `first` counts tensors that all of them hold.
fn sum(dev: &dyn Device, store: &mut dyn Store, first: bool, acc: &mut Buf) -> Result<()> {
    dev.zero(acc.view_mut())?;
    store.for_each_shard(&mut |shard| match first {
        true => {
            shard.grad.map_or(Ok(()), |grad| dev.sum_squares(SumSquares { x: grad.as_view(), acc: acc.view_mut() }))
        }
        false => sum_cut(dev, shard, acc.view_mut()),
    })
}

/// Adds the squares of tensors that are sharded over tp.
fn sum_cut(dev: &dyn Device, mut shard: Shard, mut acc: ViewMut) -> Result<()> {
    let is_cut = |segment: &Segment| segment.tp.is_cut();
    let alike = shard.layout.segments.chunk_by(|a, b| is_cut(a) == is_cut(b));
    for segments in alike.filter(|segments| is_cut(&segments[0])) {
        let owned = shard.owned(segments[0].start..segments[segments.len() - 1].range().end);
        if let (Some(grad), Some(owned)) = (&mut shard.grad, owned) {
            dev.sum_squares(SumSquares { x: grad.as_view().slice(owned), acc: acc.reborrow() })?;
        }
    }
    Ok(())
}
