//! What each family calls its classes and modules: one row per family. Never holds numbers of a model.
use crate::nn::arch::Arch;
use crate::nn::spec::Spec;

/// A row of the table.
pub struct Family {
    pub arch: Arch,
    /// The name in messages.
    pub name: &'static str,
    /// transformers' `model_type`.
    pub model_type: &'static str,
    /// transformers' class of the causal model.
    pub class: &'static str,
    /// Its class for reward models, if it has one.
    pub scored: Option<&'static str>,
    pub modules: ModuleNames,
}

/// Names of modules within a block.
pub struct ModuleNames {
    /// The model without its head.
    pub base: &'static str,
    /// Its blocks.
    pub layers: &'static str,
    /// Attention.
    pub attention: &'static str,
    /// The table of token embeddings, and that of learned positions; empty with rotary positions.
    pub embedding: &'static str,
    pub positions: &'static str,
    /// Norms of the attention branch: of its input and of its output.
    pub attention_norms: [&'static str; 2],
    /// The norms of the feed-forward branch.
    pub mlp_norms: [&'static str; 2],
    /// Norms of the inputs of parallel branches that have one each.
    pub own_norms: [&'static str; 2],
    /// Norms of queries and keys.
    pub head_norms: [&'static str; 2],
    /// Queries, keys and values as one matrix.
    pub qkv: &'static str,
    /// The projection that ends the attention branch.
    pub attention_out: &'static str,
    /// Gate, if there is one.
    pub gate: &'static str,
    /// Up and down.
    pub mlp: [&'static str; 2],
    /// Gate and up as one matrix.
    pub gate_up: &'static str,
    pub sparse: SparseNames,
    /// Mamba 2.
    pub mamba: &'static str,
    /// The norm after the last block.
    pub last_norm: &'static str,
}

/// Names of a sparse feed-forward branch, most of them within the branch's module.
pub struct SparseNames {
    pub module: &'static str,
    pub router: &'static str,
    /// Gate, up and down of an expert.
    pub expert: [&'static str; 3],
    /// The tensors of a block, within the block, that hold gate and up of all experts, and down, if files have them.
    pub stacked: Option<[&'static str; 2]>,
    /// Matrices of experts are transposed.
    pub transposed: bool,
    /// The bias of the choice, and the number of its dimensions.
    pub correction: (&'static str, usize),
    /// The expert that every token uses, within the block.
    pub shared: &'static str,
    /// Its gate and up as one matrix, and its down, if it has such.
    pub shared_fused: Option<[&'static str; 2]>,
    /// The router of the shared expert, if it has one, within the block.
    pub shared_gate: Option<&'static str>,
}

const SPARSE: SparseNames = SparseNames {
    module: "mlp",
    router: "gate",
    expert: ["gate_proj", "up_proj", "down_proj"],
    stacked: None,
    transposed: false,
    correction: ("gate.e_score_correction_bias", 1),
    shared: "mlp.shared_experts",
    shared_fused: None,
    shared_gate: None,
};
const MIXTRAL_SPARSE: SparseNames = SparseNames {
    module: "block_sparse_moe",
    expert: ["w1", "w3", "w2"],
    correction: ("e_score_correction_bias", 1),
    ..SPARSE
};
const GRANITE_SPARSE: SparseNames = SparseNames {
    module: "block_sparse_moe",
    router: "router.layer",
    stacked: Some(["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"]),
    shared: "shared_mlp",
    shared_fused: Some(["input_linear", "output_linear"]),
    ..SPARSE
};

const LLAMA: ModuleNames = ModuleNames {
    base: "model",
    layers: "layers",
    attention: "self_attn",
    embedding: "embed_tokens",
    positions: "",
    attention_norms: ["input_layernorm", "post_attention_layernorm"],
    mlp_norms: ["post_attention_layernorm", "post_feedforward_layernorm"],
    own_norms: ["input_layernorm", "post_attention_layernorm"],
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    qkv: "self_attn.qkv_proj",
    attention_out: "self_attn.o_proj",
    gate: "mlp.gate_proj",
    mlp: ["mlp.up_proj", "mlp.down_proj"],
    gate_up: "mlp.gate_up_proj",
    sparse: SPARSE,
    mamba: "mamba",
    last_norm: "norm",
};
const MIXTRAL: ModuleNames = ModuleNames { sparse: MIXTRAL_SPARSE, ..LLAMA };
const QWEN2_MOE: ModuleNames = ModuleNames {
    sparse: SparseNames { shared: "mlp.shared_expert", shared_gate: Some("mlp.shared_expert_gate"), ..SPARSE },
    ..LLAMA
};
const QWEN3_VL_MOE: ModuleNames = ModuleNames {
    sparse: SparseNames { stacked: Some(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]), ..SPARSE },
    ..LLAMA
};
const GPT_OSS: ModuleNames = ModuleNames { sparse: SparseNames { router: "router", ..SPARSE }, ..LLAMA };
const ERNIE_MOE: ModuleNames =
    ModuleNames { sparse: SparseNames { correction: ("moe_statics.e_score_correction_bias", 2), ..SPARSE }, ..LLAMA };
const GRANITE_MOE: ModuleNames = ModuleNames { sparse: GRANITE_SPARSE, ..LLAMA };
/// Without experts, the shared one is all.
const GRANITE_HYBRID: ModuleNames = ModuleNames {
    mlp: ["shared_mlp.input_linear", "shared_mlp.output_linear"],
    gate_up: "shared_mlp.input_linear",
    ..GRANITE_MOE
};
const GEMMA: ModuleNames =
    ModuleNames { mlp_norms: ["pre_feedforward_layernorm", "post_feedforward_layernorm"], ..LLAMA };
/// Experts are next to the dense branch.
const GEMMA4: ModuleNames = ModuleNames {
    sparse: SparseNames {
        module: "router",
        router: "proj",
        stacked: Some(["experts.gate_up_proj", "experts.down_proj"]),
        ..SPARSE
    },
    ..GEMMA
};
const HUNYUAN: ModuleNames =
    ModuleNames { head_norms: ["self_attn.query_layernorm", "self_attn.key_layernorm"], ..LLAMA };
const HUNYUAN_MOE: ModuleNames =
    ModuleNames { sparse: SparseNames { router: "gate.wg", shared: "mlp.shared_mlp", ..SPARSE }, ..HUNYUAN };
const HYPERCLOVAX: ModuleNames = ModuleNames {
    attention_norms: ["input_layernorm", "post_norm1"],
    mlp_norms: ["post_attention_layernorm", "post_norm2"],
    ..LLAMA
};
const GLM4: ModuleNames = ModuleNames {
    attention_norms: ["input_layernorm", "post_self_attn_layernorm"],
    mlp_norms: ["post_attention_layernorm", "post_mlp_layernorm"],
    ..LLAMA
};
/// Both branches read one norm's output.
const COHERE: ModuleNames = ModuleNames { mlp_norms: LLAMA.attention_norms, ..LLAMA };
const STARCODER: ModuleNames = ModuleNames { mlp: ["mlp.c_fc", "mlp.c_proj"], ..LLAMA };

const EXAONE_MOE: ModuleNames =
    ModuleNames { sparse: SparseNames { correction: ("e_score_correction_bias", 1), ..SPARSE }, ..LLAMA };
/// Norms before the branches of blocks with a gated delta net, and after those of the others.
const OLMO_HYBRID: ModuleNames = ModuleNames {
    attention_norms: ["attention_layer_norm", "post_attention_layernorm"],
    mlp_norms: ["feedforward_layer_norm", "post_feedforward_layernorm"],
    ..LLAMA
};
const APERTUS: ModuleNames =
    ModuleNames { attention_norms: ["attention_layernorm", ""], mlp_norms: ["feedforward_layernorm", ""], ..LLAMA };
const LFM2: ModuleNames = ModuleNames {
    attention_norms: ["operator_norm", ""],
    mlp_norms: ["ffn_norm", ""],
    head_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
    attention_out: "self_attn.out_proj",
    gate: "feed_forward.w1",
    mlp: ["feed_forward.w3", "feed_forward.w2"],
    sparse: SparseNames {
        module: "feed_forward",
        expert: ["w1", "w3", "w2"],
        correction: ("expert_bias", 1),
        ..SPARSE
    },
    last_norm: "embedding_norm",
    ..LLAMA
};
const LFM3: ModuleNames = ModuleNames {
    attention_norms: ["operator_norm", "post_operator_norm"],
    mlp_norms: ["ffn_norm", "post_ffn_norm"],
    head_norms: LLAMA.head_norms,
    attention_out: LLAMA.attention_out,
    ..LFM2
};
/// Blocks of one branch.
const NEMOTRON_H: ModuleNames = ModuleNames {
    attention: "mixer",
    embedding: "embeddings",
    attention_norms: ["norm", ""],
    mlp_norms: ["norm", ""],
    attention_out: "mixer.o_proj",
    mlp: ["mixer.up_proj", "mixer.down_proj"],
    sparse: SparseNames { module: "mixer", shared: "mixer.shared_experts", ..SPARSE },
    mamba: "mixer",
    last_norm: "norm_f",
    ..LLAMA
};
const AFMOE: ModuleNames = ModuleNames {
    mlp_norms: ["pre_mlp_layernorm", "post_mlp_layernorm"],
    sparse: SparseNames { router: "router.gate", correction: ("expert_bias", 1), ..SPARSE },
    ..LLAMA
};
const FLEX_OLMO: ModuleNames = ModuleNames { mlp_norms: ["", "post_feedforward_layernorm"], ..LLAMA };
/// Both branches read one norm's output.
const GPT_J: ModuleNames = ModuleNames {
    base: "transformer",
    layers: "h",
    attention: "attn",
    embedding: "wte",
    attention_norms: ["ln_1", ""],
    mlp_norms: ["ln_1", ""],
    attention_out: "attn.out_proj",
    mlp: ["mlp.fc_in", "mlp.fc_out"],
    last_norm: "ln_f",
    ..LLAMA
};
const CODEGEN: ModuleNames = ModuleNames { qkv: "attn.qkv_proj", ..GPT_J };
const NANOCHAT: ModuleNames = ModuleNames { mlp: PHI.mlp, ..LLAMA };
const BAMBA: ModuleNames = ModuleNames {
    mlp_norms: ["pre_ff_layernorm", ""],
    gate: "feed_forward.gate_proj",
    mlp: ["feed_forward.up_proj", "feed_forward.down_proj"],
    last_norm: "final_layernorm",
    ..LLAMA
};
const PHI: ModuleNames = ModuleNames {
    mlp_norms: LLAMA.attention_norms,
    head_norms: LFM2.head_norms,
    attention_out: "self_attn.dense",
    mlp: ["mlp.fc1", "mlp.fc2"],
    last_norm: "final_layernorm",
    ..LLAMA
};
const STABLELM: ModuleNames = ModuleNames { head_norms: LFM2.head_norms, ..LLAMA };
const OPT: ModuleNames = ModuleNames {
    base: "model.decoder",
    positions: "embed_positions",
    attention_norms: ["self_attn_layer_norm", ""],
    mlp_norms: ["final_layer_norm", ""],
    attention_out: "self_attn.out_proj",
    mlp: ["fc1", "fc2"],
    last_norm: "final_layer_norm",
    ..LLAMA
};
const BIOGPT: ModuleNames = ModuleNames { base: "biogpt", last_norm: "layer_norm", ..OPT };
const GPT: ModuleNames = ModuleNames { positions: "wpe", ..LLAMA };
const GPT_BIGCODE: ModuleNames = ModuleNames {
    positions: GPT.positions,
    mlp_norms: ["ln_2", ""],
    qkv: "attn.c_attn",
    attention_out: "attn.c_proj",
    mlp: STARCODER.mlp,
    ..GPT_J
};
const GPT_NEO: ModuleNames =
    ModuleNames { attention: "attn.attention", attention_out: "attn.attention.out_proj", ..GPT_BIGCODE };
const GPT_NEOX: ModuleNames = ModuleNames {
    base: "gpt_neox",
    attention: "attention",
    embedding: "embed_in",
    qkv: "attention.query_key_value",
    attention_out: "attention.dense",
    mlp: ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    last_norm: "final_layer_norm",
    ..LLAMA
};
const PERSIMMON: ModuleNames = ModuleNames {
    qkv: "self_attn.query_key_value",
    attention_out: PHI.attention_out,
    head_norms: LFM2.head_norms,
    mlp: GPT_NEOX.mlp,
    last_norm: "final_layernorm",
    ..LLAMA
};
const FALCON: ModuleNames = ModuleNames {
    base: "transformer",
    layers: "h",
    attention: "self_attention",
    embedding: "word_embeddings",
    own_norms: ["ln_attn", "ln_mlp"],
    qkv: "self_attention.query_key_value",
    attention_out: "self_attention.dense",
    mlp: GPT_NEOX.mlp,
    last_norm: "ln_f",
    ..LLAMA
};
const GRANITE_MOE_SWA: ModuleNames = ModuleNames {
    sparse: SparseNames {
        router: "router",
        stacked: Some(["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"]),
        ..GRANITE_SPARSE
    },
    ..LLAMA
};
const LLAMA4: ModuleNames = ModuleNames {
    gate: BAMBA.gate,
    mlp: BAMBA.mlp,
    sparse: SparseNames {
        module: "feed_forward",
        router: "router",
        stacked: Some(["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]),
        transposed: true,
        shared: "feed_forward.shared_expert",
        ..SPARSE
    },
    ..LLAMA
};
const HY_V3: ModuleNames = ModuleNames {
    sparse: SparseNames { router: "router.gate", correction: ("expert_bias", 1), shared: "mlp.shared_mlp", ..SPARSE },
    ..LLAMA
};
const AXK1: ModuleNames = ModuleNames { mlp_norms: ["post_attention_layernorm", "post_mlp_layernorm"], ..LLAMA };

macro_rules! families {
    ($($arch:ident $name:literal $model_type:literal $class:literal $scored:expr, $modules:ident;)*) => {
        static FAMILIES: &[Family] = &[$(Family {
            arch: Arch::$arch,
            name: $name,
            model_type: $model_type,
            class: $class,
            scored: $scored,
            modules: $modules,
        },)*];
    };
}
families! {
    Llama "llama" "llama" "LlamaForCausalLM" Some("LlamaForSequenceClassification"), LLAMA;
    Mistral "mistral" "mistral" "MistralForCausalLM" Some("MistralForSequenceClassification"), LLAMA;
    Ministral "ministral" "ministral" "MinistralForCausalLM" Some("MinistralForSequenceClassification"), LLAMA;
    Ministral3 "ministral3" "ministral3" "Ministral3ForCausalLM" Some("Ministral3ForSequenceClassification"), LLAMA;
    Mixtral "mixtral" "mixtral" "MixtralForCausalLM" Some("MixtralForSequenceClassification"), MIXTRAL;
    Qwen2 "qwen2" "qwen2" "Qwen2ForCausalLM" Some("Qwen2ForSequenceClassification"), LLAMA;
    Qwen2Moe "qwen2_moe" "qwen2_moe" "Qwen2MoeForCausalLM" Some("Qwen2MoeForSequenceClassification"), QWEN2_MOE;
    Qwen3 "qwen3" "qwen3" "Qwen3ForCausalLM" Some("Qwen3ForSequenceClassification"), LLAMA;
    Qwen3Moe "qwen3_moe" "qwen3_moe" "Qwen3MoeForCausalLM" Some("Qwen3MoeForSequenceClassification"), LLAMA;
    Olmoe "olmoe" "olmoe" "OlmoeForCausalLM" None, LLAMA;
    Gemma2 "gemma2" "gemma2" "Gemma2ForCausalLM" Some("Gemma2ForSequenceClassification"), GEMMA;
    Gemma3 "gemma3" "gemma3_text" "Gemma3ForCausalLM" Some("Gemma3TextForSequenceClassification"), GEMMA;
    Gemma4 "gemma4" "gemma4_text" "Gemma4ForCausalLM" None, GEMMA4;
    SmolLm3 "smollm3" "smollm3" "SmolLM3ForCausalLM" Some("SmolLM3ForSequenceClassification"), LLAMA;
    Olmo2 "olmo2" "olmo2" "Olmo2ForCausalLM" Some("Olmo2ForSequenceClassification"), LLAMA;
    Olmo3 "olmo3" "olmo3" "Olmo3ForCausalLM" Some("Olmo3ForSequenceClassification"), LLAMA;
    Granite "granite" "granite" "GraniteForCausalLM" None, LLAMA;
    SeedOss "seed_oss" "seed_oss" "SeedOssForCausalLM" Some("SeedOssForSequenceClassification"), LLAMA;
    HunyuanDense "hunyuan_v1_dense" "hunyuan_v1_dense" "HunYuanDenseV1ForCausalLM"
        Some("HunYuanDenseV1ForSequenceClassification"), HUNYUAN;
    Exaone4 "exaone4" "exaone4" "Exaone4ForCausalLM" Some("Exaone4ForSequenceClassification"), LLAMA;
    Phi3 "phi3" "phi3" "Phi3ForCausalLM" Some("Phi3ForSequenceClassification"), LLAMA;
    Glm "glm" "glm" "GlmForCausalLM" Some("GlmForSequenceClassification"), LLAMA;
    Glm4 "glm4" "glm4" "Glm4ForCausalLM" Some("Glm4ForSequenceClassification"), GLM4;
    Ernie45 "ernie4_5" "ernie4_5" "Ernie4_5ForCausalLM" None, LLAMA;
    Cohere2 "cohere2" "cohere2" "Cohere2ForCausalLM" None, COHERE;
    Cohere2Moe "cohere2_moe" "cohere2_moe" "Cohere2MoeForCausalLM" None, COHERE;
    Starcoder2 "starcoder2" "starcoder2" "Starcoder2ForCausalLM" Some("Starcoder2ForSequenceClassification"), STARCODER;
    GptOss "gpt_oss" "gpt_oss" "GptOssForCausalLM" Some("GptOssForSequenceClassification"), GPT_OSS;
    DeepseekV2 "deepseek_v2" "deepseek_v2" "DeepseekV2ForCausalLM" Some("DeepseekV2ForSequenceClassification"), LLAMA;
    DeepseekV3 "deepseek_v3" "deepseek_v3" "DeepseekV3ForCausalLM" Some("DeepseekV3ForSequenceClassification"), LLAMA;
    Glm4MoeLite "glm4_moe_lite" "glm4_moe_lite" "Glm4MoeLiteForCausalLM" None, LLAMA;
    Glm4Moe "glm4_moe" "glm4_moe" "Glm4MoeForCausalLM" None, LLAMA;
    Dots1 "dots1" "dots1" "Dots1ForCausalLM" None, LLAMA;
    Gemma "gemma" "gemma" "GemmaForCausalLM" Some("GemmaForSequenceClassification"), LLAMA;
    Cohere "cohere" "cohere" "CohereForCausalLM" None, COHERE;
    Helium "helium" "helium" "HeliumForCausalLM" Some("HeliumForSequenceClassification"), LLAMA;
    StableLm "stablelm" "stablelm" "StableLmForCausalLM" Some("StableLmForSequenceClassification"), STABLELM;
    Cwm "cwm" "cwm" "CwmForCausalLM" None, LLAMA;
    HyperClovaX "hyperclovax" "hyperclovax" "HyperCLOVAXForCausalLM" None, HYPERCLOVAX;
    GraniteHybrid "granitemoehybrid" "granitemoehybrid" "GraniteMoeHybridForCausalLM" None, GRANITE_HYBRID;
    GraniteMoe "granitemoe" "granitemoe" "GraniteMoeForCausalLM" None, GRANITE_MOE;
    GraniteMoeShared "granitemoeshared" "granitemoeshared" "GraniteMoeSharedForCausalLM" None, GRANITE_MOE;
    Youtu "youtu" "youtu" "YoutuForCausalLM" None, LLAMA;
    MiniCpm3 "minicpm3" "minicpm3" "MiniCPM3ForCausalLM" Some("MiniCPM3ForSequenceClassification"), LLAMA;
    Ernie45Moe "ernie4_5_moe" "ernie4_5_moe" "Ernie4_5_MoeForCausalLM" None, ERNIE_MOE;
    HunyuanMoe "hunyuan_v1_moe" "hunyuan_v1_moe" "HunYuanMoEV1ForCausalLM"
        Some("HunYuanMoEV1ForSequenceClassification"), HUNYUAN_MOE;
    MiniMaxM2 "minimax_m2" "minimax_m2" "MiniMaxM2ForCausalLM" None, MIXTRAL;
    SolarOpen "solar_open" "solar_open" "SolarOpenForCausalLM" None, LLAMA;
    Qwen3VlMoe "qwen3_vl_moe" "qwen3_vl_moe_text" "Qwen3VLMoeForConditionalGeneration" None, QWEN3_VL_MOE;
    Qwen3Next "qwen3_next" "qwen3_next" "Qwen3NextForCausalLM" Some("Qwen3NextForSequenceClassification"), QWEN2_MOE;
    Qwen35 "qwen3_5" "qwen3_5_text" "Qwen3_5ForCausalLM" Some("Qwen3_5TextForSequenceClassification"), LLAMA;
    Qwen35Moe "qwen3_5_moe" "qwen3_5_moe_text" "Qwen3_5MoeForCausalLM" None, QWEN2_MOE;
    VaultGemma "vaultgemma" "vaultgemma" "VaultGemmaForCausalLM" None, GEMMA;
    ExaoneMoe "exaone_moe" "exaone_moe" "ExaoneMoeForCausalLM" None, EXAONE_MOE;
    Mellum "mellum" "mellum" "MellumForCausalLM" None, LLAMA;
    OlmoHybrid "olmo_hybrid" "olmo_hybrid" "OlmoHybridForCausalLM" None, OLMO_HYBRID;
    Lfm2 "lfm2" "lfm2" "Lfm2ForCausalLM" None, LFM2;
    Lfm2Moe "lfm2_moe" "lfm2_moe" "Lfm2MoeForCausalLM" None, LFM2;
    Lfm3 "lfm3" "lfm3" "Lfm3ForCausalLM" None, LFM3;
    Arcee "arcee" "arcee" "ArceeForCausalLM" Some("ArceeForSequenceClassification"), LLAMA;
    Jais2 "jais2" "jais2" "Jais2ForCausalLM" None, LLAMA;
    Nemotron "nemotron" "nemotron" "NemotronForCausalLM" Some("NemotronForSequenceClassification"), LLAMA;
    Apertus "apertus" "apertus" "ApertusForCausalLM" None, APERTUS;
    NemotronH "nemotron_h" "nemotron_h" "NemotronHForCausalLM" None, NEMOTRON_H;
    Olmo "olmo" "olmo" "OlmoForCausalLM" Some("OlmoForSequenceClassification"), LLAMA;
    GraniteSwa "granite_swa" "granite_swa" "GraniteSWAForCausalLM" None, LLAMA;
    NanoChat "nanochat" "nanochat" "NanoChatForCausalLM" None, NANOCHAT;
    FlexOlmo "flex_olmo" "flex_olmo" "FlexOlmoForCausalLM" None, FLEX_OLMO;
    Afmoe "afmoe" "afmoe" "AfmoeForCausalLM" None, AFMOE;
    GptJ "gptj" "gptj" "GPTJForCausalLM" Some("GPTJForSequenceClassification"), GPT_J;
    Bamba "bamba" "bamba" "BambaForCausalLM" None, BAMBA;
    FalconH1 "falcon_h1" "falcon_h1" "FalconH1ForCausalLM" None, BAMBA;
    Phi "phi" "phi" "PhiForCausalLM" Some("PhiForSequenceClassification"), PHI;
    Opt "opt" "opt" "OPTForCausalLM" Some("OPTForSequenceClassification"), OPT;
    BioGpt "biogpt" "biogpt" "BioGptForCausalLM" Some("BioGptForSequenceClassification"), BIOGPT;
    GptBigCode "gpt_bigcode" "gpt_bigcode" "GPTBigCodeForCausalLM" Some("GPTBigCodeForSequenceClassification"),
        GPT_BIGCODE;
    GptNeo "gpt_neo" "gpt_neo" "GPTNeoForCausalLM" Some("GPTNeoForSequenceClassification"), GPT_NEO;
    GptNeoX "gpt_neox" "gpt_neox" "GPTNeoXForCausalLM" Some("GPTNeoXForSequenceClassification"), GPT_NEOX;
    Persimmon "persimmon" "persimmon" "PersimmonForCausalLM" Some("PersimmonForSequenceClassification"), PERSIMMON;
    Falcon "falcon" "falcon" "FalconForCausalLM" Some("FalconForSequenceClassification"), FALCON;
    GraniteMoeSwa "granitemoe_swa" "granitemoe_swa" "GraniteMoeSWAForCausalLM" None, GRANITE_MOE_SWA;
    HyV3 "hy_v3" "hy_v3" "HYV3ForCausalLM" None, HY_V3;
    Axk1 "axk1" "axk1" "AXK1ForCausalLM" Some("AXK1ForSequenceClassification"), AXK1;
    CodeGen "codegen" "codegen" "CodeGenForCausalLM" None, CODEGEN;
    Llama4 "llama4" "llama4_text" "Llama4ForCausalLM" None, LLAMA4;
    PhiMoe "phimoe" "phimoe" "PhimoeForCausalLM" Some("PhimoeForSequenceClassification"), MIXTRAL;
    Gpt "gpt" "gpt2" "GPT2LMHeadModel" Some("GPT2ForSequenceClassification"), GPT;
}

impl Arch {
    /// Whether PEFT loads adapters of the matrix that ends a Mamba layer.
    pub fn adapts_mamba_out(self) -> bool {
        !matches!(self, Arch::NemotronH | Arch::FalconH1)
    }
}

impl Family {
    /// Names of the norms of the inputs of a model's branches: attention, and the feed-forward layer.
    pub fn input_norms(&self, spec: &Spec) -> [&'static str; 2] {
        let ModuleNames { attention_norms: [attention, _], mlp_norms: [mlp, _], own_norms, .. } = self.modules;
        if spec.own_norms { own_norms } else { [attention, mlp] }
    }
}

impl Arch {
    /// Whether positions are learned, in place of rotary ones.
    pub fn learns_positions(self) -> bool {
        !self.family().modules.positions.is_empty()
    }
    /// The family's row. Every family has one: a test says so.
    pub fn family(self) -> &'static Family {
        FAMILIES.iter().find(|family| family.arch == self).unwrap_or(&FAMILIES[0])
    }
    pub fn name(self) -> &'static str {
        self.family().name
    }
    pub fn all() -> impl Iterator<Item = &'static Family> {
        FAMILIES.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_one_row() {
        for arch in 0..=Arch::Gpt as usize {
            assert_eq!(FAMILIES.iter().filter(|family| family.arch as usize == arch).count(), 1, "family {arch}");
        }
        assert_eq!(FAMILIES.len(), Arch::Gpt as usize + 1);
    }
}
