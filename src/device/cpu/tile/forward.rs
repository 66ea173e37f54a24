//! Forward of attention in tiles: scores, softmax as keys arrive (Milakov & Gimelshein 2018), weighted values.
//! Never keeps a weight beyond its tile.
use super::super::gemm::panels::{COLUMNS, Over, PanelFloat, Products, TokenRows};
use super::super::simd::{LANES, Level, lane_sum, tanh};
use super::lanes::{LaneRow, each, exp_below, hide, larger, max_lane};
use super::operands::{Group, Mask};
use super::scratch::{ACROSS, AttentionScratch, SIDE, Sizes, packed_len, with_products};
use crate::ops::AttentionShape;
use flatshard_base::dtype::Float;
use std::ops::Range;

/// Rows of the highest panel of a kernel.
const HIGHEST: usize = 32;

/// Softmax of the rows of a panel, over the keys seen so far (Milakov & Gimelshein 2018).
pub(super) struct Softmax<'a> {
    pub max: &'a mut [f32],
    /// Sixteen partial sums a row.
    pub total: &'a mut [f32],
}

impl Softmax<'_> {
    /// Turns blocks of raw products, for the keys from `k0` on, into weights relative to the new maxima. Returns the
    /// factors by which earlier weights shrink. `queries` are the panel's.
    #[inline(always)]
    pub fn weigh(
        &mut self,
        height: usize,
        scores: &mut [f32],
        queries: Range<usize>,
        k0: usize,
        a: &AttentionShape,
        mask: &Mask,
    ) -> [f32; HIGHEST] {
        let all = mask.keys(queries.end - 1).start..mask.keys(queries.start).end;
        // Softcapped scores are already scaled.
        let (inner, scale) = if a.softcap > 0.0 { (a.scale / a.softcap, 1.0) } else { (0.0, a.scale) };
        let mut factors = [0.0; HIGHEST];
        for (r, q) in queries.clone().enumerate() {
            let visible = mask.keys(q);
            let mut max = [f32::NEG_INFINITY; LANES];
            for (j, block) in scores.chunks_exact_mut(height * COLUMNS).enumerate() {
                let row = block[r * COLUMNS..][..COLUMNS].as_chunks_mut::<LANES>().0;
                for (half, x) in row.iter_mut().enumerate() {
                    let start = k0 + j * COLUMNS + half * LANES;
                    if a.softcap > 0.0 {
                        each(
                            x,
                            #[inline(always)]
                            |x| a.softcap * tanh(x * inner).0,
                        );
                    }
                    if start < all.start || all.end < start + LANES {
                        hide(x, start, &visible, f32::NEG_INFINITY);
                    }
                    for (max, &x) in max.iter_mut().zip(&*x) {
                        *max = larger(x, *max);
                    }
                }
            }
            // Finite from the start, so that a row that attends to nothing yet subtracts no infinities.
            let new = larger(max_lane(max) * scale, self.max[r]);
            factors[r] = self.max[r] - new;
            self.max[r] = new;
        }
        factors.iter_mut().for_each(|x| *x = exp_below(*x));
        for r in 0..queries.len() {
            let max = self.max[r];
            let mut total: LaneRow = [0.0; LANES];
            for block in scores.chunks_exact_mut(height * COLUMNS) {
                for x in block[r * COLUMNS..][..COLUMNS].as_chunks_mut::<LANES>().0 {
                    for (x, total) in x.iter_mut().zip(&mut total) {
                        *x = exp_below(x.mul_add(scale, -max));
                        *total += *x;
                    }
                }
            }
            for (old, new) in self.total[r * LANES..][..LANES].iter_mut().zip(total) {
                *old = old.mul_add(factors[r], new);
            }
        }
        factors
    }
}

/// `shape.scale` must be positive.
///
/// # Safety
/// Nothing else accesses the results of these heads.
pub unsafe fn forward<T: PanelFloat>(level: Level, scratch: &mut AttentionScratch, x: &Group<T>) {
    // SAFETY: upheld by the caller.
    with_products!(scratch.kernel, level, T, products => unsafe { forward_with(products, scratch, x) })
}

#[inline(always)]
unsafe fn forward_with<T: Float, P: Products<T>>(products: &P, scratch: &mut AttentionScratch, x: &Group<T>) {
    const { assert!(P::ROWS <= HIGHEST && SIDE.is_multiple_of(P::ROWS) && ACROSS.is_multiple_of(COLUMNS)) };
    let &Group { shape: a, queries, keys, values, .. } = x;
    let s = Sizes::new::<T, P>(a);
    let key_steps = keys.rows.div_ceil(s.line);
    // A single token's heads are the rows of one panel.
    let alone = queries.rows == 1;
    let same = Mask::Same(if alone { x.mask.keys(0) } else { 0..0 });
    let (n, turns, mask) = if alone { (s.group, 1, &same) } else { (queries.rows, s.group, &x.mask) };
    let [k, _] = packed_len(&s, keys.rows, COLUMNS);
    let [_, v] = packed_len(&s, values.rows, COLUMNS);
    let [q, _] = packed_len(&s, SIDE, P::ROWS);
    let sums = SIDE * s.columns * COLUMNS;
    let [k, v, q, scores, weights, out, sums, max, total, row] = scratch.take([
        k,
        v,
        q,
        P::ROWS * ACROSS,
        P::ROWS * ACROSS,
        s.block,
        sums,
        SIDE,
        SIDE * LANES,
        s.columns * COLUMNS,
    ]);
    let [k, v, q, weights] = [k, v, q, weights].map(bytemuck::cast_slice_mut::<f32, P::Packed>);
    products.pack_right(keys, Over::Dim, k);
    products.pack_right(values, Over::Tokens, v);
    for g in 0..turns {
        let queries = if alone { TokenRows { row: s.dim, rows: n, ..queries } } else { queries.head(g) };
        for q0 in (0..n).step_by(SIDE) {
            let tile = q0..n.min(q0 + SIDE);
            products.pack_left(queries.part(q0, tile.len()), Over::Dim, q);
            max.fill(f32::MIN);
            total.fill(0.0);
            sums.fill(0.0);
            // Blocks of keys begin at the same keys for every query, so that its sums do not depend on its tile.
            let seen = mask.keys(q0).start / ACROSS * ACROSS..mask.keys(tile.end - 1).end;
            for k0 in seen.clone().step_by(ACROSS) {
                for (p, first) in tile.clone().step_by(P::ROWS).enumerate() {
                    let rows = first..tile.end.min(first + P::ROWS);
                    let start = mask.keys(first).start.max(k0) / COLUMNS * COLUMNS;
                    let end = mask.keys(rows.end - 1).end.min(k0 + ACROSS);
                    if start >= end {
                        continue;
                    }
                    let scores = &mut scores[..(end - start).div_ceil(COLUMNS) * s.block];
                    let left = &q[p * s.steps * P::ROWS * s.line..][..s.steps * P::ROWS * s.line];
                    for (j, block) in scores.chunks_exact_mut(s.block).enumerate() {
                        let right = (start / COLUMNS + j) * s.steps * COLUMNS * s.line;
                        let right = &k[right..][..s.steps * COLUMNS * s.line];
                        // SAFETY: the slices are of these steps, and in whole cache lines.
                        unsafe { products.multiply(left.as_ptr(), right.as_ptr(), s.steps, block.as_mut_ptr()) };
                    }
                    let at = p * P::ROWS;
                    let mut softmax = Softmax { max: &mut max[at..], total: &mut total[at * LANES..] };
                    let factors = softmax.weigh(P::ROWS, scores, rows, start, a, mask);
                    for (block, weights) in scores.chunks_exact(s.block).zip(weights.chunks_exact_mut(s.block)) {
                        products.left_of_sums(block, weights);
                    }
                    let (from, steps) = (start / s.line, end.div_ceil(s.line) - start / s.line);
                    for c in 0..s.columns {
                        let right = &v[(c * key_steps + from) * COLUMNS * s.line..][..steps * COLUMNS * s.line];
                        let left = &weights[..steps * P::ROWS * s.line];
                        // SAFETY: as above.
                        unsafe { products.multiply(left.as_ptr(), right.as_ptr(), steps, out.as_mut_ptr()) };
                        let sums = &mut sums[(p * s.columns + c) * s.block..][..s.block];
                        let rows = sums.as_chunks_mut::<COLUMNS>().0.iter_mut().zip(out.as_chunks::<COLUMNS>().0);
                        for ((sums, out), factor) in rows.zip(factors) {
                            sums.iter_mut().zip(out).for_each(|(sum, x)| *sum = sum.mul_add(factor, *x));
                        }
                    }
                }
            }
            for (i, row_of_tile) in tile.enumerate() {
                let (g, query) = if alone { (row_of_tile, 0) } else { (g, row_of_tile) };
                let mut lanes = [0.0; LANES];
                lanes.copy_from_slice(&total[i * LANES..][..LANES]);
                let total = lane_sum(lanes);
                let nothing = total == 0.0;
                let share = if nothing { 0.0 } else { 1.0 / total };
                for (c, row) in row.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
                    let from = ((i / P::ROWS * s.columns + c) * P::ROWS + i % P::ROWS) * COLUMNS;
                    row.iter_mut().zip(&sums[from..]).for_each(|(out, sum)| *out = sum * share);
                }
                let lse = if nothing { f32::NEG_INFINITY } else { max[i] + total.ln() };
                // SAFETY: upheld by the caller.
                unsafe {
                    x.out.write(g, query, &row[..s.dim]);
                    x.lse.range(x.lse_at + g * x.apart + query, 1)[0] = lse;
                }
            }
        }
    }
}
