//! A model as data: the numbers that decide every shape. Never allocates, never reads files.
use super::layout::{Init, Layout};
use super::{gpt, llama};
use crate::base::{Error, Result};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    /// RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases (`LlamaForCausalLM`).
    Llama,
    /// LayerNorm, learned positions, GELU, biases (`GPT2LMHeadModel`).
    Gpt,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    pub arch: Arch,
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ff: usize,
    /// Longest sequence: rows of the position table (gpt) or of the rotation table (llama).
    pub max_len: usize,
    pub rope_theta: f64,
    pub norm_eps: f32,
    /// Head and token embedding are one tensor.
    pub tied: bool,
    /// After the embeddings and after each residual branch. 0 is off.
    pub dropout: f32,
}

impl Spec {
    /// The equations that every shape relies on.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab),
            ("embed_dim", self.dim),
            ("num_layers", self.layers),
            ("num_heads", self.heads),
            ("num_kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ff_hidden_dim", self.ff),
            ("max_len", self.max_len),
        ];
        for (name, value) in sizes {
            if value == 0 {
                return Err(Error::input(format!("{name} is 0: it must be at least 1")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::input(format!(
                "num_heads {} is not a multiple of num_kv_heads {}: each key/value head serves an equal group of query \
                 heads",
                self.heads, self.kv_heads
            )));
        }
        if self.arch == Arch::Gpt && (self.kv_heads != self.heads || self.head_dim * self.heads != self.dim) {
            return Err(Error::input(format!(
                "arch gpt has as many key/value heads as heads and head_dim = embed_dim / num_heads; got embed_dim {}, \
                 num_heads {}, num_kv_heads {}, head_dim {}",
                self.dim, self.heads, self.kv_heads, self.head_dim
            )));
        }
        if self.arch == Arch::Llama && !self.head_dim.is_multiple_of(2) {
            return Err(Error::input(format!("head_dim {} is odd: rotary positions pair its halves", self.head_dim)));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::input(format!("dropout {} is not in [0, 1)", self.dropout)));
        }
        Ok(())
    }
    /// Elements in a row of the fused queries, keys and values.
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// Layer 0 is the root (embeddings, final norm, head); block i is layer i + 1.
    pub fn layouts(&self) -> Vec<Layout> {
        let blocks = 0..self.layers;
        match self.arch {
            Arch::Llama => [llama::root(self).0].into_iter().chain(blocks.map(|i| llama::block(self, i).0)).collect(),
            Arch::Gpt => [gpt::root(self).0].into_iter().chain(blocks.map(|i| gpt::block(self, i).0)).collect(),
        }
    }
    /// All of them, embeddings included; a tied head counts once.
    pub fn params(&self) -> usize {
        self.layouts().iter().map(Layout::params).sum()
    }
    /// What a training step must compute for a token of a sequence of `seq`, whatever is computed twice: the definition
    /// of MosaicML's llm-foundry, attention included, 3 * (2 P + layers * 2 * 2 * width * seq). Divided by seconds and
    /// by the peak it is the MFU.
    pub fn flops_per_token(&self, seq: usize) -> u64 {
        let attention = self.layers * 2 * 2 * self.heads * self.head_dim * seq;
        3 * (2 * self.params() + attention) as u64
    }
    /// How the projections that end a residual branch start: the deviation over the root of their number, two a block
    /// (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3).
    pub(super) fn residual_init(&self) -> Init {
        Init::Normal(DEVIATION / (2.0 * self.layers as f32).sqrt())
    }
}

/// Standard deviation of fresh weights: `initializer_range` of both families' configurations.
const DEVIATION: f32 = 0.02;
pub(super) const NORMAL: Init = Init::Normal(DEVIATION);
pub(super) const ONES: Init = Init::Constant(1.0);
pub(super) const ZEROS: Init = Init::Constant(0.0);
