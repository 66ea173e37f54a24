//! Launches of the gradient norm and the optimizers. Never knows their constants: those are in memory, computed in f64.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, by_dtype};
use crate::base::{DType, Result};
use crate::device::ViewMut;
use crate::device::ops::{ALIGN, AdamW, ClipScale, LIMBS, Sgd, SumSquares};

/// Threads that add the CTAs' limbs.
const FINISH: u32 = 96;

pub fn sum_squares(gpu: &GpuDevice, op: SumSquares) -> Result<()> {
    const OP: &str = SumSquares::OP;
    op.check()?;
    let SumSquares { x, acc } = op;
    let n = x.len();
    // Eight lanes handle a block of ALIGN elements.
    let ctas = gpu.ctas(n.div_ceil(ALIGN * BLOCK as usize / 8));
    if ctas == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let (mut limbs, _) = scratch.limbs.view_mut().split_at(ctas as usize * LIMBS);
    let first = Kernel { variant: OP, entry: OP };
    let args = &mut [Arg::In(x), Arg::Out(limbs.reborrow()), Arg::U64(n as u64)];
    gpu.driver.launch(first, LaunchShape::line(ctas, BLOCK), args)?;
    let args = &mut [Arg::In(limbs.as_view()), Arg::InOut(acc), Arg::U32(ctas)];
    gpu.driver.launch(Kernel { variant: OP, entry: "sum_squares_finish" }, LaunchShape::line(1, FINISH), args)
}

pub fn clip_scale(gpu: &GpuDevice, op: ClipScale) -> Result<()> {
    const OP: &str = ClipScale::OP;
    op.check()?;
    let ClipScale { acc, max_norm, unscale, out } = op;
    gpu.line(OP, OP, (1, FINISH), &mut [Arg::In(acc), Arg::Out(out), Arg::In(unscale), Arg::F32(max_norm)])
}

pub fn adamw(gpu: &GpuDevice, op: AdamW) -> Result<()> {
    const OP: &str = AdamW::OP;
    op.check()?;
    let AdamW { h, scale, g, m, v, p, out } = op;
    let n = g.len();
    let (variant, out) = match out {
        None => ("adamw", Arg::Null),
        Some(out) => (by_dtype!(OP, out.dtype(), "adamw")?, Arg::InOut(out)),
    };
    let (g, m, v, p) = (Arg::In(g), Arg::InOut(m), Arg::InOut(v), Arg::InOut(p));
    let args = &mut [g, m, v, p, out, Arg::In(h), Arg::In(scale), Arg::U64(n as u64)];
    gpu.each(variant, OP, n, DType::F32, args)
}

pub fn sgd(gpu: &GpuDevice, op: Sgd) -> Result<()> {
    const OP: &str = Sgd::OP;
    op.check()?;
    let Sgd { h, scale, g, m, p, out } = op;
    let n = g.len();
    let dtype = out.as_ref().map(ViewMut::dtype);
    let variant = match (&m, dtype) {
        (None, None) => "sgd",
        (Some(_), None) => "sgd_momentum",
        (None, Some(dtype)) => by_dtype!(OP, dtype, "sgd")?,
        (Some(_), Some(dtype)) => by_dtype!(OP, dtype, "sgd_momentum")?,
    };
    let (m, out) = (m.map_or(Arg::Null, Arg::InOut), out.map_or(Arg::Null, Arg::InOut));
    let args = &mut [Arg::In(g), m, Arg::InOut(p), out, Arg::In(h), Arg::In(scale), Arg::U64(n as u64)];
    gpu.each(variant, OP, n, DType::F32, args)
}
