//! Layer 0: the embeddings below the blocks; the final norm, the head and the loss above them. Never materializes full
//! logits.
// Writing text.
mod draw;

pub use self::draw::Choose;
use super::context::{Batch, Cx, DropoutSite, LabeledRows};
use super::linear::Linear;
use super::norm::Norm;
use super::per_layer::PerLayerRoot;
use super::product_buffers::AdapterScratch;
use super::saved::Scratch;
use super::sequences::{LossRows, SequenceRows};
use super::split::Slice;
use super::store::{Grads, Weights};
use super::teacher::{StudentRows, Teacher, TeacherChunk, TeacherStats};
use super::tensor::Tensor;
use crate::base::{DType, Error, Result};
use crate::comm::Tag;
use crate::device::ops::{
    CrossEntropy, CrossEntropyFinish, CrossEntropyPart, CrossEntropyShape, DistillFinish, DistillPart, Embed,
    EmbedBackward, EmbedShape, RowEntropies, VocabPart,
};
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

    /// Adds the token losses of `x (R, C)`, or of all ranks' rows with sequence parallelism, to the sums of `losses`,
    /// in chunks of rows. With gradients, each chunk runs backward at once, so that logits are not stored. Rows without
    /// a target have no logits where the batch names those with one.
    pub fn loss(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        scratch: &mut Scratch,
        mut losses: LossSums,
        backward: Option<LossGrad>,
    ) -> Result<()> {
        let (dev, rows) = (cx.dev, cx.rows());
        let Scratch { h, stats, whole, parts, logits, part_stats, all_stats, dh, adapter, unused, .. } = scratch;
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let mut head = HeadScratch { logits, part_stats, all_stats, adapter };
        let by_sequence = matches!(losses.rows, LossRows::Sequences(_)) && losses.teacher.is_none();
        let alone = by_sequence && !self.score && !cx.split.sequence();
        let labeled = cx.batch.labeled.filter(|_| alone);
        let targets = labeled.map_or(cx.batch.targets, |of| of.targets);
        let n = labeled.map_or(cx.n, |of| of.host.len());
        let cx = &Cx { n, batch: Batch { labeled, targets, ..cx.batch }, ..*cx };
        // Rows with a target move to `dh`, and their gradients to `h`; then `dh` gets those of all rows.
        if let Some(LabeledRows { rows: tokens, .. }) = labeled {
            let shape = EmbedShape::whole(rows, 1.0);
            dev.embed(Embed { shape, tokens, w: h.rows(rows), y: dh.rows_mut(n), accumulate: false })?;
        }
        let Some(LossGrad { mut grads, mut dx }) = backward else {
            if labeled.is_some() {
                return self.chunks(cx, w, dh.rows(n), &mut head, &mut losses, None);
            }
            let h = cx.whole(h.rows(rows), whole)?;
            self.chunks(cx, w, h.rows, &mut head, &mut losses, None)?;
            return cx.release(h);
        };
        match labeled {
            Some(LabeledRows { places: tokens, .. }) => {
                cx.sum(self.words.cut(), parts, h.rows_mut(n), |d| {
                    self.chunks(cx, w, dh.rows(n), &mut head, &mut losses, Some((&mut grads, d)))
                })?;
                let shape = EmbedShape::whole(n + 1, 1.0);
                dev.embed(Embed { shape, tokens, w: h.rows(n), y: dh.rows_mut(rows), accumulate: false })?;
            }
            None => {
                let h = cx.whole(h.rows(rows), whole)?;
                let shared = self.words.cut() || self.score && cx.split.sequence();
                cx.sum(shared, parts, dh.rows_mut(rows), |d| {
                    self.chunks(cx, w, h.rows, &mut head, &mut losses, Some((&mut grads, d)))
                })?;
                cx.release(h)?;
            }
        }
        dev.zero(dx.reborrow())?;
        self.norm.backward(cx, w, &mut grads, x, stats.rows(rows), dh.rows(rows), dx, unused.rows_mut(2))
    }

    /// [`Root::loss`] of normalized rows `h (N, C)`; with `backward`, adds to gradients and assigns that of `h`.
    fn chunks(
        &self,
        cx: &Cx,
        w: Weights,
        h: View,
        HeadScratch { logits, part_stats, all_stats, adapter }: &mut HeadScratch,
        losses: &mut LossSums,
        mut backward: Option<(&mut Grads, ViewMut)>,
    ) -> Result<()> {
        let columns = if self.score { 1 } else { self.words.range(self.vocab).len() };
        let shape = CrossEntropyShape { vocab: columns, softcap: self.logit_cap };
        let (width, chunk) = (self.head.inputs, logits.capacity());
        let of = |band: &Range<usize>| band.start * width..band.end * width;
        for start in (0..cx.n).step_by(chunk) {
            let band = start..cx.n.min(start + chunk);
            let (h, rows) = (h.slice(of(&band)), band.len());
            self.project(cx, w, h, adapter, logits.rows_mut(rows))?;
            match (self.score, losses.teacher.is_some()) {
                (true, _) => self.scores(cx, &band, logits, losses)?,
                (_, true) => self.distill(cx, shape, &band, logits, [part_stats, all_stats], losses)?,
                (_, false) => self.token_losses(cx, shape, &band, logits, [part_stats, all_stats], losses)?,
            }
            if let Some((grads, dh)) = &mut backward {
                let dh = dh.reborrow().slice(of(&band));
                self.scale_logits(cx, logits.rows_mut(rows))?;
                self.head.backward(cx, w, grads, h, logits.rows(rows), adapter, dh, false)?;
            }
        }
        Ok(())
    }

    /// Assigns the logits of `h`, before their cap.
    pub(super) fn project(
        &self,
        cx: &Cx,
        w: Weights,
        h: View,
        work: &mut AdapterScratch,
        mut logits: ViewMut,
    ) -> Result<()> {
        self.head.forward(cx, w, h, work, logits.reborrow())?;
        self.scale_logits(cx, logits)
    }
    /// The factor of logits, and of their gradients.
    fn scale_logits(&self, cx: &Cx, logits: ViewMut) -> Result<()> {
        if self.logit_scale == 1.0 { Ok(()) } else { cx.dev.scale(self.logit_scale, logits) }
    }

    /// Adds the losses of rows `band`, whose logits (rows, columns of this rank) are given, to the sums of their
    /// sequences; with scales, the logits become their gradients.
    fn token_losses(
        &self,
        cx: &Cx,
        shape: CrossEntropyShape,
        band: &Range<usize>,
        logits: &mut Tensor,
        stats: [&mut Tensor; 2],
        losses: &mut LossSums,
    ) -> Result<()> {
        let [part_stats, all_stats] = stats;
        let LossRows::Sequences(sequences) = losses.rows else {
            let (scale, loss) =
                (losses.scales.map(|scales| scales.slice(band.clone())), losses.sums.reborrow().slice(band.clone()));
            let (targets, logits) = (cx.batch.targets.slice(band.clone()), logits.rows_mut(band.len()));
            if let Some(entropies) = &mut losses.entropies {
                let entropies = entropies.reborrow().slice(band.clone());
                self.entropies(cx, shape, targets, logits.as_view(), entropies)?;
            }
            return self.cross_entropy(cx, shape, targets, (true, scale), logits, [part_stats, all_stats], loss);
        };
        let at = |row: usize| cx.batch.labeled.map_or(row, |labeled| labeled.index(row));
        let first = sequences.partition_point(|of| at(of.rows.end) <= band.start);
        for of in sequences[first..].iter().take_while(|of| at(of.rows.start) < band.end) {
            let SequenceRows { rows, sequence, .. } = of;
            let rows = at(rows.start).max(band.start)..at(rows.end).min(band.end);
            if rows.is_empty() {
                continue;
            }
            let logits = logits.band_mut(&(rows.start - band.start..rows.end - band.start));
            let own = *sequence..sequence + 1;
            let (scale, loss) =
                (losses.scales.map(|scales| scales.slice(own.clone())), losses.sums.reborrow().slice(own));
            let targets = cx.batch.targets.slice(rows);
            self.cross_entropy(cx, shape, targets, (false, scale), logits, [part_stats, all_stats], loss)?;
        }
        Ok(())
    }

    /// [`Root::token_losses`] of a score head: assigns the scores of the sequences that end in `band`; with scales,
    /// `scores` become their gradients, 0 in all other rows. With sequence parallelism all ranks of tp have all rows:
    /// the first derives the gradients, and the sum over ranks spreads them.
    fn scores(&self, cx: &Cx, band: &Range<usize>, scores: &mut Tensor, losses: &mut LossSums) -> Result<()> {
        if losses.scales.is_some() {
            cx.dev.zero(scores.rows_mut(band.len()))?;
        }
        let LossRows::Sequences(sequences) = losses.rows else {
            return Err(Error::op("scores", "a score is a sequence's, not a token's"));
        };
        for SequenceRows { rows, sequence, .. } in sequences.iter().filter(|of| of.ends) {
            let Some(row) = (rows.end - 1).checked_sub(band.start).filter(|&row| row < band.len()) else { continue };
            let (row, own) = (row..row + 1, *sequence..sequence + 1);
            match losses.scales {
                None => cx.dev.copy(scores.band(&row), losses.sums.reborrow().slice(own))?,
                Some(_) if cx.split.sequence() && cx.split.tp.index > 0 => {}
                Some(scales) => cx.dev.copy(scales.slice(own), scores.band_mut(&row))?,
            }
        }
        Ok(())
    }

    /// [`Root::token_losses`] of distillation, all rows together.
    fn distill(
        &self,
        cx: &Cx,
        shape: CrossEntropyShape,
        band: &Range<usize>,
        logits: &mut Tensor,
        stats: [&mut Tensor; 2],
        losses: &mut LossSums,
    ) -> Result<()> {
        let LossSums { sums, scales: Some(scale), teacher: Some(teacher), .. } = losses else {
            return Err(Error::op("distill", "a teacher needs the scale of gradients"));
        };
        let (targets, rows) = (cx.batch.targets.slice(band.clone()), band.len());
        let TeacherChunk { terms, logits: teacher, stats: TeacherStats { own, all }, student } = teacher.chunk(band)?;
        if let Some(StudentRows { losses, entropies }) = student {
            self.entropies(cx, shape, targets, logits.rows(rows), entropies)?;
            self.cross_entropy(cx, shape, targets, (true, None), logits.rows_mut(rows), stats, losses)?;
        }
        let (part, stats) = (self.part(), own.rows_mut(rows));
        let both = DistillPart { shape, part, terms, targets, teacher, logits: logits.rows(rows), stats };
        cx.dev.distill_part(both)?;
        let (scale, mut logits, mut loss) = (*scale, logits.rows_mut(rows), sums.reborrow());
        self.with_all_stats(cx, rows, [own, all], |stats| {
            let (logits, loss) = (logits.reborrow(), loss.reborrow());
            cx.dev.distill_finish(DistillFinish { shape, part, terms, targets, teacher, stats, scale, logits, loss })
        })
    }

    /// Assigns the entropies, where the device has them and this rank all logits.
    fn entropies(
        &self,
        cx: &Cx,
        shape: CrossEntropyShape,
        targets: View,
        logits: View,
        entropies: ViewMut,
    ) -> Result<()> {
        match cx.dev.has_entropies() && !self.words.cut() {
            true => cx.dev.row_entropies(RowEntropies { shape, targets, logits, entropies }),
            false => Ok(()),
        }
    }

    /// With a sharded vocabulary, ranks exchange three numbers per row, never logits.
    #[allow(clippy::too_many_arguments)] // the layer, its operands and its scratch
    fn cross_entropy(
        &self,
        cx: &Cx,
        shape: CrossEntropyShape,
        targets: View,
        (by_row, scale): (bool, Option<View>),
        mut logits: ViewMut,
        [part_stats, all_stats]: [&mut Tensor; 2],
        mut loss: ViewMut,
    ) -> Result<()> {
        let rows = targets.len();
        if !self.words.cut() {
            return cx.dev.cross_entropy(CrossEntropy { shape, targets, by_row, scale, logits, loss });
        }
        let (part, stats) = (self.part(), part_stats.rows_mut(rows));
        cx.dev.cross_entropy_part(CrossEntropyPart { shape, part, targets, logits: logits.as_view(), stats })?;
        self.with_all_stats(cx, rows, [part_stats, all_stats], |stats| {
            let (logits, loss) = (logits.reborrow(), loss.reborrow());
            let both = CrossEntropyFinish { shape, part, targets, stats, by_row, scale, logits, loss };
            cx.dev.cross_entropy_finish(both)
        })
    }
    /// This rank's columns of the logits.
    fn part(&self) -> VocabPart {
        VocabPart { first: self.words.range(self.vocab).start, of: self.vocab }
    }
    /// Runs `finish` with the statistics of all ranks.
    fn with_all_stats(
        &self,
        cx: &Cx,
        rows: usize,
        [own, all]: [&mut Tensor; 2],
        finish: impl FnOnce(View) -> Result<()>,
    ) -> Result<()> {
        if !self.words.cut() {
            return finish(own.rows(rows));
        }
        let (tp, all_rows) = (&cx.groups.tp, rows * self.words.over.of);
        let ticket = tp.all_gather(Tag::new("tp loss", cx.layer), own.rows(rows), all.rows_mut(all_rows))?;
        tp.wait(ticket)?;
        finish(all.rows(all_rows))?;
        tp.release(ticket)
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
