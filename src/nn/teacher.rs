//! What the head reads of a teacher, for distillation. Never computes.
use super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::DistillTerms;
use crate::device::{View, ViewMut};
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
    pub student: Option<StudentRows<'a>>,
}

/// What is to be known of the student row by row, besides the loss.
pub struct StudentRows<'a> {
    /// f64 (rows), assigned: the log-probability of each target, negated; 0 without a target.
    pub losses: ViewMut<'a>,
    /// f32 (rows), assigned where the device has entropies and this rank all logits.
    pub entropies: ViewMut<'a>,
}

impl StudentRows<'_> {
    pub fn slice(&mut self, band: &Range<usize>) -> StudentRows<'_> {
        StudentRows {
            losses: self.losses.reborrow().slice(band.clone()),
            entropies: self.entropies.reborrow().slice(band.clone()),
        }
    }
}

/// Statistics of a chunk of the student's and the teacher's logits.
pub struct TeacherStats {
    /// (R, [`DistillTerms::STATS`]) f32: over this rank's columns.
    pub own: Tensor,
    /// (tp R, [`DistillTerms::STATS`]) f32: of all ranks; empty if the columns are whole.
    pub all: Tensor,
}
