//! A block product: what AMX and AVX-512 multiply at a time, and how k is divided for it. Never multiplies itself.
use super::pack::Load;

/// Multiplies one panel of A with one panel of B.
pub(in crate::cpu) trait Block<E> {
    /// Rows of a panel of A, and of a block of C.
    const ROWS: usize;
    /// Steps of k summed before C is written.
    const STEPS: usize;
    /// Bytes of A packed at a time, about half of L2.
    const PACKED_A: usize;
    /// Steps of a panel of B that stay in L1 while all panels of A pass.
    const CHUNK: usize;
    /// Whether rows of A that are whole steps of the panels' dtype are multiplied where they are.
    const IN_PLACE: bool = false;
    /// `out (ROWS, 32) = A B` over `steps` steps, in the layout of [`super::pack`]. Assigns, or adds.
    ///
    /// # Safety
    /// The CPU has what the kernel needs; the panels hold `steps` steps; all pointers are 64-byte aligned.
    unsafe fn multiply(&self, a: *const E, b: *const E, steps: usize, out: *mut f32, add: bool);
    /// The same with A anywhere, its parts as far apart as in a panel.
    ///
    /// # Safety
    /// As for `multiply`, but that A holds ROWS rows of `steps` whole steps, aligned to an element.
    unsafe fn multiply_rows(&self, a: LeftRows<E>, b: *const E, steps: usize, out: *mut f32, add: bool);
}

/// A left operand: rows are `row` elements apart, steps of k `step`. Each step prefetches `lines` cache lines to L2 for
/// a later product, from `next` on: few at a time, since they wait for each other, and loads for them.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct LeftRows<E> {
    pub at: *const E,
    pub row: usize,
    pub step: usize,
    pub next: *const E,
    pub lines: usize,
    /// Whether it is the right operand of the product whose order of sums is to be kept.
    pub turned: bool,
}

impl<E> LeftRows<E> {
    /// The rows of a panel. Prefetches nothing.
    pub(super) fn packed(at: *const E, row: usize, step: usize) -> LeftRows<E> {
        LeftRows { at, row, step, next: at, lines: 0, turned: false }
    }
}

/// Steps of k, and of a stretch of it: equal stretches instead of full ones and a short one.
pub(super) fn stretches<E: Load, K: Block<E::Packed>>(k: usize) -> (usize, usize) {
    // At least one, so that k = 0 assigns zeros.
    let steps = k.div_ceil(E::STEP).max(1);
    (steps, steps.div_ceil(steps.div_ceil(K::STEPS)))
}
