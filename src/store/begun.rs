//! Which segments of each layer's full gradient hold part of the current sum, so that the first contribution assigns
//! and nothing is zeroed that a product overwrites. Never holds gradients.
use crate::base::Result;
use crate::device::{Device, ViewMut};
use crate::nn::{Grads, Layout};
use std::ops::Range;

/// By layer, then by segment.
pub(super) struct Begun(Vec<Vec<bool>>);

impl Begun {
    pub fn new<'a>(layouts: impl IntoIterator<Item = &'a Layout>) -> Begun {
        Begun(layouts.into_iter().map(|layout| vec![false; layout.segments.len()]).collect())
    }
    /// No sum has begun.
    pub fn reset(&mut self) {
        self.0.iter_mut().for_each(|layer| layer.fill(false));
    }
    /// On a device that launches kernels, zeroes `flat`, the gradient of `layers`, before the first contribution: there
    /// one call a unit is cheaper than one for each of its segments, and all further calls add.
    pub fn clear(&mut self, dev: &dyn Device, layers: Range<usize>, flat: ViewMut) -> Result<()> {
        let layers = &mut self.0[layers];
        if !dev.launches_kernels() || layers.iter().flatten().any(|begun| *begun) {
            return Ok(());
        }
        layers.iter_mut().for_each(|layer| layer.fill(true));
        dev.zero(flat)
    }
    /// Ends the sum of `layers`, whose gradient is `flat`: segments without a contribution become zero.
    pub fn complete<'a>(
        &mut self,
        dev: &dyn Device,
        layers: Range<usize>,
        mut flat: ViewMut,
        layout: impl Fn(usize) -> &'a Layout,
    ) -> Result<()> {
        self.clear(dev, layers.clone(), flat.reborrow())?;
        for layer in layers {
            self.grads(dev, layer, Some(flat.reborrow()), layout(layer)).complete()?;
        }
        Ok(())
    }
    /// The gradient of `layer`, in `flat`.
    pub fn grads<'a>(
        &'a mut self,
        dev: &'a dyn Device,
        layer: usize,
        flat: Option<ViewMut<'a>>,
        layout: &'a Layout,
    ) -> Grads<'a> {
        Grads::begun(dev, flat, layout, &mut self.0[layer])
    }
}
