//! The head while text is written: logits come to the host, which chooses tokens, and the loss of each is its
//! log-probability. Never knows how a token is chosen.
use super::Root;
use crate::base::dtype::Float;
use crate::base::{DType, Result};
use crate::comm::Tag;
use crate::device::ops::CrossEntropyShape;
use crate::device::{Device, View};
use crate::nn::context::Cx;
use crate::nn::saved::Scratch;
use crate::nn::store::Weights;
use crate::nn::tensor::Tensor;
use half::{bf16, f16};

/// Chooses a token, from its index among those that are wanted and its capped logits; threads share the tokens.
pub type Choose<'a> = &'a (dyn Fn(usize, &[f32]) -> u32 + Sync);

impl Root {
    /// For each wanted row of `x (R, C)`: `choose` gives its token, on the first rank of tp. Appends it and its
    /// log-probability to `drawn`: the bits of the loss in training.
    #[allow(clippy::too_many_arguments)] // the layer, its operands and its scratch
    pub fn draw(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        wanted: &[usize],
        scratch: &mut Scratch,
        [next, all]: [&mut Tensor; 2],
        choose: Choose,
        drawn: &mut Vec<(u32, f32)>,
    ) -> Result<()> {
        let (dev, rows, columns) = (cx.dev, cx.rows(), self.words.range(self.vocab).len());
        let shape = CrossEntropyShape { vocab: columns, softcap: self.logit_cap };
        let Scratch { h, stats, whole, logits, part_stats, all_stats, adapter, cache, .. } = scratch;
        self.norm.forward(cx, w, x, h.rows_mut(rows), stats.rows_mut(rows))?;
        let width = h.width();
        let h = cx.whole(h.rows(rows), whole)?;
        let mut index = 0;
        let chunk = logits.capacity();
        for stretch in wanted.chunk_by(|a, b| a + 1 == *b).flat_map(|rows| rows.chunks(chunk)) {
            let n = stretch.len();
            let of = h.rows.slice(stretch[0] * width..(stretch[0] + n) * width);
            self.project(cx, w, of, adapter, logits.rows_mut(n))?;
            let mut tokens = vec![0u32; n];
            if self.words.cut() {
                let mut host = vec![0f32; self.vocab];
                for (i, token) in tokens.iter_mut().enumerate() {
                    let (mine, rest) = next.rows_mut(1).split_at(columns);
                    dev.zero(rest)?;
                    dev.copy(logits.band(&(i..i + 1)), mine)?;
                    self.gather_logits(cx, next, all, bytemuck::cast_slice_mut(&mut host))?;
                    if cx.split.tp.index == 0 {
                        *token = self.chosen(index + i, &mut host, choose);
                    }
                }
            } else if cx.split.tp.index == 0 {
                let from = (logits.rows(n), index);
                match logits.rows(n).dtype() {
                    DType::Bf16 => self.choose_all::<bf16>(dev, from, choose, &mut tokens)?,
                    DType::F16 => self.choose_all::<f16>(dev, from, choose, &mut tokens)?,
                    _ => self.choose_all::<f32>(dev, from, choose, &mut tokens)?,
                }
            }
            if cx.split.tp.of > 1 {
                // Ranks may run on different hardware, and must all continue with the same tokens.
                let (tp, buf) = (&cx.groups.tp, &mut cache.drawn);
                dev.upload(bytemuck::cast_slice(&tokens), buf.rows_mut(n))?;
                let ticket = tp.broadcast(Tag::new("drawn tokens", cx.layer), buf.rows_mut(n), 0)?;
                tp.wait(ticket)?;
                dev.download(buf.rows(n), bytemuck::cast_slice_mut(&mut tokens))?;
                tp.wait_sent(ticket)?;
            }
            dev.upload(bytemuck::cast_slice(&tokens), cache.targets.rows_mut(n))?;
            let (targets, loss) = (cache.targets.rows(n), cache.losses.rows_mut(n));
            let stats = [&mut *part_stats, &mut *all_stats];
            self.cross_entropy(cx, shape, targets, (true, None), logits.rows_mut(n), stats, loss)?;
            let mut losses = vec![0f64; n];
            dev.download(cache.losses.rows(n), bytemuck::cast_slice_mut(&mut losses))?;
            drawn.extend(tokens.into_iter().zip(losses).map(|(token, loss)| (token, -loss as f32)));
            index += n;
        }
        cx.release(h)
    }

    /// The tokens of rows of whole logits, the first of which has the index `first`.
    fn choose_all<T: Float>(
        &self,
        dev: &dyn Device,
        (logits, first): (View, usize),
        choose: Choose,
        tokens: &mut [u32],
    ) -> Result<()> {
        let mut all = vec![T::from_f32(0.0); logits.len()];
        dev.download(logits, bytemuck::cast_slice_mut(&mut all))?;
        let each = tokens.len().div_ceil(dev.host_threads());
        let alone = each == tokens.len();
        std::thread::scope(|threads| {
            for (part, (tokens, rows)) in tokens.chunks_mut(each).zip(all.chunks(each * self.vocab)).enumerate() {
                let mut work = move || {
                    let mut host = vec![0f32; self.vocab];
                    for (i, (token, row)) in tokens.iter_mut().zip(rows.chunks_exact(self.vocab)).enumerate() {
                        host.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_f32());
                        *token = self.chosen(first + part * each + i, &mut host, choose);
                    }
                };
                if alone { work() } else { _ = threads.spawn(work) }
            }
        });
        Ok(())
    }
    fn chosen(&self, index: usize, logits: &mut [f32], choose: Choose) -> u32 {
        let cap = self.logit_cap;
        if cap > 0.0 {
            logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        choose(index, logits)
    }
}
