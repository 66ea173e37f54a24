//! Products with a single row, as in generating one token at a time, a single column, or short sums, on any CPU. Each
//! element of the matrix is used once, so nothing is packed, and memory bandwidth is the bound. Sums along k in the
//! order of `plain`, so that a row has the bits that it has among others.
use super::buffers::Buffers;
use super::squares::{self, ROWS};
use crate::cpu::simd::Level;
use crate::ops::GemmShape;
use flatshard_base::dtype::Float;

/// Elements along k that are summed before C is added to. `gemm-f32` sums at least 512 so; its limit depends on the
/// CPU's caches.
pub(super) fn depth(k: usize) -> usize {
    k.div_ceil(k.div_ceil(512).max(1)).max(1)
}

/// Whether the product is one of these. Up to two products `gemm-f32` adds in another order, however many rows there
/// are.
pub(super) fn takes(shape: &GemmShape) -> bool {
    !shape.ta && (shape.m == 1 || shape.n == 1) || shape.k <= 2
}

/// The slices must hold `shape.extents()`.
pub(super) fn product<E: Float, C: Float>(shape: &GemmShape, a: &[E], b: &[E], c: &mut [C], buffers: &mut Buffers) {
    Level::best().run(
        #[inline(always)]
        || vectors(shape, a, b, c, buffers),
    )
}

#[inline(always)]
fn vectors<E: Float, C: Float>(shape: &GemmShape, a: &[E], b: &[E], c: &mut [C], buffers: &mut Buffers) {
    let &GemmShape { m, n, k, ta, tb, lda, ldb, ldc, accumulate, .. } = shape;
    if n == 1 && !ta {
        return vector([m, k], (b, if tb { 1 } else { ldb }), (a, lda, true), (c, ldc, accumulate), buffers);
    }
    for i in 0..m {
        let (first, step) = if ta { (i, lda) } else { (i * lda, 1) };
        let row = a.get(first..).unwrap_or_default(); // no elements: nothing to sum
        vector([n, k], (row, step), (b, ldb, tb), (&mut c[i * ldc..], 1, accumulate), buffers);
    }
}

/// A vector of k elements times n rows of a matrix, or columns if it is not transposed. Elements of vectors are `step`
/// apart.
#[inline(always)]
fn vector<E: Float, C: Float>(
    [n, k]: [usize; 2],
    (x, step): (&[E], usize),
    (b, ldb, tb): (&[E], usize, bool),
    (c, ldc, accumulate): (&mut [C], usize, bool),
    buffers: &mut Buffers,
) {
    let wide = buffers.a.take::<f32>(k);
    wide.iter_mut().zip(x.iter().step_by(step)).for_each(|(wide, x)| *wide = x.to_f32());
    let sums = buffers.c.take::<f32>(n);
    let of_c = c.iter().step_by(ldc);
    sums.iter_mut().zip(of_c).for_each(|(sum, c)| *sum = if accumulate { c.to_f32() } else { 0.0 });
    for (part, x) in wide.chunks(depth(k)).enumerate() {
        let from = part * depth(k);
        match tb {
            true => across(x, &b[from..], ldb, sums),
            false => down(x, &b[from * ldb..], ldb, sums, buffers.b.take::<f32>(n)),
        }
    }
    c.iter_mut().step_by(ldc).zip(&*sums).for_each(|(c, sum)| *c = C::from_f32(*sum));
}

/// `sums[j]` += row of x times row j of B.
#[inline(always)]
fn across<E: Float>(x: &[f32], b: &[E], ldb: usize, sums: &mut [f32]) {
    for (group, sums) in sums.chunks_mut(ROWS).enumerate() {
        let b = &b[group * ROWS * ldb..];
        let mut parts = [0f32; ROWS];
        let done = if sums.len() == ROWS { squares::sums(x, b, ldb, &mut parts) } else { 0 };
        // Rows side by side, so that their sums do not wait for each other.
        for (at, x) in x.iter().enumerate().skip(done) {
            for (row, part) in parts[..sums.len()].iter_mut().enumerate() {
                *part = x.mul_add(b[row * ldb + at].to_f32(), *part);
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
