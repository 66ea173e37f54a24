//! The block products with AVX-512: `vdpbf16ps` adds two products to each of 16 sums, `vfmadd` one.
use super::block::{Block, LeftRows};
use super::pack::{COLUMNS, LANES};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::transmute;

/// What the loops around block products need, and `vfmadd`.
pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl")
}
/// `vdpbf16ps` too.
pub(super) fn has_bf16() -> bool {
    available() && is_x86_feature_detected!("avx512bf16")
}
/// Whether `vdpbf16ps` multiplies fewer numbers per cycle than `vfmadd`: measured on Granite Rapids (68 to 107 GFLOP/s
/// instead of 134 to 213), assumed of Intel's other CPUs with AMX, whether or not the system lets programs use it. They
/// have AVX512-FP16.
pub(super) fn bf16_is_slow() -> bool {
    is_intel() && is_x86_feature_detected!("avx512fp16")
}
/// Takes microseconds in a virtual machine.
pub(super) fn is_intel() -> bool {
    const INTEL: [u32; 3] = [0x756e_6547, 0x4965_6e69, 0x6c65_746e]; // "GenuineIntel"
    let cpu = __cpuid(0);
    [cpu.ebx, cpu.edx, cpu.ecx] == INTEL
}

pub(in crate::cpu) struct Dot;

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(bits: __m512i) -> __m512bh {
    // SAFETY: the two types differ only in name.
    unsafe { transmute(bits) }
}

macro_rules! block {
    ($element:ty, $features:literal, $steps:literal, $in_place:literal, $multiply_add:expr) => {
        impl Block<$element> for Dot {
            /// 12 rows x 2 vectors of sums, 2 vectors of B and one broadcast of A: 27 of 32 registers, with 14 loads
            /// for 24 products.
            const ROWS: usize = 12;
            const STEPS: usize = $steps;
            const PACKED_A: usize = 384 << 10;
            const CHUNK: usize = $steps;
            const IN_PLACE: bool = $in_place;

            #[target_feature(enable = $features)]
            unsafe fn multiply(&self, a: *const $element, b: *const $element, steps: usize, out: *mut f32, add: bool) {
                let row = 64 / size_of::<$element>();
                let packed = LeftRows::packed(a, row, 12 * row);
                // SAFETY: the panels hold `steps` steps and `out` a block, all aligned to 64 bytes.
                unsafe { sums(packed, b.cast(), steps, out, add, $multiply_add) }
            }
            #[target_feature(enable = $features)]
            unsafe fn multiply_rows(
                &self,
                a: LeftRows<$element>,
                b: *const $element,
                steps: usize,
                out: *mut f32,
                add: bool,
            ) {
                // SAFETY: as above, but for A's alignment.
                unsafe { sums(a, b.cast(), steps, out, add, $multiply_add) }
            }
        }
    };
}

/// Inlined into both, where a panel's distances are constants.
#[inline(always)]
unsafe fn sums<E>(
    rows: LeftRows<E>,
    mut b: *const __m512i,
    steps: usize,
    out: *mut f32,
    add: bool,
    multiply_add: impl Fn(__m512, __m512i, __m512i) -> __m512,
) {
    let [row, step] = [rows.row, rows.step].map(|x| x * size_of::<E>());
    let (mut a, mut next) = (rows.at.cast::<i32>(), rows.next.cast::<i8>());
    // SAFETY: upheld by the caller.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; 12];
        if add {
            for (row, sums) in sums.iter_mut().enumerate() {
                *sums = [0, 16].map(|half| _mm512_load_ps(out.add(row * COLUMNS + half)));
            }
        }
        for _ in 0..steps {
            // The addresses of each third row, so that three rows are one address, plus nothing, `row` and twice `row`.
            let thirds = [0, 3, 6, 9].map(|r| a.byte_add(r * row));
            for lane in 0..LANES {
                let right = [b.read(), b.add(1).read()];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let left = thirds[r / 3].byte_add(r % 3 * row).add(lane);
                    let left = _mm512_set1_epi32(left.read_unaligned());
                    sums[0] = multiply_add(sums[0], left, right[0]);
                    sums[1] = multiply_add(sums[1], left, right[1]);
                }
                b = b.add(2);
            }
            a = a.byte_add(step);
            for _ in 0..rows.lines {
                _mm_prefetch::<_MM_HINT_T1>(next);
                next = next.wrapping_add(64);
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            _mm512_store_ps(out.add(row * COLUMNS), sums[0]);
            _mm512_store_ps(out.add(row * COLUMNS + 16), sums[1]);
        }
    }
}

// Panels of A and B (bf16 24 and 64 KB, f32 48 and 128 KB) stream from L2 at 15 bytes per cycle; 384 KB of rows of A
// stay in it. Rows of bf16 take as long where they are as packed.
block!(bf16, "avx512f,avx512bf16", 32, false, |sum, a, b| _mm512_dpbf16_ps(sum, pairs(a), pairs(b)));
block!(f32, "avx512f", 64, true, |sum, a, b| _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum));
