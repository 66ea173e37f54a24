//! Operands of the cross entropy, over a whole vocabulary and over ranks' shards of it. R: rows of logits.
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// Targets with this value have no loss (the Hugging Face convention).
pub const IGNORE: i32 = -100;

#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyShape {
    /// Columns of the logits.
    pub vocab: usize,
    /// The loss is of cap * tanh(logits / cap) (Gemma 2's `final_logit_softcapping`), with the gradient with respect to
    /// the logits. 0 disables it.
    pub softcap: f32,
}

/// Loss and gradient in one pass over a chunk of logits. Adds to `loss`; assigns the gradient.
pub struct CrossEntropy<'a> {
    pub shape: CrossEntropyShape,
    /// (R) i32: an index of the vocabulary, or [`IGNORE`].
    pub targets: View<'a>,
    /// Each row has a scale of its own, and a loss of its own, which is assigned.
    pub by_row: bool,
    /// f32 (1), or (R) by row, if a gradient is needed: 1 / loss tokens of the whole optimizer step, the engine's one
    /// division.
    pub scale: Option<View<'a>>,
    /// (R, vocab). With a scale, replaced by `scale * (softmax - onehot)`, 0 in ignored rows.
    pub logits: ViewMut<'a>,
    /// f64 (1): `+= sum of -log softmax[target]`, in row order. By row f64 (R), 0 in ignored rows.
    pub loss: ViewMut<'a>,
}

impl CrossEntropy<'_> {
    pub const OP: &'static str = "cross_entropy";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, by_row, scale, logits, loss } = self;
        check(Self::OP, shape, targets, logits.dtype(), logits.len(), (*by_row, scale.as_ref(), loss))
    }
}

fn check(
    op: &'static str,
    shape: &CrossEntropyShape,
    targets: &View,
    dtype: DType,
    logits: usize,
    (by_row, scale, loss): (bool, Option<&View>, &ViewMut),
) -> Result<usize> {
    let (_, n) = (float(op, dtype)?, rows(op, "logits", logits, shape.vocab)?);
    read(op, &[("targets", targets, DType::I32, n)])?;
    let each = if by_row { n } else { 1 };
    scale.map_or(Ok(()), |scale| scale.fits(op, "scale", DType::F32, each))?;
    written(op, &[("loss", loss, DType::F64, each)])?;
    Ok(n)
}

/// The entropy of the softmax of each row with a target, in nats. Assigns `entropies`.
pub struct RowEntropies<'a> {
    pub shape: CrossEntropyShape,
    /// (R) i32
    pub targets: View<'a>,
    /// (R, vocab)
    pub logits: View<'a>,
    /// (R) f32; 0 in ignored rows.
    pub entropies: ViewMut<'a>,
}

impl RowEntropies<'_> {
    pub const OP: &'static str = "row_entropies";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, logits, entropies } = self;
        let (_, n) = (float(Self::OP, logits.dtype())?, rows(Self::OP, "logits", logits.len(), shape.vocab)?);
        read(Self::OP, &[("targets", targets, DType::I32, n)])?;
        written(Self::OP, &[("entropies", entropies, DType::F32, n)])?;
        Ok(n)
    }
}

/// The columns of wider logits that one rank holds.
#[derive(Clone, Copy, Debug)]
pub struct VocabPart {
    /// Vocabulary index of the first column.
    pub first: usize,
    /// Size of the whole vocabulary.
    pub of: usize,
}

impl VocabPart {
    /// Statistics (f32) per row: the largest logit, the sum of exp(logit - largest), and the target's logit, or 0 if
    /// another rank holds it. All are 0 in an ignored row.
    pub const STATS: usize = 3;
}

/// The statistics of one rank's logits that the loss and gradient need (Shoeybi et al. 2019, "Megatron-LM", section 3;
/// here with one all_gather per chunk). Assigns `stats`.
pub struct CrossEntropyPart<'a> {
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    /// (R) i32, indices of the whole vocabulary.
    pub targets: View<'a>,
    /// (R, vocab)
    pub logits: View<'a>,
    /// (R, [`VocabPart::STATS`]) f32
    pub stats: ViewMut<'a>,
}

impl CrossEntropyPart<'_> {
    pub const OP: &'static str = "cross_entropy_part";
    /// Returns R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, logits, stats, .. } = self;
        let n = rows(Self::OP, "logits", logits.len(), shape.vocab)?;
        float(Self::OP, logits.dtype())?;
        read(Self::OP, &[("targets", targets, DType::I32, n)])?;
        written(Self::OP, &[("stats", stats, DType::F32, VocabPart::STATS * n)])?;
        Ok(n)
    }
}

/// [`CrossEntropy`] of one rank's columns, from the statistics of all ranks, merged in rank order, so that all ranks
/// compute the same loss. Adds to `loss`; assigns the gradient.
pub struct CrossEntropyFinish<'a> {
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    /// (R) i32, indices of the whole vocabulary.
    pub targets: View<'a>,
    /// (parts, R, [`VocabPart::STATS`]) f32
    pub stats: View<'a>,
    /// This and the rest as in [`CrossEntropy`].
    pub by_row: bool,
    pub scale: Option<View<'a>>,
    pub logits: ViewMut<'a>,
    pub loss: ViewMut<'a>,
}

impl CrossEntropyFinish<'_> {
    pub const OP: &'static str = "cross_entropy_finish";
    /// Returns R and the number of parts; 0 and 0 if there are no rows.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, targets, stats, by_row, scale, logits, loss, .. } = self;
        let n = check(Self::OP, shape, targets, logits.dtype(), logits.len(), (*by_row, scale.as_ref(), loss))?;
        read(Self::OP, &[("stats", stats, DType::F32, stats.len())])?;
        if n == 0 {
            return Ok((0, 0));
        }
        match rows(Self::OP, "stats", stats.len(), VocabPart::STATS * n)? {
            0 => Err(Error::op(Self::OP, "stats is empty")),
            parts => Ok((n, parts)),
        }
    }
}
