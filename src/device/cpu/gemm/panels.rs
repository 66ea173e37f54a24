//! Attention's products: the block products of this directory on panels that attention packs itself, tokens by
//! `pack`'s rules and weights from finished blocks. Never decides what to multiply.
#[cfg(target_arch = "x86_64")]
use super::pack::{self, Load, PackSource};
#[cfg(target_arch = "x86_64")]
use super::{avx512::Dot, block::Block};
use crate::cpu::simd::{LANES, Level};
use flatshard_base::Elem;
use flatshard_base::dtype::Float;
use half::{bf16, f16};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
#[cfg(target_arch = "x86_64")]
use std::mem::transmute;

/// Columns of a panel of a right operand, and of a block of sums.
pub const COLUMNS: usize = 32;

/// Rows of one head in a tensor of tokens: `dim` elements each, `row` apart.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct TokenRows<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub rows: usize,
    pub dim: usize,
}

impl<'a, T> TokenRows<'a, T> {
    /// The same rows of the head `g` places on.
    #[inline(always)]
    pub fn head(self, g: usize) -> TokenRows<'a, T> {
        TokenRows { data: self.data.get(g * self.dim..).unwrap_or_default(), ..self }
    }
    #[inline(always)]
    pub fn part(self, start: usize, rows: usize) -> TokenRows<'a, T> {
        TokenRows { data: &self.data[start * self.row..], rows, ..self }
    }
    /// Rows (of a left operand) or columns (of a right one), and length of the sums.
    #[inline(always)]
    fn extent(&self, sum: Over) -> [usize; 2] {
        assert!(self.rows == 0 || (self.rows - 1) * self.row + self.dim <= self.data.len(), "rows of tokens");
        match sum {
            Over::Dim => [self.rows, self.dim],
            Over::Tokens => [self.dim, self.rows],
        }
    }
}

/// What a product sums over.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Over {
    Dim,
    Tokens,
}

/// Block products, and packing for them. Panels are as in `pack`, with zeros past the edge: of a left operand, steps of
/// [`Products::ROWS`] lines; of a right one, steps of [`COLUMNS`] lines; a line is 16 f32 or 32 bf16 along the sum.
pub(in crate::cpu) trait Products<T> {
    type Packed: Elem;
    /// Rows of a panel of a left operand; even, and divides 96.
    const ROWS: usize;
    fn pack_left(&self, x: TokenRows<T>, sum: Over, out: &mut [Self::Packed]);
    fn pack_right(&self, x: TokenRows<T>, sum: Over, out: &mut [Self::Packed]);
    /// From a block of ROWS x 32 sums, a left operand of its rows: 32 steps of the sum.
    fn left_of_sums(&self, block: &[f32], out: &mut [Self::Packed]);
    /// From a block of ROWS x 32 sums, ROWS steps of the sum of a right operand of its columns.
    fn right_of_sums(&self, block: &[f32], out: &mut [Self::Packed]);
    /// Transposes 16 x 16 elements: rows of `from` are 32 apart, of `to` `row`.
    fn transpose(&self, from: &[f32], to: &mut [f32], row: usize);
    /// `out (ROWS, 32) = A B`.
    ///
    /// # Safety
    /// The panels hold `steps` steps and `out` a block; all are 64-byte aligned.
    unsafe fn multiply(&self, a: *const Self::Packed, b: *const Self::Packed, steps: usize, out: *mut f32);
}

/// Elements of a line: along the sum.
pub const fn line<E>() -> usize {
    64 / size_of::<E>()
}

/// f32 products on any CPU. All levels give the same bits, which are those of `Wide` in f32.
pub(in crate::cpu) struct Portable(pub Level);

const PORTABLE_ROWS: usize = 12;

impl<T: Float> Products<T> for Portable {
    type Packed = f32;
    const ROWS: usize = PORTABLE_ROWS;

    #[inline(always)]
    fn pack_left(&self, x: TokenRows<T>, sum: Over, out: &mut [f32]) {
        pack_portably::<T, PORTABLE_ROWS>(x, sum, LANES, 1, out);
    }
    #[inline(always)]
    fn pack_right(&self, x: TokenRows<T>, sum: Over, out: &mut [f32]) {
        pack_portably::<T, COLUMNS>(x, sum, 1, COLUMNS, out);
    }
    #[inline(always)]
    fn left_of_sums(&self, block: &[f32], out: &mut [f32]) {
        left_of_sums::<PORTABLE_ROWS>(block, out);
    }
    #[inline(always)]
    fn right_of_sums(&self, block: &[f32], out: &mut [f32]) {
        out[..PORTABLE_ROWS * COLUMNS].copy_from_slice(&block[..PORTABLE_ROWS * COLUMNS]);
    }
    #[inline(always)]
    fn transpose(&self, from: &[f32], to: &mut [f32], row: usize) {
        for (i, to) in to.chunks_mut(row).take(LANES).enumerate() {
            to.iter_mut().take(LANES).enumerate().for_each(|(j, x)| *x = from[j * COLUMNS + i]);
        }
    }
    #[inline(always)]
    unsafe fn multiply(&self, a: *const f32, b: *const f32, steps: usize, out: *mut f32) {
        // 32 registers of 16 lanes hold 12 x 2 sums; 16 registers of 8 lanes hold 4 x 1 (of two registers each).
        // SAFETY: upheld by the caller; each block lies within the panels and `out`.
        unsafe {
            match self.0 {
                Level::Avx512 => portable_block::<PORTABLE_ROWS, 2>(a, b, steps, out),
                _ => {
                    for i in (0..PORTABLE_ROWS).step_by(4) {
                        for j in (0..COLUMNS).step_by(LANES) {
                            portable_block::<4, 1>(a.add(i * LANES), b.add(j), steps, out.add(i * COLUMNS + j));
                        }
                    }
                }
            }
        }
    }
}

/// Element p of the sum of row (column) i goes to panel i / SIDE, step p / 16, place (i % SIDE) * `across` + (p % 16) *
/// `along`. So 16 neighbors are adjacent in `out`, along the tokens or along `dim`.
#[inline(always)]
fn pack_portably<T: Float, const SIDE: usize>(
    x: TokenRows<T>,
    sum: Over,
    across: usize,
    along: usize,
    out: &mut [f32],
) {
    let [rows, k] = x.extent(sum);
    let steps = k.div_ceil(LANES);
    out[..rows.div_ceil(SIDE) * steps * SIDE * LANES].fill(0.0);
    let place = |t: usize, d: usize| {
        let (i, p) = if matches!(sum, Over::Dim) { (t, d) } else { (d, t) };
        ((i / SIDE) * steps + p / LANES) * SIDE * LANES + (i % SIDE) * across + (p % LANES) * along
    };
    if matches!(sum, Over::Dim) == (along == 1) {
        for (t, row) in x.data.chunks(x.row).take(x.rows).enumerate() {
            for (c, run) in row[..x.dim].chunks(LANES).enumerate() {
                let out = &mut out[place(t, c * LANES)..][..run.len()];
                out.iter_mut().zip(run).for_each(|(to, x)| *to = x.to_f32());
            }
        }
    } else {
        for t0 in (0..x.rows).step_by(LANES) {
            let count = LANES.min(x.rows - t0);
            // Past the end, the first row again: not copied.
            let of: [&[T]; LANES] =
                std::array::from_fn(|t| &x.data[(t0 + if t < count { t } else { 0 }) * x.row..][..x.dim]);
            for d in 0..x.dim {
                let run: [f32; LANES] = std::array::from_fn(|t| of[t][d].to_f32());
                out[place(t0, d)..][..count].copy_from_slice(&run[..count]);
            }
        }
    }
}

/// Two steps of f32, each of ROWS lines of 16.
#[inline(always)]
fn left_of_sums<const ROWS: usize>(block: &[f32], out: &mut [f32]) {
    let (lines, _) = out.as_chunks_mut::<LANES>();
    for (r, row) in block.as_chunks::<COLUMNS>().0.iter().take(ROWS).enumerate() {
        lines[r].copy_from_slice(&row[..LANES]);
        lines[ROWS + r].copy_from_slice(&row[LANES..]);
    }
}

/// M rows and V vectors of a block. Each element sums in order, in one fused chain, so its bits do not depend on M, V.
///
/// # Safety
/// As for [`Products::multiply`], from the block's first row and column.
#[inline(always)]
unsafe fn portable_block<const M: usize, const V: usize>(a: *const f32, b: *const f32, steps: usize, out: *mut f32) {
    // SAFETY: upheld by the caller; vector accesses are unaligned.
    unsafe {
        let mut sums = [[[0.0f32; LANES]; V]; M];
        for s in 0..steps {
            let (a, b) = (a.add(s * PORTABLE_ROWS * LANES), b.add(s * LANES * COLUMNS));
            for lane in 0..LANES {
                let b: [[f32; LANES]; V] =
                    std::array::from_fn(|v| b.add(lane * COLUMNS + v * LANES).cast::<[f32; LANES]>().read());
                for (r, sums) in sums.iter_mut().enumerate() {
                    let a = *a.add(r * LANES + lane);
                    for (sum, b) in sums.iter_mut().zip(&b) {
                        for l in 0..LANES {
                            sum[l] = a.mul_add(b[l], sum[l]);
                        }
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                out.add(r * COLUMNS + v * LANES).cast::<[f32; LANES]>().write(*sum);
            }
        }
    }
}

/// What attention computes with. On x86-64 also the fast products of its type: on AMX, f32 and f16 have those of `Dot`.
pub(in crate::cpu) trait PanelFloat: Float {
    #[cfg(target_arch = "x86_64")]
    type Dot: Products<Self>;
    #[cfg(target_arch = "x86_64")]
    type Amx: Products<Self>;
    /// # Safety
    /// The CPU has AVX-512 F, BW and VL, and for bf16 BF16.
    #[cfg(target_arch = "x86_64")]
    unsafe fn dot() -> Self::Dot;
    /// # Safety
    /// As for `dot`, and for bf16 as for `Tiles::configure`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn amx() -> Self::Amx;
}
macro_rules! panel_floats {
    ($($type:ty: $amx:ty = $value:expr),*) => { $(impl PanelFloat for $type {
        #[cfg(target_arch = "x86_64")]
        type Dot = Wide<Dot>;
        #[cfg(target_arch = "x86_64")]
        type Amx = Wide<$amx>;
        #[cfg(target_arch = "x86_64")]
        unsafe fn dot() -> Wide<Dot> {
            Wide(Dot)
        }
        #[cfg(target_arch = "x86_64")]
        unsafe fn amx() -> Wide<$amx> {
            Wide($value)
        }
    })* };
}
panel_floats!(f32: Dot = Dot, f16: Dot = Dot);
// SAFETY: upheld by the caller.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
panel_floats!(bf16: super::amx::Tiles = unsafe { super::amx::Tiles::configure() });
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
panel_floats!(bf16: Dot = Dot);

/// A block product of AVX-512 or AMX.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) struct Wide<K>(K);

#[cfg(target_arch = "x86_64")]
impl<T: Float + Load<Packed: NarrowSums>, K: Block<T::Packed>> Products<T> for Wide<K> {
    type Packed = T::Packed;
    const ROWS: usize = K::ROWS;

    #[inline(always)]
    fn pack_left(&self, x: TokenRows<T>, sum: Over, out: &mut [T::Packed]) {
        let [rows, k] = x.extent(sum);
        let steps = k.div_ceil(line::<T::Packed>());
        assert!(rows.next_multiple_of(K::ROWS) * steps * line::<T::Packed>() <= out.len(), "panels of a left operand");
        let source = PackSource { from: x.data.as_ptr(), ld: x.row, k, along_k: matches!(sum, Over::Dim) };
        // SAFETY: the CPU has AVX-512; `extent` and the line above have checked the lengths.
        unsafe { pack::pack_a(&source, 0..rows, 0..steps, K::ROWS, out.as_mut_ptr()) }
    }
    #[inline(always)]
    fn pack_right(&self, x: TokenRows<T>, sum: Over, out: &mut [T::Packed]) {
        let [columns, k] = x.extent(sum);
        let steps = k.div_ceil(line::<T::Packed>());
        let len = columns.next_multiple_of(COLUMNS) * steps * line::<T::Packed>();
        assert!(len <= out.len(), "panels of a right operand");
        let source = PackSource { from: x.data.as_ptr(), ld: x.row, k, along_k: matches!(sum, Over::Dim) };
        // SAFETY: as above.
        unsafe { pack::pack_b(&source, 0..columns, 0..steps, out.as_mut_ptr()) }
    }
    #[inline(always)]
    fn left_of_sums(&self, block: &[f32], out: &mut [T::Packed]) {
        assert!(K::ROWS * COLUMNS <= block.len().min(out.len()), "a block");
        // SAFETY: the CPU has what it needs; lengths are checked.
        unsafe { T::Packed::left(K::ROWS, block.as_ptr(), out.as_mut_ptr()) }
    }
    #[inline(always)]
    fn right_of_sums(&self, block: &[f32], out: &mut [T::Packed]) {
        assert!(K::ROWS * COLUMNS <= block.len().min(out.len()), "a block");
        // SAFETY: as above.
        unsafe { T::Packed::right(K::ROWS, block.as_ptr(), out.as_mut_ptr()) }
    }
    #[inline(always)]
    fn transpose(&self, from: &[f32], to: &mut [f32], row: usize) {
        assert!(15 * COLUMNS + 16 <= from.len() && 15 * row + 16 <= to.len(), "16 x 16");
        // SAFETY: as above.
        unsafe { pack::transpose(from.as_ptr(), COLUMNS, to.as_mut_ptr(), row) }
    }
    #[inline(always)]
    unsafe fn multiply(&self, a: *const T::Packed, b: *const T::Packed, steps: usize, out: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { self.0.multiply(a, b, steps, out, false) }
    }
}

/// Packs blocks of sums. `block` and `out` hold `rows` x 32 elements.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) trait NarrowSums: Elem {
    /// # Safety
    /// AVX-512 F, BW and BF16; the pointers are to `rows` x 32 elements.
    unsafe fn left(rows: usize, block: *const f32, out: *mut Self);
    /// # Safety
    /// As for `left`.
    unsafe fn right(rows: usize, block: *const f32, out: *mut Self);
}

#[cfg(target_arch = "x86_64")]
impl NarrowSums for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn left(rows: usize, block: *const f32, out: *mut f32) {
        for r in 0..rows {
            for half in 0..2 {
                // SAFETY: by the caller, within both.
                unsafe {
                    let x = _mm512_loadu_ps(block.add(r * COLUMNS + half * LANES));
                    _mm512_storeu_ps(out.add((half * rows + r) * LANES), x);
                }
            }
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn right(rows: usize, block: *const f32, out: *mut f32) {
        // SAFETY: by the caller, within both.
        unsafe { block.copy_to_nonoverlapping(out, rows * COLUMNS) }
    }
}

#[cfg(target_arch = "x86_64")]
impl NarrowSums for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn left(rows: usize, block: *const f32, out: *mut bf16) {
        for at in (0..rows * COLUMNS).step_by(COLUMNS) {
            // SAFETY: by the caller, within both.
            unsafe {
                let [low, high] = [0, LANES].map(|half| _mm512_loadu_ps(block.add(at + half)));
                let line = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(out.add(at).cast(), line);
            }
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn right(rows: usize, block: *const f32, out: *mut bf16) {
        let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
        // SAFETY: the order is 64 bytes; by the caller, rows are within both.
        unsafe {
            let order = _mm512_loadu_si512(order.as_ptr().cast());
            for at in (0..rows * COLUMNS).step_by(2 * COLUMNS) {
                for half in [0, LANES] {
                    let [low, high] = [0, COLUMNS].map(|row| _mm512_loadu_ps(block.add(at + row + half)));
                    let halves = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                    let pairs = _mm512_permutexvar_epi16(order, halves);
                    _mm512_storeu_si512(out.add(at + 2 * half).cast(), pairs);
                }
            }
        }
    }
}
