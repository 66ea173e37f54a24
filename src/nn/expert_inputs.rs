//! What experts read: rows of tokens, or those times their weights (Llama 4). Never multiplies by a matrix.
use super::context::Cx;
use super::expert_layer::ExpertLayer;
use super::saved::Routing;
use super::sparse_buffers::SparseScratch;
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::View;
use crate::device::ops::{CombineRows, TakeRows, WeighRows};

impl ExpertLayer {
    /// Assigns what the experts read to `rows`, from the branch's `h (N, C)`.
    pub(super) fn inputs(
        &self,
        cx: &Cx,
        routing: &Routing,
        h: View,
        row_weights: &mut Tensor,
        rows: &mut Tensor,
    ) -> Result<()> {
        if !self.weighs_inputs {
            return self.take(cx, routing, h, rows);
        }
        // With one expert per token, routed rows are numbered as tokens are.
        let (dev, n, width, top_k, order) = (cx.dev, cx.tokens(), self.width, 1, routing.order.rows(cx.tokens()));
        dev.take_rows(TakeRows { top_k, order, x: routing.weights.rows(n), y: row_weights.rows_mut(n) })?;
        let (places, weights, x) = (Some(order), Some(row_weights.rows(n)), h.slice(0..n * width));
        dev.combine_rows(CombineRows { width, top_k, places, weights, x, y: rows.rows_mut(n), accumulate: false })
    }
    /// After the backward pass, whose `drows` are the gradients of weighted inputs: makes them those of inputs, and
    /// assigns `dweights`.
    pub(super) fn inputs_backward(
        &self,
        cx: &Cx,
        routing: &Routing,
        h: View,
        sparse: &mut SparseScratch,
    ) -> Result<()> {
        let (n, SparseScratch { rows, drows, dweights, .. }) = (cx.tokens(), sparse);
        self.take(cx, routing, h, rows)?;
        let (order, weights, dweights) = (Some(routing.order.rows(n)), routing.weights.rows(n), dweights.rows_mut(n));
        cx.dev.weigh_rows(WeighRows { order, weights, act: rows.rows_mut(n), dact: drows.rows_mut(n), dweights })
    }
}
