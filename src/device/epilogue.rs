//! What follows a matrix product while its result is still in registers, where a device can: biases, the residual
//! stream, GELU. And the same in passes of their own, which any device can. Never chooses: `nn` asks by
//! [`Device::gemm_then`].
//!
//! Bytes of memory that a layer of N tokens, C channels and 4 C of them inside moves less, 16-bit: each bias 4 N a
//! column (read and written again), the residual stream 4 N C of 6 N C a branch, GELU 8 N C forward (its input is read
//! no more) and 16 N C backward (the product's gradient is neither written nor read twice). GPT-2: biases 36, streams
//! 8, GELU 24, together 68 N C bytes a layer.
use super::ops::{Bias, Epilogue, Gelu, GeluBackward, Gemm, GemmThen};
use super::{Device, View, ViewMut};
use crate::base::Result;

/// The product first, then a pass for each thing that follows.
pub fn in_passes(dev: &dyn Device, op: GemmThen) -> Result<()> {
    op.check()?;
    let GemmThen { shape, a, b, mut c, then } = op;
    let biased = |bias: Option<View>, mut y: ViewMut| -> Result<()> {
        dev.gemm(Gemm { shape, a, b, c: y.reborrow() })?;
        bias.map_or(Ok(()), |bias| dev.bias(Bias { bias, y }))
    };
    match then {
        Epilogue::Sum { bias, residual } => {
            biased(bias, c.reborrow())?;
            residual.map_or(Ok(()), |x| dev.add(x, c))
        }
        Epilogue::Gelu { bias, mut z } => {
            biased(bias, z.reborrow())?;
            dev.gelu(Gelu { x: z.as_view(), y: c })
        }
        Epilogue::GeluBackward { z, mut product } => {
            dev.gemm(Gemm { shape, a, b, c: product.reborrow() })?;
            dev.gelu_backward(GeluBackward { x: z, dy: product.as_view(), dx: c })
        }
    }
}
