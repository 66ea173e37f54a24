//! The loops around a block product (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"):
//! columns of B packed for all of k, rows of A packed by blocks that stay in the second cache, and C written once for
//! each stretch of k. Never multiplies itself.
use super::Buffers;
use super::pack::{COLUMNS, LANES, Load, Operand, Store, pack_a, pack_b, prefetch, store};
use crate::base::{DType, Elem};
use crate::device::Gemm;

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
const PACKED_B: usize = 5 << 20;

/// # Safety
/// AVX-512 F, BW, VL and what `K` needs; the slices hold `shape.extents()`; m and n are not zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: Load + Elem, C: Store + Elem, K: Block<E>>(
    kernel: &K,
    shape: &Gemm,
    a: &[E],
    b: &[E],
    c: &mut [C],
    buffers: &mut Buffers,
) {
    let &Gemm { m, n, k, ldc, accumulate, .. } = shape;
    let a = Operand { from: a.as_ptr(), ld: shape.lda, k, along_k: !shape.ta };
    let b = Operand { from: b.as_ptr(), ld: shape.ldb, k, along_k: shape.tb };
    let step = LANES * E::LANE;
    let steps = k.div_ceil(step);
    // Equal stretches of k, rather than full ones and a short one.
    let stretch = steps.div_ceil(steps.div_ceil(K::STEPS).max(1)).max(1);
    let tall = (K::PANELS * K::ROWS).min(m.next_multiple_of(K::ROWS));
    let deep_panel = steps.max(1) * step * COLUMNS;
    let wide = ((PACKED_B / size_of::<E>() / deep_panel).max(1) * COLUMNS).min(n.next_multiple_of(COLUMNS));
    // Sums of several stretches stay in f32 until they are complete.
    let partial = C::DTYPE != DType::F32 && stretch < steps;

    let packed_a = buffers.a.take::<E>(tall * stretch * step).as_mut_ptr();
    let packed_b = buffers.b.take::<E>(deep_panel * (wide / COLUMNS)).as_mut_ptr();
    let block = buffers.c.take::<f32>(if partial { tall * wide } else { 0 }).as_mut_ptr();

    // SAFETY: all ranges lie within m, n and k, and the buffers were taken for these sizes.
    unsafe {
        for j in (0..n).step_by(wide) {
            let columns = wide.min(n - j);
            pack_b(&b, j..j + columns, packed_b);
            for i in (0..m).step_by(tall) {
                let rows = tall.min(m - i);
                let c = c.as_mut_ptr().add(i * ldc + j);
                // Once at least, so that k = 0 assigns zeros.
                for first in (0..steps.max(1)).step_by(stretch) {
                    let last = steps.min(first + stretch);
                    pack_a(&a, i..i + rows, first..last, K::ROWS, packed_a);
                    let panels = Panels {
                        a: packed_a,
                        b: packed_b.add(first * step * COLUMNS),
                        steps: last - first,
                        between: deep_panel,
                    };
                    if partial {
                        panels.multiply(kernel, rows, columns, block, wide, first > 0);
                    } else {
                        panels.multiply(kernel, rows, columns, c, ldc, accumulate || first > 0);
                    }
                }
                if partial {
                    store(block, wide, rows, columns, c, ldc, accumulate);
                }
            }
        }
    }
}

/// What is packed: panels of A one after the other, panels of B `between` elements apart, both `steps` deep.
struct Panels<E> {
    a: *const E,
    b: *const E,
    steps: usize,
    between: usize,
}

/// The largest block product: 32 rows x 32 columns.
#[repr(C, align(64))]
struct Sums([f32; 32 * COLUMNS]);

impl<E: Load> Panels<E> {
    /// A panel of B stays in the first cache while all panels of A pass by.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn multiply<C: Store, K: Block<E>>(
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
        let panel_a = self.steps * LANES * E::LANE * K::ROWS;
        for j in (0..columns).step_by(COLUMNS) {
            for i in (0..rows).step_by(K::ROWS) {
                // SAFETY: as for `product`.
                unsafe {
                    let (a, b) = (self.a.add(i / K::ROWS * panel_a), self.b.add(j / COLUMNS * self.between));
                    let (rows, columns) = (K::ROWS.min(rows - i), COLUMNS.min(columns - j));
                    prefetch(c.add(i * ldc + j), ldc, rows, columns);
                    kernel.multiply(a, b, self.steps, sums);
                    store(sums, COLUMNS, rows, columns, c.add(i * ldc + j), ldc, add);
                }
            }
        }
    }
}
