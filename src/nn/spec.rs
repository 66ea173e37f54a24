//! A model as data: the numbers that decide every shape. Never allocates, never reads files.
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
        if self.heads % self.kv_heads != 0 {
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
        if self.arch == Arch::Llama && self.head_dim % 2 != 0 {
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
}
