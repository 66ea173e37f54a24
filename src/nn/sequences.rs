//! Losses of whole sequences, such as DPO's: functions of the log-probabilities of sequences, or of scores at their
//! last tokens, whose gradient is known only after the whole forward pass. Never computes a loss: the engine's
//! objectives do.
//!
//! The gradient of such a loss with respect to the log-probability of a token is the same for all tokens of a sequence.
//! So the head runs twice, in the same chunks of rows: once for the sums of each sequence, and once for the gradients,
//! weighted by sequence. Logits are never stored, and the operations are those of the token loss.
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

/// What the head reads and writes for a [`SequenceLoss`].
pub struct SequenceBuffers<'a> {
    /// All rows of this rank, in order.
    pub rows: &'a [SequenceRows],
    /// One per sequence. f64: its token losses on this rank are added here. With a score head f32: the score of its
    /// last row is assigned on the rank that holds it.
    pub sums: ViewMut<'a>,
    /// f32, one per sequence: the gradient of the loss with respect to its sum or score, times the loss scale.
    pub weights: View<'a>,
}

/// A loss that is a function of the summed token losses, or the score, of each sequence.
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
