//! What the head reads of a teacher, for distillation. Never computes.
use crate::base::Result;
use crate::device::View;
use crate::device::ops::DistillTerms;
use std::ops::Range;

/// The logits of a teacher, chunk by chunk next to the student's, so that they are never stored whole.
pub trait Teacher {
    fn terms(&self) -> DistillTerms;
    /// (rows, vocab): of rows `band` of this rank's part of the micro-batch.
    fn logits(&mut self, band: &Range<usize>) -> Result<View<'_>>;
}
