//! Launches of casts to and from FP8, and of transposes. Never multiplies matrices.
use super::driver::Arg;
use super::launch::{GpuDevice, WARPS};
use crate::ops::{Coded, Dequantize, Encode, Quantize, RaiseScales};
use crate::{View, ViewMut};
use flatshard_base::fp8::{Fp8, Fp8Shape};
use flatshard_base::{DType, Error, Result};

/// Blocks are counted in 32 bits.
fn check(op: &'static str, shape: &Fp8Shape, ld: usize) -> Result<()> {
    let most = [shape.rows * shape.across(), shape.columns, ld].into_iter().max().unwrap_or(0);
    if most <= i32::MAX as usize {
        Ok(())
    } else {
        Err(Error::op(op, format!("a matrix of {shape:?}, rows {ld} apart")))
    }
}

pub fn quantize(gpu: &GpuDevice, op: Quantize) -> Result<()> {
    op.check()?;
    let across = op.shape.across();
    quantize_apart(gpu, op, [across, 1])
}

/// With the scales that far apart: of a row of blocks and the next, and within one. The operands are checked.
pub(super) fn quantize_apart(gpu: &GpuDevice, op: Quantize, apart: [usize; 2]) -> Result<()> {
    const OP: &str = Quantize::OP;
    let (shape, ld) = (op.shape, op.ld);
    check(OP, &shape, ld)?;
    let (variant, ctas) = match (shape.format, shape.tall) {
        (Fp8::E4m3, 1) => ("quantize_e4m3", shape.scales().div_ceil(WARPS)),
        (Fp8::E5m2, 1) => ("quantize_e5m2", shape.scales().div_ceil(WARPS)),
        (Fp8::E4m3, flatshard_base::fp8::BLOCK) => ("quantize_weight", shape.scales()),
        _ => return Err(Error::op(OP, format!("there is no kernel for {shape:?}"))),
    };
    let [rows, columns, ld] = [shape.rows, shape.columns, ld].map(|n| Arg::U32(n as u32));
    let [down, across] = apart.map(|n| Arg::U32(n as u32));
    let args = &mut [Arg::In(op.x), Arg::Out(op.bytes), Arg::Out(op.scales), rows, columns, ld, down, across];
    gpu.launch(variant, OP, ctas, args)
}

pub fn dequantize(gpu: &GpuDevice, op: Dequantize) -> Result<()> {
    const OP: &str = Dequantize::OP;
    op.check()?;
    let shape = op.shape;
    check(OP, &shape, shape.columns)?;
    let variant = match shape.format {
        Fp8::E4m3 => "dequantize_e4m3",
        Fp8::E5m2 => "dequantize_e5m2",
    };
    let [rows, columns, tall] = [shape.rows, shape.columns, shape.tall].map(|n| Arg::U32(n as u32));
    let args = &mut [Arg::In(op.bytes), Arg::In(op.scales), Arg::Out(op.y), rows, columns, tall];
    gpu.launch(variant, OP, (shape.rows * shape.across()).div_ceil(WARPS), args)
}

/// The variant for some elements of a weight and the numbers that describe them.
fn part<'a>(
    op: &'static str,
    [of_f32, of_bf16]: [&'static str; 2],
    (shape, at, x): (&Fp8Shape, usize, &View),
) -> Result<(&'static str, [Arg<'a>; 4])> {
    check(op, shape, shape.columns)?;
    if (shape.format, shape.tall) != (Fp8::E4m3, flatshard_base::fp8::BLOCK) {
        return Err(Error::op(op, format!("there is no kernel for {shape:?}")));
    }
    let ([at, len], [rows, columns]) = ([at, x.len()], [shape.rows, shape.columns]);
    let numbers = [Arg::U64(at as u64), Arg::U64(len as u64), Arg::U32(rows as u32), Arg::U32(columns as u32)];
    Ok((if x.dtype() == DType::F32 { of_f32 } else { of_bf16 }, numbers))
}

/// Rows that a warp of `raise_scales` reads.
const STRIP: usize = 16;

pub fn raise_scales(gpu: &GpuDevice, op: RaiseScales) -> Result<()> {
    op.check()?;
    let of = (&op.shape, op.at, &op.x);
    let (variant, [at, len, rows, columns]) = part(RaiseScales::OP, ["raise_scales_f32", "raise_scales_bf16"], of)?;
    let warps = op.shape.rows.div_ceil(STRIP) * op.shape.across();
    let args = &mut [Arg::In(op.x), Arg::InOut(op.scales), at, len, rows, columns];
    gpu.launch(variant, RaiseScales::OP, warps.div_ceil(WARPS), args)
}

pub fn encode(gpu: &GpuDevice, op: Encode) -> Result<()> {
    op.check()?;
    let of = (&op.shape, op.at, &op.x);
    let (variant, [at, len, rows, columns]) = part(Encode::OP, ["encode_f32", "encode_bf16"], of)?;
    let warps = op.shape.rows * op.shape.across();
    let args = &mut [Arg::In(op.x), Arg::In(op.scales), Arg::Out(op.bytes), at, len, rows, columns];
    gpu.launch(variant, Encode::OP, warps.div_ceil(WARPS), args)
}

/// Rows and columns that a warp of `transpose_codes` moves.
const TILE: usize = 32;

/// The transpose of a weight of `shape`: its codes, and its scales with rows [pitched](Fp8Shape::pitch). Sides are
/// multiples of 8, codes aligned to 8 bytes.
pub(super) fn transpose(gpu: &GpuDevice, shape: &Fp8Shape, from: Coded, [bytes, scales]: [ViewMut; 2]) -> Result<()> {
    const OP: &str = "transpose_codes";
    check(OP, shape, shape.columns)?;
    let [rows, columns] = [shape.rows, shape.columns].map(|n| Arg::U32(n as u32));
    let args = &mut [Arg::In(from.bytes), Arg::In(from.scales), Arg::Out(bytes), Arg::Out(scales), rows, columns];
    let tiles = shape.rows.div_ceil(TILE) * shape.columns.div_ceil(TILE);
    gpu.launch(OP, OP, tiles.div_ceil(WARPS), args)
}
