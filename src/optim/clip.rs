//! The true global norm of the step's gradient, and the factor that clips by it. Never touches the gradient: the factor
//! goes into the optimizer's pass.
//!
//! The sum of squares is kept exactly ([`Device::sum_squares`]), so it depends neither on the order of the pieces nor on
//! where they are cut: every strategy, wrap and number of ranks that computes the same gradient clips by the same bits.
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, CommUse, Reduce, Tag};
use crate::device::{Buf, Device, LIMBS, View};
use crate::store::Store;
use std::sync::Arc;

pub struct GradNorm {
    group: Arc<dyn Collective>,
    /// 0: no clipping.
    max_norm: f32,
    /// f64 (LIMBS), reduced over the group.
    acc: Buf,
    /// f32 (2): clip factor, norm.
    out: Buf,
}

impl GradNorm {
    /// `max_norm` 0 measures without clipping.
    pub fn new(dev: &dyn Device, group: Arc<dyn Collective>, max_norm: f32) -> Result<GradNorm> {
        let acc = group.alloc(DType::F64, LIMBS, CommUse::Reduced, Category::Other)?;
        Ok(GradNorm { group, max_norm, acc, out: dev.alloc(DType::F32, 2, Category::Other)? })
    }
    /// Bytes that `new` allocates.
    pub fn planned() -> (Category, usize) {
        (Category::Other, LIMBS * DType::F64.size() + 2 * DType::F32.size())
    }

    /// The norm of the whole reduced gradient before clipping: the same bits on every rank. Not finite where any element
    /// of the gradient is not.
    pub fn measure(&mut self, dev: &dyn Device, store: &mut dyn Store) -> Result<f32> {
        dev.zero(self.acc.view_mut())?;
        store.for_each_piece(&mut |piece| match piece.grad {
            Some(grad) => dev.sum_squares(grad.as_view(), self.acc.view_mut()),
            None => Ok(()), // frozen
        })?;
        if !store.replicated() {
            let ticket = self.group.all_reduce(Tag::new("norm", 0), self.acc.view_mut(), Reduce::Sum)?;
            self.group.wait(ticket)?;
        }
        dev.clip_scale(self.acc.view(), self.max_norm, self.out.view_mut())?;
        let mut out = [0f32; 2];
        dev.download(self.out.view(), bytemuck::cast_slice_mut(&mut out))?;
        Ok(out[1])
    }
    /// The factor that belongs to the last measured norm, f32 (1), where the optimizer reads it.
    pub fn scale(&self) -> View<'_> {
        self.out.view().slice(0..1)
    }
}
