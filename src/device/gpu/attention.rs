//! Launches of attention: whole documents, and the passes of ring attention. Chooses the family of kernels by
//! architecture, element type and head size; `kernels/attention_shape.ptx` documents their common arguments.
//!
//! Never reads the documents, which only the GPU has. Rows that are not those of documents that follow one another give
//! wrong numbers, but no out-of-bounds access.
// Shared by all attention kernels.
mod launch;
// The kernels for sm_90a.
mod hopper;

use self::launch::{Gradients, TailArgs, VECTOR, args, launch};
use super::driver::{Arg, Kernel, LaunchShape};
use super::launch::{GpuDevice, SM_90A, WARPS, by_dtype};
use crate::ops::{
    Attention, AttentionBackward, AttentionDelta, AttentionPaged, AttentionPass, AttentionPassBackward, AttentionShape,
    HeadSinks, HeadSinksBackward,
};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};
use flatshard_ptx::kernels::attention::{self, AttentionFamily, MOST};

/// The kernels for this call. Falls back to the slow row kernels if the operands' start addresses are not aligned for
/// tiles.
fn family(op: &'static str, dtype: DType, a: &AttentionShape, starts: &[usize]) -> Result<&'static AttentionFamily> {
    let none = || match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => {
            Error::op(op, format!("head_dim {} exceeds the limit of {MOST}", a.head_dim))
        }
        other => Error::op(op, format!("computes in f32, bf16 or f16, got {other}")),
    };
    let aligned = starts.iter().all(|at| at % VECTOR == 0);
    let tiles = attention::sm_80_family(dtype.name(), a.head_dim, a.softcap).filter(|_| aligned);
    tiles.or_else(|| attention::plain_family(dtype.name(), a.head_dim)).ok_or_else(none)
}

/// Start address of an operand that may be empty.
fn start(of: View) -> usize {
    if of.is_empty() { 0 } else { of.address() }
}

/// All gradients, from qkv, kv, d_o, lse and delta, with the keys each query attends to and the queries that attend to
/// each key.
fn gradients(
    gpu: &GpuDevice,
    (family, hopper): (&AttentionFamily, Option<&hopper::HopperFamily>),
    a: &AttentionShape,
    tails: [&TailArgs; 2],
    given: [View; 5],
    sums: ViewMut,
    mut to: Gradients,
) -> Result<()> {
    if let Some(hopper) = hopper {
        let [q, kv, d_o, ..] = given;
        return hopper::gradients(gpu, &hopper.backward, a, tails, [q, kv, d_o], sums, to);
    }
    let [of_queries, of_keys] = tails;
    let [q, kv, d_o, lse, delta] = given.map(Arg::In);
    let args = args!(*of_queries, a; q, kv, d_o, lse, delta, Arg::InOut(to.of_queries()));
    launch(gpu, &family.dq, of_queries.queries, a.heads, args)?;
    for kernel in family.dkv {
        let [q, kv, d_o, lse, delta] = given.map(Arg::In);
        let args = args!(*of_keys, a; q, kv, d_o, lse, delta, Arg::InOut(to.of_keys()));
        launch(gpu, kernel, of_keys.keys, a.kv_heads, args)?;
    }
    Ok(())
}

/// Scratch of backward on a GPU of architecture `arch`.
pub fn sums_of(arch: u32, a: &AttentionShape, dtype: DType, queries: usize) -> usize {
    if arch == SM_90A { hopper::sums(a, dtype, queries) } else { 0 }
}

fn delta_of(
    gpu: &GpuDevice,
    family: &AttentionFamily,
    a: &AttentionShape,
    [o, d_o, lse]: [View; 3],
    delta: ViewMut,
    sums: ViewMut,
) -> Result<()> {
    let rows = d_o.len() / (a.heads * a.head_dim);
    let shape = [rows, a.heads, a.head_dim].map(|n| Arg::U32(n as u32));
    let [n, heads, dim] = shape;
    let (lse, numbers) = match hopper::numbers_of(a, rows, sums) {
        Some((numbers, _)) => (Arg::In(lse), Arg::Out(numbers)),
        None => (Arg::Null, Arg::Null),
    };
    let args = &mut [Arg::In(o), Arg::In(d_o), lse, Arg::Out(delta), numbers, n, heads, dim];
    launch(gpu, &family.delta, rows, a.heads, args)
}

pub fn forward(gpu: &GpuDevice, op: Attention) -> Result<()> {
    const OP: &str = Attention::OP;
    let (n, a) = (op.check()?, &op.shape);
    let Attention { documents, qkv, o, lse, .. } = op;
    let width = a.width();
    let family = family(OP, qkv.dtype(), a, &[qkv.address(), o.address()])?;
    if n == 0 {
        return Ok(());
    }
    let (row, kv) = (a.row(), qkv.slice(width..qkv.len()));
    let tail = TailArgs { bounds: documents, packed: true, queries: n, keys: n, q_row: row, kv_row: row, out_row: 0 };
    if let Some(hopper) =
        hopper::family(gpu, hopper::FORWARD, qkv.dtype(), a, &[qkv.address(), kv.address(), o.address()])
    {
        return hopper::forward(gpu, hopper, a, &tail, [qkv, kv], o, lse);
    }
    let args = args!(tail, a; Arg::In(qkv), Arg::In(kv), Arg::Out(o), Arg::Out(lse));
    launch(gpu, &family.forward, n, a.heads, args)
}

pub fn backward(gpu: &GpuDevice, op: AttentionBackward) -> Result<()> {
    const OP: &str = AttentionBackward::OP;
    let (n, a) = (op.check()?, &op.shape);
    let AttentionBackward { documents, qkv, o, lse, d_o, mut delta, mut sums, dqkv, .. } = op;
    let (width, dtype) = (a.width(), qkv.dtype());
    let family = family(OP, dtype, a, &[qkv.address(), d_o.address(), dqkv.address()])?;
    if n == 0 {
        return Ok(());
    }
    delta_of(gpu, family, a, [o, d_o, lse], delta.reborrow(), sums.reborrow())?;
    let (row, kv, delta) = (a.row(), qkv.slice(width..qkv.len()), delta.as_view());
    let tail = TailArgs { bounds: documents, packed: true, queries: n, keys: n, q_row: row, kv_row: row, out_row: row };
    let given = [qkv, kv, d_o, lse, delta];
    let starts = [qkv, kv, d_o, lse, delta, sums.as_view(), dqkv.as_view()].map(start);
    let hopper = hopper::family(gpu, hopper::BACKWARD, dtype, a, &starts);
    gradients(gpu, (family, hopper), a, [&tail; 2], given, sums, Gradients::Fused(dqkv, width))
}

pub fn delta(gpu: &GpuDevice, op: AttentionDelta) -> Result<()> {
    let (n, a) = (op.check()?, &op.shape);
    let AttentionDelta { o, d_o, lse, delta, sums, .. } = op;
    let family = family(AttentionDelta::OP, o.dtype(), a, &[])?;
    if n == 0 { Ok(()) } else { delta_of(gpu, family, a, [o, d_o, lse], delta, sums) }
}

pub fn pass(gpu: &GpuDevice, op: AttentionPass) -> Result<()> {
    const OP: &str = AttentionPass::OP;
    let ((queries, keys), a) = (op.check()?, &op.shape);
    let AttentionPass { of_queries, qkv, kv, o, lse, .. } = op;
    let family = family(OP, qkv.dtype(), a, &[qkv.address(), kv.address()])?;
    if queries == 0 {
        return Ok(());
    }
    let (q_row, kv_row) = (a.row(), a.kv_row());
    let tail = TailArgs { bounds: of_queries, packed: false, queries, keys, q_row, kv_row, out_row: 0 };
    let hopper = hopper::family(gpu, hopper::FORWARD, qkv.dtype(), a, &[qkv.address(), kv.address(), o.address()]);
    // A tensor map needs at least one row.
    if let Some(hopper) = hopper.filter(|_| keys > 0) {
        return hopper::forward(gpu, hopper, a, &tail, [qkv, kv], o, lse);
    }
    let args = args!(tail, a; Arg::In(qkv), Arg::In(kv), Arg::Out(o), Arg::Out(lse));
    launch(gpu, &family.forward, queries, a.heads, args)
}

pub fn pass_backward(gpu: &GpuDevice, op: AttentionPassBackward) -> Result<()> {
    const OP: &str = AttentionPassBackward::OP;
    let ((queries, keys), a) = (op.check()?, &op.shape);
    let AttentionPassBackward { of_queries, of_keys, qkv, kv, lse, delta, d_o, sums, dq, dkv, .. } = op;
    let family = family(OP, qkv.dtype(), a, &[qkv.address(), kv.address(), d_o.address()])?;
    if queries == 0 || keys == 0 {
        return Ok(());
    }
    let (q_row, kv_row) = (a.row(), a.kv_row());
    let given = [qkv, kv, d_o, lse, delta];
    let starts = [qkv, kv, d_o, lse, delta, sums.as_view()].map(start);
    let hopper = hopper::family(gpu, hopper::BACKWARD, qkv.dtype(), a, &starts);
    let tail = TailArgs { bounds: of_queries, packed: false, queries, keys, q_row, kv_row, out_row: a.width() };
    let tails = [&tail, &TailArgs { bounds: of_keys, out_row: kv_row, ..tail }];
    gradients(gpu, (family, hopper), a, tails, given, sums, Gradients::Apart([dq, dkv]))
}

pub fn paged(gpu: &GpuDevice, op: AttentionPaged) -> Result<()> {
    const OP: &str = AttentionPaged::OP;
    let (n, a, dtype) = (op.check()?, op.shape, op.qkv.dtype());
    let Some((variant, heads)) = attention::paged(dtype.name(), a.heads / a.kv_heads, a.head_dim) else {
        let why = format!("heads of {} elements in {dtype}; up to {MOST} are possible", a.head_dim);
        return Err(Error::op(OP, why));
    };
    if n == 0 {
        return Ok(());
    }
    let AttentionPaged { table, qkv, mut kv, o, lse, .. } = op;
    let int = |n: usize| Arg::U32(n.min(u32::MAX as usize) as u32);
    let args = &mut [Arg::In(qkv), Arg::InOut(kv.reborrow()), Arg::In(table), int(n), int(a.row()), int(a.kv_row())];
    gpu.launch(variant, "store_rows", n.div_ceil(WARPS), args)?;
    let args = &mut [
        Arg::In(qkv),
        Arg::In(kv.as_view()),
        Arg::In(table),
        Arg::Out(o),
        Arg::Out(lse),
        int(n),
        int(a.window),
        int(a.row()),
        int(a.kv_row()),
        int(a.heads),
        int(a.kv_heads),
        int(a.head_dim),
        Arg::F32(a.scale),
        Arg::F32(a.softcap),
    ];
    let chunks = a.kv_heads * (a.heads / a.kv_heads).div_ceil(heads);
    let shape = LaunchShape { grid: [n as u32, chunks as u32, 1], block: [256, 1, 1], shared: 0 };
    gpu.driver.launch(Kernel { variant, entry: OP }, shape, args)
}

pub fn sink(gpu: &GpuDevice, op: HeadSinks) -> Result<()> {
    const OP: &str = HeadSinks::OP;
    let (n, a, variant) = (op.check()?, op.shape, by_dtype!(OP, op.o.dtype(), "sink")?);
    let [rows, heads, head_dim] = [n, a.heads, a.head_dim].map(|n| Arg::U32(n as u32));
    let args = &mut [Arg::In(op.sinks), Arg::InOut(op.o), Arg::InOut(op.lse), rows, heads, head_dim];
    gpu.launch(variant, OP, (n * a.heads).div_ceil(WARPS), args)
}
pub fn sink_backward(gpu: &GpuDevice, op: HeadSinksBackward) -> Result<()> {
    const OP: &str = HeadSinksBackward::OP;
    let (n, heads, variant) = (op.check()?, op.dsinks.len(), by_dtype!(OP, op.sinks.dtype(), "sink")?);
    let [sinks, lse, delta] = [op.sinks, op.lse, op.delta].map(Arg::In);
    gpu.line(variant, OP, (heads as u32, 256), &mut [sinks, lse, delta, Arg::InOut(op.dsinks), Arg::U32(n as u32)])
}
