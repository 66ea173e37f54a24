//! Products through the `gemm-f32` crate: f32 directly, bf16 and f16 converted to f32 in blocks. Runs on any CPU.
//!
//! The crate sums in another order where a product is small: in both dimensions up to 64, with up to 256 results, or
//! with one row or column (which `thin` computes). Such products are computed as part of one with more rows, so a row's
//! result never depends on how many there are.
use super::buffers::{Buffers, CacheLines};
use super::thin::{self, depth};
use crate::ops::GemmShape;
use flatshard_base::dtype::Float;

/// From this many rows of `n` results on, the order of sums does not depend on their number (`gemm-f32` 0.19).
fn least_rows(n: usize) -> usize {
    if n <= 64 { 65.max(256 / n.max(1) + 1) } else { 4 }
}

/// The slices must hold `shape.extents()`.
pub(super) fn f32_product(shape: &GemmShape, a: &[f32], b: &[f32], c: &mut [f32], buffers: &mut Buffers) {
    if thin::takes(shape) || shape.m < least_rows(shape.n) && !shape.ta {
        return narrow_product(shape, a, b, c, buffers);
    }
    through_crate(shape, a, b, c);
}

/// A matrix and the distances between its rows and between its columns, in elements.
#[derive(Clone, Copy)]
struct Strided {
    at: *const f32,
    row: isize,
    column: isize,
}

impl Strided {
    fn new(matrix: &[f32], ld: usize, transposed: bool) -> Strided {
        let stored = Strided { at: matrix.as_ptr(), row: ld as isize, column: 1 };
        if transposed { stored.transposed() } else { stored }
    }
    fn transposed(self) -> Strided {
        Strided { at: self.at, row: self.column, column: self.row }
    }
}

fn through_crate(shape: &GemmShape, a: &[f32], b: &[f32], c: &mut [f32]) {
    let [need_a, need_b, need_c] = shape.extents();
    assert!(a.len() >= need_a && b.len() >= need_b && c.len() >= need_c, "extents were checked");
    let mut c_strides = Strided::new(c, shape.ldc, false);
    let mut left = Strided::new(a, shape.lda, shape.ta);
    let mut right = Strided::new(b, shape.ldb, shape.tb);
    let (mut m, mut n) = (shape.m, shape.n);
    // The crate stores whole columns of C, whose elements must be adjacent: it computes C^T = B^T A^T.
    if c_strides.row > c_strides.column {
        c_strides = c_strides.transposed();
        (left, right) = (right.transposed(), left.transposed());
        (m, n) = (n, m);
    }
    let product = gemm_f32::gemm::f32::get_gemm_fn();
    let depth = depth(shape.k);
    // Without an element to sum, C is still assigned.
    for from in (0..shape.k.max(1)).step_by(depth) {
        // SAFETY: every index reachable with these sizes and strides is within the extents.
        unsafe {
            product(
                m,
                n,
                depth.min(shape.k - from),
                c.as_mut_ptr(),
                c_strides.column,
                c_strides.row,
                shape.accumulate || from > 0,
                left.at.offset(from as isize * left.column),
                left.column,
                left.row,
                right.at.offset(from as isize * right.row),
                right.column,
                right.row,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
    }
}

/// Rows and columns of C computed at a time: conversion costs 1/BLOCK of the multiplications.
const BLOCK: usize = 512;

pub(super) fn narrow_product<E: Float, C: Float>(
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    c: &mut [C],
    buffers: &mut Buffers,
) {
    if thin::takes(shape) {
        return thin::product(shape, a, b, c, buffers);
    }
    let &GemmShape { m, n, k, ta, tb, .. } = shape;
    for j in (0..n).step_by(BLOCK) {
        let columns = BLOCK.min(n - j);
        let of_b = if tb { (j, 0, columns, k) } else { (0, j, k, columns) };
        let b = widen(b, shape.ldb, of_b, columns * k, &mut buffers.b);
        for i in (0..m).step_by(BLOCK) {
            let rows = BLOCK.min(m - i);
            let padded = if ta { rows } else { rows.max(least_rows(columns)) };
            let of_a = if ta { (0, i, k, rows) } else { (i, 0, rows, k) };
            let a = widen(a, shape.lda, of_a, padded * k, &mut buffers.a);
            let block = buffers.c.take::<f32>(padded * columns);
            let rows_of_c = |row: usize| (i + row) * shape.ldc + j..(i + row) * shape.ldc + j + columns;
            // Results of rows beyond C's are never read.
            let added = if shape.accumulate { rows } else { 0 };
            for (row, sums) in block.chunks_exact_mut(columns).enumerate().take(added) {
                sums.iter_mut().zip(&c[rows_of_c(row)]).for_each(|(sum, c)| *sum = c.to_f32());
            }
            let dense =
                GemmShape { m: padded, n: columns, k, ta, tb, accumulate: shape.accumulate, ..GemmShape::nn(0, 0, 0) };
            let (lda, ldb) = (if ta { rows } else { k }, if tb { k } else { columns });
            through_crate(&dense.lda(lda).ldb(ldb).ldc(columns), a, b, block);
            for (row, sums) in block.chunks_exact(columns).enumerate().take(rows) {
                c[rows_of_c(row)].iter_mut().zip(sums).for_each(|(c, sum)| *c = C::from_f32(*sum));
            }
        }
    }
}

/// Converts the block `(row, column, rows, columns)` of a matrix to dense f32, followed by zeros: `len` elements.
fn widen<'a, E: Float>(
    x: &[E],
    ld: usize,
    (row, column, rows, columns): (usize, usize, usize, usize),
    len: usize,
    out: &'a mut CacheLines,
) -> &'a [f32] {
    let out = out.take::<f32>(len);
    out[rows * columns..].fill(0.0);
    if columns > 0 {
        for (r, to) in out.chunks_exact_mut(columns).enumerate().take(rows) {
            let from = &x[(row + r) * ld + column..][..columns];
            to.iter_mut().zip(from).for_each(|(y, x)| *y = x.to_f32());
        }
    }
    out
}
