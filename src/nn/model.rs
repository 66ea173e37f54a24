//! A [`Spec`] as layers: each layer's layout and plan, by family. Never allocates.
use super::block::DecoderBlock;
use super::families::{gpt, llama};
use super::layout::Layout;
use super::root::Root;
use super::spec::{Arch, Spec};
use super::split::Split;

impl Spec {
    /// One layout per layer: layer 0 is the root (embeddings, final norm, head); block i is layer i + 1.
    pub fn layouts(&self) -> Vec<Layout> {
        let (root, blocks) = self.layers(&Split::NONE);
        [root.0].into_iter().chain(blocks.into_iter().map(|block| block.0)).collect()
    }
    /// This rank's share of the root and the blocks, each with its layout.
    pub(super) fn layers(&self, split: &Split) -> ((Layout, Root), Vec<(Layout, DecoderBlock)>) {
        let blocks = 0..self.layers;
        match self.arch {
            Arch::Gpt => (gpt::root(self), blocks.map(|i| gpt::block(self, i)).collect()),
            _ => (llama::root(self, split), blocks.map(|i| llama::block(self, split, i)).collect()),
        }
    }
    /// Number of parameters, embeddings included. A tied head counts once.
    pub fn params(&self) -> usize {
        self.layouts().iter().map(Layout::params).sum()
    }
    /// Parameters of experts that a token does not use.
    pub fn idle_params(&self) -> usize {
        let idle = |e: &super::spec::Experts| 3 * self.dim * e.ff * (e.count - e.top_k) * self.sparse_blocks();
        self.experts.as_ref().map_or(0, idle)
    }
    /// FLOPs that a training step needs per token of a sequence of `seq`, without recomputation: the definition of
    /// MosaicML's llm-foundry, attention included, 3 * (2 P + layers * 2 * 2 * width * seq), where a layer with a
    /// sliding window counts its window. MFU is this times tokens per second, divided by the peak.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let seen = |i| if self.window_of(i) == 0 { seq } else { seq.min(self.window) };
        let attention = 2 * 2 * self.heads * self.head_dim * (0..self.layers).map(seen).sum::<usize>();
        3 * (2 * (self.params() - self.idle_params()) + attention) as u64
    }
}
