//! Launches of casts to and from FP8. Never multiplies matrices.
use super::driver::Arg;
use super::launch::{BLOCK, GpuDevice};
use crate::base::fp8::{Fp8, Fp8Shape};
use crate::base::{Error, Result};
use crate::device::ops::{Dequantize, Quantize};

/// Warps per CTA.
const WARPS: usize = BLOCK as usize / 32;

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
    const OP: &str = Quantize::OP;
    op.check()?;
    let (shape, ld) = (op.shape, op.ld);
    check(OP, &shape, ld)?;
    let (variant, ctas) = match (shape.format, shape.tall) {
        (Fp8::E4m3, 1) => ("quantize_e4m3", shape.scales().div_ceil(WARPS)),
        (Fp8::E5m2, 1) => ("quantize_e5m2", shape.scales().div_ceil(WARPS)),
        (Fp8::E4m3, crate::base::fp8::BLOCK) => ("quantize_weight", shape.scales()),
        _ => return Err(Error::op(OP, format!("there is no kernel for {shape:?}"))),
    };
    let [rows, columns, ld] = [shape.rows, shape.columns, ld].map(|n| Arg::U32(n as u32));
    let args = &mut [Arg::In(op.x), Arg::Out(op.bytes), Arg::Out(op.scales), rows, columns, ld];
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
