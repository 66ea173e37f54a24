//! Products with a single row, as in generating one token at a time, on any CPU. Each element of B is used once, so
//! nothing is packed, and memory bandwidth is the bound. Sums along k in the order of `plain`, so that a row has the
//! bits that it has among others.
use super::buffers::Buffers;
use super::plain::depth;
use crate::ops::GemmShape;
use flatshard_base::dtype::Float;

/// Rows of B read side by side: their sums fill a vector.
const SIDE: usize = 8;

/// A is one untransposed row, of more than two elements. The slices must hold `shape.extents()`.
#[inline(always)]
pub(super) fn product<E: Float, C: Float>(shape: &GemmShape, a: &[E], b: &[E], c: &mut [C], buffers: &mut Buffers) {
    let &GemmShape { n, k, tb, ldb, accumulate, .. } = shape;
    let row = buffers.a.take::<f32>(k);
    row.iter_mut().zip(a).for_each(|(x, a)| *x = a.to_f32());
    let sums = buffers.c.take::<f32>(n);
    sums.iter_mut().zip(&*c).for_each(|(sum, c)| *sum = if accumulate { c.to_f32() } else { 0.0 });
    for (part, x) in row.chunks(depth(k)).enumerate() {
        let from = part * depth(k);
        match tb {
            true => across(x, &b[from..], ldb, sums),
            false => down(x, &b[from * ldb..], ldb, sums, buffers.b.take::<f32>(n)),
        }
    }
    c.iter_mut().zip(&*sums).for_each(|(c, sum)| *c = C::from_f32(*sum));
}

/// `sums[j]` += row of x times row j of B.
#[inline(always)]
fn across<E: Float>(x: &[f32], b: &[E], ldb: usize, sums: &mut [f32]) {
    let k = x.len();
    for (group, sums) in sums.chunks_mut(SIDE).enumerate() {
        // An incomplete last group is filled up with its first row.
        let rows: [&[E]; SIDE] =
            std::array::from_fn(|i| &b[(group * SIDE + if i < sums.len() { i } else { 0 }) * ldb..][..k]);
        let mut parts = [0f32; SIDE];
        let whole = k - k % SIDE;
        for at in (0..whole).step_by(SIDE) {
            let square: [[f32; SIDE]; SIDE] = std::array::from_fn(|i| {
                let row: &[E] = &rows[i][at..at + SIDE];
                std::array::from_fn(|j| row[j].to_f32())
            });
            for (j, x) in x[at..at + SIDE].iter().enumerate() {
                for (part, row) in parts.iter_mut().zip(&square) {
                    *part = x.mul_add(row[j], *part);
                }
            }
        }
        for at in whole..k {
            for (part, row) in parts.iter_mut().zip(&rows) {
                *part = x[at].mul_add(row[at].to_f32(), *part);
            }
        }
        sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
    }
}

/// `sums` += the sum of B's rows, each times its element of x.
#[inline(always)]
fn down<E: Float>(x: &[f32], b: &[E], ldb: usize, sums: &mut [f32], parts: &mut [f32]) {
    parts.fill(0.0);
    let n = parts.len();
    for (x, row) in x.iter().zip(b.chunks(ldb.max(1))) {
        for (part, b) in parts.iter_mut().zip(&row[..n]) {
            *part = x.mul_add(b.to_f32(), *part);
        }
    }
    sums.iter_mut().zip(&*parts).for_each(|(sum, part)| *sum += part);
}
