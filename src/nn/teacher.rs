//! What the head reads of a teacher, for distillation. Never computes.
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::View;
use crate::device::ops::DistillTerms;
use std::ops::Range;

/// The logits of a teacher, chunk by chunk next to the student's, so that they are never stored whole.
pub trait Teacher {
    /// Rows `band` of this rank's part of the micro-batch.
    fn chunk(&mut self, band: &Range<usize>) -> Result<TeacherChunk<'_>>;
}

pub struct TeacherChunk<'a> {
    pub terms: DistillTerms,
    /// (rows, vocab), of this rank's columns.
    pub logits: View<'a>,
    pub stats: &'a mut TeacherStats,
}

/// Statistics of a chunk of the student's and the teacher's logits.
pub struct TeacherStats {
    /// (R, [`DistillTerms::STATS`]) f32: over this rank's columns.
    pub own: Tensor,
    /// (tp R, [`DistillTerms::STATS`]) f32: of all ranks; empty if the columns are whole.
    pub all: Tensor,
}
