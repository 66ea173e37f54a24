//! Products of some rows of A with rows of B that run along its columns: few rows of B at a time are packed, strip by
//! strip, and each strip is multiplied while it is in L1, with all sums in L2. So B is read in its own order, and what
//! follows is prefetched. Sums run in the order of `blocked`, and have its bits. Never multiplies itself.
use super::block::{Block, LeftRows, stretches};
use super::buffers::Buffers;
use super::pack::{COLUMNS, Load, PackSource, pack_a, pack_strip};
use super::store::{Destination, Partial, Patch, StoreSums};
use crate::ops::GemmShape;
use flatshard_base::Elem;
use std::arch::x86_64::*;

/// Steps of k at a time: 8 KB of a strip. On Granite Rapids 2 and 8 take 15 % longer.
const STEPS: usize = 4;

/// # Safety
/// As for `blocked::product`, for few rows of A; neither operand is transposed.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: Load + Elem, C: StoreSums + Elem, K: Block<E::Packed>>(
    kernel: &K,
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    target: &Destination<C>,
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, lda, ldb, .. } = shape;
    let few = PackSource { from: a.as_ptr(), ld: lda, k, along_k: true };
    let many = PackSource { from: b.as_ptr(), ld: ldb, k, along_k: false };
    let step = E::PACKED_STEP;
    let (steps, stretch) = stretches::<E, K>(k);
    let (panels, block) = (m.div_ceil(K::ROWS), K::ROWS * COLUMNS);
    let tall = panels * K::ROWS;
    let packed = buffers.a.take::<E::Packed>(tall * steps * step).as_mut_ptr();
    let strip = buffers.b.take::<E::Packed>(STEPS * step * COLUMNS).as_mut_ptr();
    let sums = buffers.sums.take::<f32>(panels * n.div_ceil(COLUMNS) * block).as_mut_ptr();
    let earlier = buffers.c.take::<f32>(if stretch < steps { m * n } else { 0 }).as_mut_ptr();
    let earlier = Partial { at: earlier, ld: n };
    // What is multiplied prefetches the next rows of B, or of the next matrix: those of experts are often neighbors.
    let row = E::STEP * COLUMNS * size_of::<E>() / 64;
    let lines = if ldb == n { row.div_ceil(panels) } else { 0 };
    // SAFETY: all ranges are within m, n and k, and the buffers were allocated for these sizes.
    unsafe {
        for first in (0..steps).step_by(stretch) {
            let last = steps.min(first + stretch);
            pack_a(&few, 0..m, first..last, K::ROWS, packed.add(tall * first * step));
            for chunk in (first..last).step_by(STEPS) {
                let end = last.min(chunk + STEPS);
                let mut next = b.as_ptr().wrapping_add(end * E::STEP * ldb).cast::<E::Packed>();
                for column in (0..n).step_by(COLUMNS) {
                    let columns = COLUMNS.min(n - column);
                    pack_strip(&many, column..column + columns, chunk..end, strip);
                    for panel in 0..panels {
                        let row = panel * K::ROWS;
                        let place = Patch { row, column, rows: K::ROWS.min(m - row), columns };
                        if end == steps {
                            target.prefetch(place);
                        }
                        let at = packed.add((tall * first + row * (last - first) + (chunk - first) * K::ROWS) * step);
                        let rows = LeftRows { at, row: E::STEP, step: step * K::ROWS, next, lines, turned: false };
                        let out = sums.add((column / COLUMNS * panels + panel) * block);
                        kernel.multiply_rows(rows, strip, end - chunk, out, chunk > first);
                        next = next.wrapping_byte_add((end - chunk) * lines * 64);
                        if end < last {
                            continue;
                        }
                        if E::SPLIT {
                            in_order(out, K::ROWS);
                        }
                        match last < steps {
                            true => earlier.keep(out, place, first > 0),
                            false => target.finish(out, place, (first > 0).then_some(earlier)),
                        }
                    }
                }
            }
        }
    }
}

/// Rows of sums of the even columns and the odd ones, in the order of columns.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn in_order(sums: *mut f32, rows: usize) {
    let [low, high] = [0, 8].map(|first| {
        let order: [i32; 16] = std::array::from_fn(|i| (first + i / 2 + i % 2 * 16) as i32);
        // SAFETY: 64 bytes.
        unsafe { _mm512_loadu_si512(order.as_ptr().cast()) }
    });
    for row in 0..rows {
        // SAFETY: upheld by the caller: the rows exist.
        unsafe {
            let at = sums.add(row * COLUMNS);
            let (even, odd) = (_mm512_load_ps(at), _mm512_load_ps(at.add(16)));
            _mm512_store_ps(at, _mm512_permutex2var_ps(even, low, odd));
            _mm512_store_ps(at.add(16), _mm512_permutex2var_ps(even, high, odd));
        }
    }
}
