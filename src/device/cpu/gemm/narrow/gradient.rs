//! The gradients of A and B with AVX-512. Sums of a few rows of k at a time are added up in a buffer that stays near.
//! Never packs the wide side.
use super::super::buffers::{Buffers, CacheLines};
use super::super::pack::{first16, transposed};
use super::super::store::StoreSums;
use crate::ops::GemmShape;
use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

/// The most rows, columns or steps of k of the narrow side: with more, panels of 32 have little padding.
pub(super) const NARROW: usize = 16;
/// Columns of the narrow side at a time.
pub(super) const GROUP: usize = 8;
/// Vectors of columns at a time in a gradient: as many sums and loads.
pub(super) const VECTORS: usize = 3;
/// Rows of the wide operand that pass before the next columns do: they stay in L1, and as many are prefetched. Zen 4,
/// one core, 1024 x 576 and x 1536 f32, rank 8: B's product 1.6 and 2.1 times as fast as in columns of all rows,
/// gradients 1.6 and 1.9 times.
pub(super) const BLOCK: usize = 8;
/// Rows of k that are summed before the sum is added to others.
const STRETCH: usize = 1024;

/// `C (m, n) (+)= Aᵀ B`, of which a side is narrow: rows of k one after another, each element of the narrow side times
/// vectors of the wide one.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn gradient<E: StoreSums, C: StoreSums>(
    shape: &GemmShape,
    a: *const E,
    b: *const E,
    c: *mut C,
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, lda, ldb, ldc, accumulate, .. } = shape;
    // The results do not depend on which side is taken as the narrow one.
    let turned = n <= NARROW;
    let (narrow, narrow_ld, few) = if turned { (b, ldb, n) } else { (a, lda, m) };
    let (wide, wide_ld, many) = if turned { (a, lda, m) } else { (b, ldb, n) };
    // SAFETY: upheld by the caller; each access is within an operand, or masked.
    unsafe {
        let groups = groups(narrow, narrow_ld, few, k, &mut buffers.b);
        let target = Gradient { c, ldc, turned, accumulate };
        let (stripe, stripes) = (few.next_multiple_of(GROUP) * VECTORS * 16, many.div_ceil(VECTORS * 16));
        let sums = buffers.sums.take::<f32>(2 * stripe * stripes).as_mut_ptr();
        let all = sums.add(stripe * stripes);
        std::slice::from_raw_parts_mut(all, stripe * stripes).fill(0.0);
        for stretch in (0..k).step_by(STRETCH) {
            let end = k.min(stretch + STRETCH);
            std::slice::from_raw_parts_mut(sums, stripe * stripes).fill(0.0);
            for start in (stretch..end).step_by(BLOCK) {
                let rows = start..end.min(start + BLOCK);
                for column in 0..stripes {
                    let at = wide.add(column * VECTORS * 16);
                    for first in (0..few).step_by(GROUP) {
                        let to = sums.add(column * stripe + first * VECTORS * 16);
                        outer(at, wide_ld, many - column * VECTORS * 16, groups.add(first * k), rows.clone(), to);
                    }
                }
            }
            for at in (0..stripe * stripes).step_by(16) {
                _mm512_store_ps(all.add(at), _mm512_add_ps(_mm512_load_ps(all.add(at)), _mm512_load_ps(sums.add(at))));
            }
        }
        for (column, first) in (0..stripes).flat_map(|i| (0..few).step_by(GROUP).map(move |j| (i, j))) {
            let from = all.add(column * stripe + first * VECTORS * 16);
            let rows = first..few.min(first + GROUP);
            for vector in 0..VECTORS {
                let column = (column * VECTORS + vector) * 16;
                if column < many {
                    let mut sums = [_mm512_setzero_ps(); GROUP];
                    for (element, sums) in sums.iter_mut().enumerate() {
                        *sums = _mm512_load_ps(from.add((vector * GROUP + element) * 16));
                    }
                    target.write(&sums, rows.clone(), column..many.min(column + 16));
                }
            }
        }
    }
}

/// Each [`GROUP`] of columns of the narrow side as k rows of f32, one group after another. Columns up to a whole group
/// are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn groups<E: StoreSums>(from: *const E, ld: usize, few: usize, k: usize, to: &mut CacheLines) -> *const f32 {
    let to = to.take::<f32>(few.next_multiple_of(GROUP) * k).as_mut_ptr();
    for first in (0..few).step_by(GROUP) {
        let mask = first16((few - first).min(GROUP));
        for row in 0..k {
            // SAFETY: upheld by the caller; masked lanes are not read, and GROUP lanes are written.
            unsafe {
                let lanes = E::load(from.add(row * ld + first), mask);
                f32::store(to.add(first * k + row * GROUP), first16(GROUP), lanes);
            }
        }
    }
    to
}

/// Adds to `to` (vector, element of the group, 16) the sums over `rows` of k of each element of a group times
/// [`VECTORS`] vectors of the wide side, of which `columns` exist. Prefetches as many rows behind these.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn outer<E: StoreSums>(
    wide: *const E,
    ld: usize,
    columns: usize,
    group: *const f32,
    rows: Range<usize>,
    to: *mut f32,
) {
    let mut masks = [0; VECTORS];
    for (vector, mask) in masks.iter_mut().enumerate() {
        *mask = first16(columns.saturating_sub(vector * 16));
    }
    let mut sums = [[_mm512_setzero_ps(); GROUP]; VECTORS];
    // SAFETY: upheld by the caller; masked lanes are not accessed, and a prefetch cannot fault.
    unsafe {
        for (vector, sums) in sums.iter_mut().enumerate() {
            for (element, sums) in sums.iter_mut().enumerate() {
                *sums = _mm512_load_ps(to.add((vector * GROUP + element) * 16));
            }
        }
        for row in rows {
            let at = wide.wrapping_add(row * ld);
            let mut right = [_mm512_setzero_ps(); VECTORS];
            for (vector, right) in right.iter_mut().enumerate() {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(BLOCK * ld + vector * 16).cast());
                *right = E::load(at.wrapping_add(vector * 16), masks[vector]);
            }
            for element in 0..GROUP {
                let left = _mm512_set1_ps(*group.add(row * GROUP + element));
                for (sums, right) in sums.iter_mut().zip(right) {
                    sums[element] = _mm512_fmadd_ps(left, right, sums[element]);
                }
            }
        }
        for (vector, sums) in sums.iter().enumerate() {
            for (element, sums) in sums.iter().enumerate() {
                _mm512_store_ps(to.add((vector * GROUP + element) * 16), *sums);
            }
        }
    }
}

/// Where a gradient is written.
struct Gradient<C> {
    c: *mut C,
    ldc: usize,
    /// Whether the narrow side is the columns of C.
    turned: bool,
    accumulate: bool,
}

impl<C: StoreSums> Gradient<C> {
    /// Writes vectors along the wide side, one for each of `few` on the narrow side.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn write(&self, sums: &[__m512; GROUP], few: Range<usize>, many: Range<usize>) {
        let mut tile = [_mm512_setzero_ps(); 16];
        tile[..GROUP].copy_from_slice(sums);
        // SAFETY: upheld by the caller.
        unsafe {
            if !self.turned {
                for (row, sums) in few.zip(tile) {
                    self.store(row, many.clone(), sums);
                }
                return;
            }
            let tile = transposed_floats(tile);
            for (row, sums) in many.zip(tile) {
                self.store(row, few.clone(), sums);
            }
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(&self, row: usize, columns: Range<usize>, mut x: __m512) {
        let mask = first16(columns.len());
        // SAFETY: upheld by the caller.
        unsafe {
            let at = self.c.add(row * self.ldc + columns.start);
            if self.accumulate {
                x = _mm512_add_ps(x, C::load(at, mask));
            }
            C::store(at, mask, x);
        }
    }
}

/// Transposes 16 x 16 f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transposed_floats(tile: [__m512; 16]) -> [__m512; 16] {
    // SAFETY: the types have the same bits.
    unsafe { transmute(transposed(transmute::<[__m512; 16], [__m512i; 16]>(tile))) }
}
