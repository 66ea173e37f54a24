//! Epilogues of a matrix product, applied while its result is in registers if the device can: biases, the residual
//! stream, GELU. Also as separate passes, which any device can do. Never chooses: `nn` calls [`Device::gemm_then`].
//!
//! Bytes of memory traffic that fusion saves per layer of N tokens, C channels and 4 C hidden channels, in 16 bits:
//! each bias 4 N per column (read and write), the residual stream 4 N C of 6 N C per branch, GELU 8 N C forward (its
//! input is not read back) and 16 N C backward (the product's gradient is neither written nor read again). GPT-2:
//! biases 36, streams 8, GELU 24, together 68 N C bytes per layer.
use super::ops::{Bias, Epilogue, Gelu, GeluBackward, Gemm, GemmThen};
use super::{Device, View, ViewMut};
use flatshard_base::Result;

/// The product first, then one pass per epilogue.
pub fn in_passes(dev: &dyn Device, op: GemmThen) -> Result<()> {
    op.check()?;
    let GemmThen { shape, a, b, c, then } = op;
    after(dev, c, then, |c| dev.gemm(Gemm { shape, a, b, c }))
}

/// The passes after `product`, which assigns.
pub fn after(
    dev: &dyn Device,
    mut c: ViewMut,
    then: Epilogue,
    product: impl FnOnce(ViewMut) -> Result<()>,
) -> Result<()> {
    let biased = |bias: Option<View>, mut y: ViewMut| -> Result<()> {
        product(y.reborrow())?;
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
        Epilogue::GeluBackward { z, product: mut dy } => {
            biased(None, dy.reborrow())?;
            dev.gelu_backward(GeluBackward { x: z, dy: dy.as_view(), dx: c })
        }
    }
}
