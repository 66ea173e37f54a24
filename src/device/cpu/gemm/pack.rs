//! Copies blocks of A and B into the order in which the kernels read them, and writes finished blocks of C. AVX-512.
//! Never multiplies.
//!
//! The unit is a *lane* of 32 bits: one f32 (f16 becomes f32 here), or two bf16 that are neighbours along k, which is
//! what one lane of `vdpbf16ps` and `tdpbf16ps` consumes. A *step* is 16 lanes deep along k (16 f32, 32 bf16). Both
//! operands are cut in panels, of some rows of A or [`COLUMNS`] columns of B; a panel is a sequence of steps:
//!
//! - of A: `[row][lane]`, a row's 16 lanes on one cache line (a row of an AMX tile, or 16 broadcasts);
//! - of B: `[lane][column]`, a lane of 32 columns on two cache lines (rows of two AMX tiles, or two vectors).
//!
//! What lies past the edge of the matrix is zero in the panel.
use crate::base::Elem;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

/// Columns of a panel of B.
pub(super) const COLUMNS: usize = 32;
/// Lanes of a step.
pub(super) const LANES: usize = 16;

/// An element type of A and B.
pub(super) trait Load: Copy {
    /// As which elements they are in the panels.
    type Packed: Elem;
    /// Elements in a lane.
    const LANE: usize;
    /// 16 lanes from one run of `valid` elements (at most 16 * LANE); the rest is zero.
    unsafe fn along(from: *const Self, valid: usize) -> __m512i;
    /// A lane for each of `columns` (at most 16) neighbouring elements, made of `depth` (at most LANE) rows.
    unsafe fn across(from: *const Self, ld: usize, depth: usize, columns: usize) -> __m512i;
}

#[inline]
fn first16(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as u16
}

impl Load for f32 {
    type Packed = f32;
    const LANE: usize = 1;
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
}
impl Load for f16 {
    type Packed = f32;
    const LANE: usize = 1;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn along(from: *const f16, valid: usize) -> __m512i {
        // SAFETY: elements past `valid` are masked and not accessed.
        let halves = unsafe { _mm256_maskz_loadu_epi16(first16(valid), from.cast()) };
        _mm512_castps_si512(_mm512_cvtph_ps(halves))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn across(from: *const f16, _: usize, depth: usize, columns: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { f16::along(from, if depth > 0 { columns } else { 0 }) }
    }
}
impl Load for bf16 {
    type Packed = bf16;
    const LANE: usize = 2;
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
}

/// A matrix operand: rows of A, or columns of B, by `k`.
#[derive(Clone, Copy)]
pub(super) struct PackSource<E> {
    pub from: *const E,
    pub ld: usize,
    pub k: usize,
    /// Neighbours in memory are neighbours along k (A as stored, B transposed); else along the rows of A or columns of
    /// B.
    pub along_k: bool,
}

/// Packs rows of A at some steps into panels of `height` rows.
///
/// # Safety
/// AVX-512 F, BW and VL; the rows and the first element of each step are within the operand, which is readable; `out`
/// is 64-byte aligned and holds `height` lines for each step of each panel.
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
    let line = |panel: usize, s: usize| (panel * steps.len() + s) * height;
    // SAFETY: lines within `out`; what lies past the operand is masked.
    unsafe {
        if x.along_k {
            // A copy: one row after the other, a few rows ahead of which memory is asked for.
            for i in 0..panels * height {
                for s in 0..steps.len() {
                    let k = (steps.start + s) * LANES * E::LANE;
                    let at = |row: usize| x.from.wrapping_add((rows.start + row) * x.ld + k);
                    _mm_prefetch::<_MM_HINT_T0>(at(i + 4).cast());
                    let lanes = E::along(at(i), if i < rows.len() { x.k - k } else { 0 });
                    out.add(line(i / height, s) + i % height).write(lanes);
                }
            }
        } else {
            for s in 0..steps.len() {
                for panel in 0..panels {
                    for group in (0..height).step_by(16) {
                        let first = rows.start + panel * height + group;
                        let count = (height - group).min(16);
                        let tile = across(x, first, count.min(rows.end.saturating_sub(first)), steps.start + s);
                        let out = out.add(line(panel, s) + group);
                        transposed(tile).iter().take(count).enumerate().for_each(|(i, row)| out.add(i).write(*row));
                    }
                }
            }
        }
    }
}

/// Packs columns of B at some steps into panels of [`COLUMNS`].
///
/// # Safety
/// As for [`pack_a`], with 32 lines for each step of each panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_b<E: Load>(
    x: &PackSource<E>,
    columns: Range<usize>,
    steps: Range<usize>,
    out: *mut E::Packed,
) {
    let panels = columns.len().div_ceil(COLUMNS);
    let step = |panel: usize, s: usize| {
        // Two vectors of 16 columns in each lane.
        for half in 0..2 {
            let first = columns.start + panel * COLUMNS + half * 16;
            let count = columns.end.saturating_sub(first).min(16);
            // SAFETY: lines within `out`; what lies past the operand is masked.
            unsafe {
                let at = steps.start + s;
                let tile = if x.along_k { transposed(along(x, first, count, at)) } else { across(x, first, count, at) };
                let out = out.cast::<__m512i>().add((panel * steps.len() + s) * COLUMNS + half);
                tile.iter().enumerate().for_each(|(lane, x)| out.add(2 * lane).write(*x));
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

/// 16 columns by 16 lanes of step `s`, of which `count` columns exist. Asks for the same lanes of the next panel: many
/// short rows are more than hardware prefetchers follow.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn along<E: Load>(x: &PackSource<E>, first: usize, count: usize, s: usize) -> [__m512i; 16] {
    let k = s * LANES * E::LANE;
    let mut tile = [_mm512_setzero_si512(); 16];
    for (i, row) in tile.iter_mut().enumerate() {
        let at = x.from.wrapping_add((first + i) * x.ld + k);
        // SAFETY: the caller's; a prefetch cannot fault.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(COLUMNS * x.ld).cast());
            *row = E::along(at, if i < count { x.k - k } else { 0 });
        }
    }
    tile
}

/// 16 lanes of step `s` by 16 rows (columns), of which `count` exist. Asks for the same rows of the next step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across<E: Load>(x: &PackSource<E>, first: usize, count: usize, s: usize) -> [__m512i; 16] {
    let mut tile = [_mm512_setzero_si512(); 16];
    for (i, lanes) in tile.iter_mut().enumerate() {
        let k = (s * LANES + i) * E::LANE;
        let at = |k: usize| x.from.wrapping_add(k * x.ld + first);
        // SAFETY: the caller's; a prefetch cannot fault.
        unsafe {
            for row in 0..E::LANE {
                _mm_prefetch::<_MM_HINT_T0>(at(k + LANES * E::LANE + row).cast());
            }
            *lanes = E::across(at(k), x.ld, x.k.saturating_sub(k), count);
        }
    }
    tile
}

/// 16 x 16 lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(r: [__m512i; 16]) -> [__m512i; 16] {
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
    // u[4 i + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4 i .. 4 i + 4, a column in each quarter.
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

/// An element type of C.
pub(super) trait StoreSums: Copy {
    /// Writes `x`, or adds it to what is there, where `mask` is set.
    unsafe fn store(to: *mut Self, mask: __mmask16, x: __m512, add: bool);
}
impl StoreSums for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(to: *mut f32, mask: __mmask16, mut x: __m512, add: bool) {
        // SAFETY: masked lanes are not accessed.
        unsafe {
            if add {
                x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, to));
            }
            _mm512_mask_storeu_ps(to, mask, x);
        }
    }
}
impl StoreSums for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(to: *mut f16, mask: __mmask16, mut x: __m512, add: bool) {
        // SAFETY: masked lanes are not accessed.
        unsafe {
            if add {
                x = _mm512_add_ps(x, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, to.cast())));
            }
            let nearest = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            _mm256_mask_storeu_epi16(to.cast(), mask, nearest);
        }
    }
}
impl StoreSums for bf16 {
    /// Rounds as `Float::from_f32` does. `vcvtneps2bf16` would flush denormals, and not every AVX-512 has it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(to: *mut bf16, mask: __mmask16, mut x: __m512, add: bool) {
        // SAFETY: masked lanes are not accessed.
        unsafe {
            if add {
                let old = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, to.cast()));
                x = _mm512_add_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(old)));
            }
            let bits = _mm512_castps_si512(x);
            let top = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let rounded = _mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40));
            _mm256_mask_storeu_epi16(to.cast(), mask, _mm512_cvtepi32_epi16(rounded));
        }
    }
}

/// Asks for lines of C to be owned by this core: stores that miss are retired one after the other, so that without this
/// they would take longer than the product. An address is never accessed.
#[inline]
pub(super) fn prefetch<C>(c: *const C, ldc: usize, rows: usize, columns: usize) {
    for i in 0..rows {
        for j in (0..columns).step_by(64 / size_of::<C>()) {
            // SAFETY: a hint, which cannot fault.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(c.wrapping_add(i * ldc + j).cast()) }
        }
    }
}

/// Writes the first `rows` x `columns` of a block with `ld` elements to a row into C.
///
/// # Safety
/// AVX-512 F, BW and VL; `block` holds `rows` rows of `columns` rounded up to 16; C holds the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn store<C: StoreSums>(
    block: *const f32,
    ld: usize,
    rows: usize,
    columns: usize,
    c: *mut C,
    ldc: usize,
    add: bool,
) {
    for i in 0..rows {
        for j in (0..columns).step_by(16) {
            // SAFETY: within the block and within C.
            unsafe { C::store(c.add(i * ldc + j), first16(columns - j), _mm512_loadu_ps(block.add(i * ld + j)), add) }
        }
    }
}
