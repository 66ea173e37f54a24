//! The families of models, by the names of their tensors and the format of their config. Never says what one computes.

/// The family whose tensor names and config format are used. What it computes is in the other fields of
/// [`Spec`](super::Spec).
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
