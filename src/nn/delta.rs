//! The gated delta net, a mixer whose state has the same size for any number of tokens (Yang et al. 2024; Qwen3-Next,
//! Qwen3.5): `y = x + out(norm(delta_rule(conv(qkv(h)))) silu(z(h)))`, `h = norm(x)`; and Mamba 2 (Dao & Gu 2024;
//! Granite 4, Nemotron-H), which multiplies by silu(z) in front of its norm, if it has one. Never sees other documents:
//! the device starts its state and the convolution anew with each. Sequences that are generated go on from the device's
//! own blocks, so their tokens have the bits of whole documents.
//!
//! ```text
//! saved per token: queries, keys and values in front of the convolution, z, a gate or two per head, and the rule's
//! output; and a state of all value heads in f32 for every DELTA_BLOCK tokens
//! ```
//!
//! Backward repeats the convolution, the norm and the gate, which take one pass over memory each.
use super::context::{Cx, DropoutSite};
use super::linear::Linear;
use super::norm::Norm;
use super::recurrent_buffers::{RecurrentSaved, RecurrentScratch};
use super::saved::Scratch;
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{
    ConvKind, DeltaRule, DeltaRuleBackward, DeltaShape, Glu, GluBackward, RmsNorm, RmsNormBackward, RmsNormShape,
    RowSequences, ShortConv, ShortConvBackward,
};
use crate::device::{View, ViewMut};

/// The projections of a token's `h`.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // one per block, and never moved
pub enum DeltaInputs {
    /// To queries, keys and values, by one matrix or three; to z; to the gates a and, unless of Mamba 2, b. They may be
    /// rows of one matrix.
    Apart { qkv: Vec<Linear>, z: Linear, a: Linear, b: Option<Linear> },
    /// To all of a key head's query, key, values and z, one key head after the other; and likewise to b and a.
    Fused { qkvz: Linear, ba: Linear },
}

#[derive(Clone, Debug)]
pub struct DeltaBranch {
    pub norm: Norm,
    pub inputs: DeltaInputs,
    /// Segment (2 K + V, 1, taps), or three of its parts.
    pub conv: Vec<usize>,
    /// Segment (2 K + V).
    pub conv_bias: Option<usize>,
    /// Factors of what the matrix of Mamba 2 gives: z, values, keys, queries and a. Those of the convolution's inputs
    /// are factors of its filters.
    pub factors: [f32; 5],
    /// See [`DeltaNet::has_own_filters`](super::recurrence::DeltaNet::has_own_filters).
    pub own_filters: bool,
    pub taps: usize,
    /// Segments (H).
    pub a_log: usize,
    pub dt_bias: usize,
    /// The skip weights of Mamba 2.
    pub skip: Option<usize>,
    /// The heads of this tp rank.
    pub shape: DeltaShape,
    pub out_norm: Option<OutNorm>,
    pub out: Linear,
    /// Whether heads are sharded over tp.
    pub cut: bool,
    /// Attention reads the same: this branch's output is added to what is assigned already.
    pub beside: bool,
}

/// The norm in front of the last matrix.
#[derive(Clone, Copy, Debug)]
pub struct OutNorm {
    /// Segment (value_dim): normalizes each head's output, which is then multiplied by silu(z). Or, with groups, a
    /// segment (V).
    pub weight: usize,
    pub shape: RmsNormShape,
    /// Mamba 2's output is multiplied by silu(z), and then normalized in so many groups of equal width.
    pub groups: Option<usize>,
}

/// Where the parts of a fused projection go, or come from.
struct DeltaParts<'a> {
    mixed: &'a mut Tensor,
    z: &'a mut Tensor,
    a: &'a mut Tensor,
    b: &'a mut Tensor,
}

impl DeltaBranch {
    /// The branch's matrices, in the order of their segments.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        match &mut self.inputs {
            DeltaInputs::Apart { qkv, z, a, b } => {
                qkv.iter_mut().chain([z]).chain(b).chain([a, &mut self.out]).collect()
            }
            DeltaInputs::Fused { qkvz, ba } => vec![qkvz, ba, &mut self.out],
        }
    }

    /// Multiplies what belongs to channels of values, keys and queries by their factors.
    fn scale_filters(&self, cx: &Cx, filters: &mut Tensor) -> Result<()> {
        let (shape, mut at) = (self.shape, 0);
        for (factor, channels) in self.factors[1..4].iter().zip([shape.values(), shape.keys(), shape.keys()]) {
            let len = channels * self.taps;
            if *factor != 1.0 {
                cx.dev.scale(*factor, filters.rows_mut(1).slice(at..at + len))?;
            }
            at += len;
        }
        Ok(())
    }
    /// Multiplies the gates z and a, or their gradients, by their factors.
    fn scale_gates(&self, cx: &Cx, z: &mut Tensor, a: &mut Tensor) -> Result<()> {
        for (factor, gate) in [(self.factors[0], z), (self.factors[4], a)].into_iter().filter(|of| of.0 != 1.0) {
            cx.dev.scale(factor, gate.rows_mut(cx.n))?;
        }
        Ok(())
    }

    /// The filters of all channels. Those of three convolutions are put together in `to`, and so are those with
    /// factors.
    fn filters<'a>(&self, cx: &Cx, w: Weights<'a>, to: &'a mut Tensor) -> Result<View<'a>> {
        if !self.own_filters {
            return Ok(w.get(self.conv[0]));
        }
        let mut rest = to.rows_mut(1);
        for &part in &self.conv {
            let (part, whole) = (w.get(part), rest);
            let (first, after) = whole.split_at(part.len());
            cx.dev.copy(part, first)?;
            rest = after;
        }
        self.scale_filters(cx, to)?;
        Ok(to.rows(1))
    }

    /// Adds the gradients `from` of [`DeltaBranch::filters`] to those of their segments.
    fn add_filters(&self, cx: &Cx, dw: &mut Grads, from: &mut Tensor) -> Result<()> {
        self.scale_filters(cx, from)?;
        let mut at = 0;
        for &part in &self.conv {
            let len = dw.layout.segments[part].len();
            if let Some(grad) = dw.get(part)? {
                cx.dev.add(from.rows(1).slice(at..at + len), grad)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Copies columns between fused rows and their parts: from the fused rows, or to them.
    fn regroup(&self, cx: &Cx, fused: &mut Tensor, gates: &mut Tensor, parts: DeltaParts, apart: bool) -> Result<()> {
        let (n, s) = (cx.n, self.shape);
        let (heads, group) = (s.key_heads, s.value_heads / s.key_heads);
        let (values, each) = (group * s.value_dim, 2 * s.key_dim + 2 * group * s.value_dim);
        let copy = |rows, width, fused: (&mut Tensor, usize, usize), part: (&mut Tensor, usize, usize)| {
            let (from, to) = if apart { (fused, part) } else { (part, fused) };
            let ((src, at, src_row), (dst, to, dst_row)) = (from, to);
            cx.copy_columns([rows, width], (src.rows(n), src_row, at), (dst.rows_mut(n), dst_row, to))
        };
        let DeltaParts { mixed, z, a, b } = parts;
        for head in 0..heads {
            for (width, at, to) in [
                (s.key_dim, 0, head * s.key_dim),
                (s.key_dim, s.key_dim, s.keys() + head * s.key_dim),
                (values, 2 * s.key_dim, 2 * s.keys() + head * values),
            ] {
                copy(n, width, (fused, head * each + at, heads * each), (mixed, to, s.row()))?;
            }
        }
        // Rows of z, a and b hold these parts alone, so that key heads are rows.
        copy(n * heads, values, (fused, 2 * s.key_dim + values, each), (z, 0, values))?;
        copy(n * heads, group, (gates, 0, 2 * group), (b, 0, group))?;
        copy(n * heads, group, (gates, group, 2 * group), (a, 0, group))
    }

    /// Assigns `gated`: the rule's outputs, normalized and multiplied by silu(z), in either order.
    fn gate(&self, cx: &Cx, w: Weights, saved: &RecurrentSaved, scratch: &mut RecurrentScratch) -> Result<()> {
        let (n, RecurrentScratch { stats, normed, gated, by_group, .. }) = (cx.n, scratch);
        let Some(OutNorm { weight, shape, groups }) = self.out_norm else {
            return cx.dev.swiglu(Glu { gate: saved.z.rows(n), up: saved.o.rows(n), y: gated.rows_mut(n) });
        };
        let Some(groups) = groups else {
            let (x, y, rstd) = (saved.o.rows(n), normed.rows_mut(n), stats.rows_mut(n));
            cx.dev.rmsnorm(RmsNorm { shape, x, w: w.get(weight), y, rstd })?;
            return cx.dev.swiglu(Glu { gate: saved.z.rows(n), up: normed.rows(n), y: gated.rows_mut(n) });
        };
        cx.dev.swiglu(Glu { gate: saved.z.rows(n), up: saved.o.rows(n), y: normed.rows_mut(n) })?;
        if groups == 1 {
            let (x, y, rstd) = (normed.rows(n), gated.rows_mut(n), stats.rows_mut(n).slice(0..n));
            return cx.dev.rmsnorm(RmsNorm { shape, x, w: w.get(weight), y, rstd });
        }
        let (all, width) = (self.shape.values(), self.shape.values() / groups);
        for group in 0..groups {
            let own = n * width;
            let (x, y) = by_group.rows_mut(2 * n).split_at(n * all);
            let (mut x, mut y) = (x.slice(group * own..(group + 1) * own), y.slice(0..own));
            cx.copy_columns([n, width], (normed.rows(n), all, group * width), (x.reborrow(), width, 0))?;
            let (w, rstd) = (w.get(weight).slice(group * width..(group + 1) * width), stats.rows_mut(n));
            let rstd = rstd.slice(group * n..(group + 1) * n);
            cx.dev.rmsnorm(RmsNorm { shape, x: x.as_view(), w, y: y.reborrow(), rstd })?;
            cx.copy_columns([n, width], (y.as_view(), width, 0), (gated.rows_mut(n), all, group * width))?;
        }
        Ok(())
    }
    /// After [`DeltaBranch::gate`]: assigns the gradients `dz` and `d_o` from `dgated`, and adds to that of the norm.
    fn gate_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &RecurrentSaved,
        delta: &mut RecurrentScratch,
        unused: &mut Tensor,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        let Some(OutNorm { weight, shape, groups }) = self.out_norm else {
            return dev.swiglu_backward(GluBackward {
                gate: saved.z.rows(n),
                up: saved.o.rows(n),
                dy: delta.dgated.rows(n),
                dgate: delta.dz.rows_mut(n),
                dup: delta.d_o.rows_mut(n),
            });
        };
        let len = dw.layout.segments[weight].len();
        let Some(groups) = groups else {
            dev.swiglu_backward(GluBackward {
                gate: saved.z.rows(n),
                up: delta.normed.rows(n),
                dy: delta.dgated.rows(n),
                dgate: delta.dz.rows_mut(n),
                dup: delta.dnormed.rows_mut(n),
            })?;
            dev.zero(delta.d_o.rows_mut(n))?;
            return dev.rmsnorm_backward(RmsNormBackward {
                shape,
                x: saved.o.rows(n),
                w: w.get(weight),
                rstd: delta.stats.rows(n),
                dy: delta.dnormed.rows(n),
                dx: delta.d_o.rows_mut(n),
                dw: dw.get(weight)?.unwrap_or_else(|| unused.rows_mut(2).slice(0..len)),
            });
        };
        let (all, width) = (self.shape.values(), self.shape.values() / groups);
        dev.zero(delta.dnormed.rows_mut(n))?;
        for group in 0..groups {
            let (own, band) = (n * width, group * n * width..(group + 1) * n * width);
            let weights = group * width..(group + 1) * width;
            let dw = dw.get(weight)?.map(|dw| dw.slice(weights.clone()));
            let dw = dw.unwrap_or_else(|| unused.rows_mut(2).slice(0..width));
            let RecurrentScratch { stats, normed, by_group, dgated, dnormed, d_o, .. } = &mut *delta;
            let (w, rstd) = (w.get(weight).slice(weights), stats.rows(n).slice(group * n..(group + 1) * n));
            if groups == 1 {
                let (x, dy, dx) = (normed.rows(n), dgated.rows(n), dnormed.rows_mut(n));
                dev.rmsnorm_backward(RmsNormBackward { shape, x, w, rstd, dy, dx, dw })?;
                continue;
            }
            let (x, dy) = by_group.rows_mut(2 * n).split_at(n * all);
            let (x, mut dy) = (x.slice(band), dy.slice(0..own));
            cx.copy_columns([n, width], (dgated.rows(n), all, group * width), (dy.reborrow(), width, 0))?;
            let mut dx = d_o.rows_mut(n).slice(0..own); // assigned afterwards
            dev.zero(dx.reborrow())?;
            let (x, dy) = (x.as_view(), dy.as_view());
            dev.rmsnorm_backward(RmsNormBackward { shape, x, w, rstd, dy, dx: dx.reborrow(), dw })?;
            cx.copy_columns([n, width], (dx.as_view(), width, 0), (dnormed.rows_mut(n), all, group * width))?;
        }
        dev.swiglu_backward(GluBackward {
            gate: saved.z.rows(n),
            up: saved.o.rows(n),
            dy: delta.dnormed.rows(n),
            dgate: delta.dz.rows_mut(n),
            dup: delta.d_o.rows_mut(n),
        })
    }

    /// Assigns `y (R, C)` from `x (R, C)`: this rank's rows of the residual stream. Or adds the branch's output to it,
    /// if it is `beside` another one.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        saved: &mut RecurrentSaved,
        scratch: &mut Scratch,
        mut y: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows, shape) = (cx.dev, cx.n, cx.rows(), self.shape);
        self.norm.forward(cx, w, x, scratch.h.rows_mut(rows), scratch.stats.rows_mut(rows))?;
        let h = cx.whole(scratch.h.rows(rows), &mut scratch.whole)?;
        let Scratch { adapter, recurrent: delta, recurrent_cache, cache, .. } = scratch;
        let RecurrentSaved { mixed, z, a, b, o, states } = saved;
        match &self.inputs {
            DeltaInputs::Apart { qkv, z: of_z, a: of_a, b: of_b } => {
                for linear in qkv {
                    linear.forward(cx, w, h.rows, adapter, mixed.rows_mut(n))?;
                }
                let gates = [(of_z, &mut *z), (of_a, &mut *a)].into_iter().chain(of_b.as_ref().zip(Some(&mut *b)));
                for (linear, to) in gates {
                    linear.forward(cx, w, h.rows, adapter, to.rows_mut(n))?;
                }
                self.scale_gates(cx, z, a)?;
                cx.release(h)?;
            }
            DeltaInputs::Fused { qkvz, ba } => {
                let RecurrentScratch { fused, fused_gates, .. } = delta;
                qkvz.forward(cx, w, h.rows, adapter, fused.rows_mut(n))?;
                ba.forward(cx, w, h.rows, adapter, fused_gates.rows_mut(n))?;
                cx.release(h)?;
                self.regroup(cx, fused, fused_gates, DeltaParts { mixed, z, a, b }, true)?;
            }
        }
        let kept = if cx.paged.is_some() { 0 } else { DeltaShape::kept(n).min(states.capacity()) };
        let whole = || RowSequences::Whole(cx.batch.documents);
        let [of_rule, of_conv] = match cx.paged {
            None => [whole(), whole()],
            Some(runs) => {
                let carried = |memory| RowSequences::Carried { runs, table: cache.table(runs), memory };
                recurrent_cache.of_block(cx).map(carried)
            }
        };
        dev.short_conv(ShortConv {
            kind: ConvKind::Silu,
            taps: self.taps,
            along: of_conv,
            x: mixed.rows(n),
            w: self.filters(cx, w, &mut delta.filters)?,
            bias: self.conv_bias.map(|bias| w.get(bias)),
            y: delta.convolved.rows_mut(n),
        })?;
        dev.delta_rule(DeltaRule {
            shape,
            along: of_rule,
            qkv: delta.convolved.rows(n),
            a: a.rows(n),
            b: b.rows(n),
            a_log: w.get(self.a_log),
            dt_bias: w.get(self.dt_bias),
            skip: self.skip.map(|skip| w.get(skip)),
            o: o.rows_mut(n),
            states: states.rows_mut(kept),
        })?;
        self.gate(cx, w, saved, &mut scratch.recurrent)?;
        let Scratch { parts, adapter, recurrent: delta, dh, .. } = scratch;
        let (gated, summed, site) = (delta.gated.rows(n), (self.cut, parts), DropoutSite::Attention);
        if !self.beside {
            return self.out.onto_residual(cx, w, gated, adapter, summed, site, x, y);
        }
        self.out.summed(cx, w, gated, adapter, summed, dh.rows_mut(rows))?;
        cx.leave(site, dh.rows_mut(rows))?;
        dev.add(dh.rows(rows), y.reborrow())
    }

    /// `dy (R, C)` is the residual's gradient; adds the branch's gradient to it and to the weights' gradients.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        saved: &RecurrentSaved,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows, shape) = (cx.dev, cx.n, cx.rows(), self.shape);
        let (documents, taps) = (cx.batch.documents, self.taps);
        self.gate(cx, w, saved, &mut scratch.recurrent)?;
        let d_branch = cx.branch_grad(DropoutSite::Attention, dy.as_view(), &mut scratch.masked)?;
        let d_branch = cx.whole(d_branch, &mut scratch.whole)?;
        let RecurrentScratch { gated, dgated, .. } = &mut scratch.recurrent;
        let dgated = dgated.rows_mut(n);
        self.out.backward(cx, w, dw, gated.rows(n), d_branch.rows, &mut scratch.adapter, dgated, false)?;
        cx.release(d_branch)?;

        let delta = &mut scratch.recurrent;
        self.gate_backward(cx, w, dw, saved, delta, &mut scratch.unused)?;
        let y_conv = delta.convolved.rows_mut(n);
        let (mixed, conv) = (saved.mixed.rows(n), self.filters(cx, w, &mut delta.filters)?);
        let (kind, along) = (ConvKind::Silu, RowSequences::Whole(documents));
        let bias = self.conv_bias.map(|bias| w.get(bias));
        dev.short_conv(ShortConv { kind, taps, along, x: mixed, w: conv, bias, y: y_conv })?;
        dev.zero(delta.dskip.rows_mut(1))?;
        dev.zero(delta.dconv_bias.rows_mut(1))?;
        let (da_log, ddt_bias) = dw.pair(self.a_log, self.dt_bias, scratch.unused.rows_mut(2))?;
        dev.delta_rule_backward(DeltaRuleBackward {
            shape,
            documents,
            qkv: delta.convolved.rows(n),
            a: saved.a.rows(n),
            b: saved.b.rows(n),
            a_log: w.get(self.a_log),
            dt_bias: w.get(self.dt_bias),
            skip: self.skip.map(|skip| w.get(skip)),
            states: saved.states.rows(DeltaShape::kept(n)),
            d_o: delta.d_o.rows(n),
            scratch: delta.walked.all_mut(),
            dqkv: delta.dconvolved.rows_mut(n),
            da: delta.da.rows_mut(n),
            db: delta.db.rows_mut(n),
            da_log: Some(da_log),
            ddt_bias: Some(ddt_bias),
            dskip: self.skip.map(|_| delta.dskip.rows_mut(1)),
        })?;
        let (dconvolved, dx) = (delta.dconvolved.rows(n), delta.dmixed.rows_mut(n));
        let dbias = self.conv_bias.map(|_| delta.dconv_bias.rows_mut(1));
        let of_conv = match self.own_filters {
            false => dw.get(self.conv[0])?,
            true => {
                dev.zero(delta.dfilters.rows_mut(1))?;
                Some(delta.dfilters.rows_mut(1))
            }
        };
        dev.short_conv_backward(ShortConvBackward {
            kind,
            taps,
            documents,
            x: mixed,
            w: conv,
            bias,
            dy: dconvolved,
            dx,
            dw: of_conv,
            dbias,
        })?;
        for (segment, grad) in [(self.skip, &delta.dskip), (self.conv_bias, &delta.dconv_bias)] {
            if let Some(to) = segment.map(|segment| dw.get(segment)).transpose()?.flatten() {
                dev.add(grad.rows(1), to)?;
            }
        }
        if self.own_filters {
            self.add_filters(cx, dw, &mut delta.dfilters)?;
        }
        self.scale_gates(cx, &mut delta.dz, &mut delta.da)?;
        if matches!(self.inputs, DeltaInputs::Fused { .. }) {
            let RecurrentScratch { fused, fused_gates, dmixed: mixed, dz: z, da: a, db: b, .. } = delta;
            self.regroup(cx, fused, fused_gates, DeltaParts { mixed, z, a, b }, false)?;
        }

        let Scratch { h, stats, whole, parts, dh, adapter, unused, recurrent: delta, .. } = scratch;
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let h = cx.whole(h.rows(rows), whole)?;
        cx.sum(self.cut, parts, dh.rows_mut(rows), |mut dh| {
            let mut first = true;
            let mut back = |linear: &Linear, dy: &Tensor| {
                let add = !std::mem::take(&mut first);
                linear.backward(cx, w, dw, h.rows, dy.rows(n), adapter, dh.reborrow(), add)
            };
            match &self.inputs {
                DeltaInputs::Apart { qkv, z, a, b } => {
                    qkv.iter().try_for_each(|linear| back(linear, &delta.dmixed))?;
                    back(z, &delta.dz)?;
                    b.iter().try_for_each(|b| back(b, &delta.db))?;
                    back(a, &delta.da)
                }
                DeltaInputs::Fused { qkvz, ba } => {
                    back(qkvz, &delta.fused)?;
                    back(ba, &delta.fused_gates)
                }
            }
        })?;
        cx.release(h)?;
        self.norm.backward(cx, w, dw, x, stats.rows(rows), dh.rows(rows), dy, unused.rows_mut(2))
    }
}
