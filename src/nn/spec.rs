//! A model as data: the numbers that determine every shape, and the features in which families differ. Never allocates,
//! never reads files.
use super::arch::Arch;
use super::recurrence::Recurrence;
use super::rotary::{QueryGrowth, Rotary};
use crate::device::ops::{GluClamp, RotaryPairs, RouteRule};

/// The activation of the feed-forward layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Activation {
    /// silu(gate) * up
    #[default]
    SwiGlu,
    /// gelu(gate) * up
    GeGlu,
    /// gelu(up), the tanh form
    Gelu,
    /// gelu(up), exact
    GeluExact,
    /// max(up, 0)
    Relu,
    /// max(up, 0)^2
    ReluSquared,
    /// A curve of two learned numbers per block.
    Xielu,
}

/// Norms of parts of a token's queries and keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowNorm {
    /// RMSNorm of all queries together, and of all keys.
    All,
    /// LayerNorm of each head, with one weight and one bias for all queries, and for all keys.
    Heads,
    /// LayerNorm of each head with a weight of its own. Files have one tensor of all queries' weights, and one of all
    /// keys', or with `apart` a tensor for each head.
    EachHead { apart: bool },
}

/// Sizes of attention's heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadSizes {
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Sizes of latent attention.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Latent {
    /// Width of the queries' latent; 0: they come from the model's width.
    pub q_rank: usize,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head's query and key that are not rotated, and that are.
    pub nope: usize,
    pub rope: usize,
    /// Elements of a head's value.
    pub value: usize,
}

impl Latent {
    /// Elements of a head in attention: of a query or of a value, the wider one.
    pub fn head_dim(&self) -> usize {
        (self.nope + self.rope).max(self.value)
    }
}

/// The experts of sparse blocks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Experts {
    /// Experts per block.
    pub count: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Hidden width of an expert.
    pub ff: usize,
    /// Hidden width of the expert that every token uses; 0 without one.
    pub shared_ff: usize,
    /// The output is the mean of that expert's and that of the others together, in place of their sum.
    pub averaged: bool,
    /// A token's weights are divided by their sum.
    pub normalize: bool,
    /// Blocks with a dense feed-forward layer, in order.
    pub dense: Vec<usize>,
    /// Factor of the load-balancing loss in the model's config.
    pub aux_coef: f64,
    /// Whether the config asks for that loss.
    pub aux_loss: bool,
    /// Files have one tensor with the matrices of all experts, of transposed gates and ups that alternate, and experts
    /// and the router have biases; the activation is clamped.
    pub clamp: Option<GluClamp>,
    /// How experts are chosen if not by their probabilities; then the shared expert has no gate.
    pub rule: Option<RouteRule>,
    /// A dense feed-forward layer is side by side with them, with norms of the inputs and outputs of both, and of their
    /// sum; the activation is the model's.
    pub beside: bool,
    /// A token's only weight multiplies what its expert reads, and not what it gives.
    pub weighs_inputs: bool,
}

/// Factors within blocks, in the order of computation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BlockFactors {
    /// The factor of scores, besides the usual one.
    pub scores: f32,
    /// The factors of the outputs of attention and of the other mixer.
    pub attention: f32,
    pub other: f32,
    /// The factors of the feed-forward layer's gate, and of its output.
    pub gate: f32,
    pub mlp: f32,
}

impl BlockFactors {
    pub const NONE: BlockFactors = BlockFactors { scores: 1.0, attention: 1.0, other: 1.0, gate: 1.0, mlp: 1.0 };
}

/// One of a block's two branches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Branch {
    Mixer,
    FeedForward,
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
    /// The heads of layers without a sliding window, if they differ.
    pub global_heads: Option<HeadSizes>,
    /// Hidden width of the feed-forward layer.
    pub ff: usize,
    /// Longest sequence: rows of the table of learned positions, or of the rotation tables.
    pub max_len: usize,
    /// The positions that files say the model has, if these are more: only sequences of `max_len` are supported.
    pub beyond: Option<usize>,
    pub norm_eps: f32,
    /// Whether the head and the token embedding are one tensor.
    pub tied: bool,
    /// The head is a score, one number per token, in place of logits (`...ForSequenceClassification` with one label).
    pub score: bool,
    /// Dropout probability after the embeddings and after each residual branch; 0 is off.
    pub dropout: f32,

    pub activation: Activation,
    /// Rotary positions; none if positions are learned.
    pub rope: Option<Rotary>,
    /// Rows of the table of learned positions before that of position 0.
    pub first_position: usize,
    /// Rotary positions of layers with a sliding window, if they differ.
    pub local_rope: Option<Rotary>,
    /// Elements of a head that are rotated, the first ones; none: all.
    pub rotary_dim: Option<usize>,
    /// Which of them rotate together.
    pub rotary_pairs: RotaryPairs,
    /// Rotations go in the opposite direction.
    pub turns_back: bool,
    /// Whether each layer has rotary positions; empty if all have.
    pub rotated: Vec<bool>,
    /// Growth of queries with their position, without norms on queries or a second rotation.
    pub query_growth: Option<QueryGrowth>,
    /// Sliding window in tokens, the current one included.
    pub window: usize,
    /// Whether each layer has a sliding window; empty if none has.
    pub windowed: Vec<bool>,
    /// Scores are divided by the square root of this; if none, of `head_dim`.
    pub query_scalar: Option<f64>,
    /// Scores are multiplied by this instead.
    pub score_scale: Option<f64>,
    /// Softcaps of scores and logits: cap * tanh(x / cap). 0 is off.
    pub score_cap: f32,
    pub logit_cap: f32,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// Bias of the projection that ends the attention branch.
    pub out_bias: bool,
    /// Biases of the feed-forward layer.
    pub mlp_bias: bool,
    /// Bias of the head.
    pub head_bias: bool,
    /// Normalize each query and key head before rotation.
    pub qk_norm: bool,
    /// The same after rotation, with `qk_norm`.
    pub norm_after_rope: bool,
    /// Such norms have no weights, and layers without rotary positions have no such norms.
    pub bare_head_norms: bool,
    /// Normalize queries and keys in another way before rotation.
    pub row_norm: Option<RowNorm>,
    /// Limit magnitudes of queries, keys and values before rotation.
    pub qkv_clip: Option<f32>,
    /// Normalize each value head, without a weight; with `qk_norm`.
    pub value_norm: bool,
    /// In layers without a window, values are the projected keys.
    pub keys_are_values: bool,
    /// So many of the last layers use keys and values of the last one before them that sees as many tokens.
    pub shared_kv: usize,
    /// The feed-forward layer of those is twice as wide.
    pub wide_shared: bool,
    /// Elements of an input that each layer gets from a token besides the residual stream; 0: none. And the rows of the
    /// table that they come from.
    pub layer_inputs: usize,
    pub layer_words: usize,
    /// A layer's output is multiplied by a number of its own, which is not trained.
    pub layer_scalar: bool,
    /// What some blocks have in place of attention.
    pub recurrence: Option<Recurrence>,
    /// Whether each layer has it; empty if none has.
    pub recurrent: Vec<bool>,
    /// These layers have attention too: both read one norm's output, and are added to the residual.
    pub side_by_side: bool,
    /// The only branch of each block; empty if all have both.
    pub single: Vec<Branch>,
    /// Attention's outputs are multiplied by sigmoid(gate); the projection to a head's queries also gives its gate.
    pub output_gate: bool,
    /// With `output_gate`, a projection of its own gives the gate.
    pub gate_apart: bool,
    /// With `gate_apart`, a head has one gate.
    pub gate_by_heads: bool,
    /// Experts, if some blocks are sparse.
    pub experts: Option<Experts>,
    /// Normalize a branch's input; blocks without attention always do.
    pub pre_norms: bool,
    /// Normalize a branch's output before adding it to the residual; blocks without attention never do.
    pub post_norms: bool,
    /// Normalize the experts' output before adding it to the residual, and no other branch's.
    pub expert_norms: bool,
    /// Both branches read the block's input, through one norm.
    pub parallel: bool,
    /// With `parallel`, through a norm of each.
    pub own_norms: bool,
    /// LayerNorm instead of RMSNorm, and whether it has biases.
    pub layer_norm: bool,
    pub norm_bias: bool,
    /// Or has neither weights nor biases.
    pub bare_norms: bool,
    /// Norm weights are stored minus 1.
    pub norm_from_one: bool,
    /// Queries, keys and values come from latents.
    pub latent: Option<Latent>,
    /// Each head has a sink: a score without a key or a value.
    pub sinks: bool,
    /// Queries, keys and values come from one matrix.
    pub fused_qkv: bool,
    /// It goes by key/value heads: the queries that share one, its key and its value.
    pub qkv_by_heads: bool,
    /// Or by so many blocks: of each, the queries, the values and the keys.
    pub qkv_blocks: Option<usize>,
    /// Gate and up come from one matrix.
    pub fused_gate_up: bool,
    /// Multiply token embeddings by the square root of `dim`.
    pub scaled_embedding: bool,
    /// Normalize token embeddings, without weights.
    pub embed_norm: bool,
    /// Factors of token embeddings, of a branch's output and of logits.
    pub embed_multiplier: f32,
    pub residual_multiplier: f32,
    pub logit_scale: f32,
    pub block_factors: BlockFactors,
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
            global_heads: None,
            ff: 0,
            max_len: 0,
            beyond: None,
            norm_eps: 1e-5,
            tied: false,
            score: false,
            dropout: 0.0,
            activation: Activation::SwiGlu,
            rope: Some(Rotary::new(10_000.0)),
            first_position: 0,
            local_rope: None,
            rotary_dim: None,
            rotary_pairs: RotaryPairs::Halves,
            turns_back: false,
            rotated: Vec::new(),
            query_growth: None,
            window: 0,
            windowed: Vec::new(),
            query_scalar: None,
            score_scale: None,
            score_cap: 0.0,
            logit_cap: 0.0,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            head_bias: false,
            qk_norm: false,
            norm_after_rope: false,
            bare_head_norms: false,
            row_norm: None,
            qkv_clip: None,
            value_norm: false,
            keys_are_values: false,
            shared_kv: 0,
            wide_shared: false,
            layer_inputs: 0,
            layer_words: 0,
            layer_scalar: false,
            recurrence: None,
            recurrent: Vec::new(),
            side_by_side: false,
            single: Vec::new(),
            output_gate: false,
            gate_apart: false,
            gate_by_heads: false,
            experts: None,
            pre_norms: true,
            post_norms: false,
            parallel: false,
            own_norms: false,
            expert_norms: false,
            layer_norm: false,
            norm_bias: false,
            bare_norms: false,
            norm_from_one: false,
            latent: None,
            sinks: false,
            fused_qkv: false,
            qkv_by_heads: false,
            qkv_blocks: None,
            fused_gate_up: false,
            scaled_embedding: false,
            embed_norm: false,
            embed_multiplier: 1.0,
            residual_multiplier: 1.0,
            logit_scale: 1.0,
            block_factors: BlockFactors::NONE,
        }
    }
}
