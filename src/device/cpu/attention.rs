//! Flash-style attention, forward and backward, in tiles of f32 (Dao et al. 2022). Never builds a T x T matrix.
//!
//! Work goes by document, key/value head, tile of keys, query head of the group, tile of queries: keys and values are
//! converted (and transposed) once for all queries that see them. Tiles start at multiples of [`SIDE`] from the
//! document's start, so a tile of scores is either wholly below the diagonal, or on it, or skipped. What is summed over
//! keys (the output; the gradient of the queries) waits in f32 scratch of the document's length for the query heads of
//! one group.
use super::gemm::CacheLines;
use super::simd::{LANES, Level, exp, lane_sum, sum, tanh};
use super::tile::{COLUMNS, ProductPart, Tile, TileProduct};
use crate::base::{Error, Result, dtype::Float};
use crate::device::View;
use crate::device::ops::{Attention, AttentionBackward, AttentionDelta, AttentionShape};
use std::ops::Range;

/// Queries and keys of a tile. Four tiles of 64 x 64 f32 are 64 KiB: they stay in the second-level cache at worst.
pub(super) const SIDE: usize = 64;

/// The boundaries, once they are known to rise from 0 to `n`.
fn documents<'a>(op: &'static str, cu_seqlens: View<'a>, n: usize) -> Result<&'a [u32]> {
    let cu_seqlens = cu_seqlens.host::<u32>(op)?;
    let ends = (cu_seqlens.first().copied(), cu_seqlens.last().map(|&end| end as usize));
    if ends == (Some(0), Some(n)) && cu_seqlens.is_sorted() {
        return Ok(cu_seqlens);
    }
    Err(Error::op(op, format!("cu_seqlens {cu_seqlens:?} does not rise from 0 to {n}, the rows")))
}

/// Reused between calls; grows to the longest document.
#[derive(Default)]
pub struct AttentionScratch(CacheLines);

impl AttentionScratch {
    /// Slices of these lengths, whole cache lines each, of any content.
    pub(super) fn take<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let lens = lens.map(|len| len.next_multiple_of(LANES));
        let mut rest = self.0.take(lens.iter().sum());
        lens.map(|len| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(len);
            rest = left;
            taken
        })
    }
}

/// Where the heads of a token stand in its row, and how wide they are in a tile.
struct Heads {
    row: usize,
    dim: usize,
    /// `dim` rounded up to whole columns of a tile product.
    width: usize,
    group: usize,
    key: usize,
    value: usize,
}
impl Heads {
    fn new(a: &AttentionShape) -> Heads {
        let (dim, group) = (a.head_dim, a.heads / a.kv_heads);
        let (key, value) = (a.heads * dim, (a.heads + a.kv_heads) * dim);
        Heads { row: a.row(), dim, width: dim.next_multiple_of(COLUMNS), group, key, value }
    }
}

/// `tile[r][c] = src[r * row + c]` for `dim` columns.
#[inline(always)]
pub(super) fn load<T: Float>(src: &[T], row: usize, rows: usize, dim: usize, tile: &mut [f32], width: usize) {
    for (src, tile) in src.chunks(row).zip(tile.chunks_exact_mut(width)).take(rows) {
        for (x, t) in src[..dim].iter().zip(tile) {
            *t = x.to_f32();
        }
    }
}
/// `tile[c][r] = src[r * row + c]`.
#[inline(always)]
pub(super) fn load_transposed<T: Float>(src: &[T], row: usize, rows: usize, dim: usize, tile: &mut [f32]) {
    for (r, src) in src.chunks(row).take(rows).enumerate() {
        for (x, t) in src[..dim].iter().zip(tile.chunks_exact_mut(SIDE)) {
            t[r] = x.to_f32();
        }
    }
}
/// `dst[r * row + c] = factor(r) * tile[r][c]`.
#[inline(always)]
fn store<T: Float>(
    tile: &[f32],
    width: usize,
    dst: &mut [T],
    row: usize,
    rows: usize,
    dim: usize,
    factor: impl Fn(usize) -> f32,
) {
    for (r, (tile, dst)) in tile.chunks_exact(width).zip(dst.chunks_mut(row)).take(rows).enumerate() {
        let factor = factor(r);
        for (t, x) in tile.iter().zip(&mut dst[..dim]) {
            *x = T::from_f32(t * factor);
        }
    }
}

/// One row of a tile of scores.
pub(super) type ScoreRow = [f32; SIDE];

/// Which keys of a document a query sees: those up to itself, the last `window` of them.
#[derive(Clone, Copy)]
struct Band(usize);

impl Band {
    fn new(a: &AttentionShape) -> Band {
        Band(if a.window == 0 { usize::MAX } else { a.window })
    }
    /// Tiles of queries that see any of the keys from `k0` on, in a document of `len` tokens.
    #[inline(always)]
    fn queries(self, k0: usize, len: usize) -> impl Iterator<Item = usize> {
        (k0..len.min((k0 + SIDE - 1).saturating_add(self.0))).step_by(SIDE)
    }
    /// Whether the keys from `k0` on are the first that the queries from `q0` on see.
    #[inline(always)]
    fn opens(self, q0: usize, k0: usize) -> bool {
        (q0 + 1).saturating_sub(self.0) / SIDE * SIDE == k0
    }
    /// Keys of the tile at `k0` that row `i` of the queries at `q0` sees.
    #[inline(always)]
    fn visible(self, q0: usize, k0: usize, i: usize) -> Range<usize> {
        let below = q0 + i + 1 - k0;
        below.saturating_sub(self.0).min(SIDE)..below.min(SIDE)
    }
}

#[inline(always)]
fn row_max(row: &ScoreRow) -> f32 {
    let mut max = [f32::NEG_INFINITY; LANES];
    for x in row.as_chunks::<LANES>().0 {
        for (max, &x) in max.iter_mut().zip(x) {
            *max = if x > *max { x } else { *max };
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            max[i] = if max[i + half] > max[i] { max[i + half] } else { max[i] };
        }
        half /= 2;
    }
    max[0]
}

#[inline(always)]
pub fn forward<T: Float>(level: Level, scratch: &mut AttentionScratch, op: Attention) -> Result<()> {
    const OP: &str = Attention::OP;
    let (n, a) = (op.check()?, &op.shape);
    let (documents, qkv) = (documents(OP, op.cu_seqlens, n)?, op.qkv.host::<T>(OP)?);
    let (o, lse) = (op.o.host::<T>(OP)?, op.lse.host::<f32>(OP)?);
    let (h, band) = (Heads::new(a), Band::new(a));
    let o_row = a.heads * h.dim;
    for document in documents.windows(2) {
        let (start, len) = (document[0] as usize, (document[1] - document[0]) as usize);
        let padded = len.next_multiple_of(SIDE);
        let [query, keys, values, scores, out, max, total] = scratch.take([
            SIDE * h.width,
            SIDE * h.dim,
            SIDE * h.width,
            SIDE * SIDE,
            h.group * padded * h.width,
            h.group * padded,
            h.group * padded,
        ]);
        for kv in 0..a.kv_heads {
            // Finite, so that a row which sees nothing of its first tile subtracts no infinities.
            max.fill(f32::MIN);
            total.fill(0.0);
            for k0 in (0..len).step_by(SIDE) {
                let k_rows = SIDE.min(len - k0);
                let at = (start + k0) * h.row + kv * h.dim;
                load_transposed(&qkv[at + h.key..], h.row, k_rows, h.dim, keys);
                load(&qkv[at + h.value..], h.row, k_rows, h.dim, values, h.width);
                for g in 0..h.group {
                    for q0 in band.queries(k0, len) {
                        let opens = band.opens(q0, k0);
                        let q_rows = SIDE.min(len - q0);
                        let head = kv * h.group + g;
                        load(&qkv[(start + q0) * h.row + head * h.dim..], h.row, q_rows, h.dim, query, h.width);
                        let part = |on_diagonal| if q0 == k0 { on_diagonal } else { ProductPart::All };
                        let assign = TileProduct::new(level, [q_rows, k_rows, h.dim], part(ProductPart::LowerC), false);
                        assign.run(Tile::new(query, h.width), Tile::new(keys, SIDE), scores, SIDE);
                        let at = g * padded + q0;
                        let out = &mut out[at * h.width..][..SIDE * h.width];
                        let (max, total) = (&mut max[at..][..q_rows], &mut total[at..][..q_rows]);
                        for (i, row) in scores.as_chunks_mut::<SIDE>().0.iter_mut().take(q_rows).enumerate() {
                            let old = (max[i], total[i]);
                            let factor;
                            (max[i], total[i], factor) = online_softmax(row, band.visible(q0, k0, i), a, old);
                            if !opens {
                                out[i * h.width..][..h.width].iter_mut().for_each(|x| *x *= factor);
                            }
                        }
                        let add = TileProduct::new(level, [q_rows, h.dim, k_rows], part(ProductPart::LowerA), !opens);
                        add.run(Tile::new(scores, SIDE), Tile::new(values, h.width), out, h.width);
                    }
                }
            }
            for g in 0..h.group {
                let (head, at) = (kv * h.group + g, g * padded);
                store(&out[at * h.width..], h.width, &mut o[start * o_row + head * h.dim..], o_row, len, h.dim, |i| {
                    1.0 / total[at + i]
                });
                for i in 0..len {
                    lse[head * n + start + i] = max[at + i] + total[at + i].ln();
                }
            }
        }
    }
    Ok(())
}

/// Turns raw products into weights relative to the new maximum. Returns it, the new total, and by what earlier weights
/// shrink (Milakov & Gimelshein 2018).
#[inline(always)]
pub(super) fn online_softmax(
    row: &mut ScoreRow,
    visible: Range<usize>,
    a: &AttentionShape,
    (max, total): (f32, f32),
) -> (f32, f32, f32) {
    if a.softcap > 0.0 {
        let inner = a.scale / a.softcap;
        row.iter_mut().for_each(|x| *x = a.softcap * tanh(*x * inner).0);
    } else {
        row.iter_mut().for_each(|x| *x *= a.scale);
    }
    for (j, x) in row.iter_mut().enumerate() {
        *x = if visible.start <= j && j < visible.end { *x } else { f32::NEG_INFINITY };
    }
    let tile_max = row_max(row);
    let new_max = if tile_max > max { tile_max } else { max };
    let mut sums = [0.0; LANES];
    for x in row.as_chunks_mut::<LANES>().0 {
        for (x, sum) in x.iter_mut().zip(&mut sums) {
            *x = exp(*x - new_max);
            *sum += *x;
        }
    }
    let factor = exp(max - new_max);
    (new_max, total.mul_add(factor, lane_sum(sums)), factor)
}

#[inline(always)]
pub fn delta<T: Float>(op: AttentionDelta) -> Result<()> {
    const OP: &str = AttentionDelta::OP;
    op.check()?;
    row_sums::<T>(&op.shape, op.o.host(OP)?, op.d_o.host(OP)?, op.delta.host(OP)?);
    Ok(())
}

/// `delta` = row sums of `d_o * o`.
#[inline(always)]
fn row_sums<T: Float>(a: &AttentionShape, o: &[T], d_o: &[T], delta: &mut [f32]) {
    let (o_row, n) = (a.heads * a.head_dim, delta.len() / a.heads);
    for head in 0..a.heads {
        for i in 0..n {
            let at = i * o_row + head * a.head_dim;
            let (o, d_o) = (&o[at..][..a.head_dim], &d_o[at..][..a.head_dim]);
            delta[head * n + i] = sum(a.head_dim, |c| o[c].to_f32() * d_o[c].to_f32());
        }
    }
}

#[inline(always)]
pub fn backward<T: Float>(level: Level, scratch: &mut AttentionScratch, op: AttentionBackward) -> Result<()> {
    const OP: &str = AttentionBackward::OP;
    let (n, a) = (op.check()?, &op.shape);
    let (documents, qkv) = (documents(OP, op.cu_seqlens, n)?, op.qkv.host::<T>(OP)?);
    let (o, lse, d_o) = (op.o.host::<T>(OP)?, op.lse.host::<f32>(OP)?, op.d_o.host::<T>(OP)?);
    let (delta, dqkv) = (op.delta.host::<f32>(OP)?, op.dqkv.host::<T>(OP)?);
    let (h, band) = (Heads::new(a), Band::new(a));
    let o_row = a.heads * h.dim;
    row_sums(a, o, d_o, delta);
    for document in documents.windows(2) {
        let (start, len) = (document[0] as usize, (document[1] - document[0]) as usize);
        let padded = len.next_multiple_of(SIDE);
        let (tile, across) = (SIDE * h.width, SIDE * h.dim);
        let [query, d_out, key, keys, values, dk, dv, weights, slopes, dq] = scratch.take([
            tile,
            tile,
            tile,
            across,
            across,
            tile,
            tile,
            SIDE * SIDE,
            SIDE * SIDE,
            h.group * padded * h.width,
        ]);
        for kv in 0..a.kv_heads {
            for k0 in (0..len).step_by(SIDE) {
                let k_rows = SIDE.min(len - k0);
                let at = (start + k0) * h.row + kv * h.dim;
                load(&qkv[at + h.key..], h.row, k_rows, h.dim, key, h.width);
                load_transposed(&qkv[at + h.key..], h.row, k_rows, h.dim, keys);
                load_transposed(&qkv[at + h.value..], h.row, k_rows, h.dim, values);
                dk.fill(0.0);
                dv.fill(0.0);
                for g in 0..h.group {
                    let head = kv * h.group + g;
                    for q0 in band.queries(k0, len) {
                        let opens = band.opens(q0, k0);
                        let q_rows = SIDE.min(len - q0);
                        let from = start + q0;
                        load(&qkv[from * h.row + head * h.dim..], h.row, q_rows, h.dim, query, h.width);
                        load(&d_o[from * o_row + head * h.dim..], o_row, q_rows, h.dim, d_out, h.width);
                        let part = |on_diagonal| if q0 == k0 { on_diagonal } else { ProductPart::All };
                        let across = TileProduct::new(level, [q_rows, k_rows, h.dim], part(ProductPart::LowerC), false);
                        across.run(Tile::new(query, h.width), Tile::new(keys, SIDE), weights, SIDE);
                        across.run(Tile::new(d_out, h.width), Tile::new(values, SIDE), slopes, SIDE);
                        let (weight_rows, slope_rows) = (weights.as_chunks_mut().0, slopes.as_chunks_mut().0);
                        for (i, (p, ds)) in weight_rows.iter_mut().zip(slope_rows).take(q_rows).enumerate() {
                            let at = head * n + from + i;
                            slope(p, ds, band.visible(q0, k0, i), a, lse[at], delta[at]);
                        }
                        let down = TileProduct::new(level, [k_rows, h.dim, q_rows], part(ProductPart::UpperA), true);
                        down.run(Tile::transposed(weights, SIDE), Tile::new(d_out, h.width), dv, h.width);
                        down.run(Tile::transposed(slopes, SIDE), Tile::new(query, h.width), dk, h.width);
                        let back = TileProduct::new(level, [q_rows, h.dim, k_rows], part(ProductPart::LowerA), !opens);
                        let dq = &mut dq[(g * padded + q0) * h.width..][..tile];
                        back.run(Tile::new(slopes, SIDE), Tile::new(key, h.width), dq, h.width);
                    }
                }
                store(dk, h.width, &mut dqkv[at + h.key..], h.row, k_rows, h.dim, |_| 1.0);
                store(dv, h.width, &mut dqkv[at + h.value..], h.row, k_rows, h.dim, |_| 1.0);
            }
            for g in 0..h.group {
                let dq = &dq[g * padded * h.width..];
                store(dq, h.width, &mut dqkv[start * h.row + (kv * h.group + g) * h.dim..], h.row, len, h.dim, |_| 1.0);
            }
        }
    }
    Ok(())
}

/// `p`: raw products to weights, exp(s - lse). `ds`: gradients of the weights to those of the raw products.
#[inline(always)]
pub(super) fn slope(
    p: &mut ScoreRow,
    ds: &mut ScoreRow,
    visible: Range<usize>,
    a: &AttentionShape,
    lse: f32,
    delta: f32,
) {
    if a.softcap > 0.0 {
        let inner = a.scale / a.softcap;
        for (p, ds) in p.iter_mut().zip(ds.iter_mut()) {
            let (t, slope) = tanh(*p * inner);
            *p = exp(a.softcap.mul_add(t, -lse));
            *ds = *p * (*ds - delta) * a.scale * slope;
        }
    } else {
        for (p, ds) in p.iter_mut().zip(ds.iter_mut()) {
            *p = exp(p.mul_add(a.scale, -lse));
            *ds = *p * (*ds - delta) * a.scale;
        }
    }
    for (j, (p, ds)) in p.iter_mut().zip(ds).enumerate() {
        let seen = visible.start <= j && j < visible.end;
        *p = if seen { *p } else { 0.0 };
        *ds = if seen { *ds } else { 0.0 };
    }
}
