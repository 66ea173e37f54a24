//! Losses that are functions of log-probabilities: of whole sequences, such as DPO's, of their scores at their last
//! tokens, or of tokens, such as GRPO's. Never computes a loss: the engine's objectives do.
//!
//! The gradient of such a loss is known only after the log-probabilities. So the head runs twice, in the same chunks of
//! rows: once for the sums of each sequence, or for each token, and once for the gradients, weighted likewise. All
//! tokens of a sequence have the same weight, unless each has its own. Logits are never stored, and the operations are
//! those of the token loss.
use crate::base::Result;
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

/// Adjacent rows of one sequence on this rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SequenceRows {
    pub rows: Range<usize>,
    /// Index of the sequence in the micro-batch.
    pub sequence: usize,
    /// The last of these rows is the sequence's last.
    pub ends: bool,
}

/// How the token losses of this rank's rows are summed.
#[derive(Clone, Copy, Debug)]
pub enum LossRows<'a> {
    /// By sequence: all rows, in order.
    Sequences(&'a [SequenceRows]),
    /// Not at all: each row has a sum and a weight.
    Each,
}

/// What the head reads and writes for a [`SequenceLoss`].
pub struct SequenceBuffers<'a> {
    pub rows: LossRows<'a>,
    /// One per sequence, or row. f64: its token losses on this rank are added here; a row's is assigned. With a score
    /// head f32: the score of its last row is assigned on the rank that holds it.
    pub sums: ViewMut<'a>,
    /// f32 (rows): assigned before the sums of rows, where the device has entropies and this rank all logits.
    pub entropies: Option<ViewMut<'a>>,
    /// f32, one per sequence, or row: the gradient of the loss with respect to its sum or score, times the loss scale.
    pub weights: View<'a>,
}

/// A loss that is a function of the summed token losses, or the score, of each sequence, or of each token's loss.
pub trait SequenceLoss {
    fn buffers(&mut self) -> SequenceBuffers<'_>;
    /// Called when the sums of this rank are complete, before backward: assigns the weights.
    fn weigh(&mut self, dev: &dyn Device) -> Result<()>;
}

/// A pass without gradients for a [`SequenceLoss`].
pub struct Scored<'a> {
    pub loss: &'a mut dyn SequenceLoss,
    /// Without the adapters.
    pub base: bool,
}
