//! What per-layer embeddings save for backward, and their scratch. Never computes.
use super::tensor::{Tensor, table};
use crate::base::Result;

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
