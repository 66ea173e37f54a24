//! Launch of the expansion of 4-bit weights. Never multiplies.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, by_dtype};
use super::scratch::CTAS;
use crate::ops::Expand;
use flatshard_base::nf4;
use flatshard_base::{Error, Result};

pub fn expand(gpu: &GpuDevice, op: Expand) -> Result<()> {
    const OP: &str = Expand::OP;
    op.check()?;
    let variant = by_dtype!(OP, op.y.dtype(), "expand")?;
    let (rows, pairs, width, shape) = (op.rows.len(), op.columns.len() / 2, op.from.width, op.from.shape);
    if rows * pairs == 0 {
        return Ok(());
    }
    // Blocks are counted in 32 bits.
    if shape.whole / nf4::BLOCK > u32::MAX as usize {
        return Err(Error::op(OP, format!("a matrix of {} elements", shape.whole)));
    }
    let across = (pairs as u32).div_ceil(BLOCK);
    let down = (CTAS * gpu.driver.multiprocessors()).div_ceil(across).clamp(1, rows.min(65535) as u32);
    let launch = LaunchShape { grid: [across, down, 1], block: [BLOCK, 1, 1], shared: 0 };
    let first = (op.rows.start * width + op.columns.start) as u64;
    let [rows, pairs, width] = [rows, pairs, width].map(|n| Arg::U32(n as u32));
    let [scales, factors, mean] =
        [shape.scales(), shape.factors(), shape.mean()].map(|range| Arg::U64(range.start as u64));
    let [run, before, stride] = [shape.run, shape.before, shape.stride].map(|n| Arg::U32((n / nf4::BLOCK) as u32));
    let (bytes, y) = (Arg::In(op.from.bytes), Arg::Out(op.y));
    let args = &mut [bytes, y, rows, pairs, width, Arg::U64(first), scales, factors, mean, run, before, stride];
    gpu.driver.launch(Kernel { variant, entry: OP }, launch, args)
}
