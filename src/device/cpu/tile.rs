//! Products of small f32 tiles that lie in the cache, for attention. Never packs: the tiles are built in the right order.
use super::simd::{LANES, Level};

/// Columns of B and C are padded to a multiple of this, rows of A and C to a multiple of [`ROWS`].
pub const COLUMNS: usize = 2 * LANES;
pub const ROWS: usize = 8;

/// A stored tile: element (i, p) at `i * row + p * column`.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub column: usize,
}
impl<'a> Tile<'a> {
    pub fn new(data: &'a [f32], width: usize) -> Tile<'a> {
        Tile { data, row: width, column: 1 }
    }
    pub fn transposed(data: &'a [f32], width: usize) -> Tile<'a> {
        Tile { data, row: 1, column: width }
    }
}

/// `C (m, n) (+)= A (m, k) B (k, n)`. `b` and `c` have rows of `b_row` and `c_row` elements. m is rounded up to [`ROWS`] and
/// n to [`COLUMNS`]: what lies there is read and written too. Each element of C sums over k in order, in one fused chain, so
/// its bits do not depend on the block sizes.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub fn product(
    level: Level,
    [m, n, k]: [usize; 3],
    a: Tile,
    b: &[f32],
    b_row: usize,
    c: &mut [f32],
    c_row: usize,
    accumulate: bool,
) {
    let (m, n) = (m.next_multiple_of(ROWS), n.next_multiple_of(COLUMNS));
    if m == 0 || n == 0 || k == 0 {
        assert!(accumulate || m * n == 0, "an empty sum would have to be assigned");
        return;
    }
    assert!((m - 1) * a.row + (k - 1) * a.column < a.data.len(), "rows of A");
    assert!(n <= b_row && (k - 1) * b_row + n <= b.len(), "rows of B");
    assert!(n <= c_row && (m - 1) * c_row + n <= c.len(), "rows of C");
    // 32 registers of 16 lanes hold 8 x 2 sums; 16 registers of 8 lanes hold 4 x 1 (of two registers each).
    // SAFETY: every block lies within the extents asserted above.
    unsafe {
        match level {
            Level::Avx512 => blocks::<ROWS, 2>(m, n, k, a, b, b_row, c, c_row, accumulate),
            _ => blocks::<{ ROWS / 2 }, 1>(m, n, k, a, b, b_row, c, c_row, accumulate),
        }
    }
}

/// # Safety
/// A is (m, k), B (k, n) and C (m, n) within their slices; m is a multiple of M, n of V * LANES.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn blocks<const M: usize, const V: usize>(
    m: usize,
    n: usize,
    k: usize,
    a: Tile,
    b: &[f32],
    b_row: usize,
    c: &mut [f32],
    c_row: usize,
    accumulate: bool,
) {
    for j in (0..n).step_by(V * LANES) {
        for i in (0..m).step_by(M) {
            // SAFETY: rows i..i+M and columns j..j+V*LANES are within (m, n), by the caller.
            unsafe {
                let (a_at, b_at, c_at) =
                    (a.data.as_ptr().add(i * a.row), b.as_ptr().add(j), c.as_mut_ptr().add(i * c_row + j));
                let mut sums = [[[0.0f32; LANES]; V]; M];
                if accumulate {
                    for (r, sums) in sums.iter_mut().enumerate() {
                        for (v, sum) in sums.iter_mut().enumerate() {
                            *sum = c_at.add(r * c_row + v * LANES).cast::<[f32; LANES]>().read();
                        }
                    }
                }
                for p in 0..k {
                    let b: [[f32; LANES]; V] =
                        std::array::from_fn(|v| b_at.add(p * b_row + v * LANES).cast::<[f32; LANES]>().read());
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let a = *a_at.add(r * a.row + p * a.column);
                        for (sum, b) in sums.iter_mut().zip(&b) {
                            for l in 0..LANES {
                                sum[l] = a.mul_add(b[l], sum[l]);
                            }
                        }
                    }
                }
                for (r, sums) in sums.iter().enumerate() {
                    for (v, sum) in sums.iter().enumerate() {
                        c_at.add(r * c_row + v * LANES).cast::<[f32; LANES]>().write(*sum);
                    }
                }
            }
        }
    }
}
