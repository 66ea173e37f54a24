//! Backward of attention in tiles: weights are computed again from the log of their sums, never read.
use super::super::gemm::panels::{COLUMNS, Over, PanelFloat, Products, TokenRows};
use super::super::simd::{LANES, Level, tanh};
use super::lanes::{LaneRow, exp_below, hide};
use super::operands::{HeadRows, Mask};
use super::scratch::{ACROSS, AttentionScratch, SIDE, Sizes, packed_len, with_products};
use crate::ops::AttentionShape;
use flatshard_base::dtype::Float;

/// What backward reads and writes. Tokens are those of the group's first head.
pub struct GroupGradients<'a, T> {
    pub shape: &'a AttentionShape,
    pub queries: TokenRows<'a, T>,
    pub keys: TokenRows<'a, T>,
    pub values: TokenRows<'a, T>,
    pub d_out: TokenRows<'a, T>,
    pub mask: Mask<'a>,
    /// Begins with the group's first head; `apart` from one head to the next.
    pub lse: &'a [f32],
    pub delta: &'a [f32],
    pub apart: usize,
    pub d_queries: HeadRows<'a, T>,
    pub d_keys: HeadRows<'a, T>,
    pub d_values: HeadRows<'a, T>,
}

/// `p`: from raw products to weights, exp(s - lse). `ds`: from gradients of the weights to those of the raw products,
/// without the factor `scale`. Columns are queries.
#[inline(always)]
fn slope(p: &mut LaneRow, ds: &mut LaneRow, a: &AttentionShape, lse: &LaneRow, delta: &LaneRow) {
    if a.softcap > 0.0 {
        let inner = a.scale / a.softcap;
        for l in 0..LANES {
            let (t, slope) = tanh(p[l] * inner);
            p[l] = exp_below(a.softcap.mul_add(t, -lse[l]));
            ds[l] = p[l] * (ds[l] - delta[l]) * slope;
        }
    } else {
        for l in 0..LANES {
            p[l] = exp_below(p[l].mul_add(a.scale, -lse[l]));
            ds[l] = p[l] * (ds[l] - delta[l]);
        }
    }
}

/// Sixteen values from `at` on, of the first `len`; then `past`.
#[inline(always)]
fn lanes_of(values: &[f32], at: usize, len: usize, past: f32) -> LaneRow {
    std::array::from_fn(
        #[inline(always)]
        |l| if at + l < len { values[at + l] } else { past },
    )
}

/// # Safety
/// As for [`super::forward`].
pub unsafe fn backward<T: PanelFloat>(level: Level, scratch: &mut AttentionScratch, x: &GroupGradients<T>) {
    // SAFETY: upheld by the caller.
    with_products!(scratch.kernel, level, T, products => unsafe { backward_with(products, scratch, x) })
}

#[inline(always)]
unsafe fn backward_with<T: Float, P: Products<T>>(products: &P, scratch: &mut AttentionScratch, x: &GroupGradients<T>) {
    const { assert!(SIDE.is_multiple_of(P::ROWS) && SIDE.is_multiple_of(COLUMNS) && ACROSS.is_multiple_of(COLUMNS)) };
    let &GroupGradients { shape: a, keys, values, ref mask, .. } = x;
    let s = Sizes::new::<T, P>(a);
    let (n, query_steps, query_panels) =
        (x.queries.rows, x.queries.rows.div_ceil(s.line), x.queries.rows.div_ceil(COLUMNS));
    let [of_queries, over_queries] = packed_len(&s, n, COLUMNS);
    let [of_keys, over_keys] = packed_len(&s, SIDE, P::ROWS);
    // Gradients of 32 queries, transposed: a row per element of `dim`.
    let wide = s.dim.next_multiple_of(LANES);
    let dq_panel = wide.max(s.rows * P::ROWS) * COLUMNS;
    let sums = SIDE * s.columns * COLUMNS;
    let [q, q_over, d_out, d_out_over, key, key_over, value, p, ds, ds_over, p_block, ds_block, out, dk, dv, dq, row] =
        scratch.take([
            s.group * of_queries,
            s.group * over_queries,
            s.group * of_queries,
            s.group * over_queries,
            of_keys,
            over_keys,
            of_keys,
            SIDE * ACROSS,
            SIDE * ACROSS,
            SIDE * ACROSS,
            s.block,
            s.block,
            s.block,
            sums,
            sums,
            s.group * query_panels * dq_panel,
            (COLUMNS * wide).max(s.columns * COLUMNS),
        ]);
    let [q, q_over, d_out, d_out_over, key, key_over, value, p, ds, ds_over] =
        [q, q_over, d_out, d_out_over, key, key_over, value, p, ds, ds_over]
            .map(bytemuck::cast_slice_mut::<f32, P::Packed>);
    let per_line = s.line / LANES;
    let [of_queries, over_queries] = [of_queries, over_queries].map(|len| len * per_line);
    for g in 0..s.group {
        let (queries, gradients) = (x.queries.head(g), x.d_out.head(g));
        products.pack_right(queries, Over::Dim, &mut q[g * of_queries..]);
        products.pack_right(queries, Over::Tokens, &mut q_over[g * over_queries..]);
        products.pack_right(gradients, Over::Dim, &mut d_out[g * of_queries..]);
        products.pack_right(gradients, Over::Tokens, &mut d_out_over[g * over_queries..]);
    }
    dq.fill(0.0);
    // Elements of a step of a left operand and of a right one.
    let (left_step, right_step) = (P::ROWS * s.line, COLUMNS * s.line);
    for k0 in (0..keys.rows).step_by(SIDE) {
        let tile = k0..keys.rows.min(k0 + SIDE);
        let panels = tile.len().div_ceil(P::ROWS);
        let key_steps = tile.len().div_ceil(s.line);
        products.pack_left(keys.part(k0, tile.len()), Over::Dim, key);
        products.pack_left(keys.part(k0, tile.len()), Over::Tokens, key_over);
        products.pack_left(values.part(k0, tile.len()), Over::Dim, value);
        dk.fill(0.0);
        dv.fill(0.0);
        let seen = mask.queries(k0).start / COLUMNS * COLUMNS..mask.queries(tile.end - 1).end;
        for g in 0..s.group {
            for q0 in seen.clone().step_by(ACROSS) {
                let q_end = seen.end.min(q0 + ACROSS);
                for (c, first) in (q0..q_end).step_by(COLUMNS).enumerate() {
                    let columns = first..q_end.min(first + COLUMNS);
                    // The keys that any, and that all, of these queries attend to.
                    let any = mask.keys(columns.start).start..mask.keys(columns.end - 1).end;
                    let all = mask.keys(columns.end - 1).start..mask.keys(columns.start).end;
                    let right = (g * query_panels + first / COLUMNS) * s.steps * right_step;
                    let (q, d_out) = (&q[right..][..s.steps * right_step], &d_out[right..][..s.steps * right_step]);
                    let stats = g * x.apart;
                    let [lse, delta] = [(x.lse, f32::INFINITY), (x.delta, 0.0)].map(
                        #[inline(always)]
                        |(of, past)| {
                            [0, LANES].map(
                                #[inline(always)]
                                |half| lanes_of(&of[stats..], first + half, columns.end, past),
                            )
                        },
                    );
                    // Also the rows that complete the last step of the sum over keys.
                    for r in 0..(key_steps * s.line).div_ceil(P::ROWS).max(panels) {
                        let rows = k0 + r * P::ROWS..k0 + (r + 1) * P::ROWS;
                        let left = r * s.steps * left_step;
                        if r >= panels || rows.end <= any.start || any.end <= rows.start {
                            p_block.fill(0.0);
                            ds_block.fill(0.0);
                        } else {
                            // SAFETY: the slices are of these steps, and in whole cache lines.
                            unsafe {
                                let (key, value) =
                                    (&key[left..][..s.steps * left_step], &value[left..][..s.steps * left_step]);
                                products.multiply(key.as_ptr(), q.as_ptr(), s.steps, p_block.as_mut_ptr());
                                products.multiply(value.as_ptr(), d_out.as_ptr(), s.steps, ds_block.as_mut_ptr());
                            }
                            let full = all.start <= rows.start && rows.end <= all.end;
                            let blocks = p_block.as_chunks_mut::<LANES>().0.iter_mut();
                            for (i, (p, ds)) in blocks.zip(ds_block.as_chunks_mut::<LANES>().0).enumerate() {
                                let half = i % 2;
                                slope(p, ds, a, &lse[half], &delta[half]);
                                if !full {
                                    let k = k0 + r * P::ROWS + i / 2;
                                    let visible = if k < tile.end { mask.queries(k) } else { 0..0 };
                                    let at = first + half * LANES;
                                    hide(p, at, &visible, 0.0);
                                    hide(ds, at, &visible, 0.0);
                                }
                            }
                        }
                        if r < panels {
                            let at = (r * ACROSS / COLUMNS + c) * s.block;
                            products.left_of_sums(p_block, &mut p[at..][..s.block]);
                            products.left_of_sums(ds_block, &mut ds[at..][..s.block]);
                        }
                        let at = c * SIDE * COLUMNS + r * s.block;
                        products.right_of_sums(ds_block, &mut ds_over[at..][..s.block]);
                    }
                    let from = any.start.max(k0) - k0;
                    let end = any.end.min(tile.end).max(k0) - k0;
                    let (from, end) = (from / s.line, end.div_ceil(s.line));
                    if from >= end {
                        continue;
                    }
                    let right = &ds_over[c * SIDE * COLUMNS + from * right_step..][..(end - from) * right_step];
                    let sums = &mut dq[(g * query_panels + first / COLUMNS) * dq_panel..][..dq_panel];
                    for (r, sums) in sums.chunks_exact_mut(s.block).take(s.rows).enumerate() {
                        let left = &key_over[(r * key_steps + from) * left_step..][..(end - from) * left_step];
                        // SAFETY: as above.
                        unsafe { products.multiply(left.as_ptr(), right.as_ptr(), end - from, out.as_mut_ptr()) };
                        sums.iter_mut().zip(&*out).for_each(|(sum, x)| *sum += x);
                    }
                }
                for r in 0..panels {
                    let last = tile.end.min(k0 + (r + 1) * P::ROWS) - 1;
                    let from = mask.queries(k0 + r * P::ROWS).start.clamp(q0, q_end) - q0;
                    let end = mask.queries(last).end.clamp(q0, q_end) - q0;
                    let (from, end) = (from / s.line, end.div_ceil(s.line));
                    if from >= end {
                        continue;
                    }
                    let steps = end - from;
                    for c in 0..s.columns {
                        let left = r * P::ROWS * ACROSS + from * left_step;
                        let right = g * over_queries + (c * query_steps + q0 / s.line + from) * right_step;
                        for (weights, over, sums) in [(&*p, &*d_out_over, &mut *dv), (&*ds, &*q_over, &mut *dk)] {
                            let (left, right) =
                                (&weights[left..][..steps * left_step], &over[right..][..steps * right_step]);
                            // SAFETY: as above.
                            unsafe { products.multiply(left.as_ptr(), right.as_ptr(), steps, out.as_mut_ptr()) };
                            let sums = &mut sums[(r * s.columns + c) * s.block..][..s.block];
                            sums.iter_mut().zip(&*out).for_each(|(sum, x)| *sum += x);
                        }
                    }
                }
            }
        }
        for (i, k) in tile.enumerate() {
            let row = &mut row[..s.columns * COLUMNS];
            let at = |c: usize| ((i / P::ROWS * s.columns + c) * P::ROWS + i % P::ROWS) * COLUMNS;
            for (c, row) in row.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
                row.iter_mut().zip(&dk[at(c)..]).for_each(|(x, sum)| *x = sum * a.scale);
            }
            // SAFETY: upheld by the caller.
            unsafe { x.d_keys.write(0, k, &row[..s.dim]) };
            for (c, row) in row.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
                row.copy_from_slice(&dv[at(c)..][..COLUMNS]);
            }
            // SAFETY: as above.
            unsafe { x.d_values.write(0, k, &row[..s.dim]) };
        }
    }
    for g in 0..s.group {
        for first in (0..n).step_by(COLUMNS) {
            let panel = &mut dq[(g * query_panels + first / COLUMNS) * dq_panel..][..dq_panel];
            panel.iter_mut().for_each(|x| *x *= a.scale);
            for d in (0..s.dim).step_by(LANES) {
                for half in [0, LANES] {
                    products.transpose(&panel[d * COLUMNS + half..], &mut row[half * wide + d..], wide);
                }
            }
            for (q, row) in (first..n).zip(row.chunks_exact(wide)).take(COLUMNS) {
                // SAFETY: as above.
                unsafe { x.d_queries.write(g, q, &row[..s.dim]) };
            }
        }
    }
}
