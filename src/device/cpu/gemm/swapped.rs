//! Products of some rows of A with rows of B that run along k, computed as C^T = B A^T: B, the larger operand, is
//! multiplied where it is, as a left operand, and only the rows of A are packed. Sums run in the order of `blocked`,
//! and have its bits. Never multiplies itself.
use super::block::{Block, LeftRows, stretches};
use super::buffers::Buffers;
use super::pack::{COLUMNS, Load, PackSource, pack_a, pack_b, transpose};
use super::store::{Destination, Patch, StoreSums};
use crate::ops::GemmShape;
use flatshard_base::Elem;
use std::arch::x86_64::*;

/// # Safety
/// As for `blocked::product`, for few rows of A; B is transposed.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product<E: Load + Elem, C: StoreSums + Elem, K: Block<E::Packed>>(
    kernel: &K,
    shape: &GemmShape,
    a: &[E],
    b: &[E],
    target: &Destination<C>,
    buffers: &mut Buffers,
) {
    let &GemmShape { m, n, k, ta, lda, ldb, .. } = shape;
    let few = PackSource { from: a.as_ptr(), ld: lda, k, along_k: !ta };
    let many = PackSource { from: b.as_ptr(), ld: ldb, k, along_k: true };
    let step = E::PACKED_STEP;
    let (steps, stretch) = stretches::<E, K>(k);
    // Whole steps of the panels' dtype need no copy.
    let in_place = E::DTYPE == E::Packed::DTYPE && k > 0 && k.is_multiple_of(step);
    let panels = m.div_ceil(COLUMNS);
    // Sums are transposed in squares of 16.
    let block = K::ROWS.next_multiple_of(16) * COLUMNS;
    let packed = buffers.b.take::<E::Packed>(panels * steps * step * COLUMNS).as_mut_ptr();
    let copy = buffers.a.take::<E::Packed>(K::ROWS * stretch * step).as_mut_ptr();
    let sums = buffers.sums.take::<f32>((panels + 1) * block.max(COLUMNS * COLUMNS)).as_mut_ptr();
    let earlier = buffers.c.take::<f32>(if stretch < steps { panels * block } else { 0 }).as_mut_ptr();
    let turned = sums.wrapping_add(panels * block);
    // What is multiplied prefetches the next rows of B, or of the next matrix: those of experts are often neighbors.
    let lines = if in_place && ldb == k { K::ROWS.div_ceil(panels) } else { 0 };
    // SAFETY: all ranges are within m, n and k, and the buffers were allocated for these sizes.
    unsafe {
        for first in (0..steps).step_by(stretch) {
            let last = steps.min(first + stretch);
            pack_b(&few, 0..m, first..last, packed.add(first * step * panels * COLUMNS));
        }
        for row in (0..n).step_by(K::ROWS) {
            let rows = K::ROWS.min(n - row);
            let in_place = in_place && rows == K::ROWS;
            let place =
                |j: usize| Patch { row: j * COLUMNS, column: row, rows: COLUMNS.min(m - j * COLUMNS), columns: rows };
            let mut next = b.as_ptr().wrapping_add((row + K::ROWS) * ldb).cast::<E::Packed>();
            for first in (0..steps).step_by(stretch) {
                let last = steps.min(first + stretch);
                if !in_place {
                    pack_a(&many, row..row + rows, first..last, K::ROWS, copy);
                }
                for chunk in (first..last).step_by(K::CHUNK) {
                    let end = last.min(chunk + K::CHUNK);
                    for j in 0..panels {
                        let of = packed.add((first * panels + j * (last - first) + chunk - first) * step * COLUMNS);
                        let (out, steps, add) = (sums.add(j * block), end - chunk, chunk > first);
                        let rows = if in_place {
                            let at = b.as_ptr().add(row * ldb + chunk * step).cast::<E::Packed>();
                            LeftRows { at, row: ldb, step, next, lines, turned: true }
                        } else {
                            let at = copy.add((chunk - first) * K::ROWS * step);
                            LeftRows { turned: true, ..LeftRows::packed(at, E::STEP, step * K::ROWS) }
                        };
                        kernel.multiply_rows(rows, of, steps, out, add);
                        next = next.wrapping_byte_add(steps * rows.lines * 64);
                        if chunk == first {
                            target.prefetch(place(j));
                        }
                    }
                }
                for j in 0..panels {
                    let (out, earlier) = (sums.add(j * block), earlier.wrapping_add(j * block));
                    if first > 0 {
                        for at in (0..K::ROWS * COLUMNS).step_by(16) {
                            let both = [out, earlier].map(|x| _mm512_load_ps(x.add(at)));
                            _mm512_store_ps(out.add(at), _mm512_add_ps(both[0], both[1]));
                        }
                    }
                    if last < steps {
                        out.copy_to_nonoverlapping(earlier, K::ROWS * COLUMNS);
                        continue;
                    }
                    let place = place(j);
                    for (i, j) in (0..rows).step_by(16).flat_map(|i| [(i, 0), (i, 16)]).filter(|x| x.1 < place.rows) {
                        transpose(out.add(i * COLUMNS + j), COLUMNS, turned.add(j * COLUMNS + i), COLUMNS);
                    }
                    target.finish(turned, place, None);
                }
            }
        }
    }
}
