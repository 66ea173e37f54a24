//! Operands of knowledge distillation. R: rows of logits.
use super::check::{float, read, rows, written};
use super::loss::CrossEntropyShape;
use crate::base::{DType, Result};
use crate::device::{View, ViewMut};

/// The two terms of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DistillTerms {
    /// Share of the divergence from the teacher, in (0, 1]; the rest is the cross entropy.
    pub alpha: f32,
    /// T: both models' logits are divided by it in the divergence.
    pub temperature: f32,
    /// The teacher's `final_logit_softcapping`; 0 disables it.
    pub teacher_cap: f32,
}

/// Loss and gradient of knowledge distillation (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network") in
/// one pass over a chunk of logits: `(1 - alpha) CE(target) + alpha T^2 KL(teacher || student)`, where both
/// distributions of the divergence are softmaxes of logits / T. Adds to `loss`; assigns the gradient.
pub struct Distill<'a> {
    /// Of the student.
    pub shape: CrossEntropyShape,
    pub terms: DistillTerms,
    /// (R) i32: an index of the vocabulary, or [`super::IGNORE`].
    pub targets: View<'a>,
    /// f32 (1): as in [`super::CrossEntropy`].
    pub scale: View<'a>,
    /// (R, vocab)
    pub teacher: View<'a>,
    /// (R, vocab): the student's, replaced by their gradients, 0 in ignored rows.
    pub logits: ViewMut<'a>,
    /// f64 (1): adds the losses in row order.
    pub loss: ViewMut<'a>,
}

impl Distill<'_> {
    pub const OP: &'static str = "distill";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, scale, teacher, logits, loss, .. } = self;
        let dtype = float(Self::OP, logits.dtype())?;
        let n = rows(Self::OP, "logits", logits.len(), shape.vocab)?;
        read(Self::OP, &[("targets", targets, DType::I32, n), ("teacher", teacher, dtype, n * shape.vocab)])?;
        scale.fits(Self::OP, "scale", DType::F32, 1)?;
        written(Self::OP, &[("loss", loss, DType::F64, 1)])?;
        Ok(n)
    }
}
