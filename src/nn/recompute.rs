//! Activation checkpointing: what blocks save in forward and recompute in backward (Chen et al. 2016). Never computes.
//!
//! FLOPs saved per saved element, over documents of T tokens: an output of a matrix product with C inputs saves 2 C,
//! whichever product it is; an output of attention saves about 2 T, which run at a lower rate, and under ring attention
//! a whole pass around the ring. So attention's outputs, C of a block's 11 to 12 C elements, are worth saving first,
//! and the rest are all equal. For LLaMA 3 8B (C 4096) with 8192 tokens, elements saved and FLOPs recomputed, per token
//! and block:
//!
//! ```text
//! off        11.5 C       0
//! selective   2   C      19 C^2    the input; attention's outputs
//! full        1   C      23 C^2    the input
//! ```
//!
//! To fall between two rows, recompute only every nth block. Since all products are equally worth saving, this
//! interpolates linearly; selective-to-off dominates full-to-off.
use super::core::CoreSaved;
use super::saved::{AttentionSaved, Saved};
use super::spec::{Experts, Spec};
use super::tensor::{Tensor, table};
use crate::base::Result;

/// Activation checkpointing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checkpointing {
    /// Every block saves all that its backward pass reads.
    #[default]
    Off,
    /// Save the block's input and attention's outputs; recompute the products.
    Selective,
    /// Save only the block's input.
    Full,
    /// One block in this many as in [`Checkpointing::Selective`], the others as in [`Checkpointing::Off`].
    SelectiveEvery(usize),
    /// One block in this many as in [`Checkpointing::Full`], the others as in [`Checkpointing::Off`].
    FullEvery(usize),
}

impl Checkpointing {
    /// If blocks recompute: one block in how many, and whether it saves attention's outputs.
    fn again(self) -> Option<(usize, bool)> {
        match self {
            Checkpointing::Off => None,
            Checkpointing::Selective => Some((1, true)),
            Checkpointing::Full => Some((1, false)),
            Checkpointing::SelectiveEvery(n) => Some((n, true)),
            Checkpointing::FullEvery(n) => Some((n, false)),
        }
    }
    /// The same for every `n`th block only.
    pub fn every(self, n: usize) -> Checkpointing {
        match (self.again(), n) {
            (None, _) | (_, 1) => self,
            (Some((_, true)), n) => Checkpointing::SelectiveEvery(n),
            (Some((_, false)), n) => Checkpointing::FullEvery(n),
        }
    }
    /// FLOPs per token of the matrix products that backward recomputes, in all such blocks but the last, whose
    /// activations are still in memory. Only [`Checkpointing::Full`] also recomputes attention.
    pub fn products_again(self, spec: &Spec) -> u64 {
        let Some((every, _)) = self.again() else { return 0 };
        let most = |of: &dyn Fn(&Spec) -> usize| (0..spec.layers).map(|i| of(&spec.of_block(i))).max().unwrap_or(0);
        let attention = most(&|spec| spec.qkv() + spec.heads * spec.head_dim);
        // A block's last product is needed only by a norm after it.
        let of_experts = |e: &Experts| e.top_k * e.ff + e.shared_ff + if e.beside { spec.ff } else { 0 };
        let ff = spec.experts.as_ref().map_or(spec.ff, of_experts);
        let feed_forward = ff * (1 + spec.gated() as usize + spec.norms_experts() as usize);
        (2 * spec.dim * (attention + feed_forward) * (spec.layers / every).saturating_sub(1)) as u64
    }
}

table! {
    /// Attention's outputs in one block, as in [`CoreSaved`].
    pub struct Outputs { o, lse, }
}

/// Called for each field of a table.
type Each<'a, T> = dyn FnMut(&'static str, &T) -> Result<()> + 'a;

/// Saved activations of the blocks: one [`Saved`] per block, or one shared by the blocks that recompute. With selective
/// checkpointing, a block's own attention outputs are swapped into the shared one while the block uses it.
pub(super) struct SavedBlocks<T = Tensor> {
    /// The blocks that save everything have one each; the shared one, if any, is last.
    saved: Vec<Saved<T>>,
    /// One per sharing block, if selective.
    outputs: Vec<Outputs<T>>,
    /// One block in this many (the last) shares.
    every: usize,
    /// The block that last wrote the shared one.
    last: Option<usize>,
}

impl<T> SavedBlocks<T> {
    /// `block` is what a block saves, or with none what all can share; `empty` replaces attention's outputs in that.
    pub fn plan(
        blocks: usize,
        checkpointing: Checkpointing,
        block: impl Fn(Option<usize>) -> Saved<T>,
        empty: impl Fn() -> Outputs<T>,
    ) -> SavedBlocks<T> {
        let own = |i| {
            let CoreSaved { o, lse, .. } = block(Some(i)).attention.core;
            Outputs { o, lse }
        };
        let shared = |outputs: Outputs<T>| {
            let Saved { attention, recurrent, mlp, per_layer } = block(None);
            let core = CoreSaved { o: outputs.o, lse: outputs.lse, ..attention.core };
            Saved { attention: AttentionSaved { core, ..attention }, recurrent, mlp, per_layer }
        };
        let (every, selective) = checkpointing.again().unwrap_or((usize::MAX, false));
        let sharing = blocks / every;
        let one = (sharing > 0).then(|| if selective { shared(empty()) } else { block(None) });
        let shares = |i: &usize| (i + 1).is_multiple_of(every);
        SavedBlocks {
            saved: (0..blocks).filter(|i| !shares(i)).map(|i| block(Some(i))).chain(one).collect(),
            outputs: (0..if selective { blocks } else { 0 }).filter(shares).map(own).collect(),
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
    /// Whether block `i` uses the shared activations.
    fn shares(&self, i: usize) -> bool {
        (i + 1).is_multiple_of(self.every)
    }
    /// Index of block `i` in `saved`.
    fn place(&self, i: usize) -> usize {
        if self.shares(i) { self.saved.len() - 1 } else { i - i / self.every }
    }
    /// What backward still needs with 0, 1, ... `blocks` blocks to go, in the units of `measure`.
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
        // The shared one counts from the first block that uses it.
        let own = |i: usize| match self.shares(i) {
            true => outputs.get(i / self.every).unwrap_or(&0) + if i < self.every { saved[self.place(i)] } else { 0 },
            false => saved[self.place(i)],
        };
        let mut needed = vec![0];
        (0..blocks).for_each(|i| needed.push(needed[i] + own(i)));
        Ok(needed)
    }
    /// Whether everything block `i` saved is in memory, so that nothing is recomputed.
    pub fn is_whole(&self, i: usize) -> bool {
        !self.shares(i) || self.last == Some(i)
    }
    /// Whether sharing blocks save attention's outputs.
    pub fn is_selective(&self) -> bool {
        !self.outputs.is_empty()
    }
    /// The saved activations of block `i`, to read or write.
    pub fn of(&mut self, i: usize) -> &mut Saved<T> {
        let place = self.place(i);
        if self.shares(i) && self.last != Some(i) {
            self.exchange();
            self.last = Some(i);
            self.exchange();
        }
        &mut self.saved[place]
    }
    /// Swaps the outputs of the block that uses the shared one in or out.
    fn exchange(&mut self) {
        let outputs = self.last.and_then(|last| self.outputs.get_mut(last / self.every));
        if let (Some(outputs), Some(shared)) = (outputs, self.saved.last_mut()) {
            let CoreSaved { o, lse, .. } = &mut shared.attention.core;
            std::mem::swap(o, &mut outputs.o);
            std::mem::swap(lse, &mut outputs.lse);
        }
    }
}
