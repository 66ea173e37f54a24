//! Gates of attention's outputs: a number for each element (Qwen3-Next, AFMoE), or for each head (LFM 3). Never
//! projects.
use super::context::Cx;
use super::saved::Scratch;
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::View;
use crate::device::ops::{AttentionShape, CombineRows, Sigmoid, SigmoidGate, SigmoidGateBackward, WeighRows};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGate {
    Elements,
    Heads,
}

impl OutputGate {
    /// Assigns `gated` of scratch: the outputs `o (N, heads * head_dim)` times the sigmoids of their gates.
    pub fn forward(self, cx: &Cx, shape: &AttentionShape, gate: &Tensor, o: View, scratch: &mut Scratch) -> Result<()> {
        let (dev, n, Scratch { gated, head_gates, .. }) = (cx.dev, cx.n, scratch);
        match self {
            OutputGate::Elements => dev.sigmoid_gate(SigmoidGate { gate: gate.rows(n), x: o, y: gated.rows_mut(n) }),
            OutputGate::Heads => {
                // Each head's outputs are a row.
                dev.copy(gate.rows(n), head_gates.rows_mut(n))?;
                dev.sigmoid(Sigmoid { x: head_gates.rows_mut(n), dy: None })?;
                let (weights, y) = (Some(head_gates.rows(n)), gated.rows_mut(n));
                let (width, top_k) = (shape.head_dim, 1);
                dev.combine_rows(CombineRows { width, top_k, places: None, weights, x: o, y, accumulate: false })
            }
        }
    }

    /// After [`OutputGate::forward`]: `d_o` of scratch, the gradient of `gated`, becomes that of `o`. Assigns `dgate`.
    pub fn backward(self, cx: &Cx, gate: &Tensor, o: View, scratch: &mut Scratch) -> Result<()> {
        let (dev, n, Scratch { gated, head_gates, d_head_gates, d_o, dgate, .. }) = (cx.dev, cx.n, scratch);
        match self {
            OutputGate::Elements => {
                let (dy, dgate) = (d_o.rows_mut(n), dgate.rows_mut(n));
                dev.sigmoid_gate_backward(SigmoidGateBackward { gate: gate.rows(n), x: o, dy, dgate })
            }
            OutputGate::Heads => {
                dev.copy(o, gated.rows_mut(n))?;
                dev.weigh_rows(WeighRows {
                    order: None,
                    weights: head_gates.rows(n),
                    act: gated.rows_mut(n),
                    dact: d_o.rows_mut(n),
                    dweights: d_head_gates.rows_mut(n),
                })?;
                dev.sigmoid(Sigmoid { x: head_gates.rows_mut(n), dy: Some(d_head_gates.rows_mut(n)) })?;
                dev.copy(d_head_gates.rows(n), dgate.rows_mut(n))
            }
        }
    }
}
