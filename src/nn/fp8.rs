//! Operands of a product in FP8. Never multiplies them, and never chooses the matrices: [`super::tuning`] does.
//!
//! Activations, and the gradients that come back, have a scale for each 128 columns of a token, so a token's numbers do
//! not depend on the others of its micro-batch. Weights have one for each block of 128 x 128 of this rank's part.
//! cuBLASLt knows these scales (`VEC128_32F` and `BLK128x128_32F`). Here the operands are cast to bytes and back, and
//! multiplied in bf16: [`crate::base::fp8`] says why these are the same products.
use super::context::Cx;
use super::saved::Fp8Scratch;
use crate::base::Result;
use crate::base::fp8::{Fp8, Fp8Shape};
use crate::device::View;
use crate::device::ops::{Dequantize, GemmShape, Quantize};

/// Rounds `a`, the left operand of a product of `shape`, in `format`; and `b`, a whole weight.
pub fn operands<'a>(
    cx: &Cx,
    shape: GemmShape,
    (format, a): (Fp8, View<'a>),
    (weight, b): (Fp8Shape, View<'a>),
    work: &'a mut Fp8Scratch,
) -> Result<(GemmShape, View<'a>, View<'a>)> {
    let tokens = Fp8Shape::tokens(format, shape.m, shape.k);
    let Fp8Scratch { bytes, scales, rows, weight: whole } = work;
    for (shape, x, ld, to) in [(tokens, a, shape.lda, &mut *rows), (weight, b, weight.columns, &mut *whole)] {
        let (len, blocks) = (0..shape.len(), 0..shape.scales());
        let (mut bytes, mut scales) = (bytes.all_mut().slice(len.clone()), scales.all_mut().slice(blocks));
        cx.dev.quantize(Quantize { shape, x, ld, bytes: bytes.reborrow(), scales: scales.reborrow() })?;
        let y = to.all_mut().slice(len);
        cx.dev.dequantize(Dequantize { shape, bytes: bytes.as_view(), scales: scales.as_view(), y })?;
    }
    Ok((shape.lda(tokens.columns), rows.all().slice(0..tokens.len()), whole.all().slice(0..weight.len())))
}
