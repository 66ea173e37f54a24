//! Persistent storage for one part of a unit: masters with a compute-dtype copy or with codes of FP8, only the
//! compute-dtype weights, or bytes of packed weights. Never communicates.
//!
//! Masters exist so that weights are updated and saved without rounding. Weights frozen beneath adapters need neither:
//! checkpoints hold only the adapters, and the base model is reloaded from its own directory. Nor does a model that is
//! frozen as a whole: it is only computed with.
use super::offload::Offload;
use crate::base::dtype::Float;
use crate::base::{Category, DType, Result};
use crate::device::{Buf, Device, View, ViewMut};
use crate::nn::Storage;
use half::{bf16, f16};

/// What is kept of one part of a unit: which buffers, [`Storage`] says.
pub(super) struct Kept {
    /// Masters, or the only copy.
    pub master: Buf,
    /// The compute-dtype copy, if masters have another dtype or are not where gathers read; of what is coded, only if
    /// masters are offloaded and codes are not.
    pub param: Option<Buf>,
    /// What is gathered, if that is in 8 bits.
    pub codes: Option<Buf>,
}

impl Kept {
    /// Allocates `len` elements. `masters`: their dtype.
    pub fn new(
        dev: &dyn Device,
        len: usize,
        storage: Storage,
        (dtype, masters): (DType, DType),
        offload: Offload,
    ) -> Result<Kept> {
        if matches!(storage, Storage::Frozen | Storage::Nf4) {
            let purpose = if storage == Storage::Nf4 { "4-bit weights" } else { "frozen weights" };
            let _for = dev.meter().purpose(purpose);
            let all = offload.alloc(Offload::Parameters, dev, storage.dtype(dtype), len, Category::Params)?;
            return Ok(Kept { master: all, param: None, codes: None });
        }
        let copy = || {
            let _for = dev.meter().purpose("compute copies");
            offload.alloc(Offload::Parameters, dev, dtype, len, Category::Params)
        };
        let coded = matches!(storage, Storage::Coded(_));
        let param = offload.copies(if coded { masters } else { dtype }, masters).then(copy).transpose()?;
        let codes = || {
            let _for = dev.meter().purpose("8-bit weights");
            offload.alloc(Offload::Parameters, dev, DType::U8, len, Category::Params)
        };
        let codes = coded.then(codes).transpose()?;
        let _for = dev.meter().purpose("masters");
        Ok(Kept { master: offload.alloc(Offload::Optimizer, dev, masters, len, Category::Params)?, param, codes })
    }
    /// The weights that are computed with, or gathered for it.
    pub fn compute(&self) -> View<'_> {
        self.codes.as_ref().or(self.param.as_ref()).unwrap_or(&self.master).view()
    }
    /// What codes are made of, and the codes.
    pub fn coding(&mut self) -> Option<(View<'_>, ViewMut<'_>)> {
        let from = self.param.as_ref().unwrap_or(&self.master).view();
        self.codes.as_mut().map(|codes| (from, codes.view_mut()))
    }
}

/// Assigns `values` to `to` (masters or the only copy), rounding to nearest if it is narrower. `rounded` is scratch.
pub fn assign(dev: &dyn Device, values: &[f32], rounded: &mut Vec<u16>, to: ViewMut) -> Result<()> {
    rounded.clear();
    match to.dtype() {
        DType::Bf16 => rounded.extend(values.iter().map(|&x| <bf16 as Float>::from_f32(x).to_bits())),
        DType::F16 => rounded.extend(values.iter().map(|&x| <f16 as Float>::from_f32(x).to_bits())),
        _ => return dev.upload(bytemuck::cast_slice(values), to),
    }
    dev.upload(bytemuck::cast_slice(rounded), to)
}

/// Reads `from` (masters or the only copy, or a moment) as f32. `rounded` is scratch.
pub fn values(dev: &dyn Device, from: View, rounded: &mut Vec<u16>, to: &mut [f32]) -> Result<()> {
    let dtype = from.dtype();
    if dtype == DType::F32 {
        return dev.download(from, bytemuck::cast_slice_mut(to));
    }
    rounded.resize(to.len(), 0);
    dev.download(from, bytemuck::cast_slice_mut(rounded))?;
    let wide = |bits: u16| match dtype {
        DType::Bf16 => Float::to_f32(bf16::from_bits(bits)),
        _ => Float::to_f32(f16::from_bits(bits)),
    };
    to.iter_mut().zip(rounded).for_each(|(x, bits)| *x = wide(*bits));
    Ok(())
}

/// The dtype that gradients are cast to for reduction, if they are communicated and not in f32.
pub(super) fn narrow(reduce_dtype: DType, ranks: usize) -> Option<DType> {
    Some(reduce_dtype).filter(|&dtype| dtype != DType::F32 && ranks > 1)
}
