//! Launches of the gradient norm and the optimizers. Never knows their constants: those are in memory, computed in f64.
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{BLOCK, GpuDevice, by_dtype};
use crate::ViewMut;
use crate::ops::{AdamW, ClipScale, LIMBS, NORM_BLOCK, Polynomial, Sgd, SumSquares};
use flatshard_base::{DType, Error, Result, dynamic8};

/// Threads that add the CTAs' limbs, and those of the clip scale.
const FINISH: u32 = 1024;
const SCALE: u32 = 96;

pub fn sum_squares(gpu: &GpuDevice, op: SumSquares) -> Result<()> {
    const OP: &str = SumSquares::OP;
    op.check()?;
    let SumSquares { x, acc } = op;
    let n = x.len();
    // Eight lanes handle a block.
    let ctas = gpu.ctas(n.div_ceil(NORM_BLOCK * BLOCK as usize / 8));
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
    gpu.line(OP, OP, (1, SCALE), &mut [Arg::In(acc), Arg::Out(out), Arg::In(unscale), Arg::F32(max_norm)])
}

pub fn adamw(gpu: &GpuDevice, op: AdamW) -> Result<()> {
    const OP: &str = AdamW::OP;
    op.check()?;
    let rounds = op.rounds();
    let AdamW { h, scale, g, m, v, p, out, absmax, at } = op;
    let n = g.len();
    let copies = |out: DType| Err(Error::op(OP, format!("masters in bf16 are copied in bf16, not {out}")));
    let [key, first, before, row, skip] = [at.key, at.first, at.before, at.row, at.skip].map(Arg::U64);
    if let Some([of_m, of_v]) = absmax {
        const BLOCKS: &str = "adamw_blocks";
        let variant = match (p.dtype(), out.as_ref().map(ViewMut::dtype)) {
            (DType::F32, None) => BLOCKS,
            (DType::F32, Some(out)) => by_dtype!(OP, out, "adamw_blocks")?,
            (_, None) => "adamw_blocks_master",
            (_, Some(DType::Bf16)) => "adamw_blocks_master_bf16",
            (_, Some(out)) => return copies(out),
        };
        let scratch = gpu.scratch();
        let (g, m, v, p, out) =
            (Arg::In(g), Arg::InOut(m), Arg::InOut(v), Arg::InOut(p), out.map_or(Arg::Null, Arg::InOut));
        let (of_m, of_v, tables) = (Arg::InOut(of_m), Arg::InOut(of_v), Arg::In(scratch.tables.view()));
        let (h, scale, elements) = (Arg::In(h), Arg::In(scale), Arg::U64(n as u64));
        let args = &mut [g, m, v, p, out, of_m, of_v, tables, h, scale, elements, key, first, before, row, skip];
        // A warp takes a block.
        let parts = n.div_ceil(dynamic8::BLOCK * BLOCK as usize / 32);
        return gpu.launch(variant, BLOCKS, parts, &mut args[..if rounds { 16 } else { 11 }]);
    }
    let variant = match (m.dtype(), p.dtype(), out.as_ref().map(ViewMut::dtype)) {
        (DType::F32, DType::F32, None) => "adamw",
        (DType::F32, DType::F32, Some(out)) => by_dtype!(OP, out, "adamw")?,
        (_, DType::F32, None) => "adamw_moments",
        (_, DType::F32, Some(out)) => by_dtype!(OP, out, "adamw_moments")?,
        (DType::F32, _, None) => "adamw_master",
        (DType::F32, _, Some(DType::Bf16)) => "adamw_master_bf16",
        (_, _, None) => "adamw_both",
        (_, _, Some(DType::Bf16)) => "adamw_both_bf16",
        (_, _, Some(out)) => return copies(out),
    };
    let (g, m, v, p) = (Arg::In(g), Arg::InOut(m), Arg::InOut(v), Arg::InOut(p));
    let (out, h, scale, elements) = (out.map_or(Arg::Null, Arg::InOut), Arg::In(h), Arg::In(scale), Arg::U64(n as u64));
    let args = &mut [g, m, v, p, out, h, scale, elements, key, first, before, row, skip];
    gpu.each(variant, OP, n, DType::F32, &mut args[..if rounds { 13 } else { 8 }])
}

pub fn polynomial(gpu: &GpuDevice, op: Polynomial) -> Result<()> {
    const OP: &str = Polynomial::OP;
    let n = op.check()?;
    let Polynomial { coefficients: [a, b, c], scale, square, s } = op;
    let variant = if s.dtype() == DType::Bf16 { "polynomial_bf16" } else { "polynomial_f32" };
    let (all, next) = (n * n, n + 1); // from one element of the diagonal to the next
    let (square, s, scale, n) = (Arg::In(square), Arg::InOut(s), Arg::In(scale), Arg::U64(all as u64));
    let args = &mut [square, s, scale, n, Arg::U64(next as u64), Arg::F32(a), Arg::F32(b), Arg::F32(c)];
    gpu.each(variant, OP, all, DType::F32, args)
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
