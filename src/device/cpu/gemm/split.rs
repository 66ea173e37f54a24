//! f32 as a sum of three bf16, for f32 products by bf16 instructions (Henry, Tang & Heinecke 2019, "Leveraging the
//! bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations"). The parts have 24 bits together, so
//! nothing is lost above 2^-103; below, the last part is less than bf16's least normal number, which the instructions
//! treat as zero. Never multiplies.
//!
//! x y is the sum of the six largest products of parts. The three omitted ones are together at most 2^-24 |x y|, which
//! is what rounding x y to f32 may change.
use super::pack::{Load, Planes};
use bytemuck::{Pod, Zeroable};
use flatshard_base::{DType, Elem};
use half::bf16;
use std::arch::{asm, x86_64::*};
use std::mem::transmute;

/// An f32 that is packed as its parts, the largest first.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(transparent)]
pub(super) struct SplitF32(f32);

/// One of them.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(transparent)]
pub(super) struct Part(bf16);

impl Elem for SplitF32 {
    const DTYPE: DType = DType::F32;
}
impl Elem for Part {
    const DTYPE: DType = DType::Bf16;
}

/// Needs AVX512-BF16. Lanes of pairs, of each part: the lower half of a lane from `even`, the upper one from `odd`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split(mut even: __m512, mut odd: __m512) -> [__m512i; 3] {
    let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
    // SAFETY: the two types have the same size, and any bits are valid.
    let order = unsafe { transmute::<[u16; 32], __m512i>(order) };
    let mut parts = [__m512i::zero(); 3];
    for part in &mut parts {
        let rounded: __m512i;
        // SAFETY: upheld by the caller: the CPU has AVX512-BF16. As assembly, it can be inlined like the rest.
        unsafe {
            asm!("vcvtne2ps2bf16 {x}, {odd}, {even}", odd = in(zmm_reg) odd, even = in(zmm_reg) even,
                 x = lateout(zmm_reg) rounded, options(pure, nomem, nostack, preserves_flags))
        };
        let pairs = _mm512_permutexvar_epi16(order, rounded);
        // Exact: the difference has fewer bits than the number.
        even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)));
        let upper = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32 as i32));
        odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(upper));
        *part = pairs;
    }
    parts
}

impl Load for SplitF32 {
    type Packed = Part;
    const LANE: usize = 2;
    type Lanes = [__m512i; 3];
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn along(from: *const SplitF32, valid: usize) -> [__m512i; 3] {
        // SAFETY: lanes past `valid` are masked and not accessed.
        let [first, last] = unsafe { halves(from, valid) };
        let [even, odd] = [0, 1].map(|odd| {
            let order: [i32; 16] = std::array::from_fn(|i| 2 * i as i32 + odd);
            // SAFETY: as in `split`.
            let order = unsafe { transmute::<[i32; 16], __m512i>(order) };
            _mm512_permutex2var_ps(first, order, last)
        });
        // SAFETY: upheld by the caller.
        unsafe { split(even, odd) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn across(from: *const SplitF32, ld: usize, depth: usize, columns: usize) -> [__m512i; 3] {
        let count = |row: usize| if row < depth { columns.min(16) } else { 0 };
        // SAFETY: as above.
        unsafe { split(halves(from, count(0))[0], halves(from.wrapping_add(ld), count(1))[0]) }
    }
    const SPLIT: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn strip(from: *const SplitF32, ld: usize, depth: usize, columns: usize) -> [[__m512i; 3]; 2] {
        // SAFETY: as above.
        unsafe {
            [
                SplitF32::across(from, ld, depth, columns),
                SplitF32::across(from.wrapping_add(16), ld, depth, columns.saturating_sub(16)),
            ]
        }
    }
}

/// The first 16 of `valid` elements and the next 16; the rest is zero.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves(from: *const SplitF32, valid: usize) -> [__m512; 2] {
    [0, 16].map(|first| {
        let mask = ((1u32 << valid.saturating_sub(first).min(16)) - 1) as u16;
        // SAFETY: lanes past `valid` are masked and not accessed.
        unsafe { _mm512_maskz_loadu_ps(mask, from.wrapping_add(first).cast()) }
    })
}
