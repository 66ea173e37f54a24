//! The loops around a block product (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"): a
//! stretch of k at a time, columns of B are packed to stay in the third cache and rows of A to stay in the second, and
//! C is written once for each stretch. Never multiplies itself.
use super::buffers::Buffers;
use super::pack::{COLUMNS, LANES, Load, PackSource, StoreSums, pack_a, pack_b, prefetch, store};
use crate::base::{DType, Elem};
use crate::device::ops::GemmShape;

/// Multiplies one panel of A with one panel of B.
pub(super) trait Block<E> {
    /// Rows of a panel of A: of a block of C.
    const ROWS: usize;
    /// Steps of k summed before C is written.
    const STEPS: usize;
    /// Panels of A packed at once.
    const PANELS: usize;
    /// `out (ROWS, 32) = A B` over `steps` steps, in the layout of [`super::pack`]. Assigns.
    ///
    /// # Safety
    /// The CPU has what the kernel needs; the panels hold `steps` steps; all pointers are 64-byte aligned.
    unsafe fn multiply(&self, a: *const E, b: *const E, steps: usize, out: *mut f32);
}

/// Bytes of B packed at once: a share of the third cache.
const PACKED_B: usize = 4 << 20;
/// Rows and columns of sums that wait in f32 for the next stretch of k: 4 MB. Packing B anew every 1024 rows costs 2 %.
const BAND: usize = 1024;

/// # Safety
/// AVX-512 F, BW, VL and what `K` needs; the slices hold `shape.extents()`; m and n are not zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: Load + Elem, C: StoreSums + Elem, K: Block<E::Packed>>(
    kernel: &K,
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    c: &mut [C],
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, ldc, accumulate, .. } = shape;
    let a = PackSource { from: a.as_ptr(), ld: shape.lda, k, along_k: !shape.ta };
    let b = PackSource { from: b.as_ptr(), ld: shape.ldb, k, along_k: shape.tb };
    let step = LANES * E::LANE;
    // One at least, so that k = 0 assigns zeros.
    let steps = k.div_ceil(step).max(1);
    // Equal stretches of k, rather than full ones and a short one.
    let stretch = steps.div_ceil(steps.div_ceil(K::STEPS));
    let panel_b = stretch * step * COLUMNS;
    // Sums of several stretches stay in f32 until they are complete.
    let partial = C::DTYPE != DType::F32 && stretch < steps;
    let wide = (PACKED_B / size_of::<E::Packed>() / panel_b * COLUMNS).min(if partial { BAND } else { usize::MAX });
    let wide = wide.min(n.next_multiple_of(COLUMNS));
    let high = if partial { m.min(BAND) } else { m };
    let tall = (K::PANELS * K::ROWS).min(m.next_multiple_of(K::ROWS));

    let packed_a = buffers.a.take::<E::Packed>(tall * stretch * step).as_mut_ptr();
    let packed_b = buffers.b.take::<E::Packed>(wide / COLUMNS * panel_b).as_mut_ptr();
    let band = buffers.c.take::<f32>(if partial { high * wide } else { 0 }).as_mut_ptr();

    for i0 in (0..m).step_by(high) {
        for j in (0..n).step_by(wide) {
            let (high, columns) = (high.min(m - i0), wide.min(n - j));
            // SAFETY: all ranges lie within m, n and k, and the buffers were taken for these sizes.
            unsafe {
                let c = c.as_mut_ptr().add(i0 * ldc + j);
                for first in (0..steps).step_by(stretch) {
                    let last = steps.min(first + stretch);
                    pack_b(&b, j..j + columns, first..last, packed_b);
                    for i in (0..high).step_by(tall) {
                        let rows = tall.min(high - i);
                        pack_a(&a, i0 + i..i0 + i + rows, first..last, K::ROWS, packed_a);
                        let panels = Panels::<E> { a: packed_a, b: packed_b, steps: last - first };
                        if partial {
                            panels.multiply(kernel, rows, columns, band.add(i * wide), wide, first > 0);
                        } else {
                            panels.multiply(kernel, rows, columns, c.add(i * ldc), ldc, accumulate || first > 0);
                        }
                    }
                }
                if partial {
                    store(band, wide, high, columns, c, ldc, accumulate);
                }
            }
        }
    }
}

/// Packed panels of A and of B, one after the other.
struct Panels<E: Load> {
    a: *const E::Packed,
    b: *const E::Packed,
    steps: usize,
}

/// The largest block product: 32 rows x 32 columns.
#[repr(C, align(64))]
struct Sums([f32; 32 * COLUMNS]);

impl<E: Load> Panels<E> {
    /// A panel of B stays in the first cache while all panels of A pass by.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn multiply<C: StoreSums, K: Block<E::Packed>>(
        &self,
        kernel: &K,
        rows: usize,
        columns: usize,
        c: *mut C,
        ldc: usize,
        add: bool,
    ) {
        const { assert!(K::ROWS <= 32) };
        let mut sums = Sums([0.0; 32 * COLUMNS]);
        let sums = sums.0.as_mut_ptr();
        let depth = self.steps * LANES * E::LANE;
        for j in (0..columns).step_by(COLUMNS) {
            for i in (0..rows).step_by(K::ROWS) {
                // SAFETY: as for `product`.
                unsafe {
                    let (a, b) = (self.a.add(i * depth), self.b.add(j * depth));
                    let (rows, columns) = (K::ROWS.min(rows - i), COLUMNS.min(columns - j));
                    prefetch(c.add(i * ldc + j), ldc, rows, columns);
                    kernel.multiply(a, b, self.steps, sums);
                    store(sums, COLUMNS, rows, columns, c.add(i * ldc + j), ldc, add);
                }
            }
        }
    }
}
