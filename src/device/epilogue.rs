//! What follows a matrix product while its result is still in registers, where a device can: biases, the residual stream, GELU. And the
//! same in passes of their own, which any device can. Never chooses: `nn` asks by [`Device::gemm_then`].
//!
//! Bytes of memory that a layer of N tokens, C channels and 4 C of them inside moves less, 16-bit: each bias 4 N a column (read and
//! written again), the residual stream 4 N C of 6 N C a branch, GELU 8 N C forward (its input is read no more) and 16 N C backward (the
//! product's gradient is neither written nor read twice). GPT-2: biases 36, streams 8, GELU 24, together 68 N C bytes a layer.
use super::{Device, Epilogue, Gemm, View, ViewMut};
use crate::base::Result;

/// The product first, then a pass for each thing that follows.
pub fn in_passes(dev: &dyn Device, shape: &Gemm, a: View, b: View, mut c: ViewMut, then: Epilogue) -> Result<()> {
    then.check(shape, &a, &b, &c)?;
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
