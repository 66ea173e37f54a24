//! Projected rows on their way to attention, where more than whole heads in place is transformed: norms of parts of a
//! row, then limits, then the rotation. Never changes the rows it reads: backward computes all of it again.
use super::context::Cx;
use super::norm::Norm;
use super::saved::Scratch;
use super::store::{Grads, Weights};
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{Clamp, ClampBackward, Rope, RopeShape};
use crate::device::{View, ViewMut};
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct RowTransform {
    pub norms: Vec<PartNorm>,
    /// The largest magnitude of an element, if there is one.
    pub clip: Option<f32>,
    /// The rotation of all queries and keys; none without rotary positions.
    pub rope: Option<RopeShape>,
}

/// A norm of some columns of each row.
#[derive(Clone, Debug)]
pub struct PartNorm {
    pub norm: Norm,
    pub columns: Range<usize>,
    /// Elements that are normalized together.
    pub width: usize,
}

impl PartNorm {
    /// Statistics of a row.
    fn stats(&self) -> usize {
        self.columns.len() / self.width * self.norm.statistics()
    }
}

impl RowTransform {
    /// Assigns `rotated` from the projected rows `qkv`, and the norms' statistics, one norm after the other.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        table: View,
        qkv: &Tensor,
        rotated: &mut Tensor,
        [stats, row, normed]: [&mut Tensor; 3],
    ) -> Result<()> {
        self.normalize(cx, w, qkv, rotated, [stats, row, normed])?;
        if let Some(limits) = self.limits() {
            cx.dev.clamp(Clamp { limits, x: rotated.rows_mut(cx.n) })?;
        }
        self.rotate(cx, table, rotated.rows_mut(cx.n), false)
    }

    /// The gradient of what attention reads, in `scratch.dqkv`, becomes that of the projected rows `qkv`. Adds to the
    /// gradients of the norms' weights.
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        table: View,
        qkv: &Tensor,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (dev, n) = (cx.dev, cx.n);
        // The queries' gradient was the last use of `d_o`.
        let Scratch { rotated, dqkv, row, normed, d_o, head_stats, unused, .. } = scratch;
        self.rotate(cx, table, dqkv.rows_mut(n), true)?;
        if let Some(limits) = self.limits() {
            self.normalize(cx, w, qkv, rotated, [head_stats, row, normed])?;
            dev.clamp_backward(ClampBackward { limits, x: rotated.rows(n), dx: dqkv.rows_mut(n) })?;
        }
        let mut first = 0;
        for part in &self.norms {
            let (all, stats) = (0..n * part.columns.len(), first..first + n * part.stats());
            first = stats.end;
            part.copy(cx, qkv.rows(n), row.rows_mut(n))?;
            part.copy(cx, dqkv.rows(n), normed.rows_mut(n))?;
            let (x, dy, stats) =
                (row.rows(n).slice(all.clone()), normed.rows(n).slice(all.clone()), head_stats.rows(n).slice(stats));
            dev.zero(d_o.rows_mut(n).slice(all.clone()))?;
            part.norm.backward(cx, w, dw, x, stats, dy, d_o.rows_mut(n).slice(all), unused.rows_mut(2))?;
            part.put(cx, d_o.rows(n), dqkv.rows_mut(n))?;
        }
        Ok(())
    }

    fn limits(&self) -> Option<[f32; 2]> {
        self.clip.map(|clip| [-clip, clip])
    }

    fn rotate(&self, cx: &Cx, table: View, qkv: ViewMut, inverse: bool) -> Result<()> {
        let Some(shape) = self.rope else { return Ok(()) };
        cx.dev.rope(Rope { shape, table, positions: cx.batch.positions, qkv, inverse })
    }

    /// Assigns `to`: rows `qkv` with normalized parts.
    fn normalize(
        &self,
        cx: &Cx,
        w: Weights,
        qkv: &Tensor,
        to: &mut Tensor,
        [stats, row, normed]: [&mut Tensor; 3],
    ) -> Result<()> {
        let (n, mut first) = (cx.n, 0);
        cx.dev.copy(qkv.rows(n), to.rows_mut(n))?;
        for part in &self.norms {
            let (all, own) = (0..n * part.columns.len(), first..first + n * part.stats());
            first = own.end;
            part.copy(cx, qkv.rows(n), row.rows_mut(n))?;
            let (x, y) = (row.rows(n).slice(all.clone()), normed.rows_mut(n).slice(all));
            part.norm.forward(cx, w, x, y, stats.rows_mut(n).slice(own))?;
            part.put(cx, normed.rows(n), to.rows_mut(n))?;
        }
        Ok(())
    }
}

impl PartNorm {
    /// Copies its columns of `rows` to the beginning of `to`, without gaps.
    fn copy(&self, cx: &Cx, rows: View, to: ViewMut) -> Result<()> {
        let (width, row) = (self.columns.len(), rows.len() / cx.n);
        cx.copy_columns([cx.n, width], (rows, row, self.columns.start), (to.slice(0..cx.n * width), width, 0))
    }
    /// The reverse.
    fn put(&self, cx: &Cx, from: View, rows: ViewMut) -> Result<()> {
        let (width, row) = (self.columns.len(), rows.len() / cx.n);
        cx.copy_columns([cx.n, width], (from.slice(0..cx.n * width), width, 0), (rows, row, self.columns.start))
    }
}
