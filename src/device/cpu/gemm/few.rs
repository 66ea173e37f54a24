//! Products of few rows of A with rows of B that run along k, with AVX-512, as in generating tokens: B is read from
//! memory once, in its own order, and transposed in registers, sixteen of its rows at a time. Memory bandwidth is the
//! bound. Sums run in the order of `blocked`, and have its bits. Never packs B.
use super::avx512::Dot;
use super::block::{Block, stretches};
use super::buffers::{Buffers, CacheLines};
use super::completion::Completion;
use super::pack::{COLUMNS, Load, transposed};
use super::store::{Destination, Patch, StoreSums};
use crate::ops::GemmShape;
use flatshard_base::{DType, Elem};
use half::bf16;
use std::arch::{asm, x86_64::*};

/// At most so many rows: with more, multiplications take longer than packing B saves.
pub(super) const ROWS: usize = 8;

/// Rows of B that are transposed together.
const SIDE: usize = 16;

/// Whether [`product`] has the bits of `blocked` for this product with C of `c`: unless sums over several stretches of
/// k are added to C itself, in another order.
pub(super) fn takes<E: Load>(shape: &GemmShape, c: DType) -> bool
where
    Dot: Block<E::Packed>,
{
    let &GemmShape { m, k, ta, tb, accumulate, .. } = shape;
    let (steps, stretch) = stretches::<E, Dot>(k);
    tb && !ta && m <= ROWS && !(accumulate && stretch < steps && c == DType::F32)
}

/// Adds one product, or two, to each of sixteen sums, as the block products do.
pub(in crate::cpu) trait AddProducts {
    /// # Safety
    /// The CPU has what [`Dot`] needs for this type.
    unsafe fn add(sums: __m512, a: __m512i, b: __m512i) -> __m512;
}
impl AddProducts for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(sums: __m512, a: __m512i, b: __m512i) -> __m512 {
        _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sums)
    }
}
impl AddProducts for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(mut sums: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: upheld by the caller. Assembly, because the intrinsic cannot be inlined into functions that also run
        // on CPUs without AVX512-BF16.
        unsafe {
            asm!("vdpbf16ps {sums}, {a}, {b}", sums = inout(zmm_reg) sums, a = in(zmm_reg) a, b = in(zmm_reg) b,
                 options(pure, nomem, nostack, preserves_flags))
        };
        sums
    }
}

/// Sums of [`ROWS`] rows x [`COLUMNS`] columns.
#[repr(C, align(64))]
struct FewSums([f32; ROWS * COLUMNS]);

/// A's rows as 32-bit lanes: one f32, or two bf16. Missing rows, up to a power of two, and the end of k are zeros.
struct FewRows {
    lanes: *const i32,
    /// Lanes of a row.
    row: usize,
}

/// # Safety
/// AVX-512 F, BW, VL and what `C` and [`Dot`] need; `a` and `b` hold `shape.extents()`, and `c` may be written at
/// those; [`takes`] the product.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: Load<Lanes = __m512i, Packed: AddProducts> + Elem, C: StoreSums + Elem>(
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    c: *mut C,
    then: Completion<C>,
    buffers: &mut Buffers,
) where
    Dot: Block<E::Packed>,
{
    let &GemmShape { m, n, k, ldb, ldc, accumulate, .. } = shape;
    let target = Destination { c, ld: ldc, add: accumulate, past: false, then };
    // SAFETY: upheld by the caller; each block is within C.
    unsafe {
        let x = rows_of_a(shape, a, &mut buffers.a);
        let mut sums = FewSums([0.0; ROWS * COLUMNS]);
        for column in (0..n).step_by(COLUMNS) {
            let columns = COLUMNS.min(n - column);
            for first in (0..columns).step_by(SIDE) {
                let of = b.as_ptr().wrapping_add((column + first) * ldb);
                let (rows, out) = (SIDE.min(columns - first), sums.0.as_mut_ptr().add(first));
                match m {
                    1 => multiply::<E, 1>(&x, of, (rows, ldb, k), out),
                    2 => multiply::<E, 2>(&x, of, (rows, ldb, k), out),
                    3 | 4 => multiply::<E, 4>(&x, of, (rows, ldb, k), out),
                    _ => multiply::<E, ROWS>(&x, of, (rows, ldb, k), out),
                }
            }
            target.finish(sums.0.as_mut_ptr(), Patch { row: 0, column, rows: m, columns }, None);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn rows_of_a<E: Load<Lanes = __m512i> + Elem>(shape: &GemmShape, a: &[E], to: &mut CacheLines) -> FewRows {
    let &GemmShape { m, k, lda, .. } = shape;
    let row = k.div_ceil(E::STEP).max(1) * SIDE;
    let to = to.take::<f32>(m.next_power_of_two() * row);
    to.fill(0.0);
    let to = to.as_mut_ptr().cast::<i32>();
    for i in 0..m {
        for (step, at) in (0..k).step_by(E::STEP).enumerate() {
            // SAFETY: upheld by the caller; masked lanes are not accessed.
            unsafe {
                _mm512_storeu_si512(
                    to.add(i * row + step * SIDE).cast(),
                    E::along(a.as_ptr().add(i * lda + at), k - at),
                )
            }
        }
    }
    FewRows { lanes: to, row }
}

/// `out`, rows of [`COLUMNS`], = M rows of x times these rows of B.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn multiply<E: Load<Lanes = __m512i, Packed: AddProducts> + Elem, const M: usize>(
    x: &FewRows,
    b: *const E,
    (rows, ldb, k): (usize, usize, usize),
    out: *mut f32,
) where
    Dot: Block<E::Packed>,
{
    let (steps, stretch) = stretches::<E, Dot>(k);
    let mut totals = [_mm512_setzero_ps(); M];
    for first in (0..steps).step_by(stretch) {
        let mut sums = [_mm512_setzero_ps(); M];
        for step in first..steps.min(first + stretch) {
            let at = step * E::STEP;
            let valid = k.saturating_sub(at);
            // SAFETY: upheld by the caller; masked lanes are not accessed, and prefetches cannot fault.
            unsafe {
                let mut of_b = [_mm512_setzero_si512(); SIDE];
                for (j, lanes) in of_b.iter_mut().enumerate().take(rows) {
                    let row = b.wrapping_add(j * ldb + at);
                    _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(SIDE * ldb).cast());
                    *lanes = E::along(row, valid);
                }
                for (lane, right) in transposed(of_b).into_iter().enumerate() {
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let left = x.lanes.add(i * x.row + step * SIDE + lane).read();
                        *sums = E::Packed::add(*sums, _mm512_set1_epi32(left), right);
                    }
                }
            }
        }
        for (total, sums) in totals.iter_mut().zip(sums) {
            *total = if first == 0 { sums } else { _mm512_add_ps(sums, *total) };
        }
    }
    for (i, total) in totals.into_iter().enumerate() {
        // SAFETY: `out` is half of a block.
        unsafe { _mm512_storeu_ps(out.add(i * COLUMNS), total) }
    }
}
