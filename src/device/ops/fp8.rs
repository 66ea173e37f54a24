//! Operands of casts to and from FP8.
use crate::base::fp8::Fp8Shape;
use crate::base::{DType, Error, Result};
use crate::device::{View, ViewMut};

/// Each block's scale, and its elements divided by it: [`crate::base::fp8`]. Assigns.
pub struct Quantize<'a> {
    pub shape: Fp8Shape,
    /// bf16: rows of `shape.columns` elements, `ld` apart.
    pub x: View<'a>,
    pub ld: usize,
    /// u8 (rows, columns)
    pub bytes: ViewMut<'a>,
    /// f32, one for each block.
    pub scales: ViewMut<'a>,
}

impl Quantize<'_> {
    pub const OP: &'static str = "quantize";
    pub fn check(&self) -> Result<()> {
        let Quantize { shape, x, ld, bytes, scales } = self;
        bytes.fits(Self::OP, "bytes", DType::U8, shape.len())?;
        scales.fits(Self::OP, "scales", DType::F32, shape.scales())?;
        let need = shape.rows.checked_sub(1).map_or(0, |rows| rows * ld + shape.columns);
        if x.dtype() != DType::Bf16 || *ld < shape.columns || x.len() < need {
            let (dtype, len) = (x.dtype(), x.len());
            return Err(Error::op(
                Self::OP,
                format!("{shape:?} needs {need} of bf16, rows {ld} apart: {len} of {dtype}"),
            ));
        }
        Ok(())
    }
}

/// `y` = value times the block's scale, which bf16 has exactly. Assigns.
pub struct Dequantize<'a> {
    pub shape: Fp8Shape,
    /// As in [`Quantize`].
    pub bytes: View<'a>,
    pub scales: View<'a>,
    /// bf16 (rows, columns)
    pub y: ViewMut<'a>,
}

impl Dequantize<'_> {
    pub const OP: &'static str = "dequantize";
    pub fn check(&self) -> Result<()> {
        let Dequantize { shape, bytes, scales, y } = self;
        bytes.fits(Self::OP, "bytes", DType::U8, shape.len())?;
        scales.fits(Self::OP, "scales", DType::F32, shape.scales())?;
        y.fits(Self::OP, "y", DType::Bf16, shape.len())
    }
}
