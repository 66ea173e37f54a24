//! Operands of knowledge distillation (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"), over a
//! whole vocabulary or over ranks' shards of it. R: rows of logits.
//!
//! The loss of a row is `(1 - alpha) CE(target) + alpha T^2 KL(teacher || student)`, or with the reverse divergence,
//! `KL(student || teacher)`, where both distributions of the divergence are softmaxes of logits / T. [`DistillPart`]
//! sums over the columns that a rank has, [`DistillFinish`] merges the sums of all ranks.
use super::check::{float, read, rows, written};
use super::loss::{CrossEntropyShape, VocabPart};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// The two terms of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DistillTerms {
    /// Share of the divergence from the teacher, in (0, 1]; the rest is the cross entropy.
    pub alpha: f32,
    /// T: both models' logits are divided by it in the divergence.
    pub temperature: f32,
    /// The teacher's `final_logit_softcapping`; 0 disables it.
    pub teacher_cap: f32,
    /// The divergence is that of the student from the teacher.
    pub reverse: bool,
}

impl DistillTerms {
    /// Statistics (f32) per row. Of the student's logits z: their maximum m, the sums of exp(z - m) and of
    /// exp((z - m) / T), and the target's, or 0 if another rank has it. Of the teacher's logits y: their maximum t, and
    /// the sums of p = exp((y - t) / T) and of p ((y - t) - (z - m)) / T; of the reverse divergence, q ((z - m) - (y -
    /// t)) / T, where q = exp((z - m) / T). All are 0 in an ignored row.
    pub const STATS: usize = 7;
}

/// Returns R. `dtype` and `len`: of the student's logits.
fn check(
    op: &'static str,
    shape: &CrossEntropyShape,
    [targets, teacher]: [&View; 2],
    dtype: DType,
    len: usize,
) -> Result<usize> {
    let (dtype, n) = (float(op, dtype)?, rows(op, "logits", len, shape.vocab)?);
    read(op, &[("targets", targets, DType::I32, n), ("teacher", teacher, dtype, n * shape.vocab)])?;
    Ok(n)
}

/// Assigns the statistics of one rank's columns.
pub struct DistillPart<'a> {
    /// The shape of the student.
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    pub terms: DistillTerms,
    /// (R) i32: an index of the whole vocabulary, or [`super::IGNORE`].
    pub targets: View<'a>,
    /// (R, vocab)
    pub teacher: View<'a>,
    /// (R, vocab)
    pub logits: View<'a>,
    /// (R, [`DistillTerms::STATS`]) f32
    pub stats: ViewMut<'a>,
}

impl DistillPart<'_> {
    pub const OP: &'static str = "distill_part";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, teacher, logits, stats, .. } = self;
        let n = check(Self::OP, shape, [targets, teacher], logits.dtype(), logits.len())?;
        written(Self::OP, &[("stats", stats, DType::F32, DistillTerms::STATS * n)])?;
        Ok(n)
    }
}

/// The loss and the gradient of one rank's columns, from the statistics of all ranks, merged in rank order, so that all
/// ranks compute the same loss. Adds to `loss`; assigns the gradient.
pub struct DistillFinish<'a> {
    /// This and the next four as in [`DistillPart`].
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    pub terms: DistillTerms,
    pub targets: View<'a>,
    pub teacher: View<'a>,
    /// (parts, R, [`DistillTerms::STATS`]) f32
    pub stats: View<'a>,
    /// f32 (1): as in [`super::CrossEntropy`].
    pub scale: View<'a>,
    /// (R, vocab): the student's, replaced by their gradients, 0 in ignored rows.
    pub logits: ViewMut<'a>,
    /// f64 (1): adds the losses in row order.
    pub loss: ViewMut<'a>,
}

impl DistillFinish<'_> {
    pub const OP: &'static str = "distill_finish";
    /// Returns R and the number of parts; 0 and 0 if there are no rows.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, targets, teacher, stats, scale, logits, loss, .. } = self;
        let n = check(Self::OP, shape, [targets, teacher], logits.dtype(), logits.len())?;
        read(Self::OP, &[("stats", stats, DType::F32, stats.len())])?;
        scale.fits(Self::OP, "scale", DType::F32, 1)?;
        written(Self::OP, &[("loss", loss, DType::F64, 1)])?;
        if n == 0 {
            return Ok((0, 0));
        }
        match rows(Self::OP, "stats", stats.len(), DistillTerms::STATS * n)? {
            0 => Err(Error::op(Self::OP, "stats is empty")),
            parts => Ok((n, parts)),
        }
    }
}
