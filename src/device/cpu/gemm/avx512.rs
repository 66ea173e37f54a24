//! The block product of AVX512-BF16: `vdpbf16ps` adds two products to each of 16 sums. Nothing but that.
use super::blocked::Block;
use super::pack::{COLUMNS, LANES};
use half::bf16;
use std::arch::x86_64::*;

pub(super) fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

pub(super) struct Dot;

impl Block<bf16> for Dot {
    /// 12 rows x 2 vectors of sums, 2 vectors of B and one broadcast of A: 27 of 32 registers; 14 loads for 24 products.
    const ROWS: usize = 12;
    /// Panels of A and B (24 + 64 KB) stream from the second cache, at 10 bytes a cycle.
    const STEPS: usize = 32;
    /// 192 rows x 1024 bf16 = 384 KB, within a second cache of 1 MB.
    const PANELS: usize = 16;

    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn multiply(&self, a: *const bf16, b: *const bf16, steps: usize, out: *mut f32) {
        let mut sums = [[_mm512_setzero_ps(); 2]; 12];
        let (mut a, mut b) = (a.cast::<i32>(), b.cast::<__m512i>());
        // SAFETY: the panels hold `steps` steps and `out` a block, all aligned to 64 bytes.
        unsafe {
            for _ in 0..steps {
                for lane in 0..LANES {
                    let right: [__m512bh; 2] = std::mem::transmute([b.read(), b.add(1).read()]);
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let left: __m512bh = std::mem::transmute(_mm512_set1_epi32(a.add(row * LANES + lane).read()));
                        sums[0] = _mm512_dpbf16_ps(sums[0], left, right[0]);
                        sums[1] = _mm512_dpbf16_ps(sums[1], left, right[1]);
                    }
                    b = b.add(2);
                }
                a = a.add(Self::ROWS * LANES);
            }
            for (row, sums) in sums.iter().enumerate() {
                _mm512_store_ps(out.add(row * COLUMNS), sums[0]);
                _mm512_store_ps(out.add(row * COLUMNS + 16), sums[1]);
            }
        }
    }
}
