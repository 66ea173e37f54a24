//! Layer 0: the embeddings below the blocks; the final norm, the head and the loss above them. Never materializes full
//! logits.
// Writing text, and the loss.
mod draw;
mod loss;

pub use self::draw::Choose;
use super::context::{Cx, DropoutSite};
use super::linear::Linear;
use super::norm::Norm;
use super::per_layer::PerLayerRoot;
use super::product_buffers::AdapterScratch;
use super::saved::Scratch;
use super::sequences::LossRows;
use super::split::Slice;
use super::store::{Grads, Weights};
use super::teacher::Teacher;
use super::tensor::Tensor;
use crate::base::{DType, Result};
use crate::comm::Tag;
use crate::device::ops::{Embed, EmbedBackward, EmbedShape};
use crate::device::{View, ViewMut};
use half::{bf16, f16};
use std::ops::Range;

/// A matrix with one row per vocabulary entry, and this tp rank's shard of the rows.
#[derive(Clone, Copy, Debug)]
pub struct VocabRows {
    /// Segment (rows, C).
    pub weight: usize,
    pub over: Slice,
}

impl VocabRows {
    pub fn all(weight: usize) -> VocabRows {
        VocabRows { weight, over: Slice::WHOLE }
    }
    /// This rank's range of a vocabulary.
    pub fn range(&self, vocab: usize) -> Range<usize> {
        self.over.share(vocab)
    }
    fn cut(&self) -> bool {
        self.over.of > 1
    }
}

/// Learned positions.
#[derive(Clone, Copy, Debug)]
pub struct LearnedPositions {
    /// Segment (first + rows, C).
    pub segment: usize,
    pub rows: usize,
    /// Rows before that of position 0.
    pub first: usize,
}

#[derive(Clone, Debug)]
pub struct Root {
    pub tokens: VocabRows,
    /// Inputs of the blocks besides the residual stream.
    pub per_layer: Option<PerLayerRoot>,
    pub positions: Option<LearnedPositions>,
    /// Factor of the token embeddings.
    pub embed_scale: f32,
    /// Normalizes the token embeddings.
    pub embed_norm: Option<Norm>,
    pub norm: Norm,
    /// The output projection; if tied, its weight is the token embedding.
    pub head: Linear,
    pub words: VocabRows,
    /// Vocabulary size over all ranks.
    pub vocab: usize,
    /// The head has one output, a score; `words` is its weight.
    pub score: bool,
    /// Factor of logits.
    pub logit_scale: f32,
    /// Then logits become cap * tanh(logits / cap); 0 disables it.
    pub logit_cap: f32,
}

/// Where the token losses of rows are summed; the token loss has one sequence of all rows.
pub struct LossSums<'a> {
    pub rows: LossRows<'a>,
    /// f64 (sequences), added to; or (rows), assigned.
    pub sums: ViewMut<'a>,
    /// Like [`super::SequenceBuffers::entropies`].
    pub entropies: Option<ViewMut<'a>>,
    /// f32 (sequences, or rows), if gradients are needed: a factor of every gradient of the sequence, or row.
    pub scales: Option<View<'a>>,
    /// The token loss is that of distillation; with gradients only.
    pub teacher: Option<&'a mut dyn Teacher>,
}

impl<'a> LossSums<'a> {
    /// Sums without gradients.
    pub fn new(rows: LossRows<'a>, sums: ViewMut<'a>) -> LossSums<'a> {
        LossSums { rows, sums, entropies: None, scales: None, teacher: None }
    }
}

/// Scratch of the head and the loss.
struct HeadScratch<'a> {
    logits: &'a mut Tensor,
    part_stats: &'a mut Tensor,
    all_stats: &'a mut Tensor,
    adapter: &'a mut AdapterScratch,
}

/// What the loss needs for backward.
pub struct LossGrad<'a> {
    pub grads: Grads<'a>,
    /// (R, C): the residual's gradient, assigned.
    pub dx: ViewMut<'a>,
}

impl LearnedPositions {
    fn table(&self) -> EmbedShape {
        EmbedShape::whole(self.rows, 1.0)
    }
    /// The elements of rows that positions have, each of `width`.
    fn held(&self, width: usize) -> Range<usize> {
        self.first * width..(self.first + self.rows) * width
    }
}

/// The part of this rank's rows in what the batch has for each token.
fn own_rows<'a>(cx: &Cx<'a>, of: View<'a>) -> View<'a> {
    let mine = if cx.split.sequence() { cx.split.tp.range(cx.rows() * cx.split.tp.of) } else { 0..cx.n };
    of.slice(mine.start.min(cx.n)..mine.end.min(cx.n))
}

impl Root {
    /// The embeddings' factor for weights in `dtype`. transformers first rounds it to that dtype (55.4256 becomes 55.5
    /// in bf16).
    fn scale(&self, dtype: DType) -> f32 {
        match dtype {
            DType::Bf16 => bf16::from_f32(self.embed_scale).to_f32(),
            DType::F16 => f16::from_f32(self.embed_scale).to_f32(),
            _ => self.embed_scale,
        }
    }

    fn table(&self, dtype: DType) -> EmbedShape {
        EmbedShape { rows: self.vocab, first: self.tokens.range(self.vocab).start, scale: self.scale(dtype) }
    }

    /// Assigns the token embeddings of this rank's rows.
    fn look_up(&self, cx: &Cx, w: Weights, parts: &mut Tensor, mut y: ViewMut) -> Result<()> {
        let (table, weight) = (self.table(y.dtype()), w.get(self.tokens.weight));
        if cx.split.sequence() && !self.tokens.cut() {
            // The table is whole on every rank: each looks up its own tokens, and padding rows are 0.
            let tokens = own_rows(cx, cx.batch.tokens);
            let (rows, rest) = y.reborrow().split_at(tokens.len() * self.head.inputs);
            cx.dev.zero(rest)?;
            cx.dev.embed(Embed { shape: table, tokens, w: weight, y: rows, accumulate: false })
        } else {
            let tokens = cx.batch.tokens;
            let embed = |y: ViewMut| cx.dev.embed(Embed { shape: table, tokens, w: weight, y, accumulate: false });
            cx.sum(self.tokens.cut(), parts, y, embed)
        }
    }
    /// Assigns `y (R, C)`, this rank's rows of the residual stream.
    pub fn embed(&self, cx: &Cx, w: Weights, scratch: &mut Scratch, mut y: ViewMut) -> Result<()> {
        self.look_up(cx, w, &mut scratch.parts, y.reborrow())?;
        if let Some(norm) = &self.embed_norm {
            let (rows, Scratch { h, stats, .. }) = (cx.rows(), &mut *scratch);
            cx.dev.copy(y.as_view(), h.rows_mut(rows))?;
            norm.forward(cx, w, h.rows(rows), y.reborrow(), stats.rows_mut(rows))?;
        }
        if let Some(of) = self.positions {
            let (tokens, width) = (own_rows(cx, cx.batch.positions), self.head.inputs);
            let (shape, w, y) =
                (of.table(), w.get(of.segment).slice(of.held(width)), y.reborrow().slice(0..tokens.len() * width));
            cx.dev.embed(Embed { shape, tokens, w, y, accumulate: true })?;
        }
        cx.drop(DropoutSite::Embedding, y.reborrow())?;
        match &self.per_layer {
            Some(of) => of.forward(cx, w, y.as_view(), &mut scratch.per_layer, &mut scratch.adapter),
            None => Ok(()),
        }
    }

    /// Adds to the embeddings' gradients; `x (R, C)` are the embeddings, and their gradient `dx` is masked on the way.
    pub fn embed_backward(
        &self,
        cx: &Cx,
        w: Weights,
        mut dw: Grads,
        x: View,
        scratch: &mut Scratch,
        mut dx: ViewMut,
    ) -> Result<()> {
        // Without gradients, those of the blocks' inputs may not be there.
        if let Some(per_layer) = self.per_layer.as_ref().filter(|_| dw.flat.is_some()) {
            let Scratch { per_layer: inputs, adapter, unused, .. } = &mut *scratch;
            per_layer.backward(cx, w, &mut dw, x, inputs, adapter, unused.rows_mut(1), dx.reborrow())?;
        }
        cx.drop(DropoutSite::Embedding, dx.reborrow())?;
        if let Some(norm) = &self.embed_norm {
            let (rows, Scratch { h, stats, dh, parts, unused, .. }) = (cx.rows(), &mut *scratch);
            self.look_up(cx, w, parts, h.rows_mut(rows))?;
            let (x, unused) = (h.rows(rows), unused.rows_mut(2));
            let d = norm.branch_backward(cx, w, &mut dw, x, dx.as_view(), [stats, dh], unused)?;
            cx.dev.copy(d, dx.reborrow())?;
        }
        if let Some(dw) = dw.get(self.tokens.weight)? {
            let shape = self.table(dx.dtype());
            let dx = cx.whole(dx.as_view(), &mut scratch.whole)?;
            cx.dev.embed_backward(EmbedBackward { shape, tokens: cx.batch.tokens, dy: dx.rows, dw })?;
            cx.release(dx)?;
        }
        let Some(of) = self.positions else { return Ok(()) };
        match dw.get(of.segment)? {
            Some(dw) => {
                let (shape, tokens, width) = (of.table(), own_rows(cx, cx.batch.positions), self.head.inputs);
                let (dy, dw) = (dx.as_view().slice(0..tokens.len() * width), dw.slice(of.held(width)));
                cx.dev.embed_backward(EmbedBackward { shape, tokens, dy, dw })
            }
            None => Ok(()),
        }
    }

    /// Assigns `out`, the bytes of vocab f32: the uncapped logits of token `row` on sp rank `holder`; other ranks'
    /// `row` is ignored. `x (R, C)`; `next` is scratch.
    #[allow(clippy::too_many_arguments)] // the layer, its operands and its scratch
    pub fn logits(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        (holder, row): (usize, usize),
        scratch: &mut Scratch,
        [next, all]: [&mut Tensor; 2],
        out: &mut [u8],
    ) -> Result<()> {
        let rows = cx.rows();
        let Scratch { h, stats, whole, logits, adapter, .. } = scratch;
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let width = h.width();
        let h = cx.whole(h.rows(rows), whole)?;
        let at = h.rows.slice(row * width..(row + 1) * width);
        let own = self.words.range(self.vocab).len();
        let (mine, rest) = next.rows_mut(1).split_at(own);
        cx.dev.zero(rest)?;
        if self.head.has_bias() {
            // A bias is added in its own dtype.
            self.project(cx, w, at, adapter, logits.rows_mut(1))?;
            cx.dev.copy(logits.rows(1), mine)?;
        } else {
            self.project(cx, w, at, adapter, mine)?;
        }
        cx.release(h)?;
        if cx.batch.rows.is_some() {
            let sp = &cx.groups.sp;
            let ticket = sp.broadcast(Tag::new("sp logits", cx.layer), next.rows_mut(1), holder)?;
            sp.wait(ticket)?;
            sp.wait_sent(ticket)?;
        }
        self.gather_logits(cx, next, all, out)
    }
    /// Assigns `out` from the parts in `next` of all ranks of tp.
    fn gather_logits(&self, cx: &Cx, next: &Tensor, all: &mut Tensor, out: &mut [u8]) -> Result<()> {
        let tp = &cx.groups.tp;
        if !self.words.cut() {
            return cx.dev.download(next.rows(1), out);
        }
        let ticket = tp.all_gather(Tag::new("tp logits", cx.layer), next.rows(1), all.rows_mut(1))?;
        tp.wait(ticket)?;
        // Each rank sent as many entries as the largest shard has.
        for index in 0..self.words.over.of {
            let share = Slice { index, ..self.words.over }.share(self.vocab);
            let sent = all.rows(1).slice(index * next.width()..index * next.width() + share.len());
            cx.dev.download(sent, &mut out[4 * share.start..4 * share.end])?;
        }
        tp.release(ticket)
    }
}
