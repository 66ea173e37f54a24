//! A model as data: the numbers that determine every shape, and the features in which families differ. Never allocates,
//! never reads files.
use super::rotary::{QueryGrowth, Rotary};
use crate::device::ops::{DeltaShape, GluClamp, RotaryPairs, RouteRule, StateRule};

/// The family whose tensor names and config format are used. What it computes is in the other fields of a [`Spec`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Arch {
    /// RMSNorm, rotary positions, grouped-query attention, a gated feed-forward layer (`LlamaForCausalLM`).
    #[default]
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Mistral with a sliding window in some layers.
    Ministral,
    /// Mistral with queries that grow with their position.
    Ministral3,
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
    /// Gemma 3 with wider heads in layers without a window, norms on values, and a factor of each layer's output; maybe
    /// with experts next to the feed-forward layer.
    Gemma4,
    /// Llama without rotary positions in every fourth layer.
    SmolLm3,
    /// Llama with norms after the branches only, and over all queries and over all keys.
    Olmo2,
    /// OLMo 2 with a sliding window in most layers.
    Olmo3,
    /// Llama with factors of embeddings, scores, branches and logits.
    Granite,
    /// Llama with biases on queries, keys and values.
    SeedOss,
    /// Llama with norms on queries and keys after their rotation.
    HunyuanDense,
    /// Norms after the branches only and on queries and keys; no rotary positions in layers without a window.
    Exaone4,
    /// Llama with one matrix for queries, keys and values, one for gate and up, and rotary positions in part of a head.
    Phi3,
    /// Llama with one matrix for gate and up, and adjacent rotary pairs in part of a head.
    Glm,
    /// GLM with norms after the branches too.
    Glm4,
    /// Llama with adjacent rotary pairs.
    Ernie45,
    /// Parallel branches after one LayerNorm, adjacent rotary pairs, none in layers without a window.
    Cohere2,
    /// Cohere 2 with experts in place of the MLP; the first layers may be dense, and rotate without a window.
    Cohere2Moe,
    /// LayerNorm, GELU, biases, rotary positions.
    Starcoder2,
    /// Attention sinks, biases everywhere, a sliding window in every other layer, experts with a clamped activation.
    GptOss,
    /// Latent attention, experts in groups, a shared one, the first layers dense.
    DeepseekV2,
    /// DeepSeek V2 with scores of experts that are sigmoids, and a bias in their choice.
    DeepseekV3,
    /// DeepSeek V3 without groups.
    Glm4MoeLite,
    /// GLM with the experts of DeepSeek V3.
    Glm4Moe,
    /// Qwen3 with the experts of DeepSeek V3.
    Dots1,
    /// Gemma 2 without softcaps, windows and norms after the branches.
    Gemma,
    /// Cohere 2 with rotary positions and without windows.
    Cohere,
    /// Llama with adjacent rotary pairs.
    Helium,
    /// LayerNorm, rotary positions in part of a head; the branches may be parallel.
    StableLm,
    /// Llama with a sliding window in most layers.
    Cwm,
    /// Granite with norms after the branches too.
    HyperClovaX,
    /// Granite with one matrix for gate and up; maybe with Mamba layers, and with experts and a shared one.
    GraniteHybrid,
    /// Granite with experts, which files keep in one tensor for each block.
    GraniteMoe,
    /// The same with a shared expert.
    GraniteMoeShared,
    /// Latent attention, without experts.
    Youtu,
    /// Latent attention, factors of embeddings, branches and logits.
    MiniCpm3,
    /// ERNIE 4.5 with experts, and a bias in their choice.
    Ernie45Moe,
    /// Hunyuan with experts, and a shared one without a gate.
    HunyuanMoe,
    /// Mixtral with sigmoid scores of experts, a bias in their choice, and norms over all queries and all keys.
    MiniMaxM2,
    /// Llama with the experts of DeepSeek V3.
    SolarOpen,
    /// Qwen3 with experts, which files keep in one tensor for each block.
    Qwen3VlMoe,
    /// Gated delta nets in most layers, attention with an output gate in the others, experts.
    Qwen3Next,
    /// Gated delta nets in most layers, attention with an output gate in the others.
    Qwen35,
    /// Qwen3.5 with experts.
    Qwen35Moe,
    /// Gemma 2 without norms after the branches.
    VaultGemma,
    /// EXAONE 4 with norms before the branches instead, and the experts of DeepSeek V3.
    ExaoneMoe,
    /// Qwen3 with experts, and a sliding window with its own rotary base in some layers.
    Mellum,
    /// OLMo 3 without windows, with gated delta nets in most layers.
    OlmoHybrid,
    /// Short convolutions in most layers, attention with norms on queries and keys in the others.
    Lfm2,
    /// LFM 2 with experts.
    Lfm2Moe,
    /// LFM 3.
    Lfm3,
    /// Llama with a feed-forward layer of two matrices and squared ReLU.
    Arcee,
    /// The same with LayerNorm and biases.
    Jais2,
    /// Jais 2 with norms whose weights are stored minus 1, and rotary positions in part of a head.
    Nemotron,
    /// Qwen3 with a feed-forward layer of two matrices and xIELU.
    Apertus,
    /// Blocks of one branch each: Mamba, attention, two matrices with squared ReLU, or experts of such.
    NemotronH,
    /// Llama with LayerNorm without weights.
    Olmo,
    /// Granite with attention sinks, a sliding window in most layers and a rotary base of each layer.
    GraniteSwa,
    /// Norms without weights, of token embeddings and heads too, squared ReLU, opposite rotations.
    NanoChat,
    /// OLMo 2 with the experts of OLMoE.
    FlexOlmo,
    /// Qwen3 with windows, norms after the branches too, gates of attention's outputs and the experts of DeepSeek V3.
    Afmoe,
    /// Phi with adjacent rotary pairs, and without biases in attention.
    GptJ,
    /// Attention and Mamba 2 as in Granite 4, without its factors.
    Bamba,
    /// Both in each block, and factors of what their matrices give.
    FalconH1,
    /// LayerNorm, parallel branches, rotary positions in part of a head, GELU, biases, also of the head.
    Phi,
    /// LayerNorm, learned positions of which the first two are reserved, ReLU, biases.
    Opt,
    /// OPT with scaled embeddings and exact GELU.
    BioGpt,
    /// Falcon with learned positions.
    GptBigCode,
    /// Learned positions, scores without a factor, a sliding window in every other layer.
    GptNeo,
    /// Phi with a norm of each branch, exact GELU, and a matrix that goes by heads.
    GptNeoX,
    /// GPT-NeoX with one branch after the other, norms of heads and squared ReLU.
    Persimmon,
    /// GPT-NeoX without biases, with key/value heads that queries share; branches may have one norm.
    Falcon,
    /// Granite with windows and experts.
    GraniteMoeSwa,
    /// Qwen3 with the experts of DeepSeek V3 without groups.
    HyV3,
    /// DeepSeek V3 with a norm after the experts.
    Axk1,
    /// GPT-J with one matrix for queries, keys and values.
    CodeGen,
    /// Llama with adjacent rotary pairs, norms without weights after rotations, and experts with weighted inputs.
    Llama4,
    /// Mixtral with LayerNorm, biases, and experts chosen one after the other.
    PhiMoe,
    /// LayerNorm, learned positions, GELU, biases (`GPT2LMHeadModel`).
    Gpt,
}

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

/// The gated delta nets of blocks that mix tokens with one, or their Mamba 2.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeltaNet {
    pub shape: DeltaShape,
    /// Taps of the convolution of queries, keys and values.
    pub taps: usize,
    pub form: DeltaForm,
}

/// Which matrices a gated delta net has.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DeltaForm {
    /// One for queries, keys, values and the outputs' gate, head by head; and one for the rule's gates.
    Fused,
    /// One for queries, keys and values, and one for each gate.
    Joined,
    /// One for each, and three convolutions.
    Apart,
    /// One for all, of Mamba 2.
    Mamba(Mamba),
}

/// What Mamba 2 has besides the sizes of a gated delta net.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Mamba {
    pub conv_bias: bool,
    /// A norm in front of the last matrix.
    pub normed: bool,
    /// Factors of what the first matrix gives: z, values, keys, queries and steps.
    pub factors: [f32; 5],
}

impl Mamba {
    /// Whether factors are those of filters: a convolution of products with numbers.
    pub fn scales_filters(&self) -> bool {
        self.factors[1..4] != [1.0; 3]
    }
}

impl Default for Mamba {
    fn default() -> Mamba {
        Mamba { conv_bias: true, normed: true, factors: [1.0; 5] }
    }
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

impl DeltaNet {
    /// Without heads.
    pub const NONE: DeltaNet = DeltaNet {
        shape: DeltaShape {
            key_heads: 0,
            value_heads: 0,
            key_dim: 0,
            value_dim: 0,
            rule: StateRule::Delta { doubled: false },
        },
        taps: 0,
        form: DeltaForm::Joined,
    };
    /// Groups that Mamba 2 normalizes apart: those of its key heads.
    pub fn groups(&self) -> Option<usize> {
        matches!(self.form, DeltaForm::Mamba(_)).then_some(self.shape.key_heads)
    }
    /// What it has as Mamba 2.
    pub fn mamba(&self) -> Option<&Mamba> {
        if let DeltaForm::Mamba(mamba) = &self.form { Some(mamba) } else { None }
    }
    /// Whether its convolution has biases.
    pub fn has_bias(&self) -> bool {
        self.mamba().is_some_and(|mamba| mamba.conv_bias)
    }
    /// Whether its filters are not those of one tensor.
    pub fn has_own_filters(&self) -> bool {
        self.form == DeltaForm::Apart || self.mamba().is_some_and(Mamba::scales_filters)
    }
    /// Elements of the weight of its norm.
    pub fn normed(&self) -> usize {
        if self.groups().is_some() { self.shape.values() } else { self.shape.value_dim }
    }
}

/// One of a block's two branches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Branch {
    Mixer,
    FeedForward,
}

/// What blocks have in place of attention that mix tokens by a state of a fixed size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Recurrence {
    Delta(DeltaNet),
    /// A short convolution of gated channels.
    Conv {
        channels: usize,
        taps: usize,
    },
}

impl Recurrence {
    /// Taps of the convolution.
    pub fn taps(&self) -> usize {
        match *self {
            Recurrence::Delta(net) => net.taps,
            Recurrence::Conv { taps, .. } => taps,
        }
    }
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        match *self {
            Recurrence::Delta(net) => net.shape.row(),
            Recurrence::Conv { channels, .. } => channels,
        }
    }
    /// For messages.
    pub fn name(&self) -> &'static str {
        match self {
            Recurrence::Delta(net) if net.groups().is_some() => "Mamba layers",
            Recurrence::Delta(_) => "gated delta nets",
            Recurrence::Conv { .. } => "short convolutions",
        }
    }
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
