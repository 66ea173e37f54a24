//! The head and the loss, in chunks of rows, so that full logits never exist.
use super::{HeadScratch, LossGrad, LossSums, Root};
use crate::base::{Error, Result};
use crate::comm::Tag;
use crate::device::ops::{
    CrossEntropy, CrossEntropyFinish, CrossEntropyPart, CrossEntropyShape, DistillFinish, DistillPart, Embed,
    EmbedShape, RowEntropies, VocabPart,
};
use crate::device::{View, ViewMut};
use crate::nn::context::{Batch, Cx, LabeledRows};
use crate::nn::product_buffers::AdapterScratch;
use crate::nn::saved::Scratch;
use crate::nn::sequences::{LossRows, SequenceRows};
use crate::nn::store::{Grads, Weights};
use crate::nn::teacher::{StudentRows, TeacherChunk, TeacherStats};
use crate::nn::tensor::Tensor;
use std::ops::Range;

impl Root {
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
    pub(in crate::nn) fn project(
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
    pub(super) fn cross_entropy(
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
}
