//! Attention of one group of query heads over its keys and values in tiles, forward and backward (Dao et al. 2022),
//! with f32 softmax and sums. Never builds a T x T matrix, and never knows documents or ranks.
//!
//! Forward packs all keys and values, then takes [`SIDE`] queries at a time through tiles of keys. Backward packs all
//! queries and output gradients, then takes [`SIDE`] keys at a time through tiles of queries; its blocks of weights
//! have keys as rows, so that they are left operands as they are. Blocks that no query sees are skipped.
use super::gemm::panels::{COLUMNS, Over, PanelFloat, Portable, Products, TokenRows, line};
use super::gemm::{CacheLines, GemmKernel};
use super::simd::{LANES, Level, lane_sum, tanh};
use crate::base::DType;
use crate::base::dtype::Float;
use crate::device::ops::AttentionShape;
use std::marker::PhantomData;
use std::ops::Range;

/// Queries (forward) or keys (backward) that sums are kept for, in cache: a multiple of the rows of every kernel's
/// panels and of the columns.
const SIDE: usize = 96;
/// Keys (forward) or queries (backward) in a tile.
const ACROSS: usize = 192;
/// Rows of the highest panel of a kernel.
const HIGHEST: usize = 32;

/// Which keys a query attends to. Both bounds of both ranges never decrease.
pub enum Mask<'a> {
    /// Those up to itself, limited to the last `window`, of `len` tokens.
    Causal { len: usize, window: usize },
    /// A range for each query and each key, of this number of queries and keys.
    Ranges { of_queries: &'a [[u32; 2]], of_keys: &'a [[u32; 2]], queries: usize, keys: usize },
}

impl Mask<'_> {
    #[inline(always)]
    fn keys(&self, query: usize) -> Range<usize> {
        match *self {
            Mask::Causal { window, .. } => (query + 1).saturating_sub(window)..query + 1,
            Mask::Ranges { of_queries, keys, .. } => within(of_queries[query], keys),
        }
    }
    #[inline(always)]
    fn queries(&self, key: usize) -> Range<usize> {
        match *self {
            Mask::Causal { len, window } => key..len.min(key.saturating_add(window)),
            Mask::Ranges { of_keys, queries, .. } => within(of_keys[key], queries),
        }
    }
}
#[inline(always)]
fn within([start, end]: [u32; 2], limit: usize) -> Range<usize> {
    (start as usize).min(limit)..(end as usize).min(limit)
}

/// Memory that threads write apart from each other.
pub struct Shared<'a, T> {
    at: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}
// SAFETY: elements are accessed only through `range`, whose callers keep apart.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(of: &'a mut [T]) -> Shared<'a, T> {
        Shared { at: of.as_mut_ptr(), len: of.len(), owner: PhantomData }
    }
    /// # Safety
    /// No other range that is in use overlaps.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller keeps ranges apart
    pub unsafe fn range(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at + len <= self.len, "within the memory");
        // SAFETY: within the slice that is borrowed for 'a; exclusive by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(at), len) }
    }
}

/// What happens to a finished row.
pub enum To<'a, T> {
    Assign(&'a Shared<'a, T>),
    AssignF32(&'a Shared<'a, f32>),
    AddF32(&'a Shared<'a, f32>),
}

/// Where rows of one head go: the first to `at`, others `row` apart.
pub struct HeadRows<'a, T> {
    pub to: To<'a, T>,
    pub at: usize,
    pub row: usize,
}

impl<T: Float> HeadRows<'_, T> {
    /// # Safety
    /// Nothing else accesses the row, of the head `g` places on.
    #[inline(always)]
    unsafe fn write(&self, g: usize, i: usize, x: &[f32]) {
        let at = self.at + i * self.row + g * x.len();
        // SAFETY: upheld by the caller.
        unsafe {
            match self.to {
                To::Assign(to) => to.range(at, x.len()).iter_mut().zip(x).for_each(|(to, x)| *to = T::from_f32(*x)),
                To::AssignF32(to) => to.range(at, x.len()).copy_from_slice(x),
                To::AddF32(to) => to.range(at, x.len()).iter_mut().zip(x).for_each(|(to, x)| *to += x),
            }
        }
    }
}

/// Runs `$call` with the products of `$kernel` for operands of type `$T`.
macro_rules! with_products {
    ($kernel:expr, $level:expr, $T:ty, $products:ident => $call:expr) => {
        match $kernel {
            // SAFETY: kernels are chosen only where they are available, and this thread's tiles are free.
            #[cfg(target_arch = "x86_64")]
            GemmKernel::Amx if <$T>::DTYPE == DType::Bf16 => {
                let $products = unsafe { &<$T as PanelFloat>::amx() };
                Level::Avx512.run(
                    #[inline(always)]
                    || $call,
                )
            }
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            GemmKernel::Amx | GemmKernel::Avx512 => {
                let $products = unsafe { &<$T as PanelFloat>::dot() };
                Level::Avx512.run(
                    #[inline(always)]
                    || $call,
                )
            }
            _ => {
                let $products = &Portable($level);
                $level.run(
                    #[inline(always)]
                    || $call,
                )
            }
        }
    };
}

/// The kernel of the products, and memory reused between calls, which grows to fit the longest document.
pub struct AttentionScratch {
    pub kernel: GemmKernel,
    lines: CacheLines,
}

impl AttentionScratch {
    pub fn new(kernel: GemmKernel) -> AttentionScratch {
        AttentionScratch { kernel, lines: CacheLines::default() }
    }
    /// Slices of these lengths in whole cache lines, with arbitrary contents.
    fn take<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let lens = lens.map(|len| len.next_multiple_of(LANES));
        let mut rest = self.lines.take(lens.iter().sum());
        lens.map(|len| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(len);
            rest = left;
            taken
        })
    }
}

/// e^x for x <= 0 without branches, in 13 instructions: 2^(x log2 e) as a polynomial of degree 6 (the coefficients of
/// Cephes' `exp2f`) times a power. Relative error below 3e-7 + 6e-8 |x|; 0 below -88; NaN for NaN.
#[inline(always)]
fn exp_below(x: f32) -> f32 {
    // Adding it rounds to an integer, plus the exponent's bias, in the low bits.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let x = x * std::f32::consts::LOG2_E;
    let x = if -127.0 > x { -127.0 } else { x };
    let rounded = x + ROUND;
    let r = x - (rounded - ROUND);
    let p = 1.535_336_2e-4f32.mul_add(r, 1.339_887_4e-3);
    let p = p.mul_add(r, 9.618_437e-3);
    let p = p.mul_add(r, 5.550_332_5e-2);
    let p = p.mul_add(r, 2.402_264_8e-1);
    let p = p.mul_add(r, std::f32::consts::LN_2);
    p.mul_add(r, 1.0) * f32::from_bits(rounded.to_bits() << 23)
}

/// Sixteen columns of a row of sums.
type LaneRow = [f32; LANES];

#[inline(always)]
fn each(x: &mut LaneRow, f: impl Fn(f32) -> f32) {
    x.iter_mut().for_each(|x| *x = f(*x));
}
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}
#[inline(always)]
fn max_lane(mut v: LaneRow) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            v[i] = larger(v[i + half], v[i]);
        }
        half /= 2;
    }
    v[0]
}
/// Sets all but the visible of the elements from `start` on.
#[inline(always)]
fn hide(x: &mut LaneRow, start: usize, visible: &Range<usize>, hidden: f32) {
    for (l, x) in x.iter_mut().enumerate() {
        *x = if visible.start <= start + l && start + l < visible.end { *x } else { hidden };
    }
}

/// What both directions need to know of the heads.
struct Sizes {
    group: usize,
    dim: usize,
    /// Column panels, row panels and steps of `dim`.
    columns: usize,
    rows: usize,
    steps: usize,
    /// Elements of a line.
    line: usize,
    /// Elements of a block of sums.
    block: usize,
}
impl Sizes {
    #[inline(always)]
    fn new<T, P: Products<T>>(a: &AttentionShape) -> Sizes {
        let (dim, line) = (a.head_dim, line::<P::Packed>());
        Sizes {
            group: a.heads / a.kv_heads,
            dim,
            columns: dim.div_ceil(COLUMNS),
            rows: dim.div_ceil(P::ROWS),
            steps: dim.div_ceil(line),
            line,
            block: P::ROWS * COLUMNS,
        }
    }
}

/// f32s that packed operands of `tokens` take: summed over `dim` and over the tokens.
#[inline(always)]
fn packed_len(s: &Sizes, tokens: usize, side: usize) -> [usize; 2] {
    let over_dim = tokens.next_multiple_of(side) * s.steps;
    let over_tokens = s.dim.next_multiple_of(side) * tokens.div_ceil(s.line);
    [over_dim * LANES, over_tokens * LANES]
}

/// Softmax of the rows of a panel, over the keys seen so far (Milakov & Gimelshein 2018).
struct Softmax<'a> {
    max: &'a mut [f32],
    /// Sixteen partial sums a row.
    total: &'a mut [f32],
}

impl Softmax<'_> {
    /// Turns blocks of raw products, for the keys from `k0` on, into weights relative to the new maxima. Returns the
    /// factors by which earlier weights shrink. `queries` are the panel's.
    #[inline(always)]
    fn weigh(
        &mut self,
        height: usize,
        scores: &mut [f32],
        queries: Range<usize>,
        k0: usize,
        a: &AttentionShape,
        mask: &Mask,
    ) -> [f32; HIGHEST] {
        let all = mask.keys(queries.end - 1).start..mask.keys(queries.start).end;
        // Softcapped scores are already scaled.
        let (inner, scale) = if a.softcap > 0.0 { (a.scale / a.softcap, 1.0) } else { (0.0, a.scale) };
        let mut factors = [0.0; HIGHEST];
        for (r, q) in queries.clone().enumerate() {
            let visible = mask.keys(q);
            let mut max = [f32::NEG_INFINITY; LANES];
            for (j, block) in scores.chunks_exact_mut(height * COLUMNS).enumerate() {
                let row = block[r * COLUMNS..][..COLUMNS].as_chunks_mut::<LANES>().0;
                for (half, x) in row.iter_mut().enumerate() {
                    let start = k0 + j * COLUMNS + half * LANES;
                    if a.softcap > 0.0 {
                        each(
                            x,
                            #[inline(always)]
                            |x| a.softcap * tanh(x * inner).0,
                        );
                    }
                    if start < all.start || all.end < start + LANES {
                        hide(x, start, &visible, f32::NEG_INFINITY);
                    }
                    for (max, &x) in max.iter_mut().zip(&*x) {
                        *max = larger(x, *max);
                    }
                }
            }
            // Finite from the start, so that a row that attends to nothing yet subtracts no infinities.
            let new = larger(max_lane(max) * scale, self.max[r]);
            factors[r] = self.max[r] - new;
            self.max[r] = new;
        }
        factors.iter_mut().for_each(|x| *x = exp_below(*x));
        for r in 0..queries.len() {
            let max = self.max[r];
            let mut total: LaneRow = [0.0; LANES];
            for block in scores.chunks_exact_mut(height * COLUMNS) {
                for x in block[r * COLUMNS..][..COLUMNS].as_chunks_mut::<LANES>().0 {
                    for (x, total) in x.iter_mut().zip(&mut total) {
                        *x = exp_below(x.mul_add(scale, -max));
                        *total += *x;
                    }
                }
            }
            for (old, new) in self.total[r * LANES..][..LANES].iter_mut().zip(total) {
                *old = old.mul_add(factors[r], new);
            }
        }
        factors
    }
}

/// What forward reads and writes. Tokens are those of the group's first head.
pub struct Group<'a, T> {
    pub shape: &'a AttentionShape,
    pub queries: TokenRows<'a, T>,
    pub keys: TokenRows<'a, T>,
    pub values: TokenRows<'a, T>,
    pub mask: Mask<'a>,
    /// 0 where a query attends to nothing.
    pub out: HeadRows<'a, T>,
    /// The log of the sum of exp(scores): -inf where a query attends to nothing. Of a head from `lse_at` on, and
    /// `apart` from one head to the next.
    pub lse: &'a Shared<'a, f32>,
    pub lse_at: usize,
    pub apart: usize,
}

/// `shape.scale` must be positive.
///
/// # Safety
/// Nothing else accesses the results of these heads.
pub unsafe fn forward<T: PanelFloat>(level: Level, scratch: &mut AttentionScratch, x: &Group<T>) {
    // SAFETY: upheld by the caller.
    with_products!(scratch.kernel, level, T, products => unsafe { forward_with(products, scratch, x) })
}

#[inline(always)]
unsafe fn forward_with<T: Float, P: Products<T>>(products: &P, scratch: &mut AttentionScratch, x: &Group<T>) {
    const { assert!(P::ROWS <= HIGHEST && SIDE.is_multiple_of(P::ROWS) && ACROSS.is_multiple_of(COLUMNS)) };
    let &Group { shape: a, queries, keys, values, ref mask, .. } = x;
    let s = Sizes::new::<T, P>(a);
    let (n, key_steps) = (queries.rows, keys.rows.div_ceil(s.line));
    let [k, _] = packed_len(&s, keys.rows, COLUMNS);
    let [_, v] = packed_len(&s, values.rows, COLUMNS);
    let [q, _] = packed_len(&s, SIDE, P::ROWS);
    let sums = SIDE * s.columns * COLUMNS;
    let [k, v, q, scores, weights, out, sums, max, total, row] = scratch.take([
        k,
        v,
        q,
        P::ROWS * ACROSS,
        P::ROWS * ACROSS,
        s.block,
        sums,
        SIDE,
        SIDE * LANES,
        s.columns * COLUMNS,
    ]);
    let [k, v, q, weights] = [k, v, q, weights].map(bytemuck::cast_slice_mut::<f32, P::Packed>);
    products.pack_right(keys, Over::Dim, k);
    products.pack_right(values, Over::Tokens, v);
    for g in 0..s.group {
        for q0 in (0..n).step_by(SIDE) {
            let tile = q0..n.min(q0 + SIDE);
            products.pack_left(queries.head(g).part(q0, tile.len()), Over::Dim, q);
            max.fill(f32::MIN);
            total.fill(0.0);
            sums.fill(0.0);
            let seen = mask.keys(q0).start / COLUMNS * COLUMNS..mask.keys(tile.end - 1).end;
            for k0 in seen.clone().step_by(ACROSS) {
                for (p, first) in tile.clone().step_by(P::ROWS).enumerate() {
                    let rows = first..tile.end.min(first + P::ROWS);
                    let start = mask.keys(first).start.max(k0) / COLUMNS * COLUMNS;
                    let end = mask.keys(rows.end - 1).end.min(k0 + ACROSS);
                    if start >= end {
                        continue;
                    }
                    let scores = &mut scores[..(end - start).div_ceil(COLUMNS) * s.block];
                    let left = &q[p * s.steps * P::ROWS * s.line..][..s.steps * P::ROWS * s.line];
                    for (j, block) in scores.chunks_exact_mut(s.block).enumerate() {
                        let right = (start / COLUMNS + j) * s.steps * COLUMNS * s.line;
                        let right = &k[right..][..s.steps * COLUMNS * s.line];
                        // SAFETY: the slices are of these steps, and in whole cache lines.
                        unsafe { products.multiply(left.as_ptr(), right.as_ptr(), s.steps, block.as_mut_ptr()) };
                    }
                    let at = p * P::ROWS;
                    let mut softmax = Softmax { max: &mut max[at..], total: &mut total[at * LANES..] };
                    let factors = softmax.weigh(P::ROWS, scores, rows, start, a, mask);
                    for (block, weights) in scores.chunks_exact(s.block).zip(weights.chunks_exact_mut(s.block)) {
                        products.left_of_sums(block, weights);
                    }
                    let (from, steps) = (start / s.line, end.div_ceil(s.line) - start / s.line);
                    for c in 0..s.columns {
                        let right = &v[(c * key_steps + from) * COLUMNS * s.line..][..steps * COLUMNS * s.line];
                        let left = &weights[..steps * P::ROWS * s.line];
                        // SAFETY: as above.
                        unsafe { products.multiply(left.as_ptr(), right.as_ptr(), steps, out.as_mut_ptr()) };
                        let sums = &mut sums[(p * s.columns + c) * s.block..][..s.block];
                        let rows = sums.as_chunks_mut::<COLUMNS>().0.iter_mut().zip(out.as_chunks::<COLUMNS>().0);
                        for ((sums, out), factor) in rows.zip(factors) {
                            sums.iter_mut().zip(out).for_each(|(sum, x)| *sum = sum.mul_add(factor, *x));
                        }
                    }
                }
            }
            for (i, query) in tile.enumerate() {
                let mut lanes = [0.0; LANES];
                lanes.copy_from_slice(&total[i * LANES..][..LANES]);
                let total = lane_sum(lanes);
                let nothing = total == 0.0;
                let share = if nothing { 0.0 } else { 1.0 / total };
                for (c, row) in row.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
                    let from = ((i / P::ROWS * s.columns + c) * P::ROWS + i % P::ROWS) * COLUMNS;
                    row.iter_mut().zip(&sums[from..]).for_each(|(out, sum)| *out = sum * share);
                }
                let lse = if nothing { f32::NEG_INFINITY } else { max[i] + total.ln() };
                // SAFETY: upheld by the caller.
                unsafe {
                    x.out.write(g, query, &row[..s.dim]);
                    x.lse.range(x.lse_at + g * x.apart + query, 1)[0] = lse;
                }
            }
        }
    }
}

/// What backward reads and writes. Tokens are those of the group's first head.
pub struct GroupGradients<'a, T> {
    pub shape: &'a AttentionShape,
    pub queries: TokenRows<'a, T>,
    pub keys: TokenRows<'a, T>,
    pub values: TokenRows<'a, T>,
    pub d_out: TokenRows<'a, T>,
    pub mask: Mask<'a>,
    /// Of the group's first head; `apart` from one head to the next.
    pub lse: &'a [f32],
    pub delta: &'a [f32],
    pub apart: usize,
    pub d_queries: HeadRows<'a, T>,
    pub d_keys: HeadRows<'a, T>,
    pub d_values: HeadRows<'a, T>,
}

/// `p`: from raw products to weights, exp(s - lse). `ds`: from gradients of the weights to those of the raw products,
/// without the factor `scale`. Columns are queries.
#[inline(always)]
fn slope(p: &mut LaneRow, ds: &mut LaneRow, a: &AttentionShape, lse: &LaneRow, delta: &LaneRow) {
    if a.softcap > 0.0 {
        let inner = a.scale / a.softcap;
        for l in 0..LANES {
            let (t, slope) = tanh(p[l] * inner);
            p[l] = exp_below(a.softcap.mul_add(t, -lse[l]));
            ds[l] = p[l] * (ds[l] - delta[l]) * slope;
        }
    } else {
        for l in 0..LANES {
            p[l] = exp_below(p[l].mul_add(a.scale, -lse[l]));
            ds[l] = p[l] * (ds[l] - delta[l]);
        }
    }
}

/// Sixteen values from `at` on, of the first `len`; then `past`.
#[inline(always)]
fn lanes_of(values: &[f32], at: usize, len: usize, past: f32) -> LaneRow {
    std::array::from_fn(
        #[inline(always)]
        |l| if at + l < len { values[at + l] } else { past },
    )
}

/// # Safety
/// As for [`forward`].
pub unsafe fn backward<T: PanelFloat>(level: Level, scratch: &mut AttentionScratch, x: &GroupGradients<T>) {
    // SAFETY: upheld by the caller.
    with_products!(scratch.kernel, level, T, products => unsafe { backward_with(products, scratch, x) })
}

#[inline(always)]
unsafe fn backward_with<T: Float, P: Products<T>>(products: &P, scratch: &mut AttentionScratch, x: &GroupGradients<T>) {
    const { assert!(SIDE.is_multiple_of(P::ROWS) && SIDE.is_multiple_of(COLUMNS) && ACROSS.is_multiple_of(COLUMNS)) };
    let &GroupGradients { shape: a, keys, values, ref mask, .. } = x;
    let s = Sizes::new::<T, P>(a);
    let (n, query_steps, query_panels) =
        (x.queries.rows, x.queries.rows.div_ceil(s.line), x.queries.rows.div_ceil(COLUMNS));
    let [of_queries, over_queries] = packed_len(&s, n, COLUMNS);
    let [of_keys, over_keys] = packed_len(&s, SIDE, P::ROWS);
    // Gradients of 32 queries, transposed: a row per element of `dim`.
    let wide = s.dim.next_multiple_of(LANES);
    let dq_panel = wide.max(s.rows * P::ROWS) * COLUMNS;
    let sums = SIDE * s.columns * COLUMNS;
    let [q, q_over, d_out, d_out_over, key, key_over, value, p, ds, ds_over, p_block, ds_block, out, dk, dv, dq, row] =
        scratch.take([
            s.group * of_queries,
            s.group * over_queries,
            s.group * of_queries,
            s.group * over_queries,
            of_keys,
            over_keys,
            of_keys,
            SIDE * ACROSS,
            SIDE * ACROSS,
            SIDE * ACROSS,
            s.block,
            s.block,
            s.block,
            sums,
            sums,
            s.group * query_panels * dq_panel,
            (COLUMNS * wide).max(s.columns * COLUMNS),
        ]);
    let [q, q_over, d_out, d_out_over, key, key_over, value, p, ds, ds_over] =
        [q, q_over, d_out, d_out_over, key, key_over, value, p, ds, ds_over]
            .map(bytemuck::cast_slice_mut::<f32, P::Packed>);
    let per_line = s.line / LANES;
    let [of_queries, over_queries] = [of_queries, over_queries].map(|len| len * per_line);
    for g in 0..s.group {
        let (queries, gradients) = (x.queries.head(g), x.d_out.head(g));
        products.pack_right(queries, Over::Dim, &mut q[g * of_queries..]);
        products.pack_right(queries, Over::Tokens, &mut q_over[g * over_queries..]);
        products.pack_right(gradients, Over::Dim, &mut d_out[g * of_queries..]);
        products.pack_right(gradients, Over::Tokens, &mut d_out_over[g * over_queries..]);
    }
    dq.fill(0.0);
    // Elements of a step of a left operand and of a right one.
    let (left_step, right_step) = (P::ROWS * s.line, COLUMNS * s.line);
    for k0 in (0..keys.rows).step_by(SIDE) {
        let tile = k0..keys.rows.min(k0 + SIDE);
        let panels = tile.len().div_ceil(P::ROWS);
        let key_steps = tile.len().div_ceil(s.line);
        products.pack_left(keys.part(k0, tile.len()), Over::Dim, key);
        products.pack_left(keys.part(k0, tile.len()), Over::Tokens, key_over);
        products.pack_left(values.part(k0, tile.len()), Over::Dim, value);
        dk.fill(0.0);
        dv.fill(0.0);
        let seen = mask.queries(k0).start / COLUMNS * COLUMNS..mask.queries(tile.end - 1).end;
        for g in 0..s.group {
            for q0 in seen.clone().step_by(ACROSS) {
                let q_end = seen.end.min(q0 + ACROSS);
                for (c, first) in (q0..q_end).step_by(COLUMNS).enumerate() {
                    let columns = first..q_end.min(first + COLUMNS);
                    // The keys that any, and that all, of these queries attend to.
                    let any = mask.keys(columns.start).start..mask.keys(columns.end - 1).end;
                    let all = mask.keys(columns.end - 1).start..mask.keys(columns.start).end;
                    let right = (g * query_panels + first / COLUMNS) * s.steps * right_step;
                    let (q, d_out) = (&q[right..][..s.steps * right_step], &d_out[right..][..s.steps * right_step]);
                    let stats = g * x.apart;
                    let [lse, delta] = [(x.lse, f32::INFINITY), (x.delta, 0.0)].map(
                        #[inline(always)]
                        |(of, past)| {
                            [0, LANES].map(
                                #[inline(always)]
                                |half| lanes_of(&of[stats..], first + half, columns.end, past),
                            )
                        },
                    );
                    // Also the rows that complete the last step of the sum over keys.
                    for r in 0..(key_steps * s.line).div_ceil(P::ROWS).max(panels) {
                        let rows = k0 + r * P::ROWS..k0 + (r + 1) * P::ROWS;
                        let left = r * s.steps * left_step;
                        if r >= panels || rows.end <= any.start || any.end <= rows.start {
                            p_block.fill(0.0);
                            ds_block.fill(0.0);
                        } else {
                            // SAFETY: the slices are of these steps, and in whole cache lines.
                            unsafe {
                                let (key, value) =
                                    (&key[left..][..s.steps * left_step], &value[left..][..s.steps * left_step]);
                                products.multiply(key.as_ptr(), q.as_ptr(), s.steps, p_block.as_mut_ptr());
                                products.multiply(value.as_ptr(), d_out.as_ptr(), s.steps, ds_block.as_mut_ptr());
                            }
                            let full = all.start <= rows.start && rows.end <= all.end;
                            let blocks = p_block.as_chunks_mut::<LANES>().0.iter_mut();
                            for (i, (p, ds)) in blocks.zip(ds_block.as_chunks_mut::<LANES>().0).enumerate() {
                                let half = i % 2;
                                slope(p, ds, a, &lse[half], &delta[half]);
                                if !full {
                                    let k = k0 + r * P::ROWS + i / 2;
                                    let visible = if k < tile.end { mask.queries(k) } else { 0..0 };
                                    let at = first + half * LANES;
                                    hide(p, at, &visible, 0.0);
                                    hide(ds, at, &visible, 0.0);
                                }
                            }
                        }
                        if r < panels {
                            let at = (r * ACROSS / COLUMNS + c) * s.block;
                            products.left_of_sums(p_block, &mut p[at..][..s.block]);
                            products.left_of_sums(ds_block, &mut ds[at..][..s.block]);
                        }
                        let at = c * SIDE * COLUMNS + r * s.block;
                        products.right_of_sums(ds_block, &mut ds_over[at..][..s.block]);
                    }
                    let from = any.start.max(k0) - k0;
                    let end = any.end.min(tile.end).max(k0) - k0;
                    let (from, end) = (from / s.line, end.div_ceil(s.line));
                    if from >= end {
                        continue;
                    }
                    let right = &ds_over[c * SIDE * COLUMNS + from * right_step..][..(end - from) * right_step];
                    let sums = &mut dq[(g * query_panels + first / COLUMNS) * dq_panel..][..dq_panel];
                    for (r, sums) in sums.chunks_exact_mut(s.block).take(s.rows).enumerate() {
                        let left = &key_over[(r * key_steps + from) * left_step..][..(end - from) * left_step];
                        // SAFETY: as above.
                        unsafe { products.multiply(left.as_ptr(), right.as_ptr(), end - from, out.as_mut_ptr()) };
                        sums.iter_mut().zip(&*out).for_each(|(sum, x)| *sum += x);
                    }
                }
                for r in 0..panels {
                    let last = tile.end.min(k0 + (r + 1) * P::ROWS) - 1;
                    let from = mask.queries(k0 + r * P::ROWS).start.clamp(q0, q_end) - q0;
                    let end = mask.queries(last).end.clamp(q0, q_end) - q0;
                    let (from, end) = (from / s.line, end.div_ceil(s.line));
                    if from >= end {
                        continue;
                    }
                    let steps = end - from;
                    for c in 0..s.columns {
                        let left = r * P::ROWS * ACROSS + from * left_step;
                        let right = g * over_queries + (c * query_steps + q0 / s.line + from) * right_step;
                        for (weights, over, sums) in [(&*p, &*d_out_over, &mut *dv), (&*ds, &*q_over, &mut *dk)] {
                            let (left, right) =
                                (&weights[left..][..steps * left_step], &over[right..][..steps * right_step]);
                            // SAFETY: as above.
                            unsafe { products.multiply(left.as_ptr(), right.as_ptr(), steps, out.as_mut_ptr()) };
                            let sums = &mut sums[(r * s.columns + c) * s.block..][..s.block];
                            sums.iter_mut().zip(&*out).for_each(|(sum, x)| *sum += x);
                        }
                    }
                }
            }
        }
        for (i, k) in tile.enumerate() {
            let row = &mut row[..s.columns * COLUMNS];
            let at = |c: usize| ((i / P::ROWS * s.columns + c) * P::ROWS + i % P::ROWS) * COLUMNS;
            for (c, row) in row.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
                row.iter_mut().zip(&dk[at(c)..]).for_each(|(x, sum)| *x = sum * a.scale);
            }
            // SAFETY: upheld by the caller.
            unsafe { x.d_keys.write(0, k, &row[..s.dim]) };
            for (c, row) in row.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
                row.copy_from_slice(&dv[at(c)..][..COLUMNS]);
            }
            // SAFETY: as above.
            unsafe { x.d_values.write(0, k, &row[..s.dim]) };
        }
    }
    for g in 0..s.group {
        for first in (0..n).step_by(COLUMNS) {
            let panel = &mut dq[(g * query_panels + first / COLUMNS) * dq_panel..][..dq_panel];
            panel.iter_mut().for_each(|x| *x *= a.scale);
            for d in (0..s.dim).step_by(LANES) {
                for half in [0, LANES] {
                    products.transpose(&panel[d * COLUMNS + half..], &mut row[half * wide + d..], wide);
                }
            }
            for (q, row) in (first..n).zip(row.chunks_exact(wide)).take(COLUMNS) {
                // SAFETY: as above.
                unsafe { x.d_queries.write(g, q, &row[..s.dim]) };
            }
        }
    }
}
