//! Products of few rows of A with AVX-512, as in generating tokens: B is read from memory once, in its own order, and
//! nothing is packed. Memory bandwidth is the bound. Never sums in any order other than along k, in lanes if B's rows
//! run along k.
use super::avx512::is_intel;
use super::buffers::{Buffers, CacheLines};
use super::completion::Completion;
use super::pack::{COLUMNS, first16};
use super::store::{Destination, Patch, StoreSums};
use crate::ops::GemmShape;
use std::arch::x86_64::*;

/// At most so many rows: with more, multiplications take longer than packing B saves.
pub(super) const ROWS: usize = 8;

/// Bytes by which one row of B is prefetched ahead. One core reads 326 MB of f32 at 13.3 GB/s on Granite Rapids without
/// prefetch, at 19 with a line 8 KB ahead before each load, and at 14 with two lines before two loads. On Zen 4, which
/// reads 34 GB/s without, 8 KB ahead is too far: a model generates 1.2 times as fast with 1 KB.
pub(super) fn ahead() -> usize {
    if is_intel() { 8192 } else { 1024 }
}

/// Sums of [`ROWS`] rows x [`COLUMNS`] columns.
#[repr(C, align(64))]
struct FewSums([f32; ROWS * COLUMNS]);

/// Operands with rows that run along k, in f32 for A.
struct RowsOfB<E> {
    x: *const f32,
    m: usize,
    b: *const E,
    ldb: usize,
    k: usize,
    ahead: usize,
}

/// Prefetches [`ahead()`] bytes ahead, as determined once.
///
/// # Safety
/// AVX-512 F, BW, VL and what `C` needs; `a` and `b` hold `shape.extents()`, and `c` may be written at those; A is not
/// transposed and has 1 to [`ROWS`] rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: StoreSums, C: StoreSums>(
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    c: *mut C,
    ahead: usize,
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, lda, tb, ldb, ldc, accumulate, .. } = shape;
    let target = Destination { c, ld: ldc, add: accumulate, past: false, then: Completion::Nothing };
    // SAFETY: upheld by the caller; each block is within C.
    unsafe {
        let x = widen(a, [m, k, lda], &mut buffers.a);
        let down = if tb { None } else { Some(down([m, n, k], x, b.as_ptr(), ldb, &mut buffers.c)) };
        let mut sums = FewSums([0.0; ROWS * COLUMNS]);
        for column in (0..n).step_by(COLUMNS) {
            let columns = COLUMNS.min(n - column);
            match down {
                Some(down) => {
                    for i in 0..m {
                        down.add(i * n + column).copy_to_nonoverlapping(sums.0.as_mut_ptr().add(i * COLUMNS), columns);
                    }
                }
                None => {
                    let b = b.as_ptr().wrapping_add(column * ldb);
                    RowsOfB { x, m, b, ldb, k, ahead }.multiply(columns, &mut sums)
                }
            }
            target.finish(sums.0.as_mut_ptr(), Patch { row: 0, column, rows: m, columns }, None);
        }
    }
}

/// A's rows in f32, without gaps.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn widen<E: StoreSums>(a: &[E], [m, k, lda]: [usize; 3], to: &mut CacheLines) -> *const f32 {
    let to = to.take::<f32>(m * k).as_mut_ptr();
    for i in 0..m {
        for at in (0..k).step_by(16) {
            let mask = first16(k - at);
            // SAFETY: upheld by the caller; masked lanes are not accessed.
            unsafe { f32::store(to.add(i * k + at), mask, E::load(a.as_ptr().add(i * lda + at), mask)) };
        }
    }
    to
}

impl<E: StoreSums> RowsOfB<E> {
    /// `sums (m, COLUMNS)` = rows of x times the first `columns` rows of B.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn multiply(&self, columns: usize, sums: &mut FewSums) {
        let mut j = 0;
        // SAFETY: upheld by the caller: the rows exist.
        unsafe {
            // One row of x waits for memory alone, which comes fastest one row of B after another. More rows share what
            // they load, so four rows of B are multiplied side by side while the next four are prefetched.
            while self.m > 1 && j + 4 <= columns {
                let mut i = 0;
                while i + 4 <= self.m {
                    self.block::<4, 4, 1>(i, j, sums);
                    i += 4;
                }
                while i + 2 <= self.m {
                    self.block::<2, 4, 1>(i, j, sums);
                    i += 2;
                }
                if i < self.m {
                    self.block::<1, 4, 1>(i, j, sums);
                }
                j += 4;
            }
            for j in j..columns {
                for i in 0..self.m {
                    self.block::<1, 1, 2>(i, j, sums);
                }
            }
        }
    }
    /// The sums of M rows of x with S rows of B, from `i` and `j` on, each in U vectors of partial sums.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn block<const M: usize, const S: usize, const U: usize>(&self, i: usize, j: usize, sums: &mut FewSums) {
        let &RowsOfB { k, ldb, .. } = self;
        let (x, b) = (self.x.wrapping_add(i * k), self.b.wrapping_add(j * ldb));
        let mut lanes = [[[_mm512_setzero_ps(); U]; S]; M];
        let ahead = if S == 1 { self.ahead / size_of::<E>() } else { S * ldb };
        let mut step = |at: usize, mask: __mmask16, u: usize| {
            for s in 0..S {
                let right = b.wrapping_add(s * ldb + at);
                // A line before each line, in the order of loads.
                if i == 0 && (u * 16 * size_of::<E>()).is_multiple_of(64) {
                    _mm_prefetch::<_MM_HINT_T1>(right.wrapping_add(ahead).cast());
                }
                // SAFETY: upheld by the caller; masked lanes are not accessed.
                unsafe {
                    let right = E::load(right, mask);
                    for (m, lanes) in lanes.iter_mut().enumerate() {
                        let left = f32::load(x.wrapping_add(m * k + at), mask);
                        lanes[s][u] = _mm512_fmadd_ps(left, right, lanes[s][u]);
                    }
                }
            }
        };
        let whole = k - k % (16 * U);
        for at in (0..whole).step_by(16 * U) {
            for u in 0..U {
                step(at + 16 * u, !0, u);
            }
        }
        for (u, at) in (whole..k).step_by(16).enumerate() {
            step(at, first16(k - at), u);
        }
        for (m, lanes) in lanes.iter().enumerate() {
            for (s, lanes) in lanes.iter().enumerate() {
                let mut sum = lanes[0];
                for more in &lanes[1..] {
                    sum = _mm512_add_ps(sum, *more);
                }
                sums.0[(i + m) * COLUMNS + j + s] = _mm512_reduce_add_ps(sum);
            }
        }
    }
}

/// `sums (m, n)` = x B, whose rows run along n: the sum of B's rows, each times its elements of x.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn down<E: StoreSums>(
    [m, n, k]: [usize; 3],
    x: *const f32,
    b: *const E,
    ldb: usize,
    sums: &mut CacheLines,
) -> *const f32 {
    let sums = sums.take::<f32>(m * n);
    sums.fill(0.0);
    let sums = sums.as_mut_ptr();
    let mut row = 0;
    // SAFETY: upheld by the caller: the rows exist.
    unsafe {
        while row + 4 <= k {
            add_rows::<E, 4>([m, n, k], x.add(row), b.wrapping_add(row * ldb), ldb, sums);
            row += 4;
        }
        for row in row..k {
            add_rows::<E, 1>([m, n, k], x.add(row), b.wrapping_add(row * ldb), ldb, sums);
        }
    }
    sums
}

/// Adds R rows of B, each times its elements of x, one after another.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn add_rows<E: StoreSums, const R: usize>(
    [m, n, k]: [usize; 3],
    x: *const f32,
    b: *const E,
    ldb: usize,
    sums: *mut f32,
) {
    for j in (0..n).step_by(16) {
        let mask = first16(n - j);
        // SAFETY: upheld by the caller; masked lanes are not accessed.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = E::load(b.wrapping_add(r * ldb + j), mask);
            }
            for i in 0..m {
                let mut sum = f32::load(sums.add(i * n + j), mask);
                for (r, row) in rows.iter().enumerate() {
                    sum = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(i * k + r)), *row, sum);
                }
                f32::store(sums.add(i * n + j), mask, sum);
            }
        }
    }
}
