//! What a rank keeps of a part for good: f32 masters with the copy that layers compute in. And how a layer sees its unit's two
//! parts. Never communicates.
use super::offload::Offload;
use crate::base::{Category, DType, Error, Result};
use crate::device::{Buf, Device, View};
use crate::nn::{Layout, Weights};

pub(super) struct Kept {
    pub master: Buf,
    /// The copy in the compute dtype, where that is not f32 or the master is not where it is gathered from.
    pub param: Option<Buf>,
}

impl Kept {
    /// Of `len` elements.
    pub fn new(dev: &dyn Device, len: usize, dtype: DType, offload: Offload) -> Result<Kept> {
        let copy = || {
            let _for = dev.meter().purpose("copies of masters");
            offload.alloc(Offload::Parameters, dev, dtype, len, Category::Params)
        };
        let param = offload.copies(dtype).then(copy).transpose()?;
        let _for = dev.meter().purpose("masters");
        Ok(Kept { master: offload.alloc(Offload::Optimizer, dev, DType::F32, len, Category::Params)?, param })
    }
    /// Bytes that [`Kept::new`] allocates: masters, copies.
    pub fn planned(len: usize, dtype: DType, offload: Offload) -> [(Category, usize); 2] {
        let copy = if offload.copies(dtype) { dtype.size() } else { 0 };
        [
            (offload.category(Offload::Optimizer, Category::Params), len * DType::F32.size()),
            (offload.category(Offload::Parameters, Category::Params), len * copy),
        ]
    }
    /// What is computed with, or gathered to be.
    pub fn compute(&self) -> View<'_> {
        self.param.as_ref().unwrap_or(&self.master).view()
    }
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
