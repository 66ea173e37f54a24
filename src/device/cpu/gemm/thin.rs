//! Products with a single row, as in generating one token at a time, on any CPU. Each element of B is used once, so
//! nothing is packed, and memory bandwidth is the bound. Never sums in any order other than along k, in lanes.
use super::buffers::Buffers;
use crate::cpu::simd::{LANES, lane_sum};
use crate::ops::GemmShape;
use flatshard_base::dtype::Float;

/// Rows of B read side by side, so that their sums do not wait for each other.
const SIDE: usize = 4;

/// A is one untransposed row. The slices must hold `shape.extents()`.
#[inline(always)]
pub(super) fn product<E: Float, C: Float>(shape: &GemmShape, a: &[E], b: &[E], c: &mut [C], buffers: &mut Buffers) {
    let &GemmShape { n, k, tb, ldb, accumulate, .. } = shape;
    let row = buffers.a.take::<f32>(k);
    row.iter_mut().zip(a).for_each(|(x, a)| *x = a.to_f32());
    let sums = buffers.c.take::<f32>(n);
    match tb {
        true => across(row, b, ldb, sums),
        false => down(row, b, ldb, sums),
    }
    for (c, sum) in c.iter_mut().zip(&*sums) {
        *c = C::from_f32(if accumulate { c.to_f32() + sum } else { *sum });
    }
}

/// `sums[j]` = row of x times row j of B.
#[inline(always)]
fn across<E: Float>(x: &[f32], b: &[E], ldb: usize, sums: &mut [f32]) {
    let k = x.len();
    for (group, sums) in sums.chunks_mut(SIDE).enumerate() {
        // An incomplete last group is filled up with its first row.
        let rows: [&[E]; SIDE] =
            std::array::from_fn(|i| &b[(group * SIDE + if i < sums.len() { i } else { 0 }) * ldb..][..k]);
        let mut lanes = [[0f32; LANES]; SIDE];
        let whole = k - k % LANES;
        for at in (0..whole).step_by(LANES) {
            let x = &x[at..at + LANES];
            for (row, lanes) in rows.iter().zip(&mut lanes) {
                let row = &row[at..at + LANES];
                for l in 0..LANES {
                    lanes[l] = x[l].mul_add(row[l].to_f32(), lanes[l]);
                }
            }
        }
        for (row, lanes) in rows.iter().zip(&mut lanes) {
            for at in whole..k {
                lanes[at - whole] = x[at].mul_add(row[at].to_f32(), lanes[at - whole]);
            }
        }
        sums.iter_mut().zip(lanes).for_each(|(sum, lanes)| *sum = lane_sum(lanes));
    }
}

/// `sums` = the sum of B's rows, each times its element of x.
#[inline(always)]
fn down<E: Float>(x: &[f32], b: &[E], ldb: usize, sums: &mut [f32]) {
    sums.fill(0.0);
    let n = sums.len();
    for (x, row) in x.iter().zip(b.chunks(ldb.max(1))) {
        for (sum, b) in sums.iter_mut().zip(&row[..n]) {
            *sum = x.mul_add(b.to_f32(), *sum);
        }
    }
}
