//! What blocks keep of their forward pass, and what backward computes again (Chen et al. 2016). Never computes.
//!
//! What keeping an element spares, over documents of T tokens: an output of a matrix product from C inputs 2 C FLOPs,
//! whichever product it is; an output of attention some 2 T, at a lower rate than a product's, and under ring attention
//! a whole turn of the ring. So attention's outputs, C elements of a block's 11 to 12 C, are what is worth keeping
//! first, and of the rest no part is better than another. For LLaMA 3 8B (C 4096) over 8192 tokens, kept elements and
//! FLOPs computed again, a token and block:
//!
//! ```text
//! off        11.5 C       0
//! selective   2   C      19 C^2    the input; attention's outputs
//! full        1   C      23 C^2    the input
//! ```
//!
//! Between two rows: every nth block alone computes again, the others keep all. A straight line, as no part is better
//! than another; from selective to off it lies below that from full to off.
use super::saved::{AttentionSaved, Saved};
use super::spec::Spec;
use super::tensor::{Tensor, table};
use crate::base::Result;

/// Activation checkpointing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checkpointing {
    /// Every block keeps all that its backward pass reads.
    #[default]
    Off,
    /// Its input and what attention made; backward computes the products again.
    Selective,
    /// Its input only.
    Full,
    /// Every block of so many as with [`Checkpointing::Selective`], the others as with [`Checkpointing::Off`].
    SelectiveEvery(usize),
    /// Every block of so many as with [`Checkpointing::Full`], the others as with [`Checkpointing::Off`].
    FullEvery(usize),
}

impl Checkpointing {
    /// One block of how many computes again, if any does; and whether it has attention's outputs.
    fn again(self) -> Option<(usize, bool)> {
        match self {
            Checkpointing::Off => None,
            Checkpointing::Selective => Some((1, true)),
            Checkpointing::Full => Some((1, false)),
            Checkpointing::SelectiveEvery(n) => Some((n, true)),
            Checkpointing::FullEvery(n) => Some((n, false)),
        }
    }
    /// The same of every `n`th block only.
    pub fn every(self, n: usize) -> Checkpointing {
        match (self.again(), n) {
            (None, _) | (_, 1) => self,
            (Some((_, true)), n) => Checkpointing::SelectiveEvery(n),
            (Some((_, false)), n) => Checkpointing::FullEvery(n),
        }
    }
    /// FLOPs of the matrix products that backward computes again, a token: of all such blocks but the last, whose are
    /// still there. Attention is computed again by [`Checkpointing::Full`] alone.
    pub fn products_again(self, spec: &Spec) -> u64 {
        let Some((every, _)) = self.again() else { return 0 };
        let attention = spec.qkv() + spec.heads * spec.head_dim;
        // The last product of a block is read by a norm behind it, or by nothing.
        let feed_forward = spec.ff * (1 + spec.gated() as usize + spec.post_norms as usize);
        (2 * spec.dim * (attention + feed_forward) * (spec.layers / every).saturating_sub(1)) as u64
    }
}

table! {
    /// What attention made of a block, as in [`AttentionSaved`].
    Outputs { o, lse, }
}

/// What is done with each field of a table.
type Each<'a, T> = dyn FnMut(&'static str, &T) -> Result<()> + 'a;

/// What the blocks keep: a [`Saved`] each, or one that those share which compute again. Where they share it
/// selectively, each one's outputs take their place in it while it is the block's.
pub(super) struct SavedBlocks<T = Tensor> {
    /// Those of blocks that keep all; then the shared one, where there is one.
    saved: Vec<Saved<T>>,
    /// One a block that shares, or none.
    outputs: Vec<Outputs<T>>,
    /// Of so many blocks the last shares.
    every: usize,
    /// The block that wrote the shared one last.
    last: Option<usize>,
}

impl<T> SavedBlocks<T> {
    /// `block` and `outputs` say what one block keeps; `outputs` is also given with nothing in it, for the shared one.
    pub fn plan(
        blocks: usize,
        checkpointing: Checkpointing,
        block: impl Fn() -> Saved<T>,
        empty: impl Fn() -> Outputs<T>,
    ) -> SavedBlocks<T> {
        let own = || {
            let Saved { attention: AttentionSaved { o, lse, .. }, .. } = block();
            Outputs { o, lse }
        };
        let shared = |outputs: Outputs<T>| {
            let Saved { attention, mlp } = block();
            Saved { attention: AttentionSaved { o: outputs.o, lse: outputs.lse, ..attention }, mlp }
        };
        let (every, selective) = checkpointing.again().unwrap_or((usize::MAX, false));
        let sharing = blocks / every;
        let one = (sharing > 0).then(|| if selective { shared(empty()) } else { block() });
        SavedBlocks {
            saved: (sharing..blocks).map(|_| block()).chain(one).collect(),
            outputs: (0..if selective { sharing } else { 0 }).map(|_| own()).collect(),
            every,
            last: None,
        }
    }
    pub fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<SavedBlocks<U>> {
        Ok(SavedBlocks {
            saved: self.saved.iter().map(|saved| saved.map(f)).collect::<Result<_>>()?,
            outputs: self.outputs.iter().map(|outputs| outputs.map(f)).collect::<Result<_>>()?,
            every: self.every,
            last: None,
        })
    }
    /// Whether block `i` has nothing for itself, or attention's outputs.
    fn shares(&self, i: usize) -> bool {
        (i + 1).is_multiple_of(self.every)
    }
    /// Where in `saved` that of block `i` is.
    fn place(&self, i: usize) -> usize {
        if self.shares(i) { self.saved.len() - 1 } else { i - i / self.every }
    }
    /// What backward still needs when it has yet to pass 0, 1, ... `blocks` blocks, as `measure` counts it.
    pub fn needed(&self, blocks: usize, measure: fn(&T) -> usize) -> Result<Vec<usize>> {
        let sum = |map: &dyn Fn(&mut Each<T>) -> Result<()>| -> Result<usize> {
            let mut sum = 0;
            map(&mut |_, table| {
                sum += measure(table);
                Ok(())
            })?;
            Ok(sum)
        };
        let saved = self.saved.iter().map(|saved| sum(&|f| saved.map(f).map(|_| ()))).collect::<Result<Vec<_>>>()?;
        let outputs =
            self.outputs.iter().map(|outputs| sum(&|f| outputs.map(f).map(|_| ()))).collect::<Result<Vec<_>>>()?;
        // The shared one from the first block on that has it.
        let own = |i: usize| match self.shares(i) {
            true => outputs.get(i / self.every).unwrap_or(&0) + if i < self.every { saved[self.place(i)] } else { 0 },
            false => saved[self.place(i)],
        };
        let mut needed = vec![0];
        (0..blocks).for_each(|i| needed.push(needed[i] + own(i)));
        Ok(needed)
    }
    /// Whether all that block `i` kept is there: nothing is to be computed again.
    pub fn is_whole(&self, i: usize) -> bool {
        !self.shares(i) || self.last == Some(i)
    }
    /// Whether blocks keep attention's outputs though they share the rest.
    pub fn is_selective(&self) -> bool {
        !self.outputs.is_empty()
    }
    /// What block `i` kept, to be read or written.
    pub fn of(&mut self, i: usize) -> &mut Saved<T> {
        let place = self.place(i);
        if self.shares(i) && self.last != Some(i) {
            self.exchange();
            self.last = Some(i);
            self.exchange();
        }
        &mut self.saved[place]
    }
    /// The outputs of the block that has the shared one: in, or out again.
    fn exchange(&mut self) {
        let outputs = self.last.and_then(|last| self.outputs.get_mut(last / self.every));
        if let (Some(outputs), Some(shared)) = (outputs, self.saved.last_mut()) {
            let AttentionSaved { o, lse, .. } = &mut shared.attention;
            std::mem::swap(o, &mut outputs.o);
            std::mem::swap(lse, &mut outputs.lse);
        }
    }
}
