//! Casts to and from FP8. Never divides a block over threads.
use crate::ops::{Dequantize, Encode, Quantize, RaiseScales};
use flatshard_base::Result;
use flatshard_base::dtype::Float;
use flatshard_base::fp8::BLOCK;
use half::bf16;

#[inline(always)]
pub(super) fn quantize(op: Quantize) -> Result<()> {
    op.check()?;
    let Quantize { shape, x, ld, bytes, scales } = op;
    let (x, bytes) = (x.host::<bf16>(Quantize::OP)?, bytes.host::<u8>(Quantize::OP)?);
    let scales = scales.host::<f32>(Quantize::OP)?;
    for (band, scales) in scales.chunks_exact_mut(shape.across().max(1)).enumerate() {
        let rows = band * shape.tall..shape.rows.min((band + 1) * shape.tall);
        for (at, scale) in (0..shape.columns).step_by(BLOCK).zip(scales) {
            let width = BLOCK.min(shape.columns - at);
            let part = |row: usize| &x[row * ld + at..][..width];
            // As integers, magnitudes are in the order of numbers, and NaN is above all of them.
            let largest =
                rows.clone().flat_map(part).fold(0, |most, x| most.max(Float::to_f32(*x).to_bits() & 0x7fff_ffff));
            *scale = shape.format.scale(largest);
            let inverse = 1.0 / *scale;
            for row in rows.clone() {
                let codes = &mut bytes[row * shape.columns + at..][..width];
                codes
                    .iter_mut()
                    .zip(part(row))
                    .for_each(|(code, x)| *code = shape.format.encode(Float::to_f32(*x) * inverse));
            }
        }
    }
    Ok(())
}

#[inline(always)]
pub(super) fn raise_scales<T: Float>(op: RaiseScales) -> Result<()> {
    op.check()?;
    let RaiseScales { shape, at, x, scales } = op;
    let (x, scales) = (x.host::<T>(RaiseScales::OP)?, scales.host::<f32>(RaiseScales::OP)?);
    for (block, piece) in shape.pieces(at..at + x.len()) {
        let magnitude = |x: &T| rounded(*x).to_bits() & 0x7fff_ffff;
        let largest = x[piece].iter().fold(0, |most, x| most.max(magnitude(x)));
        scales[block] = scales[block].max(shape.format.scale(largest));
    }
    Ok(())
}

#[inline(always)]
pub(super) fn encode<T: Float>(op: Encode) -> Result<()> {
    op.check()?;
    let Encode { shape, at, x, scales, bytes } = op;
    let (x, scales) = (x.host::<T>(Encode::OP)?, scales.host::<f32>(Encode::OP)?);
    let bytes = bytes.host::<u8>(Encode::OP)?;
    for (block, piece) in shape.pieces(at..at + x.len()) {
        let inverse = 1.0 / scales[block];
        let codes = bytes[piece.clone()].iter_mut().zip(&x[piece]);
        codes.for_each(|(code, x)| *code = shape.format.encode(rounded(*x) * inverse));
    }
    Ok(())
}

/// To bf16.
#[inline(always)]
fn rounded<T: Float>(x: T) -> f32 {
    Float::to_f32(<bf16 as Float>::from_f32(x.to_f32()))
}

#[inline(always)]
pub(super) fn dequantize(op: Dequantize) -> Result<()> {
    op.check()?;
    let Dequantize { shape, bytes, scales, y } = op;
    let (bytes, scales) = (bytes.host::<u8>(Dequantize::OP)?, scales.host::<f32>(Dequantize::OP)?);
    let (values, columns) = (shape.format.values(), shape.columns.max(1));
    let rows = bytes.chunks_exact(columns).zip(y.host::<bf16>(Dequantize::OP)?.chunks_exact_mut(columns));
    for (row, (codes, y)) in rows.enumerate() {
        let scales = &scales[row / shape.tall * shape.across()..];
        for ((codes, y), scale) in codes.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).zip(scales) {
            codes.iter().zip(y).for_each(|(code, y)| *y = Float::from_f32(values[*code as usize] * scale));
        }
    }
    Ok(())
}
