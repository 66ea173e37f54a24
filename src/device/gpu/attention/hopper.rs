//! Launches of the attention kernels for sm_90a, whose operands come by tensor maps. Which kernels keep what is told in
//! `flatshard_ptx::kernels::attention_hopper`. Never checks operands: attention.rs has.
use super::{Tail, VECTOR, launch};
use crate::base::{DType, Result};
use crate::device::gpu::GpuDevice;
use crate::device::gpu::driver::{Arg, Map, Swizzle};
use crate::device::{Attention, View, ViewMut};
pub(super) use flatshard_ptx::kernels::attention_hopper::Family;
use flatshard_ptx::kernels::attention_hopper::{BOX, Tiles, sm_90a_family};

/// The architecture that `.target sm_90a` is for, and no other.
const ARCH: u32 = 90;

/// The kernels for this call; none where the GPU is another, or the operands (their first bytes are given) do not fit.
pub(super) fn family(gpu: &GpuDevice, dtype: DType, a: &Attention, starts: &[usize]) -> Option<&'static Family> {
    let fits = gpu.driver.arch() == ARCH && starts.iter().all(|at| at % VECTOR == 0);
    sm_90a_family(dtype.name(), a.head_dim).filter(|_| fits)
}

/// `heads` heads in each of so many rows, `row` elements apart, by boxes of `side` rows.
fn map<'a>(a: &Attention, of: View<'a>, heads: usize, (rows, row): (usize, usize), side: u32) -> Arg<'a> {
    let sizes = [a.head_dim, heads, rows].map(|n| n as u64);
    let strides = [a.head_dim, row].map(|n| n as u64);
    Arg::Map(Map { of, sizes, strides, tile: [BOX, 1, side], swizzle: Swizzle::B128 })
}
/// Keys and values of the rows of kv.
fn keys_and_values<'a>(a: &Attention, kv: View<'a>, t: &Tail, side: u32) -> [Arg<'a>; 2] {
    let values = kv.slice(a.kv_heads * a.head_dim..kv.len());
    [kv, values].map(|of| map(a, of, a.kv_heads, (t.keys, t.kv_row), side))
}
fn queries<'a>(a: &Attention, q: View<'a>, t: &Tail, side: u32) -> Arg<'a> {
    map(a, q, a.heads, (t.queries, t.q_row), side)
}
fn gradients<'a>(a: &Attention, d_o: View<'a>, t: &Tail, side: u32) -> Arg<'a> {
    map(a, d_o, a.heads, (t.queries, a.heads * a.head_dim), side)
}

/// A number a head and query, for `side` queries at a time.
fn numbers<'a>(of: View<'a>, side: u32) -> Arg<'a> {
    let (n, row) = (of.len() as u64, of.len().next_multiple_of(VECTOR) as u64);
    Arg::Map(Map { of, sizes: [n, 1, 1], strides: [row; 2], tile: [side, 1, 1], swizzle: Swizzle::None })
}

/// Of q and kv.
pub(super) fn forward(
    gpu: &GpuDevice,
    tiles: &Tiles,
    a: &Attention,
    t: &Tail,
    [q, kv]: [View; 2],
    o: ViewMut,
    lse: ViewMut,
) -> Result<()> {
    let [k, v] = keys_and_values(a, kv, t, tiles.columns);
    let args = args!(*t, a; queries(a, q, t, tiles.kernel.rows), k, v, Arg::Out(o), Arg::Out(lse));
    launch(gpu, &tiles.kernel, t.queries, a.heads, args)
}

/// Of q, kv, d_o, lse, delta.
pub(super) fn dq(
    gpu: &GpuDevice,
    tiles: &Tiles,
    a: &Attention,
    t: &Tail,
    [q, kv, d_o, lse, delta]: [View; 5],
    dq: ViewMut,
) -> Result<()> {
    let rows = tiles.kernel.rows;
    let ([k, v], q, d_o) =
        (keys_and_values(a, kv, t, tiles.columns), queries(a, q, t, rows), gradients(a, d_o, t, rows));
    let args = args!(*t, a; q, k, v, d_o, Arg::In(lse), Arg::In(delta), Arg::InOut(dq));
    launch(gpu, &tiles.kernel, t.queries, a.heads, args)
}

/// Of q, kv, d_o, lse, delta.
pub(super) fn dkv(
    gpu: &GpuDevice,
    tiles: &Tiles,
    a: &Attention,
    t: &Tail,
    [q, kv, d_o, lse, delta]: [View; 5],
    dkv: ViewMut,
) -> Result<()> {
    let columns = tiles.columns;
    let [k, v] = keys_and_values(a, kv, t, tiles.kernel.rows);
    let (q, d_o) = (queries(a, q, t, columns), gradients(a, d_o, t, columns));
    let (lse, delta) = (numbers(lse, columns), numbers(delta, columns));
    let args = args!(*t, a; k, v, q, d_o, lse, delta, Arg::InOut(dkv));
    launch(gpu, &tiles.kernel, t.keys, a.kv_heads, args)
}
