//! A [`Spec`] as layers: the layout of each and the plan that computes it, by family. Never allocates.
use super::block::DecoderBlock;
use super::families::{gpt, llama};
use super::layout::Layout;
use super::root::Root;
use super::spec::{Arch, Spec};
use super::split::Split;

impl Spec {
    /// Layer 0 is the root (embeddings, final norm, head); block i is layer i + 1.
    pub fn layouts(&self) -> Vec<Layout> {
        let (root, blocks) = self.layers(&Split::NONE);
        [root.0].into_iter().chain(blocks.into_iter().map(|block| block.0)).collect()
    }
    /// The root and the blocks, each with its layout: one rank's part of them.
    pub(super) fn layers(&self, split: &Split) -> ((Layout, Root), Vec<(Layout, DecoderBlock)>) {
        let blocks = 0..self.layers;
        match self.arch {
            Arch::Gpt => (gpt::root(self), blocks.map(|i| gpt::block(self, i)).collect()),
            _ => (llama::root(self, split), blocks.map(|i| llama::block(self, split, i)).collect()),
        }
    }
    /// All of them, embeddings included; a tied head counts once.
    pub fn params(&self) -> usize {
        self.layouts().iter().map(Layout::params).sum()
    }
    /// What a training step must compute for a token of a sequence of `seq`, whatever is computed twice: the definition
    /// of MosaicML's llm-foundry, attention included, 3 * (2 P + layers * 2 * 2 * width * seq), where a layer within a
    /// window counts its window. Divided by seconds and by the peak it is the MFU.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let seen = |i| if self.window_of(i) == 0 { seq } else { seq.min(self.window) };
        let attention = 2 * 2 * self.heads * self.head_dim * (0..self.layers).map(seen).sum::<usize>();
        3 * (2 * self.params() + attention) as u64
    }
}
