//! Converts elements between file dtypes and f32, and counts the non-finite ones. Never reads a file.
use crate::base::{DType, Error, Result};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use safetensors::Dtype;

/// Number of NaN or infinite values: all bits of their exponent are set.
pub(super) fn not_finite(bytes: &[u8], dtype: Dtype) -> u64 {
    let half = |exponent: u16| {
        let is = |b: &&[u8; 2]| u16::from_le_bytes(**b) & exponent == exponent;
        bytes.as_chunks::<2>().0.iter().filter(is).count()
    };
    let count = match dtype {
        Dtype::BF16 => half(0x7f80),
        Dtype::F16 => half(0x7c00),
        _ => bytes.as_chunks::<4>().0.iter().filter(|b| !f32::from_le_bytes(**b).is_finite()).count(),
    };
    count as u64
}

/// An error if `values`, elements of tensor `name`, are not finite, or are beyond `most`, the largest value of their
/// type `dtype` in the file: a model with such weights cannot be used or trained on.
pub(super) fn storable(name: &str, values: &[f32], dtype: &str, most: f32) -> Result<()> {
    match values.iter().find(|x| x.is_nan() || x.abs() > most) {
        None => Ok(()),
        Some(x) if x.is_finite() => Err(Error::Run(format!(
            "tensor {name} has the weight {x:e}, and the largest of {dtype} is {most:e}: choose a type with a wider range"
        ))),
        Some(x) => Err(Error::Run(format!(
            "tensor {name} has the value {x}: the model is lost, and is not saved. Lower --lr, or resume from an earlier \
             checkpoint"
        ))),
    }
}

/// The device dtype of such elements, if there is one.
pub(super) fn on_device(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Widens masters or moments, in f32 or bf16 at any address.
pub(super) fn widen_device(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::Bf16 => {
            let pairs = bytes.as_chunks::<2>().0;
            out.iter_mut().zip(pairs).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32());
        }
        _ => bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes),
    }
}

/// Widens elements to f32. bf16 and f16 need `bytes` aligned to 2.
pub(super) fn widen(bytes: &[u8], dtype: Dtype, out: &mut [f32]) {
    match dtype {
        Dtype::BF16 => bytemuck::cast_slice::<u8, bf16>(bytes).convert_to_f32_slice(out),
        Dtype::F16 => bytemuck::cast_slice::<u8, f16>(bytes).convert_to_f32_slice(out),
        _ => bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes),
    }
}
