//! What per-layer embeddings save for backward, and their scratch. Never computes.
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};

table! {
    /// Saved by the branch of a block for backward; empty without. P: elements of a block's input.
    pub struct PerLayerSaved {
        /// (R, C): what the branch reads.
        x,
        /// (N, P): outputs of its gate.
        gate,
        /// (R, C): the input of its norm.
        branch,
    }
}
table! {
    /// Empty without per-layer embeddings. L: blocks.
    pub struct PerLayerScratch {
        /// (N, L P): the inputs of all blocks, for a whole micro-batch, and the projections that they are normalized
        /// from.
        inputs,
        projected,
        /// (N, L) f32: 1/rms of those.
        stats,
        /// (N, L P): the gradients of the inputs, then of the projections; backward only.
        d_inputs,
        d_projected,
        /// (N, P) each: of the current block. From `d_act` on: backward only.
        input,
        act,
        d_act,
        d_gate,
        d_input,
    }
}

impl PerLayerScratch<TensorShape> {
    /// Buffers of `layers` blocks with `inputs` each.
    pub fn plan(layers: usize, inputs: usize, (tokens, dtype, train): (usize, DType, bool)) -> Self {
        let scratch = |width| TensorShape::new(Category::Scratch, dtype, tokens, width);
        let back = |width| TensorShape::new(Category::Scratch, dtype, if train { tokens } else { 0 }, width);
        let all = layers * inputs;
        PerLayerScratch {
            inputs: scratch(all),
            projected: scratch(all),
            stats: TensorShape { dtype: DType::F32, ..scratch(if inputs > 0 { layers } else { 0 }) },
            d_inputs: back(all),
            d_projected: back(all),
            input: scratch(inputs),
            act: scratch(inputs),
            d_act: back(inputs),
            d_gate: back(inputs),
            d_input: back(inputs),
        }
    }
}
