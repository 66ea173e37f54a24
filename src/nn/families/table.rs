//! What each family calls its classes and modules: one row per family. Never holds numbers of a model.
use crate::nn::spec::Arch;

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
    /// Norms of the attention branch: of its input and of its output.
    pub attention_norms: [&'static str; 2],
    /// Those of the feed-forward branch.
    pub mlp_norms: [&'static str; 2],
    /// Norms of queries and keys.
    pub head_norms: [&'static str; 2],
    /// Up and down.
    pub mlp: [&'static str; 2],
}

const LLAMA: ModuleNames = ModuleNames {
    attention_norms: ["input_layernorm", "post_attention_layernorm"],
    mlp_norms: ["post_attention_layernorm", "post_feedforward_layernorm"],
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    mlp: ["mlp.up_proj", "mlp.down_proj"],
};
const GEMMA: ModuleNames =
    ModuleNames { mlp_norms: ["pre_feedforward_layernorm", "post_feedforward_layernorm"], ..LLAMA };
const HUNYUAN: ModuleNames =
    ModuleNames { head_norms: ["self_attn.query_layernorm", "self_attn.key_layernorm"], ..LLAMA };
const GLM4: ModuleNames = ModuleNames {
    attention_norms: ["input_layernorm", "post_self_attn_layernorm"],
    mlp_norms: ["post_attention_layernorm", "post_mlp_layernorm"],
    ..LLAMA
};
/// Both branches read one norm's output.
const COHERE: ModuleNames = ModuleNames { mlp_norms: LLAMA.attention_norms, ..LLAMA };
const STARCODER: ModuleNames = ModuleNames { mlp: ["mlp.c_fc", "mlp.c_proj"], ..LLAMA };

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
    Mixtral "mixtral" "mixtral" "MixtralForCausalLM" Some("MixtralForSequenceClassification"), LLAMA;
    Qwen2 "qwen2" "qwen2" "Qwen2ForCausalLM" Some("Qwen2ForSequenceClassification"), LLAMA;
    Qwen2Moe "qwen2_moe" "qwen2_moe" "Qwen2MoeForCausalLM" Some("Qwen2MoeForSequenceClassification"), LLAMA;
    Qwen3 "qwen3" "qwen3" "Qwen3ForCausalLM" Some("Qwen3ForSequenceClassification"), LLAMA;
    Qwen3Moe "qwen3_moe" "qwen3_moe" "Qwen3MoeForCausalLM" Some("Qwen3MoeForSequenceClassification"), LLAMA;
    Olmoe "olmoe" "olmoe" "OlmoeForCausalLM" None, LLAMA;
    Gemma2 "gemma2" "gemma2" "Gemma2ForCausalLM" Some("Gemma2ForSequenceClassification"), GEMMA;
    Gemma3 "gemma3" "gemma3_text" "Gemma3ForCausalLM" Some("Gemma3TextForSequenceClassification"), GEMMA;
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
    Starcoder2 "starcoder2" "starcoder2" "Starcoder2ForCausalLM" Some("Starcoder2ForSequenceClassification"), STARCODER;
    GptOss "gpt_oss" "gpt_oss" "GptOssForCausalLM" Some("GptOssForSequenceClassification"), LLAMA;
    DeepseekV2 "deepseek_v2" "deepseek_v2" "DeepseekV2ForCausalLM" Some("DeepseekV2ForSequenceClassification"), LLAMA;
    DeepseekV3 "deepseek_v3" "deepseek_v3" "DeepseekV3ForCausalLM" Some("DeepseekV3ForSequenceClassification"), LLAMA;
    Glm4MoeLite "glm4_moe_lite" "glm4_moe_lite" "Glm4MoeLiteForCausalLM" None, LLAMA;
    Glm4Moe "glm4_moe" "glm4_moe" "Glm4MoeForCausalLM" None, LLAMA;
    Dots1 "dots1" "dots1" "Dots1ForCausalLM" None, LLAMA;
    Gpt "gpt" "gpt2" "GPT2LMHeadModel" Some("GPT2ForSequenceClassification"), LLAMA;
}

impl Arch {
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
