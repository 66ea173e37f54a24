//! Products of which a side is as narrow as an adapter's rank, with AVX-512: `x Aᵀ` and `dy B`, what B and A make of
//! them, and the gradients of A and B. Activations are read or written once where they are, and nothing of their size
//! is packed: panels of 32 columns would be mostly padding, and packing would take longer than multiplying. Sums are
//! in f32 whatever the operands, and those of an element do not depend on how rows or columns are divided. Never used
//! for experts, whose rows have the sums of `blocked`.
mod gradient;

use self::gradient::{BLOCK, GROUP, NARROW, VECTORS, gradient, transposed_floats};
use super::buffers::{Buffers, CacheLines};
use super::pack::first16;
use super::store::StoreSums;
use crate::ops::GemmShape;
use std::arch::x86_64::*;

/// The fewest of the side across from it. Narrower matrices have the sums of `blocked`, so that a part of a tiny
/// model's matrix has the bits of the whole.
const WIDE: usize = 256;
/// Rows of the other operand at a time: 24 sums of 32 registers, with 11 loads for 24 products.
const ROWS: usize = 3;

/// Whether a product has such a side and fits these loops. With a transposed A, either side may be narrow.
pub(super) fn is_narrow(shape: &GemmShape) -> bool {
    match shape.ta {
        false => is_pair(shape.n, shape.k),
        true => !shape.tb && is_pair(shape.m, shape.n),
    }
}

fn is_pair(a: usize, b: usize) -> bool {
    a.min(b) <= NARROW && a.max(b) >= WIDE
}

/// # Safety
/// AVX-512 F, BW, VL and what `E` and `C` need; the product is narrow, or columns or rows of one that is; the operands
/// hold `shape.extents()`, and nobody else accesses what is written of C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: StoreSums, C: StoreSums>(
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    c: *mut C,
    buffers: &mut Buffers,
) {
    // SAFETY: upheld by the caller.
    unsafe {
        match shape.ta {
            false if shape.k > NARROW => project(shape, a.as_ptr(), b.as_ptr(), c, buffers),
            false if shape.k > GROUP => spread::<E, C, NARROW, 1>(shape, a.as_ptr(), b.as_ptr(), c, buffers),
            false => spread::<E, C, GROUP, VECTORS>(shape, a.as_ptr(), b.as_ptr(), c, buffers),
            true => gradient(shape, a.as_ptr(), b.as_ptr(), c, buffers),
        }
    }
}

/// `C (m, n) (+)= A B` with few columns: dot products of rows of A with the columns of B, in lanes along k.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn project<E: StoreSums, C: StoreSums>(
    shape: &GemmShape,
    a: *const E,
    b: *const E,
    c: *mut C,
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, lda, ldc, accumulate, .. } = shape;
    let depth = k.next_multiple_of(16);
    // SAFETY: upheld by the caller; each access is within an operand, or masked.
    unsafe {
        let columns = columns_in_rows(shape, b, depth, &mut buffers.b);
        for i in (0..m).step_by(ROWS) {
            // An incomplete last block repeats a row.
            let rows: [*const E; ROWS] = std::array::from_fn(|r| a.wrapping_add((i + r).min(m - 1) * lda));
            for j in (0..n).step_by(GROUP) {
                let sums = dot(rows, lda, columns.add(j * depth), k, depth);
                let mask = first16((n - j).min(GROUP));
                for (r, sums) in sums.iter().enumerate().take(m - i) {
                    let at = c.add((i + r) * ldc + j);
                    let mut x = _mm512_castps256_ps512(*sums);
                    if accumulate {
                        x = _mm512_add_ps(x, C::load(at, mask));
                    }
                    C::store(at, mask, x);
                }
            }
        }
    }
}

/// The columns of B as rows of `depth` f32, which are zero from k on. Rows up to a whole group repeat the last.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn columns_in_rows<E: StoreSums>(
    shape: &GemmShape,
    b: *const E,
    depth: usize,
    to: &mut CacheLines,
) -> *const f32 {
    let &GemmShape { n, k, tb, ldb, .. } = shape;
    let rows = n.next_multiple_of(GROUP);
    let to = to.take::<f32>(rows * depth).as_mut_ptr();
    // SAFETY: upheld by the caller.
    unsafe {
        for at in (0..k).step_by(16) {
            if tb {
                for row in 0..rows {
                    let from = b.add(row.min(n - 1) * ldb + at);
                    f32::store(to.add(row * depth + at), !0, E::load(from, first16(k - at)));
                }
                continue;
            }
            let mut tile = [_mm512_setzero_ps(); 16];
            for (i, lanes) in tile.iter_mut().enumerate().take(k - at) {
                *lanes = E::load(b.add((at + i) * ldb), first16(n));
            }
            let tile = transposed_floats(tile);
            for (row, lanes) in tile.iter().enumerate().take(rows) {
                f32::store(to.add(row * depth + at), !0, *lanes);
            }
        }
    }
    to
}

/// The products of rows of k elements with [`GROUP`] rows of f32, `depth` apart. Prefetches the rows after these, which
/// are `ld` apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn dot<E: StoreSums>(
    rows: [*const E; ROWS],
    ld: usize,
    columns: *const f32,
    k: usize,
    depth: usize,
) -> [__m256; ROWS] {
    let mut lanes = [[_mm512_setzero_ps(); GROUP]; ROWS];
    let mut step = |at: usize, mask: __mmask16| {
        let mut left = [_mm512_setzero_ps(); ROWS];
        // SAFETY: upheld by the caller; masked lanes are not accessed, and a prefetch cannot fault.
        unsafe {
            for (left, row) in left.iter_mut().zip(rows) {
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(ROWS * ld + at).cast());
                *left = E::load(row.wrapping_add(at), mask);
            }
            for column in 0..GROUP {
                let right = _mm512_load_ps(columns.wrapping_add(column * depth + at));
                for (lanes, left) in lanes.iter_mut().zip(left) {
                    lanes[column] = _mm512_fmadd_ps(left, right, lanes[column]);
                }
            }
        }
    };
    let whole = k - k % 16;
    for at in (0..whole).step_by(16) {
        step(at, !0);
    }
    if whole < k {
        step(whole, first16(k - whole));
    }
    let mut sums = [_mm256_setzero_ps(); ROWS];
    for (sum, lanes) in sums.iter_mut().zip(lanes) {
        *sum = lane_sums(lanes);
    }
    sums
}

/// The sum of each vector's lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn lane_sums(x: [__m512; GROUP]) -> __m256 {
    let mut halves = [_mm256_setzero_ps(); GROUP];
    for (half, x) in halves.iter_mut().zip(x) {
        let high = _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x))));
        *half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_castps512_ps256(high));
    }
    let [a, b, c, d, e, f, g, h] = halves;
    let first = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let last = _mm256_hadd_ps(_mm256_hadd_ps(e, f), _mm256_hadd_ps(g, h));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(first, last), _mm256_permute2f128_ps::<0x31>(first, last))
}

/// `C (m, n) (+)= A B` with at most K steps of k: K rows of V vectors of B are in registers, of 32, while the rows of a
/// block pass. The rows of the next block are prefetched meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn spread<E: StoreSums, C: StoreSums, const K: usize, const V: usize>(
    shape: &GemmShape,
    a: *const E,
    b: *const E,
    c: *mut C,
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, lda, ldc, accumulate, .. } = shape;
    let rows = buffers.a.take::<f32>(m * K).as_mut_ptr();
    // SAFETY: upheld by the caller; each access is within an operand, or masked, and a prefetch cannot fault.
    unsafe {
        for i in 0..m {
            f32::store(rows.add(i * K), first16(K), E::load(a.add(i * lda), first16(k)));
        }
        let stripes = rows_in_stripes::<E, K, V>(shape, b, &mut buffers.b);
        for (first, column) in (0..m).step_by(BLOCK).flat_map(|i| (0..n).step_by(V * 16).map(move |j| (i, j))) {
            let mut right = [[_mm512_setzero_ps(); V]; K];
            for (step, right) in right.iter_mut().enumerate() {
                for (vector, right) in right.iter_mut().enumerate() {
                    *right = _mm512_load_ps(stripes.add((column * K) + (step * V + vector) * 16));
                }
            }
            for i in first..m.min(first + BLOCK) {
                let mut sums = [_mm512_setzero_ps(); V];
                for (step, right) in right.iter().enumerate() {
                    let left = _mm512_set1_ps(*rows.add(i * K + step));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = _mm512_fmadd_ps(left, *right, *sum);
                    }
                }
                for (vector, mut sum) in sums.into_iter().enumerate() {
                    let mask = first16(n.saturating_sub(column + vector * 16));
                    let at = c.wrapping_add(i * ldc + column + vector * 16);
                    if accumulate {
                        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(BLOCK * ldc).cast());
                        sum = _mm512_add_ps(sum, C::load(at, mask));
                    }
                    C::store(at, mask, sum);
                }
            }
        }
    }
}

/// K rows of B in f32, by stripes of V vectors of columns. Rows from k on and columns from n on are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn rows_in_stripes<E: StoreSums, const K: usize, const V: usize>(
    shape: &GemmShape,
    b: *const E,
    to: &mut CacheLines,
) -> *const f32 {
    let &GemmShape { n, k, tb, ldb, .. } = shape;
    let to = to.take::<f32>(n.next_multiple_of(V * 16) * K).as_mut_ptr();
    for at in (0..n.next_multiple_of(V * 16)).step_by(16) {
        let count = n.saturating_sub(at).min(16);
        let mut tile = [_mm512_setzero_ps(); 16];
        let stripe = at - at % (V * 16);
        // SAFETY: upheld by the caller; masked lanes are not accessed.
        unsafe {
            if tb {
                for (j, lanes) in tile.iter_mut().enumerate().take(count) {
                    *lanes = E::load(b.add((at + j) * ldb), first16(k));
                }
                tile = transposed_floats(tile);
            } else {
                for (step, lanes) in tile.iter_mut().enumerate().take(k) {
                    *lanes = E::load(b.wrapping_add(step * ldb + at), first16(count));
                }
            }
            for (step, lanes) in tile.into_iter().enumerate().take(K) {
                f32::store(to.add(stripe * K + step * V * 16 + at - stripe), !0, lanes);
            }
        }
    }
    to
}
