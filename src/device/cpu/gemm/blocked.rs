//! The loops around a block product (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"):
//! for one stretch of k at a time, columns of B are packed to stay in L3 and rows of A to stay in L2, and C is written
//! once per stretch. Never multiplies itself.
use super::block::{Block, LeftRows, stretches};
use super::buffers::Buffers;
use super::completion::Completion;
use super::pack::{COLUMNS, Load, PackSource, Planes, pack_a, pack_b};
use super::store::{Destination, Partial, Patch, StoreSums};
use super::{strips, swapped};
use crate::ops::GemmShape;
use flatshard_base::{DType, Elem};
use std::arch::x86_64::_mm_sfence;
use std::marker::PhantomData;

/// The loops around a block product without it, for benchmarks.
pub(super) struct Skip<K>(pub PhantomData<K>);

impl<E, K: Block<E>> Block<E> for Skip<K> {
    const ROWS: usize = K::ROWS;
    const STEPS: usize = K::STEPS;
    const PACKED_A: usize = K::PACKED_A;
    const CHUNK: usize = K::CHUNK;
    const IN_PLACE: bool = K::IN_PLACE;
    unsafe fn multiply(&self, _: *const E, _: *const E, _: usize, _: *mut f32, _: bool) {}
    unsafe fn multiply_rows(&self, _: LeftRows<E>, _: *const E, _: usize, _: *mut f32, _: bool) {}
}

/// Bytes of B packed at a time, for each part of an element: a share of L3.
const PACKED_B: usize = 4 << 20;
/// Bytes of C from which on it is stored past the caches: what reads it finds little of it there, and a store that
/// misses reads the line first. Granite Rapids, one core: 26 GB/s instead of 10; the products of the 105.8 M model take
/// 15 % less time.
const PAST_CACHES: usize = 4 << 20;
/// Rows and columns of sums kept in f32 until the next stretch of k: 4 MB. Repacking B every 1024 rows costs 2 %. Also
/// the most rows of A packed at a time.
const BAND: usize = 1024;

/// The most rows of A for which `swapped` and `strips` are used: more take as long to transpose as B takes to pack.
pub(super) const NEAR_ROWS: usize = 256;

/// Whether the rows of A are so few that B, read once, takes as long to pack as to multiply: `swapped` and `strips` are
/// then faster. Not if sums over several stretches are added to C itself, in another order than theirs.
fn few_rows<E: Load, C: Elem, K: Block<E::Packed>>(shape: &GemmShape) -> bool {
    /// Bytes of packed rows of A, and of sums: they stay in L2 next to a part of B.
    const NEAR: usize = 1 << 20;
    let &GemmShape { m, n, k, tb, accumulate, .. } = shape;
    let (steps, stretch) = stretches::<E, K>(k);
    let packed = m.next_multiple_of(COLUMNS) * steps * E::PACKED_STEP * size_of::<E::Packed>();
    let sums = if tb { 0 } else { m.next_multiple_of(COLUMNS) * n * size_of::<f32>() };
    let adds = accumulate && stretch < steps && C::DTYPE == DType::F32;
    m <= NEAR_ROWS && packed.max(sums) <= NEAR && !adds
}

/// Whether A, of the panels' dtype, is multiplied where it is: in whole steps, if L1 can hold its rows together. Zen 4,
/// one core, 1024 x 576 and x 1536 f32: 2 % to 5 % less time than with packing.
fn stays_in_place(&GemmShape { k, ta, lda, .. }: &GemmShape, size: usize) -> bool {
    /// Bytes after which L1's sets repeat.
    const SETS: usize = 4096;
    !ta && k > 0 && (k * size).is_multiple_of(64) && !(lda * size).is_multiple_of(SETS)
}

/// With `lower`, the number of the first row of C in a square matrix, blocks above its diagonal are left as they are.
///
/// # Safety
/// AVX-512 F, BW, VL and what `E`, `C` and `K` need; the operands hold `shape.extents()`, and nobody else accesses what
/// is written of C; m and n are not zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: Load + Elem, C: StoreSums + Elem, K: Block<E::Packed>>(
    kernel: &K,
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    c: *mut C,
    (then, lower): (Completion<C>, Option<usize>),
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, ldc: ld, accumulate, .. } = shape;
    let lines = c.addr().is_multiple_of(64) && (ld * size_of::<C>()).is_multiple_of(64);
    let large = (m * n * size_of::<C>()).max(buffers.among) >= PAST_CACHES;
    let past = large && lines && !accumulate && matches!(then, Completion::Nothing);
    let few = lower.is_none() && few_rows::<E, C, K>(shape);
    if few && (shape.tb && n >= K::ROWS || !shape.tb && !shape.ta) {
        let target = Destination { c, ld, add: accumulate, past, then };
        // SAFETY: upheld by the caller.
        unsafe {
            match shape.tb {
                true => swapped::product(kernel, shape, a, b, &target, buffers),
                false => strips::product(kernel, shape, a, b, &target, buffers),
            }
        }
        if past {
            _mm_sfence(); // orders such stores, as at the end
        }
        return;
    }
    let a = PackSource { from: a.as_ptr(), ld: shape.lda, k, along_k: !shape.ta };
    let b = PackSource { from: b.as_ptr(), ld: shape.ldb, k, along_k: shape.tb };
    let step = E::PACKED_STEP;
    let (steps, stretch) = stretches::<E, K>(k);
    let panel_b = stretch * step * COLUMNS;
    // Sums over several stretches stay in f32 until complete: in a band of C, or in C itself.
    let several = stretch < steps;
    let narrow = several && C::DTYPE != DType::F32;
    let wide = (PACKED_B * E::Lanes::COUNT / size_of::<E::Packed>() / panel_b * COLUMNS).min(if narrow {
        BAND
    } else {
        usize::MAX
    });
    let wide = wide.min(n.next_multiple_of(COLUMNS));
    let high = if narrow { m.min(BAND) } else { m };
    // As many panels of A at a time as fit, and about as many each time.
    let most = (K::PACKED_A / size_of::<E::Packed>() / (stretch * step)).min(BAND) / K::ROWS;
    let panels = m.div_ceil(K::ROWS);
    let tall = panels.div_ceil(panels.div_ceil(most.max(1))) * K::ROWS;

    let sums = buffers.sums.take::<f32>(tall * COLUMNS).as_mut_ptr();
    let packed_a = buffers.a.take::<E::Packed>(tall * stretch * step).as_mut_ptr();
    let packed_b = buffers.b.take::<E::Packed>(wide / COLUMNS * panel_b).as_mut_ptr();
    let band = buffers.c.take::<f32>(if narrow { high * wide } else { 0 }).as_mut_ptr();
    let add_first = accumulate && several && !narrow;
    let target = Destination { c, ld, add: accumulate && !add_first, past, then };

    // The last panel of rows is packed if it is not whole.
    let in_place = K::IN_PLACE && E::DTYPE == E::Packed::DTYPE && stays_in_place(shape, size_of::<E>());
    for i0 in (0..m).step_by(high) {
        for j in (0..n).step_by(wide) {
            let (high, columns) = (high.min(m - i0), wide.min(n - j));
            let partial = match narrow {
                // Addressed like C.
                true => Partial { at: band.wrapping_sub(i0 * wide + j), ld: wide },
                false => Partial { at: c.cast(), ld },
            };
            for first in (0..steps).step_by(stretch) {
                let last = steps.min(first + stretch);
                // SAFETY: all ranges are within m, n and k, and the buffers were allocated for these sizes.
                unsafe {
                    pack_b(&b, j..j + columns, first..last, packed_b);
                    for i in (i0..i0 + high).step_by(tall) {
                        let place = Patch { row: i, column: j, rows: tall.min(i0 + high - i), columns };
                        let whole = if in_place { place.rows - place.rows % K::ROWS } else { 0 };
                        pack_a(&a, i + whole..i + place.rows, first..last, K::ROWS, packed_a);
                        let rows = a.from.wrapping_add(i * a.ld + first * step).cast();
                        let left = LeftPanels { rows, ld: a.ld, whole, packed: packed_a };
                        let panels = Panels::<E> { left, b: packed_b, steps: last - first, sums, lower };
                        panels.multiply(kernel, place, &target, partial, first > 0 || add_first, last == steps);
                    }
                }
            }
        }
    }
    if past {
        _mm_sfence(); // such stores are not ordered before those by which another thread learns that C is complete
    }
}

/// Rows of A: the first `whole` of them where they are, `ld` apart, and the others packed.
struct LeftPanels<E> {
    rows: *const E,
    ld: usize,
    whole: usize,
    packed: *const E,
}

/// Panels of A and B, consecutive, and space for the block of each panel of A.
struct Panels<E: Load> {
    left: LeftPanels<E::Packed>,
    b: *const E::Packed,
    steps: usize,
    sums: *mut f32,
    lower: Option<usize>,
}

impl<E: Load> Panels<E> {
    /// Writes to `target` if these are the last steps of k, else to `partial`. With `add`, `partial` holds the sums of
    /// earlier steps. A chunk of a panel of B stays in L1 while all panels of A pass through.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn multiply<C: StoreSums, K: Block<E::Packed>>(
        &self,
        kernel: &K,
        all: Patch,
        target: &Destination<C>,
        partial: Partial,
        add: bool,
        last: bool,
    ) {
        let step = E::PACKED_STEP;
        for j in (0..all.columns).step_by(COLUMNS) {
            for chunk in (0..self.steps).step_by(K::CHUNK) {
                let end = self.steps.min(chunk + K::CHUNK);
                for i in (0..all.rows).step_by(K::ROWS) {
                    let (rows, columns) = (K::ROWS.min(all.rows - i), COLUMNS.min(all.columns - j));
                    let block = Patch { row: all.row + i, column: all.column + j, rows, columns };
                    if self.lower.is_some_and(|first| block.column >= first + block.row + rows) {
                        continue;
                    }
                    // Each chunk prefetches its share of C: all of a block at once would wait for each other.
                    let [from, to] = [chunk, end].map(|step| rows * step / self.steps);
                    let share = Patch { row: block.row + from, rows: to - from, ..block };
                    if add || !last {
                        share.prefetch(partial.at, partial.ld);
                    }
                    if last {
                        target.prefetch(share);
                    }
                    // SAFETY: as for `product`.
                    unsafe {
                        let LeftPanels { rows: at, ld, whole, packed } = self.left;
                        let b = self.b.add((j * self.steps + chunk * COLUMNS) * step);
                        let sums = self.sums.add(i * COLUMNS);
                        if i < whole {
                            let a = LeftRows { row: ld, ..LeftRows::packed(at.add(i * ld + chunk * step), ld, step) };
                            kernel.multiply_rows(a, b, end - chunk, sums, chunk > 0);
                        } else {
                            let a = packed.add(((i - whole) * self.steps + chunk * K::ROWS) * step);
                            kernel.multiply(a, b, end - chunk, sums, chunk > 0);
                        }
                        match (end == self.steps, last) {
                            (false, _) => {}
                            (_, true) => target.finish(sums, block, add.then_some(partial)),
                            (_, false) => partial.keep(sums, block, add),
                        }
                    }
                }
            }
        }
    }
}
