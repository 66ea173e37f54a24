//! How fast this device multiplies matrices when nothing else is asked of it: what `mfu` is measured against.
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Collective, Tag};
use crate::device::Device;
use crate::device::ops::{Gemm, GemmShape};
use std::sync::Arc;
use std::time::Instant;

const SIDE: usize = 1024;
const ROUNDS: usize = 6;

/// FLOP/s of the best of several square products in `dtype`. All ranks measure together: they share caches and clocks,
/// as they do in training.
pub fn flops(device: &dyn Device, dtype: DType, group: &Arc<dyn Collective>) -> Result<f64> {
    let alloc = || device.alloc(dtype, SIDE * SIDE, Category::Scratch);
    let (mut a, mut b, mut c) = (alloc()?, alloc()?, alloc()?);
    // Not zeros, which some units multiply faster.
    let bytes: Vec<u8> = match dtype {
        DType::F16 => [0x00, 0x3c].repeat(SIDE * SIDE),
        DType::Bf16 => [0x80, 0x3f].repeat(SIDE * SIDE),
        _ => [0x00, 0x00, 0x80, 0x3f].repeat(SIDE * SIDE),
    };
    device.upload(&bytes, a.view_mut())?;
    device.upload(&bytes, b.view_mut())?;
    let (mut best, mut last) = (f64::INFINITY, [0; 8]);
    for _ in 0..ROUNDS {
        group.barrier(Tag::new("peak", 0))?;
        let started = Instant::now();
        let shape = GemmShape::nt(SIDE, SIDE, SIDE);
        device.gemm(Gemm { shape, a: a.view(), b: b.view(), c: c.view_mut() })?;
        device.download(c.view().slice(0..1), &mut last[..dtype.size()])?; // a device may have only enqueued it
        best = best.min(started.elapsed().as_secs_f64());
    }
    if best <= 0.0 {
        return Err(Error::op("measure-peak", "the clock did not move"));
    }
    Ok(2.0 * (SIDE as f64).powi(3) / best)
}
