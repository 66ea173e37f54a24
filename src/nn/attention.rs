//! The attention branch: `y = x + factor dropout(post(out(attention(rope(qkv(norm(x)))))))`. Never masks: the device
//! keeps documents apart.
use super::context::{Cx, DropoutSite, TurnTable};
use super::core::CoreAttention;
use super::latent::LatentProjections;
use super::linear::Linear;
use super::norm::Norm;
use super::output_gate::OutputGate;
use super::row_transform::RowTransform;
use super::saved::{AttentionSaved, Scratch};
use super::shared_kv::{KvSharing, SharedKv};
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use super::value_norm::ValueNorm;
use crate::base::Result;
use crate::device::ops::{
    AttentionShape, Bias, BiasBackward, QkNormRope, QkNormRopeBackward, QkNormRopeShape, Rope, RopeShape,
};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct AttentionBranch {
    pub norm: Norm,
    /// One fused projection or three, each writing its columns of the rows `qkv`.
    pub qkv: Vec<Linear>,
    /// Biases of the projections in `qkv`.
    pub bias: Option<RowBias>,
    /// How rows of the first projection differ from those that attention reads.
    pub order: QkvOrder,
    /// The gate of the outputs, and its projection if none in `qkv` gives it.
    pub output_gate: Option<OutputGate>,
    pub gate: Option<Linear>,
    pub transform: HeadTransform,
    /// Whether heads are sharded over tp.
    pub cut: bool,
    /// The rotation of `transform`.
    pub turns: TurnTable,
    /// Rotated queries grow with their position, by [`TurnTable::Local`].
    pub growth: Option<RopeShape>,
    /// Another branch also reads the block's input: the gradient of this one's output is in scratch.
    pub parallel: bool,
    pub shape: AttentionShape,
    /// What of this block another one reads, or the reverse.
    pub sharing: KvSharing,
    /// Elements of a token's cached keys and values before this block's.
    pub cached_before: usize,
    /// What takes the place of `qkv`, and of heads as wide as attention's in `out`.
    pub latent: Option<LatentProjections>,
    /// Segment (heads): a score per head without a key or a value.
    pub sinks: Option<usize>,
    pub out: Linear,
    /// Normalizes the branch's output before it is added to the residual.
    pub post: Option<Norm>,
}

/// How rows of a projection differ from those that attention reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QkvOrder {
    /// Not at all.
    Same,
    /// They are each head's queries and then the gate of its outputs.
    Gated,
    /// They go by blocks of heads, or by key/value heads: the queries of one, its keys and its values, or these first.
    ByBlocks { blocks: usize, values_first: bool },
}

/// Transformation of queries and keys before attention.
#[derive(Clone, Debug)]
pub enum HeadTransform {
    /// None: positions are learned.
    None,
    Rope(RopeShape),
    /// Each head is normalized first, with segments of the weights of queries and of keys, or without weights; or, with
    /// `before`, rotated first and then normalized. With `after`, the rotation of a part of it follows by itself.
    NormRope {
        shape: QkNormRopeShape,
        weights: Option<[usize; 2]>,
        before: Option<RopeShape>,
        after: Option<RopeShape>,
        values: Option<ValueNorm>,
    },
    /// Not in place, and of other parts than heads.
    Rows(RowTransform),
}

impl HeadTransform {
    /// The rotation of projected rows, before anything else.
    fn rope_in_place(&self) -> Option<RopeShape> {
        match *self {
            HeadTransform::Rope(shape) => Some(shape),
            HeadTransform::NormRope { before, .. } => before,
            HeadTransform::None | HeadTransform::Rows(_) => None,
        }
    }
}

/// Biases of projections that write to the same rows, one segment per projection in column order. They are concatenated
/// first, so that one pass over the rows adds them all.
#[derive(Clone, Debug)]
pub struct RowBias(pub Vec<RowPart>);

/// A segment, and the elements of it that apply to these columns.
#[derive(Clone, Debug)]
pub struct RowPart {
    pub segment: usize,
    pub held: Range<usize>,
}

impl RowBias {
    /// `y += bias`, on whole rows.
    fn add(&self, dev: &dyn Device, w: Weights, row: &mut Tensor, y: ViewMut) -> Result<()> {
        let mut rest = row.rows_mut(1);
        for RowPart { segment, held } in &self.0 {
            let bias = w.get(*segment).slice(held.clone());
            let (part, right) = rest.split_at(bias.len());
            dev.copy(bias, part)?;
            rest = right;
        }
        dev.bias(Bias { bias: row.rows(1), y })
    }
    /// Adds the column sums of `dy` to the biases' gradients.
    fn grad(&self, dev: &dyn Device, dw: &mut Grads, row: &mut Tensor, dy: View) -> Result<()> {
        if !self.0.iter().any(|part| dw.layout.segments[part.segment].is_trained()) {
            return Ok(());
        }
        dev.zero(row.rows_mut(1))?;
        dev.bias_backward(BiasBackward { dy, db: row.rows_mut(1) })?;
        let mut at = 0;
        for RowPart { segment, held } in &self.0 {
            let columns = at..at + held.len();
            at = columns.end;
            if let Some(grad) = dw.get(*segment)? {
                dev.add(row.rows(1).slice(columns), grad.slice(held.clone()))?;
            }
        }
        Ok(())
    }
}

/// The weights of norms of queries and keys: those of the segments, or ones.
fn head_weights<'a>(cx: &Cx<'a>, w: Weights<'a>, shape: &QkNormRopeShape, of: Option<[usize; 2]>) -> [View<'a>; 2] {
    match of {
        Some(segments) => segments.map(|segment| w.get(segment)),
        None => [cx.ones.slice(0..shape.head_dim); 2],
    }
}

impl AttentionBranch {
    /// The branch's matrices, in the order of their segments.
    pub fn linears(&mut self) -> Vec<&mut Linear> {
        let latents = self.latent.iter_mut().flat_map(LatentProjections::linears);
        self.qkv.iter_mut().chain(&mut self.gate).chain(latents).chain([&mut self.out]).collect()
    }
    fn table<'a>(&self, cx: &Cx<'a>) -> View<'a> {
        cx.tables[self.turns as usize]
    }
    /// Assigns `y (R, C)` from `x (R, C)`: this rank's rows of the residual stream.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        saved: &mut AttentionSaved,
        scratch: &mut Scratch,
        y: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows) = (cx.dev, cx.n, cx.rows());
        self.fit(scratch);
        saved.qkv.fit(self.projected());
        self.norm.forward(cx, w, x, scratch.h.rows_mut(rows), scratch.stats.rows_mut(rows))?;
        let h = cx.whole(scratch.h.rows(rows), &mut scratch.whole)?;
        let Scratch { rotated, head_stats, row, normed, core: core_scratch, cache, zeros, shared_kv, .. } = scratch;
        let AttentionSaved { qkv, branch, gate, core, latent: latents } = saved;
        let projected = if qkv.len() > 0 { &mut *qkv } else { &mut *rotated };
        for (i, projection) in self.qkv.iter().enumerate() {
            let to = if self.is_regrouped() && i == 0 { &mut scratch.queries } else { &mut *projected };
            projection.forward(cx, w, h.rows, &mut scratch.adapter, to.rows_mut(n))?;
        }
        self.regroup(cx, &mut scratch.queries, projected, gate, true)?;
        if let Some(projection) = &self.gate {
            projection.forward(cx, w, h.rows, &mut scratch.adapter, gate.rows_mut(n))?;
        }
        if let Some(latent) = &self.latent {
            let (latent_scratch, adapter) = (&mut scratch.latent, &mut scratch.adapter);
            latent.forward(cx, w, h.rows, latents, latent_scratch, adapter, projected)?;
        }
        cx.release(h)?;
        if let Some(bias) = &self.bias {
            bias.add(dev, w, &mut scratch.bias, projected.rows_mut(n))?;
        }
        let (table, positions) = (self.table(cx), cx.batch.positions);
        if let Some(shape) = self.transform.rope_in_place() {
            dev.rope(Rope { shape, table, positions, qkv: projected.rows_mut(n), inverse: false })?;
        }
        self.grow(cx, projected.rows_mut(n))?;
        let attention =
            CoreAttention { sinks: self.sinks.map(|sinks| w.get(sinks)), ..CoreAttention::of(cx, &self.shape) };
        attention.fit(core);
        if !attention.is_done(cx.attended) {
            let qkv = self.rotated(cx, w, qkv, rotated, head_stats, [row, normed], zeros, shared_kv)?;
            if let KvSharing::Gives(sight) = self.sharing {
                shared_kv.put(cx, sight, &self.shape, qkv)?;
            }
            match cx.paged {
                Some(runs) => {
                    cache.attention(
                        cx,
                        runs,
                        self.shape,
                        self.cached_before,
                        qkv,
                        core.o.rows_mut(n),
                        core.lse.rows_mut(n),
                    )?;
                    attention.sink(&self.shape, core.o.rows_mut(n), core.lse.rows_mut(n))?
                }
                None => attention.forward(core_scratch, qkv, core, cx.attended)?,
            }
        }
        if let Some(of) = self.output_gate {
            of.forward(cx, &self.shape, gate, core.outputs(n), scratch)?;
        }
        let Scratch { parts, adapter, stats, gated, latent, .. } = scratch;
        let o = if self.output_gate.is_some() { gated.rows(n) } else { core.outputs(n) };
        let o = self.latent.as_ref().map_or(Ok(o), |of| of.narrow(cx, o, latent))?;
        let summed = (self.cut, parts);
        let Some(norm) = &self.post else {
            return self.out.onto_residual(cx, w, o, adapter, summed, DropoutSite::Attention, x, y);
        };
        self.out.summed(cx, w, o, adapter, summed, branch.rows_mut(rows))?;
        norm.onto_residual(cx, w, branch.rows(rows), DropoutSite::Attention, x, y, stats.rows_mut(rows))
    }

    fn is_regrouped(&self) -> bool {
        self.order != QkvOrder::Same
    }
    /// Copies columns between the rows of the first projection and those that attention reads: from the former, or to
    /// them.
    fn regroup(&self, cx: &Cx, both: &mut Tensor, qkv: &mut Tensor, gate: &mut Tensor, apart: bool) -> Result<()> {
        let (n, AttentionShape { heads, kv_heads, head_dim: width, .. }) = (cx.n, self.shape);
        let copy = |rows, width, both: (&mut Tensor, usize, usize), part: (&mut Tensor, usize, usize)| {
            let (from, to) = if apart { (both, part) } else { (part, both) };
            let ((src, at, src_row), (dst, to, dst_row)) = (from, to);
            cx.copy_columns([rows, width], (src.rows(n), src_row, at), (dst.rows_mut(n), dst_row, to))
        };
        let row = qkv.width();
        match self.order {
            QkvOrder::Same => Ok(()),
            QkvOrder::Gated => {
                for head in 0..heads {
                    copy(n, width, (both, 2 * head * width, 2 * heads * width), (qkv, head * width, row))?;
                }
                copy(n * heads, width, (both, width, 2 * width), (gate, 0, width))
            }
            QkvOrder::ByBlocks { blocks, values_first } => {
                let (queries, pairs) = (heads / blocks, kv_heads / blocks);
                let [keys, values] = [usize::from(values_first), usize::from(!values_first)];
                for block in 0..blocks {
                    // In heads: how many, the first one of the projection, and that of attention's rows.
                    let first = block * (queries + 2 * pairs);
                    let parts = [
                        (queries, first, block * queries),
                        (pairs, first + queries + keys * pairs, heads + block * pairs),
                        (pairs, first + queries + values * pairs, heads + kv_heads + block * pairs),
                    ];
                    for (many, from, to) in parts {
                        copy(n, many * width, (both, from * width, row), (qkv, to * width, row))?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Multiplies rotated queries in rows `qkv`, or the gradient of such, by a factor of their position.
    fn grow(&self, cx: &Cx, qkv: ViewMut) -> Result<()> {
        let Some(shape) = self.growth else { return Ok(()) };
        let table = cx.tables[TurnTable::Local as usize];
        cx.dev.rope(Rope { shape, table, positions: cx.batch.positions, qkv, inverse: false })
    }

    /// Elements of a projected row.
    fn projected(&self) -> usize {
        if matches!(self.sharing, KvSharing::Takes(_)) { self.shape.width() } else { self.shape.row() }
    }
    /// Blocks may differ in the widths of their heads, and share buffers.
    fn fit(&self, scratch: &mut Scratch) {
        let Scratch { rotated, dqkv, bias, bias_grad, d_o, .. } = scratch;
        [rotated, dqkv].into_iter().for_each(|tensor| tensor.fit(self.shape.row()));
        [bias, bias_grad].into_iter().for_each(|tensor| tensor.fit(self.projected()));
        d_o.fit(self.shape.width());
    }

    /// The rows that attention reads: `qkv` itself, or normalized and rotated heads in `rotated`, which also holds what
    /// need not be saved.
    #[allow(clippy::too_many_arguments)] // its operands and its scratch
    fn rotated<'a>(
        &self,
        cx: &Cx,
        w: Weights,
        qkv: &'a Tensor,
        rotated: &'a mut Tensor,
        stats: &mut Tensor,
        parts: [&mut Tensor; 2],
        zeros: &Tensor,
        shared_kv: &SharedKv,
    ) -> Result<View<'a>> {
        if let HeadTransform::Rows(rows) = &self.transform {
            let [row, normed] = parts;
            rows.forward(cx, w, self.table(cx), qkv, rotated, [stats, row, normed])?;
            return Ok(rotated.rows(cx.n));
        }
        let HeadTransform::NormRope { shape, weights, before, after, values } = self.transform else {
            return Ok(if qkv.len() > 0 { qkv.rows(cx.n) } else { rotated.rows(cx.n) });
        };
        let table = if before.or(after).is_some() { cx.tables[TurnTable::None as usize] } else { self.table(cx) };
        let (positions, [wq, wk], n) = (cx.batch.positions, head_weights(cx, w, &shape, weights), cx.n);
        let rstd = stats.rows_mut(n).slice(0..n * (shape.heads + shape.kv_heads));
        if let KvSharing::Takes(sight) = self.sharing {
            // Queries only, next to the keys and values of another block.
            let (inner, row) = (self.shape.width(), self.shape.row());
            let [queries, _] = parts;
            let (qkv, out) = (qkv.rows(n), queries.rows_mut(n).slice(0..n * inner));
            cx.dev.qk_norm_rope(QkNormRope { shape, table, positions, wq, wk, qkv, out, rstd })?;
            let queries = queries.rows(n).slice(0..n * inner);
            cx.copy_columns([n, inner], (queries, inner, 0), (rotated.rows_mut(n), row, 0))?;
            shared_kv.take(cx, sight, &self.shape, rotated.rows_mut(n))?;
            return Ok(rotated.rows(n));
        }
        let (qkv_rows, out) = (qkv.rows(n), rotated.rows_mut(n));
        cx.dev.qk_norm_rope(QkNormRope { shape, table, positions, wq, wk, qkv: qkv_rows, out, rstd })?;
        if let Some(of) = values {
            of.forward(cx, &self.shape, qkv.rows(n), rotated.rows_mut(n), stats.rows_mut(n), parts, zeros)?;
        }
        if let Some(shape) = after {
            let (table, qkv) = (self.table(cx), rotated.rows_mut(cx.n));
            cx.dev.rope(Rope { shape, table, positions, qkv, inverse: false })?;
        }
        Ok(rotated.rows(cx.n))
    }

    /// `dy (R, C)` is the residual's gradient; adds the branch's gradient to it and to the weights' gradients.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        saved: &AttentionSaved,
        scratch: &mut Scratch,
        dy: ViewMut,
    ) -> Result<()> {
        let (dev, n, rows, positions) = (cx.dev, cx.n, cx.rows(), cx.batch.positions);
        self.fit(scratch);
        let mut o = saved.core.outputs(n);
        if let Some(of) = self.output_gate {
            of.forward(cx, &self.shape, &saved.gate, o, scratch)?;
            o = scratch.gated.rows(n);
        }
        let d_y = if self.parallel { scratch.beside.rows(rows) } else { dy.as_view() };
        let mut d_branch = cx.branch_grad(DropoutSite::Attention, d_y, &mut scratch.masked)?;
        if let Some(norm) = &self.post {
            let Scratch { stats, dh, unused, .. } = scratch;
            d_branch =
                norm.branch_backward(cx, w, dw, saved.branch.rows(rows), d_branch, [stats, dh], unused.rows_mut(2))?;
        }
        let d_branch = cx.whole(d_branch, &mut scratch.whole)?;
        let (adapter, latent, d_o) = (&mut scratch.adapter, &mut scratch.latent, &mut scratch.d_o);
        match &self.latent {
            Some(of) => of.out_backward(cx, w, dw, &self.out, o, d_branch.rows, adapter, latent, d_o)?,
            None => self.out.backward(cx, w, dw, o, d_branch.rows, adapter, d_o.rows_mut(n), false)?,
        }
        cx.release(d_branch)?;
        if let Some(of) = self.output_gate {
            of.backward(cx, &saved.gate, saved.core.outputs(n), scratch)?;
        }

        let Scratch { rotated, head_stats, row, normed, zeros, shared_kv, .. } = scratch;
        let qkv = self.rotated(cx, w, &saved.qkv, rotated, head_stats, [row, normed], zeros, shared_kv)?;
        let (d_o, dqkv) = (scratch.d_o.rows(n), scratch.dqkv.rows_mut(n));
        let attention =
            CoreAttention { sinks: self.sinks.map(|sinks| w.get(sinks)), ..CoreAttention::of(cx, &self.shape) };
        attention.backward(&mut scratch.core, qkv, &saved.core, d_o, dqkv)?;
        if let Some(dsinks) = self.sinks.map(|sinks| dw.get(sinks)).transpose()?.flatten() {
            attention.sink_backward(&scratch.core, &saved.core, n, dsinks)?;
        }
        self.grow(cx, scratch.dqkv.rows_mut(n))?;
        match self.sharing {
            KvSharing::Own => {}
            KvSharing::Gives(sight) => {
                let Scratch { shared_kv, dqkv, normed, .. } = scratch;
                shared_kv.add_to(cx, sight, &self.shape, dqkv.rows_mut(n), normed)?;
            }
            KvSharing::Takes(sight) => {
                let Scratch { shared_kv, dqkv, row, normed, .. } = scratch;
                shared_kv.collect(cx, sight, &self.shape, dqkv.rows(n), normed)?;
                let (inner, all) = (self.shape.width(), self.shape.row());
                let queries = row.rows_mut(n).slice(0..n * inner);
                cx.copy_columns([n, inner], (dqkv.rows(n), all, 0), (queries, inner, 0))?;
                dqkv.fit(inner);
                dev.copy(row.rows(n).slice(0..n * inner), dqkv.rows_mut(n))?;
            }
        }
        let table = self.table(cx);
        match self.transform {
            HeadTransform::None => {}
            HeadTransform::Rows(ref rows) => rows.backward(cx, w, dw, table, &saved.qkv, scratch)?,
            HeadTransform::Rope(shape) => {
                dev.rope(Rope { shape, table, positions, qkv: scratch.dqkv.rows_mut(n), inverse: true })?
            }
            HeadTransform::NormRope { shape, weights, before, after, values } => {
                let still = before.or(after).is_some();
                let of_norm = if still { cx.tables[TurnTable::None as usize] } else { table };
                if let Some(shape) = after {
                    dev.rope(Rope { shape, table, positions, qkv: scratch.dqkv.rows_mut(n), inverse: true })?;
                }
                let dqkv = scratch.dqkv.rows_mut(n);
                let unused = scratch.unused.rows_mut(2);
                let (dwq, dwk) = match (weights, self.sharing) {
                    (None, _) => {
                        let (queries, keys) = unused.split_at(shape.head_dim);
                        (queries, keys.slice(0..shape.head_dim))
                    }
                    (Some([wq, _]), KvSharing::Takes(_)) => {
                        let (queries, keys) = unused.split_at(shape.head_dim);
                        (dw.get(wq)?.unwrap_or(queries), keys.slice(0..shape.head_dim))
                    }
                    (Some([wq, wk]), _) => dw.pair(wq, wk, unused)?,
                };
                let [wq, wk] = head_weights(cx, w, &shape, weights);
                dev.qk_norm_rope_backward(QkNormRopeBackward {
                    shape,
                    table: of_norm,
                    positions,
                    wq,
                    wk,
                    qkv: saved.qkv.rows(n),
                    rstd: scratch.head_stats.rows(n).slice(0..n * (shape.heads + shape.kv_heads)),
                    dqkv,
                    dwq,
                    dwk,
                })?;
                if let Some(of) = values {
                    of.backward(cx, &self.shape, saved.qkv.rows(n), scratch)?;
                }
                if let Some(shape) = before {
                    dev.rope(Rope { shape, table, positions, qkv: scratch.dqkv.rows_mut(n), inverse: true })?;
                }
            }
        }
        if let Some(bias) = &self.bias {
            bias.grad(dev, dw, &mut scratch.bias_grad, scratch.dqkv.rows(n))?;
        }

        let Scratch { queries, dqkv, dgate, .. } = scratch;
        self.regroup(cx, queries, dqkv, dgate, false)?;
        let Scratch { h, stats, whole, parts, dqkv, dgate, dh, adapter, unused, queries, latent, .. } = scratch;
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let h = cx.whole(h.rows(rows), whole)?;
        cx.sum(self.cut, parts, dh.rows_mut(rows), |mut dh| {
            if let Some(of) = &self.latent {
                return of.backward(cx, w, dw, h.rows, &saved.latent, latent, adapter, dqkv.rows(n), dh, unused);
            }
            for (i, projection) in self.qkv.iter().enumerate() {
                let dy = if self.is_regrouped() && i == 0 { &*queries } else { &*dqkv };
                projection.backward(cx, w, dw, h.rows, dy.rows(n), adapter, dh.reborrow(), i > 0)?;
            }
            match &self.gate {
                Some(gate) => gate.backward(cx, w, dw, h.rows, dgate.rows(n), adapter, dh, true),
                None => Ok(()),
            }
        })?;
        cx.release(h)?;
        self.norm.backward(cx, w, dw, x, stats.rows(rows), dh.rows(rows), dy, unused.rows_mut(2))
    }
}
