//! Operands of the cross entropy, of a whole vocabulary and of the parts that ranks have. R: rows of logits.
use super::check::{float, read, rows, written};
use crate::base::{DType, Error, Result};
use crate::device::{View, ViewMut};

/// Targets with this value carry no loss (the Hugging Face convention).
pub const IGNORE: i32 = -100;

#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyShape {
    /// Columns of the logits.
    pub vocab: usize,
    /// The loss is of cap * tanh(logits / cap) (Gemma 2's `final_logit_softcapping`), the gradient that of the logits.
    /// 0: of the logits themselves.
    pub softcap: f32,
}

/// Loss and gradient in one pass over a chunk of logits. Adds to `loss`; assigns the gradient.
pub struct CrossEntropy<'a> {
    pub shape: CrossEntropyShape,
    /// (R) i32: an index of the vocabulary, or [`IGNORE`].
    pub targets: View<'a>,
    /// f32 (1), where a gradient is wanted: 1 / loss tokens of the whole optimizer step, the engine's one division.
    pub scale: Option<View<'a>>,
    /// (R, vocab). With a scale they become `scale * (softmax - onehot)`, 0 in ignored rows.
    pub logits: ViewMut<'a>,
    /// f64 (1): `+= sum of -log softmax[target]`, in row order.
    pub loss: ViewMut<'a>,
}

impl CrossEntropy<'_> {
    pub const OP: &'static str = "cross_entropy";
    /// R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, scale, logits, loss } = self;
        check(Self::OP, shape, targets, logits.dtype(), logits.len(), scale.as_ref(), loss)
    }
}

fn check(
    op: &'static str,
    shape: &CrossEntropyShape,
    targets: &View,
    dtype: DType,
    logits: usize,
    scale: Option<&View>,
    loss: &ViewMut,
) -> Result<usize> {
    let (_, n) = (float(op, dtype)?, rows(op, "logits", logits, shape.vocab)?);
    read(op, &[("targets", targets, DType::I32, n)])?;
    scale.map_or(Ok(()), |scale| scale.fits(op, "scale", DType::F32, 1))?;
    written(op, &[("loss", loss, DType::F64, 1)])?;
    Ok(n)
}

/// Columns that one of several ranks has of wider logits.
#[derive(Clone, Copy, Debug)]
pub struct VocabPart {
    /// What the first column stands for.
    pub first: usize,
    /// The whole vocabulary.
    pub of: usize,
}

impl VocabPart {
    /// f32 that a part finds in a row: the largest logit, the sum of exp(logit - that), and the target's logit, 0 where
    /// it is another part's. All are 0 in an ignored row.
    pub const STATS: usize = 3;
}

/// What the loss and the gradient need of each row of one part's logits (Shoeybi et al. 2019, "Megatron-LM", section 3;
/// here one exchange for each chunk). Assigns `stats`.
pub struct CrossEntropyPart<'a> {
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    /// (R) i32, of the whole vocabulary.
    pub targets: View<'a>,
    /// (R, vocab)
    pub logits: View<'a>,
    /// (R, [`VocabPart::STATS`]) f32
    pub stats: ViewMut<'a>,
}

impl CrossEntropyPart<'_> {
    pub const OP: &'static str = "cross_entropy_part";
    /// R.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, targets, logits, stats, .. } = self;
        let n = rows(Self::OP, "logits", logits.len(), shape.vocab)?;
        float(Self::OP, logits.dtype())?;
        read(Self::OP, &[("targets", targets, DType::I32, n)])?;
        written(Self::OP, &[("stats", stats, DType::F32, VocabPart::STATS * n)])?;
        Ok(n)
    }
}

/// [`CrossEntropy`] of one part's columns, from the statistics of all parts: merged in their order, so that all ranks
/// come to the same loss. Adds to `loss`; assigns the gradient.
pub struct CrossEntropyFinish<'a> {
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    /// (R) i32, of the whole vocabulary.
    pub targets: View<'a>,
    /// (parts, R, [`VocabPart::STATS`]) f32
    pub stats: View<'a>,
    /// As of [`CrossEntropy`], as is what follows.
    pub scale: Option<View<'a>>,
    pub logits: ViewMut<'a>,
    pub loss: ViewMut<'a>,
}

impl CrossEntropyFinish<'_> {
    pub const OP: &'static str = "cross_entropy_finish";
    /// R and the number of parts; 0 and 0 where there is no row.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, targets, stats, scale, logits, loss, .. } = self;
        let n = check(Self::OP, shape, targets, logits.dtype(), logits.len(), scale.as_ref(), loss)?;
        read(Self::OP, &[("stats", stats, DType::F32, stats.len())])?;
        if n == 0 {
            return Ok((0, 0));
        }
        match rows(Self::OP, "stats", stats.len(), VocabPart::STATS * n)? {
            0 => Err(Error::op(Self::OP, "stats of no part")),
            parts => Ok((n, parts)),
        }
    }
}
