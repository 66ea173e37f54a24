//! Writes blocks of sums to C with AVX-512: adds the sums of earlier stretches of k, applies what is fused after the
//! product in f32, and rounds once. Never multiplies.
use super::completion::Completion;
use super::pack::{COLUMNS, first16};
use super::widened::Widened;
use crate::cpu::activation::{gelu_at, gelu_slope_at};
use half::{bf16, f16};
use std::arch::{asm, x86_64::*};

/// An element type of C. bf16 needs AVX512-BF16 to be stored. Lanes that are not set in a mask are neither read nor
/// written.
pub(in crate::cpu) trait StoreSums: Copy {
    unsafe fn load(from: *const Self, mask: __mmask16) -> __m512;
    unsafe fn store(to: *mut Self, mask: __mmask16, x: __m512);
    /// Stores 32 elements past the caches, from the start of a cache line on.
    unsafe fn stream(to: *mut Self, x: [__m512; 2]);
    /// The lanes as they are after being stored and loaded again.
    unsafe fn rounded(x: __m512) -> __m512;
}
impl StoreSums for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not accessed.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(to: *mut f32, mask: __mmask16, x: __m512) {
        // SAFETY: masked lanes are not accessed.
        unsafe { _mm512_mask_storeu_ps(to, mask, x) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn stream(to: *mut f32, [low, high]: [__m512; 2]) {
        // SAFETY: upheld by the caller.
        unsafe {
            _mm512_stream_ps(to, low);
            _mm512_stream_ps(to.add(16), high);
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn rounded(x: __m512) -> __m512 {
        x
    }
}

/// A 16-bit type whose 16 elements convert by `$narrow` and `$wide`.
macro_rules! half {
    ($element:ty, $narrow:expr, $wide:expr) => {
        impl StoreSums for $element {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn load(from: *const $element, mask: __mmask16) -> __m512 {
                // SAFETY: masked lanes are not accessed.
                unsafe { $wide(_mm256_maskz_loadu_epi16(mask, from.cast())) }
            }
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn store(to: *mut $element, mask: __mmask16, x: __m512) {
                let x = $narrow(x);
                // SAFETY: masked lanes are not accessed.
                unsafe { _mm256_mask_storeu_epi16(to.cast(), mask, x) }
            }
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn stream(to: *mut $element, [low, high]: [__m512; 2]) {
                let (low, high) = ($narrow(low), $narrow(high));
                let line = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                // SAFETY: upheld by the caller.
                unsafe { _mm512_stream_si512(to.cast(), line) }
            }
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn rounded(x: __m512) -> __m512 {
                $wide($narrow(x))
            }
        }
    };
}
half!(f16, |x| _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x), |x| _mm512_cvtph_ps(x));
// SAFETY: stored only by kernels that need AVX512-BF16.
half!(bf16, |x| unsafe { narrowed(x) }, |x| widened(x));
half!(Widened, |x| rounded(x), |x| widened(x));

/// To bf16. Results below 2^-126 become zero, as do the operands and sums of bf16 products.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn narrowed(x: __m512) -> __m256i {
    let y;
    // SAFETY: upheld by the caller: the CPU has AVX512-BF16. Assembly, because the intrinsic cannot be inlined into
    // functions that also run on CPUs without.
    unsafe {
        asm!("vcvtneps2bf16 {y}, {x}", x = in(zmm_reg) x, y = lateout(ymm_reg) y,
             options(pure, nomem, nostack, preserves_flags))
    };
    y
}

/// To bf16 by integer instructions, as [`Float::from_f32`](flatshard_base::dtype::Float::from_f32).
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512) -> __m256i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let nearest = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x40_0000));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(nearest))
}

/// From bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn widened(x: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

/// Rows and columns from `row` and `column` on of a block in C.
#[derive(Clone, Copy)]
pub(super) struct Patch {
    pub row: usize,
    pub column: usize,
    pub rows: usize,
    pub columns: usize,
}

/// A matrix of sums that later stretches of k add to.
#[derive(Clone, Copy)]
pub(super) struct Partial {
    pub at: *mut f32,
    pub ld: usize,
}

impl Partial {
    /// Assigns the block, or adds it.
    ///
    /// # Safety
    /// AVX-512 F, BW, VL and what C needs; the sums have [`COLUMNS`] per row; the place is within the matrix.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn keep(self, sums: *const f32, place: Patch, add: bool) {
        let Partial { at, ld } = self;
        let from = |i, j| at.wrapping_add((place.row + i) * ld + place.column + j);
        // SAFETY: upheld by the caller.
        unsafe {
            match add {
                true => place.write(sums, at, ld, |i, j, mask, x| _mm512_add_ps(x, f32::load(from(i, j), mask))),
                false => place.write(sums, at, ld, |_, _, _, x| x),
            }
        }
    }
}

impl Patch {
    /// Calls `f` with the row, the first column and the mask of each vector.
    #[inline(always)]
    fn vectors(self, mut f: impl FnMut(usize, usize, __mmask16)) {
        if self.columns == COLUMNS {
            for i in 0..self.rows {
                f(i, 0, !0);
                f(i, 16, !0);
            }
            return;
        }
        for i in 0..self.rows {
            for j in (0..self.columns).step_by(16) {
                f(i, j, first16(self.columns - j));
            }
        }
    }
    /// Writes `f` of each vector of sums, and of its row, first column and mask.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn write<C: StoreSums>(
        self,
        sums: *const f32,
        c: *mut C,
        ld: usize,
        f: impl Fn(usize, usize, __mmask16, __m512) -> __m512,
    ) {
        let c = c.wrapping_add(self.row * ld + self.column);
        self.vectors(|i, j, mask| {
            // SAFETY: upheld by the caller.
            unsafe { C::store(c.add(i * ld + j), mask, f(i, j, mask, _mm512_loadu_ps(sums.add(i * COLUMNS + j)))) }
        });
    }
    /// Replaces each vector of sums by `f` of it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn change(self, sums: *mut f32, f: impl Fn(usize, usize, __mmask16, __m512) -> __m512) {
        self.vectors(|i, j, mask| {
            // SAFETY: upheld by the caller.
            unsafe {
                let at = sums.add(i * COLUMNS + j);
                _mm512_storeu_ps(at, f(i, j, mask, _mm512_loadu_ps(at)));
            }
        });
    }
    /// Prefetches lines of a matrix for writing: stores that miss retire one after another, and would otherwise take
    /// longer than the product. Never accesses the address.
    #[inline]
    pub fn prefetch<C>(self, c: *const C, ld: usize) {
        for i in 0..self.rows {
            for j in (0..self.columns).step_by(64 / size_of::<C>()) {
                // SAFETY: a hint, which cannot fault.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add((self.row + i) * ld + self.column + j).cast()) }
            }
        }
    }
}

/// C, and what follows the product. The rows of all other matrices in `then` are as far apart.
pub(super) struct Destination<'a, C> {
    pub c: *mut C,
    pub ld: usize,
    /// Adds to C.
    pub add: bool,
    /// Stored past the caches, which then read no line before it is overwritten. The rows of C start on cache lines,
    /// and nothing is added to them.
    pub past: bool,
    pub then: Completion<'a, C>,
}

impl<C: StoreSums> Destination<'_, C> {
    pub fn prefetch(&self, place: Patch) {
        if self.past {
            return;
        }
        place.prefetch(self.c, self.ld);
        match &self.then {
            Completion::Gelu { z, .. } => place.prefetch(*z, self.ld),
            Completion::GeluBackward { z } | Completion::Sum { residual: Some(z), .. } => {
                place.prefetch(z.as_ptr(), self.ld)
            }
            Completion::Nothing | Completion::Sum { .. } => {}
        }
    }
    /// Writes a block, complete after adding `earlier` stretches of k. Overwrites `sums`.
    ///
    /// # Safety
    /// As for [`Partial::keep`]; C and what is fused hold the place.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn finish(&self, sums: *mut f32, place: Patch, earlier: Option<Partial>) {
        let (c, ld) = (self.c, self.ld);
        let at = |i: usize, j: usize| (place.row + i) * ld + place.column + j;
        // SAFETY: upheld by the caller; each closure runs for vectors within the place.
        unsafe {
            if let Some(Partial { at, ld }) = earlier {
                let from = |i, j| at.wrapping_add((place.row + i) * ld + place.column + j);
                place.change(sums, |i, j, mask, x| _mm512_add_ps(x, f32::load(from(i, j), mask)));
            }
            match &self.then {
                Completion::Nothing if self.add => {
                    place.write(sums, c, ld, |i, j, mask, x| _mm512_add_ps(x, C::load(c.add(at(i, j)), mask)));
                }
                Completion::Nothing if self.past && place.columns == COLUMNS => {
                    for i in 0..place.rows {
                        let row = sums.add(i * COLUMNS);
                        C::stream(c.add(at(i, 0)), [_mm512_load_ps(row), _mm512_load_ps(row.add(16))]);
                    }
                }
                Completion::Nothing => place.write(sums, c, ld, |_, _, _, x| x),
                Completion::Sum { bias, residual } => {
                    let [bias, residual] = [bias, residual].map(|x| x.map(<[C]>::as_ptr));
                    place.write(sums, c, ld, |i, j, mask, mut x| {
                        if let Some(bias) = bias {
                            x = _mm512_add_ps(x, C::load(bias.add(place.column + j), mask));
                        }
                        if let Some(residual) = residual {
                            x = _mm512_add_ps(x, C::load(residual.add(at(i, j)), mask));
                        }
                        x
                    });
                }
                Completion::Gelu { bias, z } => {
                    if let Some(bias) = bias.map(<[C]>::as_ptr) {
                        place.change(sums, |_, j, mask, x| _mm512_add_ps(x, C::load(bias.add(place.column + j), mask)));
                    }
                    place.write(sums, *z, ld, |_, _, _, x| x);
                    // Rounded as what backward reads, which then recomputes the same.
                    place.change(sums, |_, _, _, x| C::rounded(x));
                    let lanes = std::slice::from_raw_parts_mut(sums, place.rows * COLUMNS);
                    lanes.iter_mut().for_each(|x| *x = gelu_at(*x));
                    place.write(sums, c, ld, |_, _, _, x| x);
                }
                Completion::GeluBackward { z } => {
                    let z = z.as_ptr();
                    let mut slopes = [0.0; 32 * COLUMNS];
                    place.change(slopes.as_mut_ptr(), |i, j, mask, _| C::load(z.add(at(i, j)), mask));
                    slopes[..place.rows * COLUMNS].iter_mut().for_each(|z| *z = gelu_slope_at(*z));
                    let slope = slopes.as_ptr();
                    place
                        .write(sums, c, ld, |i, j, _, x| _mm512_mul_ps(x, _mm512_loadu_ps(slope.add(i * COLUMNS + j))));
                }
            }
        }
    }
}
