//! Copies blocks of A and B into the order in which the kernels read them, with AVX-512. Never multiplies.
//!
//! The unit is a 32-bit *lane*: one f32 (f16 and [`Widened`] are converted), or two bf16 that are adjacent along k,
//! which is what one lane of `vdpbf16ps` and `tdpbf16ps` consumes. A *step* is 16 lanes deep along k (16 f32, 32 bf16).
//! Both operands are divided into panels, of some rows of A or [`COLUMNS`] columns of B; a panel is a sequence of
//! steps:
//!
//! - of A: `[row][lane]`, a row's 16 lanes on one cache line (a row of an AMX tile, or 16 broadcasts);
//! - of B: `[lane][column]`, a lane of 32 columns on two cache lines (rows of two AMX tiles, or two vectors).
//!
//! Positions past the edge of the matrix are zero in the panel. An element that is packed as several *parts* has that
//! many planes in each step, each laid out like this.
use super::widened::Widened;
use flatshard_base::Elem;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

/// Columns in a panel of B.
pub(super) const COLUMNS: usize = 32;
/// Lanes in a step.
pub(super) const LANES: usize = 16;

/// Vectors of lanes, one for each part of an element.
pub(in crate::cpu) trait Planes: Copy {
    const COUNT: usize;
    fn zero() -> Self;
    fn part(self, part: usize) -> __m512i;
}
impl Planes for __m512i {
    const COUNT: usize = 1;
    #[inline(always)]
    fn zero() -> __m512i {
        // SAFETY: any bits are a vector.
        unsafe { std::mem::zeroed() }
    }
    #[inline(always)]
    fn part(self, _: usize) -> __m512i {
        self
    }
}
impl Planes for [__m512i; 3] {
    const COUNT: usize = 3;
    #[inline(always)]
    fn zero() -> [__m512i; 3] {
        [__m512i::zero(); 3]
    }
    #[inline(always)]
    fn part(self, part: usize) -> __m512i {
        self[part]
    }
}

/// An element type of A and B. Parts of f32 (`split`) need AVX512-BF16 to be packed.
pub(in crate::cpu) trait Load: Copy {
    /// Their element type in the panels.
    type Packed: Elem;
    /// Elements per lane.
    const LANE: usize;
    /// 16 lanes of each part.
    type Lanes: Planes;
    /// Elements of a step along k, as stored and as packed.
    const STEP: usize = LANES * Self::LANE;
    const PACKED_STEP: usize = Self::STEP * Self::Lanes::COUNT;
    /// 16 lanes from one run of `valid` elements (at most 16 * LANE); the rest is zero.
    unsafe fn along(from: *const Self, valid: usize) -> Self::Lanes;
    /// One lane for each of `columns` (at most 16) adjacent elements, built from `depth` (at most LANE) rows.
    unsafe fn across(from: *const Self, ld: usize, depth: usize, columns: usize) -> Self::Lanes;
    /// Whether the vectors of `strip` hold the even columns and the odd ones, rather than the first and the last.
    const SPLIT: bool;
    /// One lane for each of `columns` (at most 32) adjacent elements, built from `depth` (at least 1) rows.
    unsafe fn strip(from: *const Self, ld: usize, depth: usize, columns: usize) -> [Self::Lanes; 2];
}

#[inline]
pub(super) fn first16(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as u16
}

impl Load for f32 {
    type Packed = f32;
    const LANE: usize = 1;
    type Lanes = __m512i;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn along(from: *const f32, valid: usize) -> __m512i {
        // SAFETY: lanes past `valid` are masked and not accessed.
        unsafe { _mm512_maskz_loadu_epi32(first16(valid), from.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn across(from: *const f32, _: usize, depth: usize, columns: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_maskz_loadu_epi32(if depth > 0 { first16(columns) } else { 0 }, from.cast()) }
    }
    const SPLIT: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn strip(from: *const f32, _: usize, _: usize, columns: usize) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe { [f32::along(from, columns), f32::along(from.wrapping_add(16), columns.saturating_sub(16))] }
    }
}
/// A 16-bit type that is packed as f32, of which `$wide` converts 16.
macro_rules! widened {
    ($element:ty, $wide:expr) => {
        impl Load for $element {
            type Packed = f32;
            const LANE: usize = 1;
            type Lanes = __m512i;
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn along(from: *const $element, valid: usize) -> __m512i {
                // SAFETY: elements past `valid` are masked and not accessed.
                let halves = unsafe { _mm256_maskz_loadu_epi16(first16(valid), from.cast()) };
                $wide(halves)
            }
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn across(from: *const $element, _: usize, depth: usize, columns: usize) -> __m512i {
                // SAFETY: as above.
                unsafe { <$element>::along(from, if depth > 0 { columns } else { 0 }) }
            }
            const SPLIT: bool = false;
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn strip(from: *const $element, _: usize, _: usize, columns: usize) -> [__m512i; 2] {
                let last = from.wrapping_add(16);
                // SAFETY: as above.
                unsafe { [<$element>::along(from, columns), <$element>::along(last, columns.saturating_sub(16))] }
            }
        }
    };
}
widened!(f16, |x| _mm512_castps_si512(_mm512_cvtph_ps(x)));
widened!(Widened, |x| _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)));
impl Load for bf16 {
    type Packed = bf16;
    const LANE: usize = 2;
    type Lanes = __m512i;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn along(from: *const bf16, valid: usize) -> __m512i {
        let mask = ((1u64 << valid.min(32)) - 1) as u32;
        // SAFETY: elements past `valid` are masked and not accessed.
        unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn across(from: *const bf16, ld: usize, depth: usize, columns: usize) -> __m512i {
        let row = |d: usize| if d < depth { first16(columns) } else { 0 };
        // SAFETY: as above.
        let (even, odd) = unsafe {
            (
                _mm256_maskz_loadu_epi16(row(0), from.cast()),
                _mm256_maskz_loadu_epi16(row(1), from.wrapping_add(ld).cast()),
            )
        };
        let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
        _mm512_or_si512(_mm512_cvtepu16_epi32(even), odd)
    }
    /// Four instructions for two lines, of which no two need the same unit; the order of columns takes twice as many.
    const SPLIT: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn strip(from: *const bf16, ld: usize, depth: usize, columns: usize) -> [__m512i; 2] {
        const LOW: i32 = 0xffff;
        /// Bits of the second where the first is set, else of the third.
        const CHOOSE: i32 = 0xca;
        let low = _mm512_set1_epi32(LOW);
        // SAFETY: as above.
        let [first, second] = unsafe {
            [bf16::along(from, columns), bf16::along(from.wrapping_add(ld), if depth > 1 { columns } else { 0 })]
        };
        [
            _mm512_ternarylogic_epi32::<CHOOSE>(low, first, _mm512_slli_epi32::<16>(second)),
            _mm512_ternarylogic_epi32::<CHOOSE>(low, _mm512_srli_epi32::<16>(first), second),
        ]
    }
}

/// A matrix operand: rows of A, or columns of B, by `k`.
#[derive(Clone, Copy)]
pub(super) struct PackSource<E> {
    pub from: *const E,
    pub ld: usize,
    pub k: usize,
    /// Whether adjacent elements are adjacent along k (A as stored, B transposed) rather than along the rows of A or
    /// columns of B.
    pub along_k: bool,
}

/// Packs rows of A over some steps into panels of `height` rows.
///
/// # Safety
/// AVX-512 F, BW, VL and what `E` needs; the rows and the first element of each step are within the operand; `out` is
/// 64-byte aligned and holds `height` lines per step, part and panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_a<E: Load>(
    x: &PackSource<E>,
    rows: Range<usize>,
    steps: Range<usize>,
    height: usize,
    out: *mut E::Packed,
) {
    let out = out.cast::<__m512i>();
    let panels = rows.len().div_ceil(height);
    let line = |panel: usize, s: usize, part: usize| ((panel * steps.len() + s) * E::Lanes::COUNT + part) * height;
    // SAFETY: lines are within `out`; anything past the operand is masked.
    unsafe {
        if x.along_k {
            // A copy, row by row, with a prefetch a few rows ahead.
            for i in 0..panels * height {
                for s in 0..steps.len() {
                    let k = (steps.start + s) * E::STEP;
                    let at = |row: usize| x.from.wrapping_add((rows.start + row) * x.ld + k);
                    _mm_prefetch::<_MM_HINT_T0>(at(i + 4).cast());
                    let lanes = E::along(at(i), if i < rows.len() { x.k - k } else { 0 });
                    for part in 0..E::Lanes::COUNT {
                        out.add(line(i / height, s, part) + i % height).write(lanes.part(part));
                    }
                }
            }
        } else {
            // In groups of 16 rows, whatever the panels' height.
            for s in 0..steps.len() {
                for group in (0..panels * height).step_by(16) {
                    let first = rows.start + group;
                    let tile = across(x, first, rows.end.saturating_sub(first).min(16), steps.start + s);
                    for part in 0..E::Lanes::COUNT {
                        for (row, lanes) in (group..panels * height).zip(transposed(plane(&tile, part))) {
                            out.add(line(row / height, s, part) + row % height).write(lanes);
                        }
                    }
                }
            }
        }
    }
}

/// Packs columns of B over some steps into panels of [`COLUMNS`].
///
/// # Safety
/// As for [`pack_a`], with 32 lines per step, part and panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_b<E: Load>(
    x: &PackSource<E>,
    columns: Range<usize>,
    steps: Range<usize>,
    out: *mut E::Packed,
) {
    let panels = columns.len().div_ceil(COLUMNS);
    let step = |panel: usize, s: usize| {
        // Two vectors of 16 columns per lane.
        for half in 0..2 {
            let first = columns.start + panel * COLUMNS + half * 16;
            let count = columns.end.saturating_sub(first).min(16);
            // SAFETY: lines are within `out`; anything past the operand is masked.
            unsafe {
                let at = steps.start + s;
                let tile = if x.along_k { along(x, first, count, at) } else { across(x, first, count, at) };
                for part in 0..E::Lanes::COUNT {
                    let lines = plane(&tile, part);
                    let lines = if x.along_k { transposed(lines) } else { lines };
                    let line = ((panel * steps.len() + s) * E::Lanes::COUNT + part) * COLUMNS + half;
                    let out = out.cast::<__m512i>().add(line);
                    for (lane, x) in lines.iter().enumerate() {
                        out.add(2 * lane).write(*x);
                    }
                }
            }
        }
    };
    // In the order of the source's memory.
    if x.along_k {
        (0..panels).for_each(|panel| (0..steps.len()).for_each(|s| step(panel, s)));
    } else {
        (0..steps.len()).for_each(|s| (0..panels).for_each(|panel| step(panel, s)));
    }
}

/// Packs one panel of a B whose rows run along its columns, in the order of [`Load::SPLIT`]. Prefetches nothing.
///
/// # Safety
/// As for [`pack_b`]; `columns` has at most [`COLUMNS`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_strip<E: Load>(
    x: &PackSource<E>,
    columns: Range<usize>,
    steps: Range<usize>,
    out: *mut E::Packed,
) {
    let out = out.cast::<__m512i>();
    for (i, lane) in (steps.start * LANES..steps.end * LANES).enumerate() {
        let k = lane * E::LANE;
        let from = x.from.wrapping_add(k * x.ld + columns.start);
        // SAFETY: upheld by the caller; anything past the operand is masked.
        unsafe {
            let pair = match k < x.k {
                true => E::strip(from, x.ld, x.k - k, columns.len()),
                false => [E::Lanes::zero(); 2],
            };
            for part in 0..E::Lanes::COUNT {
                let at = (i / LANES * E::Lanes::COUNT + part) * COLUMNS + i % LANES * 2;
                out.add(at).write(pair[0].part(part));
                out.add(at + 1).write(pair[1].part(part));
            }
        }
    }
}

/// Packs 16 columns by 16 lanes of step `s`, of which `count` columns exist. Prefetches the same lanes of the next
/// panel: hardware prefetchers cannot follow many short rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn along<E: Load>(x: &PackSource<E>, first: usize, count: usize, s: usize) -> [E::Lanes; 16] {
    let k = s * E::STEP;
    let mut tile = [E::Lanes::zero(); 16];
    for (i, row) in tile.iter_mut().enumerate() {
        let at = x.from.wrapping_add((first + i) * x.ld + k);
        // SAFETY: upheld by the caller; a prefetch cannot fault.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(COLUMNS * x.ld).cast());
            *row = E::along(at, if i < count { x.k - k } else { 0 });
        }
    }
    tile
}

/// Packs 16 lanes of step `s` by 16 rows (columns), of which `count` exist. Prefetches the same rows of the next step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across<E: Load>(x: &PackSource<E>, first: usize, count: usize, s: usize) -> [E::Lanes; 16] {
    let mut tile = [E::Lanes::zero(); 16];
    for (i, lanes) in tile.iter_mut().enumerate() {
        let k = (s * LANES + i) * E::LANE;
        let at = |k: usize| x.from.wrapping_add(k * x.ld + first);
        // SAFETY: upheld by the caller; a prefetch cannot fault.
        unsafe {
            for row in 0..E::LANE {
                _mm_prefetch::<_MM_HINT_T0>(at(k + E::STEP + row).cast());
            }
            *lanes = E::across(at(k), x.ld, x.k.saturating_sub(k), count);
        }
    }
    tile
}

/// One part of a tile's lanes. A loop, because `array::map` is compiled without AVX-512: it would call its closure for
/// each.
#[inline]
#[target_feature(enable = "avx512f")]
fn plane<P: Planes>(tile: &[P; 16], part: usize) -> [__m512i; 16] {
    let mut plane = [__m512i::zero(); 16];
    for (to, lanes) in plane.iter_mut().zip(tile) {
        *to = lanes.part(part);
    }
    plane
}

/// Transposes 16 x 16 lanes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn transposed(r: [__m512i; 16]) -> [__m512i; 16] {
    let (mut t, mut u, mut v) = (r, r, r);
    for i in (0..16).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for i in (0..16).step_by(4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // u[4 i + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4 i .. 4 i + 4, one column per quarter.
    for j in 0..4 {
        let even = |i: usize| _mm512_shuffle_i32x4::<0x88>(u[i + j], u[i + 4 + j]);
        let odd = |i: usize| _mm512_shuffle_i32x4::<0xdd>(u[i + j], u[i + 4 + j]);
        v[j] = _mm512_shuffle_i32x4::<0x88>(even(0), even(8));
        v[j + 8] = _mm512_shuffle_i32x4::<0xdd>(even(0), even(8));
        v[j + 4] = _mm512_shuffle_i32x4::<0x88>(odd(0), odd(8));
        v[j + 12] = _mm512_shuffle_i32x4::<0xdd>(odd(0), odd(8));
    }
    v
}

/// Transposes 16 x 16 f32.
///
/// # Safety
/// AVX-512; `from` and `to` hold 16 rows of 16 elements, `from_ld` and `to_ld` apart.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose(from: *const f32, from_ld: usize, to: *mut f32, to_ld: usize) {
    // SAFETY: within both.
    unsafe {
        let rows = std::array::from_fn(|i| _mm512_loadu_si512(from.add(i * from_ld).cast()));
        transposed(rows).iter().enumerate().for_each(|(i, row)| _mm512_storeu_si512(to.add(i * to_ld).cast(), *row));
    }
}
