//! A [`Spec`] as layers: each layer's layout and plan, by family. Never allocates.
use super::arch::Arch;
use super::block::DecoderBlock;
use super::families::{gpt, llama};
use super::layout::Layout;
use super::recurrence::Recurrence;
use super::root::Root;
use super::spec::{Experts, Spec};
use super::split::Split;

impl Spec {
    /// One layout per layer: layer 0 is the root (embeddings, final norm, head); block i is layer i + 1; the experts of
    /// the sparse blocks follow, a layer each.
    pub fn layouts(&self) -> Vec<Layout> {
        self.layers(&Split::NONE).0
    }
    /// This rank's share of all layers, and what is computed with the root and the blocks.
    pub(super) fn layers(&self, split: &Split) -> (Vec<Layout>, Root, Vec<DecoderBlock>) {
        let (root_layout, root) = match self.arch {
            Arch::Gpt => gpt::root(self),
            _ => llama::root(self, split),
        };
        let (mut layouts, mut blocks) = (vec![root_layout], Vec::with_capacity(self.layers));
        for i in 0..self.layers {
            let (layout, block) = match self.arch {
                Arch::Gpt => gpt::block(self, i),
                _ => llama::block(self, split, i),
            };
            layouts.push(layout);
            blocks.push(block);
        }
        let sparse = (0..self.layers).filter(|&i| self.experts_of(i).is_some());
        layouts.extend(sparse.map(|i| llama::experts(self, split, i)));
        (layouts, root, blocks)
    }
    /// The layer of the experts of sparse block `index`, counted among the sparse blocks.
    pub(super) fn experts_layer(&self, index: usize) -> usize {
        1 + self.layers + index
    }
    /// Number of parameters, embeddings included. A tied head counts once.
    pub fn params(&self) -> usize {
        let all = |spec: &Spec| spec.layouts().iter().map(Layout::params).sum::<usize>();
        let Some(experts) = &self.experts else { return all(self) };
        // The experts of a block are alike, so a second one tells what each adds: layouts of all are large.
        let [one, two] =
            [1, 2].map(|count| all(&Spec { experts: Some(Experts { count, ..experts.clone() }), ..self.clone() }));
        one + (experts.count - 1) * (two - one)
    }
    /// Parameters of experts that a token does not use.
    pub fn idle_params(&self) -> usize {
        let matrices = if self.gated() { 3 } else { 2 };
        let idle = |e: &Experts| matrices * self.dim * e.ff * (e.count - e.top_k) * self.sparse_blocks();
        self.experts.as_ref().map_or(0, idle)
    }
    /// FLOPs that a training step needs per token of a sequence of `seq`, without recomputation: the definition of
    /// MosaicML's llm-foundry, attention included, 3 * (2 P + layers * 2 * 2 * width * seq), where a layer with a
    /// sliding window counts its window. MFU is this times tokens per second, divided by the peak.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let seen = |i| if self.window_of(i) == 0 { seq } else { seq.min(self.window) };
        let attends = |i: &usize| self.attends(*i);
        let of_heads = |i| 2 * 2 * self.heads * self.heads_of(i).head_dim * seen(i);
        let attention = (0..self.layers).filter(attends).map(of_heads).sum::<usize>();
        let of_other = |mixer: &Recurrence| match mixer {
            Recurrence::Delta(net) => net.shape.flops(false),
            Recurrence::Conv { .. } => 0, // its filters are parameters
        };
        let others = (0..self.layers).filter_map(|i| self.recurrence_of(i)).map(of_other).sum::<usize>();
        let attention = attention + others;
        // A token reads one row of the table of the layers' inputs.
        let table = self.layer_words * self.layers * self.layer_inputs;
        3 * (2 * (self.params() - self.idle_params() - table) + attention) as u64
    }
}
