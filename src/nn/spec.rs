//! A model as data: the numbers that decide every shape, and what a family does that another does not. Never allocates,
//! never reads files.
use super::rotary::Rotary;
use crate::base::{Error, Result};

/// Whose names the tensors and the configuration bear. What a family computes is in the other fields of a [`Spec`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Arch {
    /// RMSNorm, rotary positions, grouped-query attention, a gated feed-forward layer (`LlamaForCausalLM`).
    #[default]
    Llama,
    /// Llama within a window.
    Mistral,
    /// Llama with biases of queries, keys and values.
    Qwen2,
    /// Llama with norms of queries and keys.
    Qwen3,
    /// Softcaps, norms behind the branches too, every other layer within a window.
    Gemma2,
    /// Norms of queries and keys, norms behind the branches too, most layers within a window and with a base of their
    /// own.
    Gemma3,
    /// LayerNorm, learned positions, GELU, biases (`GPT2LMHeadModel`).
    Gpt,
}

impl Arch {
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Mistral => "mistral",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::Gemma2 => "gemma2",
            Arch::Gemma3 => "gemma3",
            Arch::Gpt => "gpt",
        }
    }
}

/// Between the two matrices of a feed-forward layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Activation {
    /// silu(gate) * up
    #[default]
    SwiGlu,
    /// gelu(gate) * up
    GeGlu,
    /// gelu(up)
    Gelu,
}

/// The numbers of a model. [`Spec::default`] is a Llama without sizes.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    pub arch: Arch,
    /// Token ids are below this.
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads of a block.
    pub heads: usize,
    /// Key and value heads of a block; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even with rotary positions.
    pub head_dim: usize,
    /// Width inside the feed-forward layer.
    pub ff: usize,
    /// Longest sequence: rows of the position table (gpt) or of the rotation tables.
    pub max_len: usize,
    pub norm_eps: f32,
    /// Head and token embedding are one tensor.
    pub tied: bool,
    /// After the embeddings and after each residual branch. 0 is off.
    pub dropout: f32,

    pub activation: Activation,
    /// Rotary positions; none with learned ones (gpt).
    pub rope: Option<Rotary>,
    /// Of the layers within the window, where theirs are others.
    pub local_rope: Option<Rotary>,
    /// Tokens that a layer of `windowed` sees, itself included.
    pub window: usize,
    /// Which layers see their window only: one a layer, or none at all.
    pub windowed: Vec<bool>,
    /// Scores are divided by the root of this; `head_dim` where it is none.
    pub query_scalar: Option<f64>,
    /// Bounds of scores and of logits: cap * tanh(x / cap). 0: none.
    pub score_cap: f32,
    pub logit_cap: f32,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// Of the projection that ends the attention branch.
    pub out_bias: bool,
    /// Of the feed-forward layer.
    pub mlp_bias: bool,
    /// Each query and key head is normalised before it is rotated.
    pub qk_norm: bool,
    /// What a branch adds to the residual is normalised too.
    pub post_norms: bool,
    /// Norms keep their weights as the difference from 1.
    pub norm_from_one: bool,
    /// Token embeddings are multiplied by the root of `dim`.
    pub scaled_embedding: bool,
}

/// A Llama without sizes: what its descendants start from.
impl Default for Spec {
    fn default() -> Spec {
        Spec {
            arch: Arch::Llama,
            vocab: 0,
            dim: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            ff: 0,
            max_len: 0,
            norm_eps: 1e-5,
            tied: false,
            dropout: 0.0,
            activation: Activation::SwiGlu,
            rope: Some(Rotary::new(10_000.0)),
            local_rope: None,
            window: 0,
            windowed: Vec::new(),
            query_scalar: None,
            score_cap: 0.0,
            logit_cap: 0.0,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            qk_norm: false,
            post_norms: false,
            norm_from_one: false,
            scaled_embedding: false,
        }
    }
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
        let gpt = self.arch == Arch::Gpt;
        if gpt && (self.kv_heads != self.heads || self.head_dim * self.heads != self.dim) {
            return Err(Error::input(format!(
                "arch gpt has as many key/value heads as heads and head_dim = embed_dim / num_heads; got embed_dim {}, \
                 num_heads {}, num_kv_heads {}, head_dim {}",
                self.dim, self.heads, self.kv_heads, self.head_dim
            )));
        }
        if gpt != self.rope.is_none() || gpt != (self.activation == Activation::Gelu) {
            return Err(Error::input(format!(
                "arch {} with rotary positions {} and {:?}: gpt has learned positions and GELU, the others have rotary \
                 positions and a gate",
                self.arch.name(),
                self.rope.is_some(),
                self.activation
            )));
        }
        if self.rope.is_some() && !self.head_dim.is_multiple_of(2) {
            return Err(Error::input(format!("head_dim {} is odd: rotary positions pair its halves", self.head_dim)));
        }
        if !self.windowed.is_empty() && (self.windowed.len() != self.layers || self.window == 0) {
            return Err(Error::input(format!(
                "sliding windows of {} tokens are given for {} layers of {}: each layer needs to know, and a window holds \
                 at least 1 token",
                self.window,
                self.windowed.len(),
                self.layers
            )));
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
    pub fn gated(&self) -> bool {
        self.activation != Activation::Gelu
    }
    /// Tokens that block `i` sees, 0 where it sees all.
    pub fn window_of(&self, i: usize) -> usize {
        if self.windowed.get(i) == Some(&true) { self.window } else { 0 }
    }
    /// Whether block `i` turns by `local_rope`.
    pub fn uses_local_rope(&self, i: usize) -> bool {
        self.local_rope.is_some() && self.window_of(i) > 0
    }
}
