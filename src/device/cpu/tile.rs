//! Products of small f32 tiles that lie in the cache, for attention. Never packs: the tiles are built in the right
//! order.
use super::simd::{LANES, Level};
use std::ops::Range;

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

/// What a product on the diagonal of attention needs not do. Rows and columns count from the same token.
#[derive(Clone, Copy)]
pub enum ProductPart {
    All,
    /// Of C only what is on or below its diagonal is wanted; the rest keeps any content.
    LowerC,
    /// A is lower triangular: row i sums p <= i.
    LowerA,
    /// A is upper triangular: row i sums p >= i.
    UpperA,
}

/// `C (m, n) (+)= A (m, k) B (k, n)`.
#[derive(Clone, Copy)]
pub struct TileProduct {
    level: Level,
    m: usize,
    n: usize,
    k: usize,
    part: ProductPart,
    accumulate: bool,
}

impl TileProduct {
    pub fn new(level: Level, [m, n, k]: [usize; 3], part: ProductPart, accumulate: bool) -> TileProduct {
        TileProduct { level, m, n, k, part, accumulate }
    }
    /// `b` and `c` are stored row by row, `c_row` apart. m is rounded up to [`ROWS`] and n to [`COLUMNS`]: what lies
    /// there is read and written too. Each element of C sums over k in order, in one fused chain, so its bits do not
    /// depend on the block sizes.
    #[inline(always)]
    pub fn run(self, a: Tile, b: Tile, c: &mut [f32], c_row: usize) {
        let (m, n) = (self.m.next_multiple_of(ROWS), self.n.next_multiple_of(COLUMNS));
        assert!(self.k > 0, "an empty sum");
        if m == 0 || n == 0 {
            return;
        }
        assert!((m - 1) * a.row + (self.k - 1) * a.column < a.data.len(), "rows of A");
        assert!(b.column == 1 && n <= b.row && (self.k - 1) * b.row + n <= b.data.len(), "rows of B");
        assert!(n <= c_row && (m - 1) * c_row + n <= c.len(), "rows of C");
        let rounded = TileProduct { m, n, ..self };
        // 32 registers of 16 lanes hold 8 x 2 sums; 16 registers of 8 lanes hold 4 x 1 (of two registers each).
        // SAFETY: every block lies within the extents asserted above.
        unsafe {
            match self.level {
                Level::Avx512 => rounded.blocks::<ROWS, 2>(a, b, c, c_row),
                _ => rounded.blocks::<{ ROWS / 2 }, 1>(a, b, c, c_row),
            }
        }
    }

    /// # Safety
    /// A is (m, k), B (k, n) and C (m, n) within their slices; m is a multiple of M, n of V * LANES.
    #[inline(always)]
    unsafe fn blocks<const M: usize, const V: usize>(self, a: Tile, b: Tile, c: &mut [f32], c_row: usize) {
        for j in (0..self.n).step_by(V * LANES) {
            for i in (0..self.m).step_by(M) {
                let depth = match self.part {
                    ProductPart::LowerC if j >= i + M => continue,
                    ProductPart::LowerA => 0..self.k.min(i + M),
                    ProductPart::UpperA => i.min(self.k)..self.k,
                    _ => 0..self.k,
                };
                // SAFETY: rows i..i+M and columns j..j+V*LANES are within (m, n), by the caller.
                unsafe {
                    let (a_at, b_at) = (a.data.as_ptr().add(i * a.row), b.data.as_ptr().add(j));
                    block::<M, V>(
                        depth,
                        a_at,
                        a,
                        b_at,
                        b.row,
                        c.as_mut_ptr().add(i * c_row + j),
                        c_row,
                        self.accumulate,
                    );
                }
            }
        }
    }
}

/// M rows and V vectors of C, in registers.
///
/// # Safety
/// The pointers are to the block's first element, and what the strides reach from there is theirs.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // pointers and strides, which stay in registers
unsafe fn block<const M: usize, const V: usize>(
    depth: Range<usize>,
    a: *const f32,
    stride: Tile,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    accumulate: bool,
) {
    // SAFETY: by the caller; vectors are read and written unaligned.
    unsafe {
        let mut sums = [[[0.0f32; LANES]; V]; M];
        if accumulate {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = c.add(r * c_row + v * LANES).cast::<[f32; LANES]>().read();
                }
            }
        }
        for p in depth {
            let b: [[f32; LANES]; V] =
                std::array::from_fn(|v| b.add(p * b_row + v * LANES).cast::<[f32; LANES]>().read());
            for (r, sums) in sums.iter_mut().enumerate() {
                let a = *a.add(r * stride.row + p * stride.column);
                for (sum, b) in sums.iter_mut().zip(&b) {
                    for l in 0..LANES {
                        sum[l] = a.mul_add(b[l], sum[l]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                c.add(r * c_row + v * LANES).cast::<[f32; LANES]>().write(*sum);
            }
        }
    }
}
