//! A model as data: the numbers that determine every shape, and the features in which families differ. Never allocates,
//! never reads files.
use super::rotary::Rotary;
use crate::base::{Error, Result};

/// The family whose tensor names and config format are used. What it computes is in the other fields of a [`Spec`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Arch {
    /// RMSNorm, rotary positions, grouped-query attention, a gated feed-forward layer (`LlamaForCausalLM`).
    #[default]
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Llama with biases on queries, keys and values.
    Qwen2,
    /// Llama with norms on queries and keys.
    Qwen3,
    /// Mistral with experts.
    Mixtral,
    /// Qwen2 with experts, one of them shared.
    Qwen2Moe,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Llama with experts, and norms over all queries and over all keys.
    Olmoe,
    /// Softcaps, norms after the branches too, a sliding window in every other layer.
    Gemma2,
    /// Norms on queries and keys, norms after the branches too, a sliding window with its own rotary base in most
    /// layers.
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
            Arch::Mixtral => "mixtral",
            Arch::Qwen2Moe => "qwen2_moe",
            Arch::Qwen3Moe => "qwen3_moe",
            Arch::Olmoe => "olmoe",
            Arch::Gemma2 => "gemma2",
            Arch::Gemma3 => "gemma3",
            Arch::Gpt => "gpt",
        }
    }
}

/// The activation of the feed-forward layer.
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

/// The experts of sparse blocks.
#[derive(Clone, PartialEq, Debug)]
pub struct Experts {
    /// Experts per block.
    pub count: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Hidden width of an expert.
    pub ff: usize,
    /// Hidden width of the expert that every token uses; 0 without one.
    pub shared_ff: usize,
    /// A token's weights are divided by their sum.
    pub normalize: bool,
    /// Blocks with a dense feed-forward layer, in order.
    pub dense: Vec<usize>,
    /// Factor of the load-balancing loss in the model's config.
    pub aux_coef: f64,
    /// Whether the config asks for that loss.
    pub aux_loss: bool,
}

/// The hyperparameters of a model. [`Spec::default`] is a Llama without sizes.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    pub arch: Arch,
    /// Number of token ids.
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads per block.
    pub heads: usize,
    /// Key/value heads per block; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; must be even with rotary positions.
    pub head_dim: usize,
    /// Hidden width of the feed-forward layer.
    pub ff: usize,
    /// Longest sequence: rows of the position table (gpt) or the rotation tables.
    pub max_len: usize,
    pub norm_eps: f32,
    /// Whether the head and the token embedding are one tensor.
    pub tied: bool,
    /// The head is a score, one number per token, in place of logits (`...ForSequenceClassification` with one label).
    pub score: bool,
    /// Dropout probability after the embeddings and after each residual branch; 0 is off.
    pub dropout: f32,

    pub activation: Activation,
    /// Rotary positions; none if positions are learned (gpt).
    pub rope: Option<Rotary>,
    /// Rotary positions of layers with a sliding window, if they differ.
    pub local_rope: Option<Rotary>,
    /// Sliding window in tokens, the current one included.
    pub window: usize,
    /// Whether each layer has a sliding window; empty if none has.
    pub windowed: Vec<bool>,
    /// Scores are divided by the square root of this; if none, of `head_dim`.
    pub query_scalar: Option<f64>,
    /// Softcaps of scores and logits: cap * tanh(x / cap). 0 is off.
    pub score_cap: f32,
    pub logit_cap: f32,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// Bias of the projection that ends the attention branch.
    pub out_bias: bool,
    /// Biases of the feed-forward layer.
    pub mlp_bias: bool,
    /// Normalize each query and key head before rotation.
    pub qk_norm: bool,
    /// Normalize all queries of a token together before rotation, and all its keys.
    pub row_norm: bool,
    /// Experts, if some blocks are sparse.
    pub experts: Option<Experts>,
    /// Normalize a branch's output before adding it to the residual.
    pub post_norms: bool,
    /// Norm weights are stored minus 1.
    pub norm_from_one: bool,
    /// Multiply token embeddings by the square root of `dim`.
    pub scaled_embedding: bool,
}

/// A Llama without sizes, the base of its descendants.
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
            score: false,
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
            row_norm: false,
            experts: None,
            post_norms: false,
            norm_from_one: false,
            scaled_embedding: false,
        }
    }
}

impl Spec {
    /// Checks the relations that every shape relies on.
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
                "arch gpt needs num_kv_heads = num_heads and head_dim = embed_dim / num_heads; got embed_dim {}, \
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
        if let Some(Experts { count, top_k, ff, .. }) = self.experts
            && (top_k == 0 || top_k > count || ff == 0)
        {
            return Err(Error::input(format!(
                "num_experts_per_tok {top_k} of {count} experts of width {ff}: a token needs 1 to {count} experts, of \
                 width 1 or more"
            )));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::input(format!("dropout {} is not in [0, 1)", self.dropout)));
        }
        Ok(())
    }
    /// Outputs of the head per token.
    pub fn outputs(&self) -> usize {
        if self.score { 1 } else { self.vocab }
    }
    /// Elements in a row of fused queries, keys and values.
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// The experts of block `i`, if it is sparse.
    pub fn experts_of(&self, i: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| !experts.dense.contains(&i))
    }
    /// Number of sparse blocks.
    pub fn sparse_blocks(&self) -> usize {
        (0..self.layers).filter(|&i| self.experts_of(i).is_some()).count()
    }
    /// Whether some block is dense.
    pub fn has_dense_blocks(&self) -> bool {
        self.sparse_blocks() < self.layers
    }
    pub fn gated(&self) -> bool {
        self.activation != Activation::Gelu
    }
    /// Tokens that block `i` attends to; 0 means all.
    pub fn window_of(&self, i: usize) -> usize {
        if self.windowed.get(i) == Some(&true) { self.window } else { 0 }
    }
    /// Whether block `i` rotates with `local_rope`.
    pub fn uses_local_rope(&self, i: usize) -> bool {
        self.local_rope.is_some() && self.window_of(i) > 0
    }
}
