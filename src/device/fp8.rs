//! Products in FP8 where a device has none: operands are cast to bytes and back and multiplied in bf16, which gives the
//! same products ([`flatshard_base::fp8`] says why), in more time. Never chooses: `nn` calls [`Device::fp8_gemm`].
//!
//! Activations, and the gradients that come back, have a scale for each 128 columns of a token, so a token's numbers do
//! not depend on the others of its micro-batch. Weights have one for each block of 128 x 128 of this rank's part. A GPU
//! whose library knows such scales multiplies the bytes: `gpu/scaled.rs`.
use super::ops::{Coded, Dequantize, Fp8Gemm, Fp8Values, Fp8Work, Gemm, GemmThen, Quantize};
use super::{Device, View, ViewMut};
use flatshard_base::Result;
use flatshard_base::fp8::Fp8Shape;

pub fn in_bf16(dev: &dyn Device, op: Fp8Gemm) -> Result<()> {
    op.check()?;
    let (tokens, Fp8Gemm { shape, a, b, c, then, work, .. }) = (op.tokens(), op);
    let Fp8Work { mut bytes, mut scales, mut rows, mut weight } = work;
    let mut round = |shape: Fp8Shape, x: View, ld: usize, y: ViewMut| -> Result<()> {
        let mut bytes = bytes.reborrow().slice(0..shape.len());
        let mut scales = scales.reborrow().slice(0..shape.scales());
        dev.quantize(Quantize { shape, x, ld, bytes: bytes.reborrow(), scales: scales.reborrow() })?;
        dev.dequantize(Dequantize { shape, bytes: bytes.as_view(), scales: scales.as_view(), y })
    };
    round(tokens, a, shape.lda, rows.reborrow().slice(0..tokens.len()))?;
    let y = weight.reborrow().slice(0..b.shape.len());
    match b.values {
        Fp8Values::Whole(x) => round(b.shape, x, b.shape.columns, y)?,
        Fp8Values::Coded(Coded { bytes, scales }) => dev.dequantize(Dequantize { shape: b.shape, bytes, scales, y })?,
    }
    let held = b.rows.start * b.shape.columns..b.rows.end * b.shape.columns;
    let (shape, a, b) =
        (shape.lda(tokens.columns), rows.as_view().slice(0..tokens.len()), weight.as_view().slice(held));
    match then {
        Some(then) => dev.gemm_then(GemmThen { shape, a, b, c, then }),
        None => dev.gemm(Gemm { shape, a, b, c }),
    }
}
