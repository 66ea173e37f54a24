//! What a rank keeps of a part for good: f32 masters with the copy that layers compute in, or that alone. And how a
//! layer sees its unit's two parts. Never communicates.
//!
//! A master is there to be updated, and to be saved without having been rounded. What stays as it is beside adapters
//! needs neither: checkpoints hold the adapters, and the model comes from its own directory each time.
use super::offload::Offload;
use crate::base::dtype::Float;
use crate::base::{Category, DType, Error, Result};
use crate::device::{Buf, Device, View, ViewMut};
use crate::nn::{Layout, Segment, Weights, has_adapters, is_adapter};
use half::{bf16, f16};

/// How a part is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// f32 masters, and what is computed with where that is another buffer.
    Masters,
    /// What is computed with.
    Computed,
}

impl Keep {
    /// For each tensor of a model. A frozen adapter is saved like the others.
    pub(super) fn of(layouts: &[Layout]) -> impl Fn(&Segment) -> Keep + use<> {
        let adapters = has_adapters(layouts);
        move |s| if adapters && !s.trainable && !is_adapter(s) { Keep::Computed } else { Keep::Masters }
    }
}

pub(super) struct Kept {
    /// f32, or all there is.
    pub master: Buf,
    /// The copy in the compute dtype, where that is not f32 or the master is not where it is gathered from.
    pub param: Option<Buf>,
}

impl Kept {
    /// Of `len` elements.
    pub fn new(dev: &dyn Device, len: usize, keep: Keep, dtype: DType, offload: Offload) -> Result<Kept> {
        if keep == Keep::Computed {
            let _for = dev.meter().purpose("frozen weights");
            let all = offload.alloc(Offload::Parameters, dev, dtype, len, Category::Params)?;
            return Ok(Kept { master: all, param: None });
        }
        let copy = || {
            let _for = dev.meter().purpose("copies of masters");
            offload.alloc(Offload::Parameters, dev, dtype, len, Category::Params)
        };
        let param = offload.copies(dtype).then(copy).transpose()?;
        let _for = dev.meter().purpose("masters");
        Ok(Kept { master: offload.alloc(Offload::Optimizer, dev, DType::F32, len, Category::Params)?, param })
    }
    /// What is computed with, or gathered to be.
    pub fn compute(&self) -> View<'_> {
        self.param.as_ref().unwrap_or(&self.master).view()
    }
}

/// Assigns `to`, masters or what there is in their place, from `values`: to nearest where it is narrower. `rounded` is
/// scratch.
pub fn assign(dev: &dyn Device, values: &[f32], rounded: &mut Vec<u16>, to: ViewMut) -> Result<()> {
    rounded.clear();
    match to.dtype() {
        DType::Bf16 => rounded.extend(values.iter().map(|&x| <bf16 as Float>::from_f32(x).to_bits())),
        DType::F16 => rounded.extend(values.iter().map(|&x| <f16 as Float>::from_f32(x).to_bits())),
        _ => return dev.upload(bytemuck::cast_slice(values), to),
    }
    dev.upload(bytemuck::cast_slice(rounded), to)
}

/// What gradients are cast to before they travel, where they travel.
pub(super) fn narrow(reduce_dtype: DType, ranks: usize) -> Option<DType> {
    Some(reduce_dtype).filter(|&dtype| dtype != DType::F32 && ranks > 1)
}

/// What a layer of `unit` computes with: the unit's trainable part and its frozen one, of which one may be absent.
pub(super) fn weights<'a>(unit: usize, parts: [Option<View<'a>>; 2], layout: &'a Layout) -> Result<Weights<'a>> {
    let (trained, frozen) = match parts {
        [Some(trained), Some(frozen)] => (trained, frozen),
        [Some(trained), None] => (trained, trained.slice(0..0)),
        [None, Some(frozen)] => (frozen.slice(0..0), frozen),
        [None, None] => return Err(Error::op("weights", format!("unit {unit} has no tensors"))),
    };
    Ok(Weights { trained, frozen, layout })
}
