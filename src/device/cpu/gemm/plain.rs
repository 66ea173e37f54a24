//! Products through the `gemm` crate: f32 directly, bf16 and f16 converted to f32 in blocks. Runs on any CPU.
use super::buffers::{Buffers, CacheLines};
#[cfg(target_arch = "x86_64")]
use super::store::StoreSums;
use crate::base::dtype::Float;
#[cfg(not(target_arch = "x86_64"))]
use crate::base::dtype::Float as StoreSums;
use crate::device::ops::GemmShape;

/// Output types of products of bf16 or f16.
pub(super) trait Output: Float + StoreSums {}
impl<T: Float + StoreSums> Output for T {}

/// The slices must hold `shape.extents()`.
pub(super) fn f32_product(shape: &GemmShape, a: &[f32], b: &[f32], c: &mut [f32]) {
    let [need_a, need_b, need_c] = shape.extents();
    assert!(a.len() >= need_a && b.len() >= need_b && c.len() >= need_c, "extents were checked");
    let strides = |transposed: bool, ld: usize| if transposed { (1, ld as isize) } else { (ld as isize, 1) };
    let ((a_row, a_col), (b_row, b_col)) = (strides(shape.ta, shape.lda), strides(shape.tb, shape.ldb));
    // SAFETY: every index reachable with these sizes and strides is within the extents.
    unsafe {
        gemm::gemm(
            shape.m,
            shape.n,
            shape.k,
            c.as_mut_ptr(),
            1,
            shape.ldc as isize,
            shape.accumulate,
            a.as_ptr(),
            a_col,
            a_row,
            b.as_ptr(),
            b_col,
            b_row,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
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
    let &GemmShape { m, n, k, ta, tb, .. } = shape;
    for j in (0..n).step_by(BLOCK) {
        let columns = BLOCK.min(n - j);
        let b = widen(b, shape.ldb, if tb { (j, 0, columns, k) } else { (0, j, k, columns) }, &mut buffers.b);
        for i in (0..m).step_by(BLOCK) {
            let rows = BLOCK.min(m - i);
            let a = widen(a, shape.lda, if ta { (0, i, k, rows) } else { (i, 0, rows, k) }, &mut buffers.a);
            let block = buffers.c.take::<f32>(rows * columns);
            let dense = GemmShape { m: rows, n: columns, k, ta, tb, ..GemmShape::nn(0, 0, 0) };
            let (lda, ldb) = (if ta { rows } else { k }, if tb { k } else { columns });
            f32_product(&dense.lda(lda).ldb(ldb).ldc(columns), a, b, block);
            for (row, from) in block.chunks_exact(columns).enumerate() {
                let to = &mut c[(i + row) * shape.ldc + j..][..columns];
                for (c, x) in to.iter_mut().zip(from) {
                    *c = C::from_f32(if shape.accumulate { c.to_f32() + x } else { *x });
                }
            }
        }
    }
}

/// Converts the block `(row, column, rows, columns)` of a matrix to dense f32.
fn widen<'a, E: Float>(
    x: &[E],
    ld: usize,
    (row, column, rows, columns): (usize, usize, usize, usize),
    out: &'a mut CacheLines,
) -> &'a [f32] {
    let out = out.take::<f32>(rows * columns);
    if columns > 0 {
        for (r, to) in out.chunks_exact_mut(columns).enumerate() {
            let from = &x[(row + r) * ld + column..][..columns];
            to.iter_mut().zip(from).for_each(|(y, x)| *y = x.to_f32());
        }
    }
    out
}
