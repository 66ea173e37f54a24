//! The gated delta rule (Yang et al. 2024) and Mamba 2 (Dao & Gu 2024) in blocks, forward and backward, by key heads.
//! Never keeps a state from one document to another.
//!
//! With G the sums of a block's log decays up to each row, E = exp(G), D_ij = exp(G_i - G_j) for j <= i, and S the
//! state in front of the block, its rows (in f32) are
//!
//! ```text
//! (I + A) X = beta (v - E k S)          A_ij = beta_i (k_i . k_j) D_ij, below the diagonal
//! o = E q S + P X                       P_ij = (q_i . k_j) D_ij
//! S = E_last S + (E_last / E k)^T X
//! ```
//!
//! Mamba 2 has neither A nor the state in X, so that X = beta v, and adds a multiple of v to o.
//!
//! The system is solved row by row, and a row's products do not depend on the rows after it: so a sequence goes on from
//! the state in front of its last block and that block's keys, X and G so far, with the same bits. Backward takes the
//! blocks in reverse, with the gradient of the state after each; it computes X and P again, from the state in front of
//! the block, which forward has kept.
//!
//! Key heads are independent, so threads share a call by them: results do not depend on how they are divided.
// From gradients of the outputs to gradients of the inputs.
mod backward;

pub use self::backward::DeltaBackward;
use super::gemm::{GemmScratch, f32_product};
use super::sequences::CpuSequences;
use super::simd::{Level, exp, sum};
use super::tile::{AttentionScratch, Shared};
use crate::ops::{DELTA_BLOCK, DeltaRule, DeltaShape, GemmShape, StateRule};
use flatshard_base::{Elem, Result, dtype::Float};
use std::ops::Range;

const BLOCK: usize = DELTA_BLOCK;
/// Added to a square length before its root is taken.
const EPSILON: f32 = 1e-6;
/// Values of a row that are solved for in registers.
const STRIP: usize = 64;

/// What both directions read.
struct Inputs<'a, T> {
    shape: DeltaShape,
    qkv: &'a [T],
    a: &'a [T],
    b: &'a [T],
    a_log: &'a [T],
    dt_bias: &'a [T],
    /// The skip weights of Mamba 2.
    skip: Option<&'a [T]>,
}

impl<T: Float> Inputs<'_, T> {
    /// Value heads of a key head.
    fn group(&self) -> usize {
        self.shape.value_heads / self.shape.key_heads
    }
    /// The first column of a key head's queries and keys.
    fn columns(&self, head: usize) -> [usize; 2] {
        let [q, k, _] = self.shape.columns();
        [q, k].map(|first| first + head * self.shape.key_dim)
    }
    /// Where a value head's values of a row are.
    fn values(&self, row: usize, head: usize) -> Range<usize> {
        let [.., v] = self.shape.columns();
        let first = row * self.shape.row() + v + head * self.shape.value_dim;
        first..first + self.shape.value_dim
    }
    /// Reads a block's keys and queries, one below the other. Those of a delta rule are divided by their lengths;
    /// `inverse` gets the factors.
    #[inline(always)]
    fn load(&self, rows: &Range<usize>, head: usize, kq: &mut [f32], inverse: &mut [f32]) {
        let (dim, n, [q, k]) = (self.shape.key_dim, rows.len(), self.columns(head));
        for (i, row) in rows.clone().enumerate() {
            for (at, column, scale) in [(i, k, 1.0), (n + i, q, (dim as f32).sqrt().recip())] {
                let x = &self.qkv[row * self.shape.row() + column..][..dim];
                if !self.shape.rule.replaces() {
                    kq[at * dim..][..dim].iter_mut().zip(x).for_each(|(y, x)| *y = x.to_f32());
                    continue;
                }
                let squares = sum(
                    [x],
                    #[inline(always)]
                    |[x]| x * x,
                );
                let factor = (squares + EPSILON).sqrt().recip();
                inverse[at] = factor;
                for (y, x) in kq[at * dim..][..dim].iter_mut().zip(x) {
                    *y = x.to_f32() * factor * scale;
                }
            }
        }
    }
    /// A token's step before it is clamped, and what it is the softplus of.
    fn step(&self, at: usize, head: usize) -> (f32, f32) {
        let x = self.a[at].to_f32() + self.dt_bias[head].to_f32();
        (if x > 20.0 { x } else { x.exp().ln_1p() }, x)
    }
    /// The gates of a block's rows for one value head, after rows of the block whose `sums` are known.
    fn gates(&self, rows: &Range<usize>, head: usize, sums: &[f32]) -> Gates {
        let (before, zeros) = (sums.len(), [0.0; BLOCK]);
        let mut gates = Gates { before, rates: zeros, sums: zeros, decay: zeros, beta: zeros };
        gates.sums[..before].copy_from_slice(sums);
        let rate = self.a_log[head].to_f32().exp();
        let mut total = sums.last().copied().unwrap_or(0.0);
        for (i, row) in (before..).zip(rows.clone()) {
            let at = row * self.shape.value_heads + head;
            let (step, _) = self.step(at, head);
            let (step, beta) = match self.shape.rule {
                StateRule::Delta { .. } => (step, self.shape.most() * (1.0 + (-self.b[at].to_f32()).exp()).recip()),
                StateRule::Decay { limits: [least, most] } => {
                    let clamped = step.max(least).min(most);
                    (clamped, clamped)
                }
            };
            gates.rates[i] = -rate * step;
            total += gates.rates[i];
            gates.sums[i] = total;
            gates.decay[i] = total.exp();
            gates.beta[i] = beta;
        }
        gates
    }
}

/// A block's rows, for one value head.
struct Gates {
    /// Rows of which only `sums` is known.
    before: usize,
    /// Its log decay.
    rates: [f32; BLOCK],
    /// G
    sums: [f32; BLOCK],
    /// E
    decay: [f32; BLOCK],
    beta: [f32; BLOCK],
}

/// `pairs` of `n` rows with all rows so far becomes D times it, or with `strict` and `beta` A: zero above the diagonal,
/// or on it too.
#[inline(always)]
fn decayed(gates: &Gates, n: usize, strict: bool, pairs: &[f32], out: &mut [f32]) {
    let all = gates.before + n;
    for (i, (row, pairs)) in (gates.before..all).zip(out.chunks_exact_mut(all).zip(pairs.chunks_exact(all))) {
        let g = gates.sums[i];
        let factor = if strict { gates.beta[i] } else { 1.0 };
        for ((out, x), sum) in row.iter_mut().zip(pairs).zip(&gates.sums) {
            // Above the diagonal the difference is positive, and may be large.
            let difference = g - sum;
            *out = exp(if difference > 0.0 { 0.0 } else { difference }) * x * factor;
        }
        row[if strict { i } else { i + 1 }..].fill(0.0);
    }
}

/// Solves `(I + A) X = X` in place, row by row; with `transposed`, `(I + A)^T X = X`. Of X, and of A if it is not
/// transposed, the `rows` are solved for, after those before them.
#[inline(always)]
fn solve(a: &[f32], rows: Range<usize>, x: &mut [f32], dim: usize, transposed: bool) {
    let n = rows.end;
    for step in 0..rows.len() {
        let i = if transposed { n - 1 - step } else { rows.start + step };
        for from in (0..dim).step_by(STRIP) {
            let width = STRIP.min(dim - from);
            let mut row = [0.0; STRIP];
            row[..width].copy_from_slice(&x[i * dim + from..][..width]);
            for j in if transposed { i + 1..n } else { 0..i } {
                let factor = -if transposed { a[j * n + i] } else { a[(i - rows.start) * n + j] };
                // A whole strip has a length that the compiler knows.
                if let Some(other) = x[j * dim + from..].first_chunk::<STRIP>().filter(|_| width == STRIP) {
                    row.iter_mut().zip(other).for_each(|(x, y)| *x = factor.mul_add(*y, *x));
                } else {
                    let other = &x[j * dim + from..][..width];
                    row.iter_mut().zip(other).for_each(|(x, y)| *x = factor.mul_add(*y, *x));
                }
            }
            x[i * dim + from..][..width].copy_from_slice(&row[..width]);
        }
    }
}

/// The right side of the system: `x = beta (v - E k S)`, from `ks = k S`.
#[inline(always)]
fn right_side<T: Float>(
    inputs: &Inputs<T>,
    gates: &Gates,
    rows: &Range<usize>,
    head: usize,
    ks: &[f32],
    x: &mut [f32],
) {
    let dim = inputs.shape.value_dim;
    for (i, row) in rows.clone().enumerate() {
        let v = &inputs.qkv[inputs.values(row, head)];
        let (decay, beta) = (gates.decay[gates.before + i], gates.beta[gates.before + i]);
        for ((x, v), ks) in x[i * dim..][..dim].iter_mut().zip(v).zip(&ks[i * dim..][..dim]) {
            *x = beta * (-decay).mul_add(*ks, v.to_f32());
        }
    }
}

/// Rows of `x` times the decay from each to the end of the block.
#[inline(always)]
fn to_the_end(gates: &Gates, n: usize, x: &[f32], dim: usize, out: &mut [f32]) {
    for i in 0..n {
        let factor = (gates.sums[n - 1] - gates.sums[i]).exp();
        out[i * dim..][..dim].iter_mut().zip(&x[i * dim..][..dim]).for_each(|(y, x)| *y = x * factor);
    }
}

#[inline(always)]
fn dot(x: &[f32], y: &[f32]) -> f32 {
    sum(
        [x, y],
        #[inline(always)]
        |[x, y]| x * y,
    )
}

/// A checked forward pass, for any division by key heads.
pub struct DeltaForward<'a, T> {
    inputs: Inputs<'a, T>,
    along: CpuSequences<'a, f32>,
    o: Shared<'a, T>,
    states: Option<Shared<'a, f32>>,
}

impl<'a, T: Float + Elem> DeltaForward<'a, T> {
    pub fn new(op: DeltaRule<'a>) -> Result<DeltaForward<'a, T>> {
        const OP: &str = DeltaRule::OP;
        let n = op.check()?;
        Ok(DeltaForward {
            inputs: Inputs {
                shape: op.shape,
                qkv: op.qkv.host(OP)?,
                a: op.a.host(OP)?,
                b: op.b.host(OP)?,
                a_log: op.a_log.host(OP)?,
                dt_bias: op.dt_bias.host(OP)?,
                skip: op.skip.map(|skip| skip.host(OP)).transpose()?,
            },
            along: CpuSequences::new(OP, op.along, n)?,
            o: Shared::new(op.o.host(OP)?),
            states: (!op.states.is_empty()).then(|| op.states.host(OP)).transpose()?.map(Shared::new),
        })
    }
    /// # Safety
    /// No other call at the same time has one of these key heads.
    pub unsafe fn heads(
        &self,
        level: Level,
        tiles: &mut AttentionScratch,
        gemm: &mut GemmScratch,
        heads: Range<usize>,
    ) {
        let (inputs, shape) = (&self.inputs, self.inputs.shape);
        let (dk, dv, group, replaces) = (shape.key_dim, shape.value_dim, inputs.group(), shape.rule.replaces());
        let carried = shape.carried() / shape.key_heads;
        let [kq, inverse, pairs, weights, read, far, scratch] = tiles.take([
            2 * BLOCK * dk,
            2 * BLOCK,
            2 * BLOCK * BLOCK,
            BLOCK * BLOCK,
            2 * BLOCK * dv,
            BLOCK * dk,
            carried,
        ]);
        for (of, head) in self.along.iter().flat_map(|of| heads.clone().map(move |head| (of.clone(), head))) {
            let memory = match self.along.memory() {
                // SAFETY: only this call has this head.
                Some(memory) => unsafe { memory.range((of.slot * shape.key_heads + head) * carried, carried) },
                None => &mut *scratch,
            };
            let (states, memory) = memory.split_at_mut(group * dk * dv);
            let (keys, memory) = memory.split_at_mut(BLOCK * dk);
            let (solved, sums) = memory.split_at_mut(group * BLOCK * dv);
            if of.past == 0 {
                states.fill(0.0);
            }
            let mut start = of.rows.start;
            while start < of.rows.end {
                // Rows of the block before these.
                let before = (of.past + start - of.rows.start) % BLOCK;
                let rows = start..of.rows.end.min(start + BLOCK - before);
                let (n, end) = (rows.len(), before + rows.len());
                if let Some(kept) = self.states.as_ref().filter(|_| start > of.rows.start) {
                    let place = DeltaShape::place(start) * shape.state() + head * group * dk * dv;
                    // SAFETY: likewise; the states of its value heads are adjacent.
                    unsafe { kept.range(place, group * dk * dv) }.copy_from_slice(states);
                }
                start = rows.end;
                level.run(
                    #[inline(always)]
                    || inputs.load(&rows, head, kq, inverse),
                );
                keys[before * dk..end * dk].copy_from_slice(&kq[..n * dk]);
                let (pairs, read) = (&mut pairs[..2 * n * end], &mut read[..2 * n * dv]);
                // Keys with keys, unless only queries meet them, and queries with keys.
                let skipped = if replaces { 0 } else { n };
                let (rows_in, at) = (&kq[skipped * dk..2 * n * dk], skipped * end);
                f32_product(gemm, &GemmShape::nt(2 * n - skipped, end, dk), rows_in, keys, &mut pairs[at..]);
                for (own, state) in states.chunks_exact_mut(dk * dv).enumerate() {
                    let value_head = head * group + own;
                    let x = &mut solved[own * BLOCK * dv..][..end * dv];
                    let sums = &mut sums[own * BLOCK..][..end];
                    let gates = inputs.gates(&rows, value_head, &sums[..before]);
                    sums[before..].copy_from_slice(&gates.sums[before..end]);
                    let at = skipped * dv;
                    read[..at].fill(0.0);
                    f32_product(gemm, &GemmShape::nn(2 * n - skipped, dv, dk), rows_in, state, &mut read[at..]);
                    let (ks, qs) = read.split_at_mut(n * dv);
                    level.run(
                        #[inline(always)]
                        || {
                            right_side(inputs, &gates, &rows, value_head, ks, &mut x[before * dv..]);
                            if replaces {
                                decayed(&gates, n, true, &pairs[..n * end], weights);
                                solve(weights, before..end, x, dv, false);
                            }
                            decayed(&gates, n, false, &pairs[n * end..], weights);
                            for (qs, decay) in qs.chunks_exact_mut(dv).zip(&gates.decay[before..]) {
                                qs.iter_mut().for_each(|x| *x *= decay);
                            }
                        },
                    );
                    let add = |shape| GemmShape { accumulate: true, ..shape };
                    f32_product(gemm, &add(GemmShape::nn(n, dv, end)), weights, x, qs);
                    if let Some(skip) = inputs.skip.map(|skip| skip[value_head].to_f32()) {
                        for (row, o) in rows.clone().zip(qs.chunks_exact_mut(dv)) {
                            let v = &inputs.qkv[inputs.values(row, value_head)];
                            o.iter_mut().zip(v).for_each(|(o, v)| *o = skip.mul_add(v.to_f32(), *o));
                        }
                    }
                    for (row, o) in rows.clone().zip(qs.chunks_exact(dv)) {
                        // SAFETY: only this call has this value head.
                        let to = unsafe { self.o.range(row * shape.values() + value_head * dv, dv) };
                        to.iter_mut().zip(o).for_each(|(to, o)| *to = T::from_f32(*o));
                    }
                    if end < BLOCK {
                        continue; // no row has this block in front of it
                    }
                    level.run(
                        #[inline(always)]
                        || {
                            to_the_end(&gates, end, keys, dk, far);
                            let last = gates.decay[end - 1];
                            state.iter_mut().for_each(|x| *x *= last);
                        },
                    );
                    f32_product(gemm, &add(GemmShape::tn(dk, dv, end)), far, x, state);
                }
            }
        }
    }
}
