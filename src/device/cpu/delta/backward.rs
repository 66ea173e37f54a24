//! Backward of the gated delta rule and of Mamba 2: the blocks of a document in reverse. Never computes a state that
//! forward kept.
use super::{BLOCK, Gates, Inputs, decayed, dot, right_side, solve, to_the_end};
use crate::ViewMut;
use crate::cpu::gemm::{GemmScratch, f32_product};
use crate::cpu::sequences::CpuSequences;
use crate::cpu::simd::{Level, sum_with};
use crate::cpu::tile::{AttentionScratch, Shared};
use crate::ops::{DeltaRuleBackward, DeltaShape, GemmShape, RowSequences, StateRule};
use flatshard_base::{Elem, Result, dtype::Float};
use std::ops::Range;

/// A checked backward pass, for any division by key heads.
pub struct DeltaBackward<'a, T> {
    inputs: Inputs<'a, T>,
    along: CpuSequences<'a, f32>,
    states: &'a [f32],
    d_o: &'a [T],
    dqkv: Shared<'a, T>,
    da: Shared<'a, T>,
    db: Shared<'a, T>,
    da_log: Option<Shared<'a, f32>>,
    ddt_bias: Option<Shared<'a, f32>>,
    dskip: Option<Shared<'a, f32>>,
}

/// Memory of a block and its gradients.
struct BlockGradients<'a> {
    kq: &'a mut [f32],
    inverse: &'a mut [f32],
    pairs: &'a mut [f32],
    /// A and P.
    a: &'a mut [f32],
    p: &'a mut [f32],
    /// `[k; q] S`
    read: &'a mut [f32],
    x: &'a mut [f32],
    dx: &'a mut [f32],
    d_o: &'a mut [f32],
    far: &'a mut [f32],
    /// The gradient of `[k; q] S`.
    dread: &'a mut [f32],
    /// Gradients of pairs of rows: `[A; P]`.
    dpairs: &'a mut [f32],
    dkq: &'a mut [f32],
}

impl<'a, T: Float + Elem> DeltaBackward<'a, T> {
    pub fn new(op: DeltaRuleBackward<'a>) -> Result<DeltaBackward<'a, T>> {
        const OP: &str = DeltaRuleBackward::OP;
        let n = op.check()?;
        let gradient = |grad: Option<ViewMut<'a>>| grad.map(|grad| grad.host(OP)).transpose();
        Ok(DeltaBackward {
            inputs: Inputs {
                shape: op.shape,
                qkv: op.qkv.host(OP)?,
                a: op.a.host(OP)?,
                b: op.b.host(OP)?,
                a_log: op.a_log.host(OP)?,
                dt_bias: op.dt_bias.host(OP)?,
                skip: op.skip.map(|skip| skip.host(OP)).transpose()?,
            },
            along: CpuSequences::new(OP, RowSequences::Whole(op.documents), n)?,
            states: op.states.host(OP)?,
            d_o: op.d_o.host(OP)?,
            dqkv: Shared::new(op.dqkv.host(OP)?),
            da: Shared::new(op.da.host(OP)?),
            db: Shared::new(op.db.host(OP)?),
            da_log: gradient(op.da_log)?.map(Shared::new),
            ddt_bias: gradient(op.ddt_bias)?.map(Shared::new),
            dskip: gradient(op.dskip)?.map(Shared::new),
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
        let (dk, dv, group) = (shape.key_dim, shape.value_dim, inputs.group());
        let (keys, values, square) = (BLOCK * dk, BLOCK * dv, BLOCK * BLOCK);
        let [kq, inverse, pairs, a, p, read, x, dx, d_o, far, dread, dpairs, dkq, dstates, zero] = tiles.take([
            2 * keys,
            2 * BLOCK,
            2 * square,
            square,
            square,
            2 * values,
            values,
            values,
            values,
            keys,
            2 * values,
            2 * square,
            2 * keys,
            group * dk * dv,
            dk * dv,
        ]);
        let mut block = BlockGradients { kq, inverse, pairs, a, p, read, x, dx, d_o, far, dread, dpairs, dkq };
        zero.fill(0.0);
        block.a.fill(0.0); // Mamba 2 has none
        let documents = self.along.iter().map(|of| of.rows);
        for (document, head) in documents.flat_map(|of| heads.clone().map(move |head| (of.clone(), head))) {
            dstates.fill(0.0);
            for start in document.clone().step_by(BLOCK).rev() {
                let rows = start..document.end.min(start + BLOCK);
                level.run(
                    #[inline(always)]
                    || inputs.load(&rows, head, block.kq, block.inverse),
                );
                let n = rows.len();
                // Keys with keys, unless only queries meet them, and queries with keys.
                let skipped = if shape.rule.replaces() { 0 } else { n };
                block.pairs[..skipped * n].fill(0.0);
                let pairs = &mut block.pairs[skipped * n..2 * n * n];
                f32_product(gemm, &GemmShape::nt(2 * n - skipped, n, dk), &block.kq[skipped * dk..], block.kq, pairs);
                block.dkq[..2 * n * dk].fill(0.0);
                for (own, dstate) in dstates.chunks_exact_mut(dk * dv).enumerate() {
                    let value_head = head * group + own;
                    let state = match start > document.start {
                        true => {
                            &self.states[DeltaShape::place(start) * shape.state() + value_head * dk * dv..][..dk * dv]
                        }
                        false => &*zero,
                    };
                    // SAFETY: upheld by the caller.
                    unsafe { self.block(level, gemm, &mut block, &rows, value_head, state, dstate) };
                }
                // SAFETY: likewise.
                level.run(
                    #[inline(always)]
                    || unsafe { self.of_lengths(&block, &rows, head) },
                );
            }
        }
    }

    /// One value head in one block: `dstate` becomes the gradient of the state in front of it. Adds to the gradient of
    /// its keys and queries.
    ///
    /// # Safety
    /// No other call at the same time has this value head.
    #[allow(clippy::too_many_arguments)] // a block's operands and its scratch
    unsafe fn block(
        &self,
        level: Level,
        gemm: &mut GemmScratch,
        block: &mut BlockGradients,
        rows: &Range<usize>,
        head: usize,
        state: &[f32],
        dstate: &mut [f32],
    ) {
        let (inputs, shape, n) = (&self.inputs, self.inputs.shape, rows.len());
        let (dk, dv, replaces) = (shape.key_dim, shape.value_dim, shape.rule.replaces());
        let gates = inputs.gates(rows, head, &[]);
        // Only queries, not keys, read the state of Mamba 2.
        let (skipped, readers) = if replaces { (0, 2 * n) } else { (n, n) };
        let BlockGradients { kq, pairs, a, p, read, x, dx, d_o, far, dread, dpairs, dkq, .. } = block;
        let (pairs, read) = (&pairs[..2 * n * n], &mut read[..2 * n * dv]);
        let (a, p, dpairs) = (&mut a[..n * n], &mut p[..n * n], &mut dpairs[..2 * n * n]);
        let (x, dx, dread, dkq) =
            (&mut x[..n * dv], &mut dx[..n * dv], &mut dread[..2 * n * dv], &mut dkq[..2 * n * dk]);
        let add = |shape| GemmShape { accumulate: true, ..shape };
        // Forward again.
        read[..skipped * dv].fill(0.0);
        f32_product(gemm, &GemmShape::nn(readers, dv, dk), &kq[skipped * dk..], state, &mut read[skipped * dv..]);
        let (ks, qs) = read.split_at(n * dv);
        level.run(
            #[inline(always)]
            || {
                right_side(inputs, &gates, rows, head, ks, x);
                if replaces {
                    decayed(&gates, n, true, &pairs[..n * n], a);
                    solve(a, 0..n, x, dv, false);
                }
                decayed(&gates, n, false, &pairs[n * n..], p);
                to_the_end(&gates, n, kq, dk, far);
                for (i, row) in rows.clone().enumerate() {
                    let from = &self.d_o[row * shape.values() + head * dv..][..dv];
                    d_o[i * dv..][..dv].iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
                }
            },
        );
        let d_o = &d_o[..n * dv];
        // The gradient of X, then of the right side.
        f32_product(gemm, &GemmShape::tn(n, dv, n), p, d_o, dx);
        f32_product(gemm, &add(GemmShape::nn(n, dv, dk)), far, dstate, dx);
        // What the keys get through the state after the block, without their decays.
        f32_product(gemm, &GemmShape::nt(n, dk, dv), x, dstate, far);
        let (da, dp) = dpairs.split_at_mut(n * n);
        f32_product(gemm, &GemmShape::nt(n, n, dv), d_o, x, dp);
        if replaces {
            level.run(
                #[inline(always)]
                || solve(a, 0..n, dx, dv, true),
            );
            f32_product(gemm, &GemmShape::nt(n, n, dv), dx, x, da);
        } else {
            da.fill(0.0);
        }
        // Each sum has what others have with the other sign, which cancels exactly in f64.
        let (mut dsums, mut dbeta, mut dskip) = ([0.0f64; BLOCK], [0.0; BLOCK], 0.0f64);
        let skip = inputs.skip.map_or(0.0, |skip| skip[head].to_f32());
        level.run(
            #[inline(always)]
            || {
                let last = gates.decay[n - 1];
                dsums[n - 1] += (last * dot(dstate, state)) as f64;
                for i in 0..n {
                    let factor = (gates.sums[n - 1] - gates.sums[i]).exp();
                    let (k, far) = (&kq[i * dk..][..dk], &far[i * dk..][..dk]);
                    let through = (factor * dot(k, far)) as f64;
                    dsums[n - 1] += through;
                    dsums[i] -= through;
                    dkq[i * dk..][..dk].iter_mut().zip(far).for_each(|(d, far)| *d = factor.mul_add(*far, *d));
                }
                let (dks, dqs) = dread.split_at_mut(n * dv);
                for (i, row) in rows.clone().enumerate() {
                    let (decay, beta, own) = (gates.decay[i], gates.beta[i], i * dv..(i + 1) * dv);
                    let (ks, qs, d_o, dx) = (&ks[own.clone()], &qs[own.clone()], &d_o[own.clone()], &dx[own.clone()]);
                    dqs[own.clone()].iter_mut().zip(d_o).for_each(|(d, d_o)| *d = decay * d_o);
                    dks[own.clone()].iter_mut().zip(dx).for_each(|(d, dx)| *d = -beta * decay * dx);
                    dsums[i] += (dot(&dqs[own.clone()], qs) + dot(&dks[own], ks)) as f64;
                    let of_row = inputs.values(row, head);
                    let v = &inputs.qkv[of_row.clone()];
                    dbeta[i] += sum_of_error(v, ks, dx, decay);
                    // SAFETY: upheld by the caller.
                    let dv_row = unsafe { self.dqkv.range(of_row.start, dv) };
                    if replaces {
                        dv_row.iter_mut().zip(dx).for_each(|(d, dx)| *d = T::from_f32(beta * dx));
                        continue;
                    }
                    for ((d, dx), d_o) in dv_row.iter_mut().zip(dx).zip(d_o) {
                        *d = T::from_f32(beta.mul_add(*dx, skip * d_o));
                    }
                    dskip += sum_with(
                        [v],
                        [d_o],
                        #[inline(always)]
                        |[v], [d_o]| v * d_o,
                    ) as f64;
                }
                // Through the pairs: `da` and `dp` become the gradients of the products of keys with keys and queries.
                for i in 0..n {
                    let (da, dp) = (&mut da[i * n..][..n], &mut dp[i * n..][..n]);
                    let (a, p, pairs) = (&a[i * n..][..n], &p[i * n..][..n], &pairs[i * n..][..n]);
                    let (mut of_row, mut of_beta) = (0.0f64, 0.0);
                    for j in 0..n {
                        let decay = if j > i { 0.0 } else { (gates.sums[i] - gates.sums[j]).exp() };
                        let below = if j < i { -da[j] } else { 0.0 };
                        let own = if j <= i { dp[j] } else { 0.0 };
                        let moved = (below * a[j] + own * p[j]) as f64;
                        of_row += moved;
                        dsums[j] -= moved;
                        of_beta += below * pairs[j] * decay;
                        da[j] = below * gates.beta[i] * decay;
                        dp[j] = own * decay;
                    }
                    dsums[i] += of_row;
                    dbeta[i] += of_beta;
                }
                dstate.iter_mut().for_each(|d| *d *= last);
            },
        );
        let of_readers = &dread[skipped * dv..];
        f32_product(gemm, &add(GemmShape::nt(readers, dk, dv)), of_readers, state, &mut dkq[skipped * dk..]);
        f32_product(gemm, &add(GemmShape::tn(dk, dv, readers)), &kq[skipped * dk..], of_readers, dstate);
        // [da + da^T; dp] k, and dp^T q.
        let (dk_rows, dq_rows) = dkq.split_at_mut(n * dk);
        let (k, q) = kq.split_at(n * dk);
        if replaces {
            f32_product(gemm, &add(GemmShape::nn(n, dk, n)), da, k, dk_rows);
            f32_product(gemm, &add(GemmShape::tn(n, dk, n)), da, k, dk_rows);
        }
        f32_product(gemm, &add(GemmShape::nn(n, dk, n)), dp, k, dq_rows);
        f32_product(gemm, &add(GemmShape::tn(n, dk, n)), dp, q, dk_rows);
        // SAFETY: upheld by the caller.
        unsafe { self.of_gates(&gates, rows, head, &dsums, &dbeta) };
        if let Some(grad) = &self.dskip {
            // SAFETY: likewise.
            unsafe { grad.range(head, 1)[0] += dskip as f32 };
        }
    }

    /// From the gradients of a block's summed log decays and of its betas to those of what they follow from.
    ///
    /// # Safety
    /// No other call at the same time has this value head.
    unsafe fn of_gates(&self, gates: &Gates, rows: &Range<usize>, head: usize, dsums: &[f64], dbeta: &[f32]) {
        let inputs = &self.inputs;
        let rate = inputs.a_log[head].to_f32().exp();
        let (mut total, mut da_log, mut ddt_bias) = (0.0f64, 0.0f64, 0.0f64);
        for (i, row) in rows.clone().enumerate().rev() {
            let at = row * inputs.shape.value_heads + head;
            total += dsums[i];
            let after = total as f32;
            let (step, x) = inputs.step(at, head);
            let slope = (1.0 + (-x).exp()).recip();
            let da = match inputs.shape.rule {
                StateRule::Delta { .. } => after * -rate * slope,
                StateRule::Decay { limits: [least, most] } if (least..=most).contains(&step) => {
                    after.mul_add(-rate, dbeta[i]) * slope
                }
                StateRule::Decay { .. } => 0.0,
            };
            da_log += (after * gates.rates[i]) as f64;
            ddt_bias += da as f64;
            // SAFETY: upheld by the caller.
            unsafe {
                self.da.range(at, 1)[0] = T::from_f32(da);
                if inputs.shape.rule.replaces() {
                    let (beta, most) = (gates.beta[i], inputs.shape.most());
                    self.db.range(at, 1)[0] = T::from_f32(dbeta[i] * beta * (1.0 - beta / most));
                }
            }
        }
        for (grad, d) in [(&self.da_log, da_log), (&self.ddt_bias, ddt_bias)] {
            if let Some(grad) = grad {
                // SAFETY: likewise.
                unsafe { grad.range(head, 1)[0] += d as f32 };
            }
        }
    }

    /// From the gradients of keys and queries of length 1 to those of what they were before. Those of Mamba 2 are as
    /// they were.
    ///
    /// # Safety
    /// No other call at the same time has this key head.
    #[inline(always)]
    unsafe fn of_lengths(&self, block: &BlockGradients, rows: &Range<usize>, head: usize) {
        let (dim, n, [q, k]) = (self.inputs.shape.key_dim, rows.len(), self.inputs.columns(head));
        let scale = (dim as f32).sqrt();
        for (i, row) in rows.clone().enumerate() {
            // A query is also divided by `scale`: so is its gradient.
            for (at, column, scale) in [(i, k, 1.0), (n + i, q, scale)] {
                let (x, d) = (&block.kq[at * dim..][..dim], &block.dkq[at * dim..][..dim]);
                let along = dot(x, d) * scale;
                let factor = block.inverse[at] / scale;
                // SAFETY: upheld by the caller.
                let to = unsafe { self.dqkv.range(row * self.inputs.shape.row() + column, dim) };
                if !self.inputs.shape.rule.replaces() {
                    to.iter_mut().zip(d).for_each(|(to, d)| *to = T::from_f32(*d));
                    continue;
                }
                for ((to, x), d) in to.iter_mut().zip(x).zip(d) {
                    *to = T::from_f32(factor * (-along * scale).mul_add(*x, *d));
                }
            }
        }
    }
}

/// The sum of `dx (v - decay ks)`.
#[inline(always)]
fn sum_of_error<T: Float>(v: &[T], ks: &[f32], dx: &[f32], decay: f32) -> f32 {
    sum_with(
        [v],
        [ks, dx],
        #[inline(always)]
        |[v], [ks, dx]| dx * (-decay).mul_add(ks, v),
    )
}
