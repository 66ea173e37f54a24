//! One row times [`ROWS`] rows of B, on AVX2: squares of B are transposed in registers, so that every lane sums a row
//! of its own along k, in order. Never packs, and never reads the columns that fill no square.
use crate::cpu::simd::Level;
use flatshard_base::DType;
use flatshard_base::dtype::Float;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Two registers of sums, since one waits for each multiply-add. More rows are more than the prefetchers follow.
pub(super) const ROWS: usize = 16;
const SIDE: usize = 8;

/// `parts[i]` += row i of B, whose rows start `ldb` elements apart, times x. Returns the number of columns that are
/// summed: none without AVX2, or of f16.
#[inline(always)]
pub(super) fn sums<E: Float>(x: &[f32], b: &[E], ldb: usize, parts: &mut [f32; ROWS]) -> usize {
    let in_word = match E::DTYPE {
        DType::F32 => 1,
        DType::Bf16 => 2,
        _ => return 0,
    };
    let squares = x.len() / (SIDE * in_word);
    assert!(b.len() >= (ROWS - 1) * ldb + x.len(), "the operands hold their extents");
    #[cfg(target_arch = "x86_64")]
    if Level::Avx2.available() {
        let rows = (b.as_ptr().cast::<u8>(), ldb * size_of::<E>());
        // SAFETY: AVX2 and FMA are there, and the squares are within the rows, which are within `b`.
        unsafe {
            match in_word {
                1 => of_words::<1>(rows, squares, x.as_ptr(), parts),
                _ => of_words::<2>(rows, squares, x.as_ptr(), parts),
            }
        }
        return squares * SIDE * in_word;
    }
    let _ = (squares, parts);
    0
}

/// Words of an f32, or of two bf16, the first of which is the low half.
///
/// # Safety
/// The CPU has AVX2 and FMA. Each of the rows, the distance of which is in bytes, has `squares` times eight words, and
/// `x` as many elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn of_words<const IN_WORD: usize>(
    (first, row): (*const u8, usize),
    squares: usize,
    x: *const f32,
    parts: &mut [f32; ROWS],
) {
    const SIDES: usize = ROWS / SIDE;
    // SAFETY: upheld by the caller; prefetches access nothing.
    unsafe {
        let mut sums: [__m256; SIDES] = std::array::from_fn(|side| _mm256_loadu_ps(parts[SIDE * side..].as_ptr()));
        for square in 0..squares {
            let at = 4 * SIDE * square;
            for (side, sum) in sums.iter_mut().enumerate() {
                if square % 2 == 0 {
                    // A line of each of the rows that come next.
                    for i in 0..SIDE {
                        _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add((ROWS + SIDE * side + i) * row + at).cast());
                    }
                }
                let rows = std::array::from_fn(|i| _mm256_loadu_ps(first.add((SIDE * side + i) * row + at).cast()));
                for (j, column) in transposed(rows).into_iter().enumerate() {
                    let x = x.add(IN_WORD * (SIDE * square + j));
                    *sum = match IN_WORD {
                        1 => _mm256_fmadd_ps(_mm256_broadcast_ss(&*x), column, *sum),
                        _ => {
                            let words = _mm256_castps_si256(column);
                            let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
                            let high = _mm256_and_ps(column, _mm256_castsi256_ps(_mm256_set1_epi32(-65536)));
                            let sum = _mm256_fmadd_ps(_mm256_broadcast_ss(&*x), low, *sum);
                            _mm256_fmadd_ps(_mm256_broadcast_ss(&*x.add(1)), high, sum)
                        }
                    };
                }
            }
        }
        for (side, sum) in sums.iter().enumerate() {
            _mm256_storeu_ps(parts[SIDE * side..].as_mut_ptr(), *sum);
        }
    }
}

/// Register j of the result has word j of each row.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn transposed(rows: [__m256; SIDE]) -> [__m256; SIDE] {
    let [a, b, c, d, e, f, g, h] = rows;
    let low = |a, b, c, d| (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
    let high = |a, b, c, d| (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
    // Words 0 and 4, 1 and 5, 2 and 6, 3 and 7 of four rows.
    let quads = |(ab, cd): (__m256, __m256)| [_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd)];
    let ([a0, a1], [a2, a3]) = (quads(low(a, b, c, d)), quads(high(a, b, c, d)));
    let ([e0, e1], [e2, e3]) = (quads(low(e, f, g, h)), quads(high(e, f, g, h)));
    let of = [(a0, e0), (a1, e1), (a2, e2), (a3, e3)];
    std::array::from_fn(|j| match of[j % 4] {
        (a, e) if j < 4 => _mm256_permute2f128_ps::<0x20>(a, e),
        (a, e) => _mm256_permute2f128_ps::<0x31>(a, e),
    })
}
