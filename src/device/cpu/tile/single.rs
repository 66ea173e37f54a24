//! Attention of one token's heads over keys and values that lie in rows, such as those of a cache: nothing is gathered
//! or packed, and no row is computed that does not exist. Results have the bits of `forward`, whose products these are,
//! in the same order. Never without AVX-512.
use super::super::gemm::AddProducts;
use super::super::gemm::GemmKernel;
use super::super::gemm::panels::{COLUMNS, NarrowSums};
use super::super::gemm::transposed;
use super::super::simd::{LANES, Level, lane_sum};
use super::forward::Softmax;
use super::operands::{HeadRows, Mask, Shared};
use super::scratch::{ACROSS, AttentionScratch};
use crate::ops::AttentionShape;
use flatshard_base::dtype::Float;
use flatshard_base::{DType, Elem};
use std::arch::x86_64::*;
use std::ops::Range;

/// Query heads of a key/value head.
const HEADS: usize = 8;

/// One token's query heads of a key/value head.
pub struct SingleToken<'a, T> {
    pub shape: &'a AttentionShape,
    /// (heads, dim)
    pub queries: &'a [T],
    /// The keys and values of all tokens; of token t, `row(t)` is where its key is.
    pub kv: &'a [T],
    /// From a key to its value.
    pub apart: usize,
    /// The tokens that are attended to.
    pub visible: Range<usize>,
    pub out: HeadRows<'a, T>,
    pub lse: &'a Shared<'a, f32>,
    pub lse_at: usize,
    pub lse_apart: usize,
}

/// Whether [`single`] computes this: the kernel's products of the type are those of AVX-512, and rows are whole words.
pub fn takes(kernel: GemmKernel, dtype: DType, shape: &AttentionShape) -> bool {
    let by_kernel = match dtype {
        DType::F32 => kernel != GemmKernel::Plain,
        DType::Bf16 => kernel == GemmKernel::Avx512Bf16 || widens(kernel, dtype),
        _ => false,
    };
    by_kernel && shape.heads / shape.kv_heads <= HEADS && shape.head_dim.is_multiple_of(COLUMNS)
}

/// Whether products are those of f32, to which the elements are widened as they are read.
fn widens(kernel: GemmKernel, dtype: DType) -> bool {
    kernel == GemmKernel::Avx512 && dtype == DType::Bf16
}

/// # Safety
/// [`takes`] holds for the kernel of `scratch`; `row` is of elements in `kv` for all visible tokens, and those of their
/// first block; nothing else accesses the results of these heads.
pub unsafe fn single<T: Float + Elem + AddProducts + NarrowSums>(
    scratch: &mut AttentionScratch,
    x: &SingleToken<T>,
    row: impl Fn(usize) -> usize + Copy,
) {
    macro_rules! by_heads {
        ($wide:literal: $($heads:literal),*) => {
            match x.shape.heads / x.shape.kv_heads {
                $($heads => Level::Avx512.run(
                    #[inline(always)]
                    // SAFETY: upheld by the caller.
                    || unsafe { heads::<T, $heads, $wide>(scratch, x, row) },
                ),)*
                _ => unreachable!("taken heads"),
            }
        };
    }
    match widens(scratch.kernel, T::DTYPE) {
        true => by_heads!(true: 1, 2, 3, 4, 5, 6, 7, 8),
        false => by_heads!(false: 1, 2, 3, 4, 5, 6, 7, 8),
    }
}

/// Elements in a 32-bit lane of products. `WIDE`: bf16 is widened to f32.
const fn each<T, const WIDE: bool>() -> usize {
    if WIDE { 1 } else { size_of::<i32>() / size_of::<T>() }
}

/// Sixteen lanes.
///
/// # Safety
/// AVX-512 F; so many elements are at `at`.
#[inline(always)]
unsafe fn lanes<T, const WIDE: bool>(at: *const T) -> __m512i {
    // SAFETY: upheld by the caller; loads are unaligned.
    unsafe {
        match WIDE {
            true => _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()))),
            false => _mm512_loadu_si512(at.cast()),
        }
    }
}

/// One lane, sixteen times.
///
/// # Safety
/// As for [`lanes`].
#[inline(always)]
unsafe fn lane<T, const WIDE: bool>(at: *const T) -> __m512i {
    // SAFETY: as above.
    unsafe {
        match WIDE {
            true => _mm512_set1_epi32(i32::from(at.cast::<i16>().read()) << 16),
            false => _mm512_set1_epi32(at.cast::<i32>().read_unaligned()),
        }
    }
}

/// # Safety
/// What the products need.
#[inline(always)]
unsafe fn add<T: AddProducts, const WIDE: bool>(sums: __m512, left: __m512i, right: __m512i) -> __m512 {
    // SAFETY: upheld by the caller.
    unsafe { if WIDE { f32::add(sums, left, right) } else { T::add(sums, left, right) } }
}

/// Prefetches a head's key or value at `at` of `kv`, which may be beyond its end: a head's rows are further apart than
/// the CPU's own prefetchers look, but those of the next head follow each.
#[inline(always)]
fn prefetch_row<T, const HINT: i32>(x: &SingleToken<T>, at: usize) {
    let row = x.kv.as_ptr().wrapping_add(at).cast::<i8>();
    for byte in (0..x.shape.head_dim * size_of::<T>()).step_by(64) {
        // SAFETY: a hint, which cannot fault.
        unsafe { _mm_prefetch::<HINT>(row.wrapping_add(byte)) }
    }
}

/// # Safety
/// What [`single`] needs, for `N` heads.
#[inline(always)]
unsafe fn heads<T: Float + Elem + AddProducts + NarrowSums, const N: usize, const WIDE: bool>(
    scratch: &mut AttentionScratch,
    x: &SingleToken<T>,
    row: impl Fn(usize) -> usize + Copy,
) {
    let (dim, end) = (x.shape.head_dim, x.visible.end);
    let [scores, weights, sums, max, total] = scratch.take([N * ACROSS, N * ACROSS, N * dim, LANES, N * LANES]);
    sums.fill(0.0);
    max.fill(f32::MIN);
    total.fill(0.0);
    assert!(x.queries.len() >= N * dim, "queries");
    let mask = Mask::Same(x.visible.clone());
    for k0 in (x.visible.start / ACROSS * ACROSS..end).step_by(ACROSS) {
        let (start, stop) = (x.visible.start.max(k0) / COLUMNS * COLUMNS, end.min(k0 + ACROSS));
        if start >= stop {
            continue;
        }
        let blocks = (stop - start).div_ceil(COLUMNS);
        let scores = &mut scores[..blocks * N * COLUMNS];
        for (j, block) in scores.chunks_exact_mut(N * COLUMNS).enumerate() {
            for half in [0, LANES] {
                let first = start + j * COLUMNS + half;
                // SAFETY: tokens before `stop` have rows; upheld by the caller.
                unsafe { products_of_keys::<T, N, WIDE>(x, row, first, stop, &mut block[half..]) };
            }
        }
        let factors = Softmax { max, total }.weigh(N, scores, 0..N, start, x.shape, &mask);
        if each::<T, WIDE>() == 1 {
            weights[..scores.len()].copy_from_slice(scores);
        } else {
            let weights = bytemuck::cast_slice_mut::<f32, T>(weights).chunks_exact_mut(N * COLUMNS);
            for (block, weights) in scores.chunks_exact(N * COLUMNS).zip(weights) {
                // SAFETY: both are of N rows.
                unsafe { T::left(N, block.as_ptr(), weights.as_mut_ptr()) }
            }
        }
        for c in (0..dim).step_by(COLUMNS) {
            // SAFETY: as above.
            let out = unsafe { products_of_values::<T, N, WIDE>(x, row, start..stop, c, weights) };
            for r in 0..N {
                let sums = &mut sums[r * dim + c..][..COLUMNS];
                sums.iter_mut().zip(out[r]).for_each(|(sum, x)| *sum = sum.mul_add(factors[r], x));
            }
        }
    }
    for r in 0..N {
        let mut lanes = [0.0; LANES];
        lanes.copy_from_slice(&total[r * LANES..][..LANES]);
        let total = lane_sum(lanes);
        let nothing = total == 0.0;
        let share = if nothing { 0.0 } else { 1.0 / total };
        let row = &mut sums[r * dim..][..dim];
        row.iter_mut().for_each(|x| *x *= share);
        let lse = if nothing { f32::NEG_INFINITY } else { max[r] + total.ln() };
        // SAFETY: upheld by the caller.
        unsafe {
            x.out.write(r, 0, row);
            x.lse.range(x.lse_at + r * x.lse_apart, 1)[0] = lse;
        }
    }
}

/// Products with sixteen keys, from `first` on; rows of `scores` are 32 apart. Keys from `stop` on are zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn products_of_keys<T: Elem + AddProducts, const N: usize, const WIDE: bool>(
    x: &SingleToken<T>,
    row: impl Fn(usize) -> usize,
    first: usize,
    stop: usize,
    scores: &mut [f32],
) {
    let (dim, each) = (x.shape.head_dim, each::<T, WIDE>());
    let at: [Option<usize>; LANES] = std::array::from_fn(|i| (first + i < stop).then(|| row(first + i)));
    for (i, at) in at.iter().enumerate() {
        let next = row((first + LANES + i).min(stop - 1));
        prefetch_row::<T, _MM_HINT_T0>(x, next);
        at.iter().for_each(|at| prefetch_row::<T, _MM_HINT_T1>(x, at + dim));
    }
    // SAFETY: rows are within `kv`, by the slices; loads are unaligned.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); N];
        let keys = at.map(|at| at.map(|at| x.kv[at..][..dim].as_ptr()));
        let queries = x.queries.as_ptr();
        for d in (0..dim).step_by(LANES * each) {
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (row, key) in rows.iter_mut().zip(keys) {
                *row = key.map_or(
                    *row,
                    #[inline(always)]
                    |key| lanes::<T, WIDE>(key.add(d)),
                );
            }
            for (i, keys) in transposed(rows).into_iter().enumerate() {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = lane::<T, WIDE>(queries.add(r * dim + d + i * each));
                    *sums = add::<T, WIDE>(*sums, query, keys);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(scores[r * COLUMNS..][..LANES].as_mut_ptr(), sums);
        }
    }
}

/// Values of `tokens`, weighted: 32 columns from `column` on. Weights are blocks of 32 tokens, row after row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn products_of_values<T: Elem + AddProducts, const N: usize, const WIDE: bool>(
    x: &SingleToken<T>,
    row: impl Fn(usize) -> usize,
    tokens: Range<usize>,
    column: usize,
    weights: &[f32],
) -> [[f32; COLUMNS]; N] {
    // Tokens of a lane.
    let each = each::<T, WIDE>();
    let value = |t: usize| x.kv[row(t) + x.apart + column..][..COLUMNS].as_ptr();
    let mut out = [[0.0; COLUMNS]; N];
    // SAFETY: rows are within `kv`, by the slices; loads are unaligned. Weights are of whole blocks.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; N];
        for (i, t) in tokens.clone().step_by(each).enumerate() {
            let first = value(t);
            if column == 0 {
                let of_next_head = |t: usize| row(t) + x.apart + x.shape.head_dim;
                (t..t + each).for_each(|t| prefetch_row::<T, _MM_HINT_T1>(x, of_next_head(t.min(tokens.end - 1))));
            }
            let right = if each == 1 {
                [lanes::<T, WIDE>(first), lanes::<T, WIDE>(first.add(LANES))]
            } else {
                let low = _mm512_loadu_si512(first.cast());
                let high = match t + 1 < tokens.end {
                    true => _mm512_loadu_si512(value(t + 1).cast()),
                    false => _mm512_setzero_si512(),
                };
                [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)]
            };
            let at = i * each;
            let first = at / COLUMNS * N * COLUMNS + at % COLUMNS;
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = match each {
                    1 => _mm512_castps_si512(_mm512_set1_ps(weights[first + r * COLUMNS])),
                    _ => lane::<T, false>(bytemuck::cast_slice(weights)[first + r * COLUMNS..][..each].as_ptr()),
                };
                sums[0] = add::<T, WIDE>(sums[0], weight, right[0]);
                sums[1] = add::<T, WIDE>(sums[1], weight, right[1]);
            }
        }
        let zero = _mm512_setzero_si512();
        for (out, sums) in out.iter_mut().zip(sums) {
            // The end of a line is zeros.
            let [a, b] = sums.map(|sums| add::<T, WIDE>(sums, zero, zero));
            let [a, b] = if each == 1 {
                [a, b]
            } else {
                // Each quarter of the first holds the first four columns of eight, of the second the others.
                let order = |from: i32| {
                    let of = |i: i32| {
                        let column = from + i;
                        column / 8 * 4 + column % 4 + if column % 8 < 4 { 0 } else { 16 }
                    };
                    let order: [i32; LANES] = std::array::from_fn(|i| of(i as i32));
                    _mm512_loadu_si512(order.as_ptr().cast())
                };
                [0, 16].map(|from| _mm512_permutex2var_ps(a, order(from), b))
            };
            _mm512_storeu_ps(out.as_mut_ptr(), a);
            _mm512_storeu_ps(out[LANES..].as_mut_ptr(), b);
        }
    }
    out
}
