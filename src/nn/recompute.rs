//! What blocks keep of their forward pass, and what backward computes again (Chen et al. 2016). Never computes.
//!
//! What keeping an element spares, over documents of T tokens: an output of a matrix product from C inputs 2 C FLOPs, whichever
//! product it is; an output of attention some 2 T, at a lower rate than a product's, and under ring attention a whole turn of the
//! ring. So attention's outputs, C elements of a block's 11 to 12 C, are what is worth keeping first, and of the rest no part is
//! better than another. For LLaMA 3 8B (C 4096) over 8192 tokens, kept elements and FLOPs computed again, a token and block:
//!
//! ```text
//! off        11.5 C       0
//! selective   2   C      19 C^2    the input; attention's outputs
//! full        1   C      23 C^2    the input
//! ```
use super::spec::Spec;
use super::workspace::{AttentionSaved, Saved, Tensor, table};
use crate::base::Result;

/// Activation checkpointing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checkpointing {
    /// Every block keeps all that its backward pass reads.
    Off,
    /// Its input and what attention made; backward computes the products again.
    Selective,
    /// Its input only.
    Full,
}

impl Checkpointing {
    /// FLOPs of the matrix products that backward computes again, a token: of all blocks but the last, whose are still there.
    /// Attention is computed again by [`Checkpointing::Full`] alone.
    pub fn products_again(self, spec: &Spec) -> u64 {
        if self == Checkpointing::Off {
            return 0;
        }
        let attention = spec.qkv() + spec.heads * spec.head_dim;
        // The last product of a block is read by a norm behind it, or by nothing.
        let feed_forward = spec.ff * (1 + spec.gated() as usize + spec.post_norms as usize);
        (2 * spec.dim * (attention + feed_forward) * (spec.layers - 1)) as u64
    }
}

table! {
    /// What attention made of a block, as in [`AttentionSaved`].
    Outputs { o, lse, }
}

/// What is done with each field of a table.
type Each<'a, T> = dyn FnMut(&'static str, &T) -> Result<()> + 'a;

/// What the blocks keep: a [`Saved`] each, or one that they share. Where they share it selectively, each block's outputs take
/// their place in it while it is the block's.
pub(super) struct SavedBlocks<T = Tensor> {
    saved: Vec<Saved<T>>,
    /// One a block, or none.
    outputs: Vec<Outputs<T>>,
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
        match checkpointing {
            Checkpointing::Off => {
                SavedBlocks { saved: (0..blocks).map(|_| block()).collect(), outputs: vec![], last: None }
            }
            Checkpointing::Full => SavedBlocks { saved: vec![block()], outputs: vec![], last: None },
            Checkpointing::Selective => {
                SavedBlocks { saved: vec![shared(empty())], outputs: (0..blocks).map(|_| own()).collect(), last: None }
            }
        }
    }
    pub fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<SavedBlocks<U>> {
        Ok(SavedBlocks {
            saved: self.saved.iter().map(|saved| saved.map(f)).collect::<Result<_>>()?,
            outputs: self.outputs.iter().map(|outputs| outputs.map(f)).collect::<Result<_>>()?,
            last: None,
        })
    }
    /// What each block keeps for itself, and what they share, as `measure` counts it.
    pub fn measured(&self, measure: fn(&T) -> usize) -> Result<(Vec<usize>, usize)> {
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
        Ok(match saved[..] {
            [shared] => (outputs, shared),
            _ => (saved, 0),
        })
    }
    /// Whether all that block `i` kept is there: nothing is to be computed again.
    pub fn is_whole(&self, i: usize) -> bool {
        self.saved.len() > 1 || self.last == Some(i)
    }
    /// Whether blocks keep attention's outputs though they share the rest.
    pub fn is_selective(&self) -> bool {
        !self.outputs.is_empty()
    }
    /// What block `i` kept, to be read or written.
    pub fn of(&mut self, i: usize) -> &mut Saved<T> {
        let place = i % self.saved.len();
        if self.saved.len() == 1 && self.last != Some(i) {
            self.exchange();
            self.last = Some(i);
            self.exchange();
        }
        &mut self.saved[place]
    }
    /// The outputs of the block that has the shared one: in, or out again.
    fn exchange(&mut self) {
        if let Some(outputs) = self.last.and_then(|last| self.outputs.get_mut(last)) {
            let AttentionSaved { o, lse, .. } = &mut self.saved[0].attention;
            std::mem::swap(o, &mut outputs.o);
            std::mem::swap(lse, &mut outputs.lse);
        }
    }
}
