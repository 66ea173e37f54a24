//! Launches of the attention kernels for sm_90a, which load operands by tensor maps.
//! `flatshard_ptx::kernels::attention_hopper` documents what each kernel keeps. Never checks operands: attention.rs
//! does.
use super::launch::{Gradients, TailArgs, VECTOR, args, launch, launch_grid};
use crate::gpu::driver::{Arg, Map, Swizzle};
use crate::gpu::launch::{GpuDevice, SM_90A};
use crate::ops::AttentionShape;
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};
pub(super) use flatshard_ptx::kernels::attention_hopper::HopperFamily;
use flatshard_ptx::kernels::attention_hopper::{BOX, Backward, Fused, TiledKernel, sm_90a_family};

/// Elements of f32 to which the parts of `sums` are aligned.
const ALIGNED: usize = VECTOR / 4;

/// Whether a kernel that a call launches is one of these.
type Launches = fn(&HopperFamily, &dyn Fn(&TiledKernel) -> bool) -> bool;

/// The launches of a forward pass.
pub(super) const FORWARD: Launches = |family, is| is(&family.forward);
/// The launches of a backward pass.
pub(super) const BACKWARD: Launches = |family, is| match &family.backward {
    Backward::Fused(fused) => is(&fused.tiles),
    Backward::Apart { dq, dkv } => is(dq) || dkv.iter().any(is),
};

/// The kernels for this call; `None` on another GPU, if the operands' start addresses are not aligned, or if the driver
/// has compiled one of them badly.
pub(super) fn family(
    gpu: &GpuDevice,
    launches: Launches,
    dtype: DType,
    a: &AttentionShape,
    starts: &[usize],
) -> Option<&'static HopperFamily> {
    let fits = gpu.driver.arch() == SM_90A && starts.iter().all(|at| at % VECTOR == 0);
    let slow = |kernel: &TiledKernel| gpu.driver.avoids(kernel.kernel.variant);
    sm_90a_family(dtype.name(), a.head_dim, a.softcap).filter(|family| fits && !launches(family, &slow))
}

/// A map of `heads` heads in each row, with rows `row` elements apart, in boxes of `side` rows.
fn map<'a>(a: &AttentionShape, of: View<'a>, heads: usize, (rows, row): (usize, usize), side: u32) -> Arg<'a> {
    let sizes = [a.head_dim, heads, rows].map(|n| n as u64);
    let strides = [a.head_dim, row].map(|n| n as u64);
    Arg::Map(Map { of, sizes, strides, tile: [BOX, 1, side], swizzle: Swizzle::B128 })
}
/// Keys and values of the rows of kv.
fn keys_and_values<'a>(a: &AttentionShape, kv: View<'a>, t: &TailArgs, side: u32) -> [Arg<'a>; 2] {
    let values = kv.slice(a.kv_heads * a.head_dim..kv.len());
    [kv, values].map(|of| map(a, of, a.kv_heads, (t.keys, t.kv_row), side))
}
fn queries<'a>(a: &AttentionShape, q: View<'a>, t: &TailArgs, side: u32) -> Arg<'a> {
    map(a, q, a.heads, (t.queries, t.q_row), side)
}
fn gradients_of<'a>(a: &AttentionShape, d_o: View<'a>, t: &TailArgs, side: u32) -> Arg<'a> {
    map(a, d_o, a.heads, (t.queries, a.heads * a.head_dim), side)
}

/// One number per head and query, for `side` queries at a time.
fn map_of_numbers<'a>(of: View<'a>, side: u32) -> Arg<'a> {
    let n = of.len() as u64; // a multiple of ALIGNED, as strides must be
    Arg::Map(Map { of, sizes: [n, 1, 1], strides: [n; 2], tile: [side, 1, 1], swizzle: Swizzle::None })
}

/// From q and kv. Where two query heads share keys, by clusters of two CTAs.
pub(super) fn forward(
    gpu: &GpuDevice,
    family: &HopperFamily,
    a: &AttentionShape,
    t: &TailArgs,
    [q, kv]: [View; 2],
    o: ViewMut,
    lse: ViewMut,
) -> Result<()> {
    let paired = Some(family.forward_of(a.heads, a.kv_heads));
    let (tiles, cluster) =
        paired.filter(|(tiles, _)| !gpu.driver.avoids(tiles.kernel.variant)).unwrap_or((&family.forward, 1));
    let [k, v] = keys_and_values(a, kv, t, tiles.columns);
    let mut scratch = gpu.scratch();
    let (q, drawn) = (queries(a, q, t, tiles.kernel.rows), Arg::InOut(scratch.drawn.view_mut()));
    let args = args!(*t, a; q, k, v, Arg::Out(o), Arg::Out(lse), drawn);
    // A CTA fills a multiprocessor, and clusters are whole.
    let most = (gpu.driver.multiprocessors() / cluster).max(1) * cluster;
    let work = (t.queries as u32).div_ceil(tiles.kernel.rows) * a.heads as u32;
    launch_grid(gpu, &tiles.kernel, [work.min(most), 1], args)
}

/// Parameters as the caller's; `sums` starts with the numbers of its queries, which the kernel of delta has written.
pub(super) fn gradients(
    gpu: &GpuDevice,
    backward: &Backward,
    a: &AttentionShape,
    [of_queries, of_keys]: [&TailArgs; 2],
    [q, kv, d_o]: [View; 3],
    sums: ViewMut,
    mut to: Gradients,
) -> Result<()> {
    const OP: &str = "attention_backward";
    let (queries, dtype, len) = (of_queries.queries, sums.dtype(), sums.len());
    let needed = sums_of(backward, a, queries);
    let Some((numbers, sums)) = numbers_of(a, queries, sums).filter(|_| len >= needed) else {
        let what = format!("sums has {len} elements of {dtype}, but needs {needed} of f32 for {queries} queries");
        return Err(Error::op(OP, what));
    };
    let (half, numbers) = (numbers.len() / 2, numbers.as_view());
    let [exponents, delta] = [numbers.slice(0..half), numbers.slice(half..2 * half)];
    let given = [q, kv, d_o, exponents, delta];
    match backward {
        Backward::Fused(fused) => all(gpu, fused, a, [of_queries, of_keys], given, sums, to),
        Backward::Apart { dq: tiles, dkv: parts } => {
            dq(gpu, tiles, a, of_queries, given, to.of_queries())?;
            parts.iter().try_for_each(|tiles| dkv(gpu, tiles, a, of_keys, given, to.of_keys()))
        }
    }
}

/// Count of 4-byte values: numbers, sums, then turn counters.
pub(super) fn sums(a: &AttentionShape, dtype: DType, queries: usize) -> usize {
    sm_90a_family(dtype.name(), a.head_dim, a.softcap).map_or(0, |family| sums_of(&family.backward, a, queries))
}
fn sums_of(backward: &Backward, a: &AttentionShape, queries: usize) -> usize {
    let numbers = numbers(a, queries);
    match backward {
        _ if queries == 0 => 0,
        Backward::Fused(fused) => numbers + fused.sums(a.heads, queries) + fused.turns(a.heads, queries),
        Backward::Apart { .. } => numbers,
    }
}
/// An exponent and delta for each head and query. A box of a tensor map starts at a multiple of 16 bytes, so that each
/// head does.
fn numbers(a: &AttentionShape, queries: usize) -> usize {
    2 * a.heads * queries.next_multiple_of(ALIGNED)
}
/// The numbers of that many queries, and the rest; `None` if there is no room, as on other GPUs.
pub(super) fn numbers_of<'a>(
    a: &AttentionShape,
    queries: usize,
    sums: ViewMut<'a>,
) -> Option<(ViewMut<'a>, ViewMut<'a>)> {
    let n = numbers(a, queries);
    (sums.dtype() == DType::F32 && sums.len() >= n).then(|| sums.split_at(n))
}

fn all(
    gpu: &GpuDevice,
    fused: &Fused,
    a: &AttentionShape,
    [of_queries, t]: [&TailArgs; 2],
    [q, kv, d_o, exponents, delta]: [View; 5],
    sums: ViewMut,
    mut to: Gradients,
) -> Result<()> {
    let Fused { tiles: TiledKernel { kernel, columns }, finish, .. } = *fused;
    let [n, more] = [fused.sums(a.heads, t.queries), fused.turns(a.heads, t.queries)];
    let (mut sums, rest) = sums.split_at(n);
    let mut turns = rest.slice(0..more);
    gpu.driver.zero(turns.reborrow())?;
    let [k, v] = keys_and_values(a, kv, t, kernel.rows);
    let (q, d_o) = (queries(a, q, t, columns), gradients_of(a, d_o, t, columns));
    let (exponents, delta) = (map_of_numbers(exponents, columns), map_of_numbers(delta, columns));
    let (dkv, added, drawn) = (to.of_keys(), sums.reborrow(), turns.reborrow());
    let args = args!(*t, a; k, v, q, d_o, exponents, delta, Arg::InOut(dkv), Arg::InOut(added), Arg::InOut(drawn));
    launch_grid(gpu, &kernel, [(t.keys as u32).div_ceil(kernel.rows) * a.kv_heads as u32, 1], args)?;
    let halves = 2 * (t.queries as u32).div_ceil(columns);
    let (sums, turns, dq) = (Arg::In(sums.as_view()), Arg::In(turns.as_view()), Arg::InOut(to.of_queries()));
    let args = args!(*of_queries, a; sums, turns, dq);
    launch_grid(gpu, &finish, [halves, a.heads as u32], args)
}

/// From q, kv, d_o, exponents and delta.
fn dq(
    gpu: &GpuDevice,
    tiles: &TiledKernel,
    a: &AttentionShape,
    t: &TailArgs,
    [q, kv, d_o, exponents, delta]: [View; 5],
    dq: ViewMut,
) -> Result<()> {
    let rows = tiles.kernel.rows;
    let ([k, v], q, d_o) =
        (keys_and_values(a, kv, t, tiles.columns), queries(a, q, t, rows), gradients_of(a, d_o, t, rows));
    let args = args!(*t, a; q, k, v, d_o, Arg::In(exponents), Arg::In(delta), Arg::InOut(dq));
    launch(gpu, &tiles.kernel, t.queries, a.heads, args)
}

/// From q, kv, d_o, exponents and delta.
fn dkv(
    gpu: &GpuDevice,
    tiles: &TiledKernel,
    a: &AttentionShape,
    t: &TailArgs,
    [q, kv, d_o, exponents, delta]: [View; 5],
    dkv: ViewMut,
) -> Result<()> {
    let columns = tiles.columns;
    let [k, v] = keys_and_values(a, kv, t, tiles.kernel.rows);
    let (q, d_o) = (queries(a, q, t, columns), gradients_of(a, d_o, t, columns));
    let (exponents, delta) = (map_of_numbers(exponents, columns), map_of_numbers(delta, columns));
    let args = args!(*t, a; k, v, q, d_o, exponents, delta, Arg::InOut(dkv));
    launch(gpu, &tiles.kernel, t.keys, a.kv_heads, args)
}
