//! Copies blocks of A and B into the order in which the kernels read them, and writes finished blocks of C. AVX-512.
//! Never multiplies.
//!
//! The unit is a *lane* of 32 bits: one f32, or two bf16 that are neighbours along k, which is what one lane of
//! `vdpbf16ps` and `tdpbf16ps` consumes. A *step* is 16 lanes deep along k (16 f32, 32 bf16). Both operands are cut in
//! panels, of some rows of A or [`COLUMNS`] columns of B; a panel is a sequence of steps:
//!
//! - of A: `[row][lane]`, a row's 16 lanes on one cache line (a row of an AMX tile, or 16 broadcasts);
//! - of B: `[lane][column]`, a lane of 32 columns on two cache lines (rows of two AMX tiles, or two vectors).
//!
//! What lies past the edge of the matrix is zero in the panel.
use half::bf16;
use std::arch::x86_64::*;
use std::ops::Range;

/// Columns of a panel of B.
pub(super) const COLUMNS: usize = 32;
/// Lanes of a step.
pub(super) const LANES: usize = 16;

/// An element type of A and B.
pub(super) trait Load: Copy {
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
impl Load for bf16 {
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
pub(super) struct Operand<E> {
    pub from: *const E,
    pub ld: usize,
    pub k: usize,
    /// Neighbours in memory are neighbours along k (A as stored, B transposed); else along the rows of A or columns of B.
    pub along_k: bool,
}

/// Packs rows (columns) `which` at `steps`, `width` to a panel. `of_b` chooses the order within a step.
///
/// # Safety
/// AVX-512 F, BW and VL; the operand is readable; `out` is 64-byte aligned and holds the panels:
/// `which.len().div_ceil(width) * steps.len() * width * 16` lanes. `which` and `steps` are within the operand
/// (`steps` within k rounded up). A panel of B is [`COLUMNS`] wide.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack<E: Load>(
    x: &Operand<E>,
    which: Range<usize>,
    steps: Range<usize>,
    width: usize,
    of_b: bool,
    out: *mut E,
) {
    let panels = which.len().div_ceil(width);
    let step = |panel: usize, s: usize| {
        let out = out.wrapping_add((panel * steps.len() + s) * width * LANES * E::LANE);
        // SAFETY: as for the whole.
        unsafe { pack_step(x, which.start + panel * width..which.end, steps.start + s, width, of_b, out.cast()) }
    };
    // Walk the source in the order of its memory.
    if x.along_k {
        (0..panels).for_each(|panel| (0..steps.len()).for_each(|s| step(panel, s)));
    } else {
        (0..steps.len()).for_each(|s| (0..panels).for_each(|panel| step(panel, s)));
    }
}

/// One step of the panel that begins at `which.start`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_step<E: Load>(
    x: &Operand<E>,
    which: Range<usize>,
    step: usize,
    width: usize,
    of_b: bool,
    out: *mut __m512i,
) {
    let k = step * LANES * E::LANE;
    let depth = x.k - k;
    for group in (0..width).step_by(16) {
        let first = which.start + group;
        let valid = which.end.saturating_sub(first).min(width - group).min(16);
        // 16 x 16 lanes. Pointers past the matrix are formed but, being masked, never read.
        let mut tile = [_mm512_setzero_si512(); 16];
        for (i, row) in tile.iter_mut().enumerate() {
            // SAFETY: only what is within the operand is read.
            *row = unsafe {
                if x.along_k {
                    E::along(x.from.wrapping_add((first + i) * x.ld + k), if i < valid { depth } else { 0 })
                } else {
                    let rows = depth.saturating_sub(i * E::LANE);
                    E::across(x.from.wrapping_add((k + i * E::LANE) * x.ld + first), x.ld, rows, valid)
                }
            };
        }
        if x.along_k == of_b {
            tile = transposed(tile);
        }
        // SAFETY: `out` holds a step; a panel of B stores 16 rows of two lines, one of A its rows of one line.
        unsafe {
            if of_b {
                (0..16).for_each(|i| out.add(i * COLUMNS / 16 + group / 16).write(tile[i]));
            } else {
                (0..16.min(width - group)).for_each(|i| out.add(group + i).write(tile[i]));
            }
        }
    }
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
pub(super) trait Store: Copy {
    /// Writes `x`, or adds it to what is there, where `mask` is set.
    unsafe fn store(to: *mut Self, mask: __mmask16, x: __m512, add: bool);
}
impl Store for f32 {
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
impl Store for bf16 {
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
pub(super) unsafe fn store<C: Store>(
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
