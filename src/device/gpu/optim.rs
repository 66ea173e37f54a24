//! Launches of the gradient norm and the optimizers. Never knows their constants: those are in memory, worked out in f64.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, by_dtype};
use crate::base::{DType, Error, Result};
use crate::device::ops::AdamWScalars;
use crate::device::{ALIGN, LIMBS, Sgd, View, ViewMut};

/// Threads that add up the CTAs' limbs.
const FINISH: u32 = 96;

pub fn sum_squares(gpu: &GpuDevice, x: View, mut acc: ViewMut) -> Result<()> {
    const OP: &str = "sum_squares";
    let n = x.len();
    x.fits(OP, "x", DType::F32, n)?;
    acc.fits(OP, "acc", DType::F64, LIMBS)?;
    // Eight lanes take a block of ALIGN elements.
    let ctas = gpu.ctas(n.div_ceil(ALIGN * BLOCK as usize / 8));
    if ctas == 0 {
        return Ok(());
    }
    let mut scratch = gpu.scratch();
    let (mut limbs, _) = scratch.limbs.view_mut().split_at(ctas as usize * LIMBS);
    let first = Kernel { variant: OP, entry: OP };
    let args = &mut [Arg::In(x), Arg::Out(limbs.reborrow()), Arg::U64(n as u64)];
    gpu.driver.launch(first, LaunchShape::line(ctas, BLOCK), args)?;
    let args = &mut [Arg::In(limbs.as_view()), Arg::InOut(acc.reborrow()), Arg::U32(ctas)];
    gpu.driver.launch(Kernel { variant: OP, entry: "sum_squares_finish" }, LaunchShape::line(1, FINISH), args)
}

pub fn clip_scale(gpu: &GpuDevice, acc: View, max_norm: f32, unscale: View, out: ViewMut) -> Result<()> {
    const OP: &str = "clip_scale";
    acc.fits(OP, "acc", DType::F64, LIMBS)?;
    out.fits(OP, "out", DType::F32, 2)?;
    unscale.fits(OP, "unscale", DType::F32, 1)?;
    gpu.line(OP, OP, (1, FINISH), &mut [Arg::In(acc), Arg::Out(out), Arg::In(unscale), Arg::F32(max_norm)])
}

/// Of the constants, scale and g; m, v and p.
pub fn adamw(gpu: &GpuDevice, [h, scale, g]: [View; 3], [m, v, p]: [ViewMut; 3], out: Option<ViewMut>) -> Result<()> {
    const OP: &str = "adamw";
    let n = g.len();
    h.fits(OP, "h", DType::F32, AdamWScalars::LEN)?;
    scale_fits(OP, &scale)?;
    g.fits(OP, "g", DType::F32, n)?;
    m.fits(OP, "m", DType::F32, n)?;
    v.fits(OP, "v", DType::F32, n)?;
    p.fits(OP, "p", DType::F32, n)?;
    let (variant, out) = match out {
        None => ("adamw", Arg::Null),
        Some(out) => {
            out.fits(OP, "out", out.dtype(), n)?;
            (by_dtype!(OP, out.dtype(), "adamw")?, Arg::InOut(out))
        }
    };
    let (g, m, v, p) = (Arg::In(g), Arg::InOut(m), Arg::InOut(v), Arg::InOut(p));
    let args = &mut [g, m, v, p, out, Arg::In(h), Arg::In(scale), Arg::U64(n as u64)];
    gpu.each(variant, OP, n, DType::F32, args)
}

/// Of the constants, scale and g.
pub fn sgd(
    gpu: &GpuDevice,
    [h, scale, g]: [View; 3],
    m: Option<ViewMut>,
    p: ViewMut,
    out: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "sgd";
    let n = g.len();
    h.fits(OP, "h", DType::F32, Sgd::LEN)?;
    scale_fits(OP, &scale)?;
    g.fits(OP, "g", DType::F32, n)?;
    p.fits(OP, "p", DType::F32, n)?;
    let dtype = out.as_ref().map(ViewMut::dtype);
    let variant = match (&m, dtype) {
        (None, None) => "sgd",
        (Some(_), None) => "sgd_momentum",
        (None, Some(dtype)) => by_dtype!(OP, dtype, "sgd")?,
        (Some(_), Some(dtype)) => by_dtype!(OP, dtype, "sgd_momentum")?,
    };
    if let Some(m) = &m {
        m.fits(OP, "m", DType::F32, n)?;
    }
    if let Some(out) = &out {
        out.fits(OP, "out", out.dtype(), n)?;
    }
    let (m, out) = (m.map_or(Arg::Null, Arg::InOut), out.map_or(Arg::Null, Arg::InOut));
    let args = &mut [Arg::In(g), m, Arg::InOut(p), out, Arg::In(h), Arg::In(scale), Arg::U64(n as u64)];
    gpu.each(variant, OP, n, DType::F32, args)
}

/// Its first element is the clip scale.
fn scale_fits(op: &'static str, scale: &View) -> Result<()> {
    match scale.is_empty() {
        true => Err(Error::op(op, "scale holds 0 elements, needs at least 1")),
        false => scale.fits(op, "scale", DType::F32, scale.len()),
    }
}
