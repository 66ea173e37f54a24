//! What follows a matrix product while its result is still in registers, where a device can: biases, the residual stream, GELU. And the
//! same in passes of their own, which any device can. Never chooses: `nn` asks by [`Device::gemm_then`].
//!
//! Bytes of memory that a layer of N tokens, C channels and 4 C of them inside moves less, 16-bit: each bias 4 N a column (read and
//! written again), the residual stream 4 N C of 6 N C a branch, GELU 8 N C forward (its input is read no more) and 16 N C backward (the
//! product's gradient is neither written nor read twice). GPT-2: biases 36, streams 8, GELU 24, together 68 N C bytes a layer.
use super::{Device, Gemm, View, ViewMut};
use crate::base::{Error, Result};

/// Of `C (m, n) = A B`, rows of n elements without gaps.
pub enum Epilogue<'a> {
    /// `C = A B + bias (n) + residual (m, n)`.
    Sum { bias: Option<View<'a>>, residual: Option<View<'a>> },
    /// `z (m, n) = A B + bias (n)`, kept for backward, and `C = gelu(z)`. Assigns both.
    Gelu { bias: Option<View<'a>>, z: ViewMut<'a> },
    /// `C = A B gelu'(z)`. `product` is scratch like C.
    GeluBackward { z: View<'a>, product: ViewMut<'a> },
}

impl Epilogue<'_> {
    /// Operands of the product's own shape and of C's type.
    pub fn check(&self, shape: &Gemm, a: &View, b: &View, c: &ViewMut) -> Result<()> {
        const OP: &str = "gemm_then";
        shape.check(a, b, c)?;
        if shape.accumulate || shape.ldc != shape.n {
            return Err(Error::op(OP, format!("assigns rows without gaps, got {shape:?}")));
        }
        let (dtype, len) = (c.dtype(), shape.m * shape.n);
        let bias = |bias: &Option<View>| bias.map_or(Ok(()), |b| b.fits(OP, "bias", dtype, shape.n));
        c.fits(OP, "c", dtype, len)?;
        match self {
            Epilogue::Sum { bias: b, residual } => {
                bias(b)?;
                residual.map_or(Ok(()), |x| x.fits(OP, "residual", dtype, len))
            }
            Epilogue::Gelu { bias: b, z } => {
                bias(b)?;
                z.fits(OP, "z", dtype, len)
            }
            Epilogue::GeluBackward { z, product } => {
                z.fits(OP, "z", dtype, len)?;
                product.fits(OP, "product", dtype, len)
            }
        }
    }
}

/// The product first, then a pass for each thing that follows.
pub fn in_passes(
    dev: &(impl Device + ?Sized),
    shape: &Gemm,
    a: View,
    b: View,
    mut c: ViewMut,
    then: Epilogue,
) -> Result<()> {
    let biased = |bias: Option<View>, mut y: ViewMut| -> Result<()> {
        dev.gemm(shape, a, b, y.reborrow())?;
        bias.map_or(Ok(()), |bias| dev.bias(bias, y))
    };
    match then {
        Epilogue::Sum { bias, residual } => {
            biased(bias, c.reborrow())?;
            residual.map_or(Ok(()), |x| dev.add(x, c))
        }
        Epilogue::Gelu { bias, mut z } => {
            biased(bias, z.reborrow())?;
            dev.gelu(z.as_view(), c)
        }
        Epilogue::GeluBackward { z, mut product } => {
            dev.gemm(shape, a, b, product.reborrow())?;
            dev.gelu_backward(z, product.as_view(), c)
        }
    }
}
