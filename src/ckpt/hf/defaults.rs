//! What a family's config means where a key is absent, as transformers' config classes have it, and which keys the
//! family has: one row per family. Never reads a key.
use crate::device::ops::RotaryPairs;
use crate::nn::{Activation, Arch};

/// When a family's layers have a sliding window. A number is the default of `sliding_window`.
#[derive(Clone, Copy)]
pub enum WindowKeys {
    Never,
    /// Never supported, because versions of transformers differ.
    Unclear,
    /// If `sliding_window` is not null.
    Given(Option<usize>),
    /// If `use_sliding_window` says so too.
    Switched(Option<usize>),
}

/// A flag's key, which is empty if the class has none, and its default.
type Flag = Option<(&'static str, bool)>;

pub struct Defaults {
    /// None: `num_attention_heads`.
    pub kv_heads: Option<usize>,
    /// None: `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// The key of the norms' epsilon, which is empty if the class has none, and its default.
    pub eps: (&'static str, f64),
    pub tied: bool,
    pub theta: f64,
    pub window: WindowKeys,
    pub activation: Activation,
    pub qkv_bias: Flag,
    pub out_bias: Flag,
    pub mlp_bias: Flag,
    pub pairs: RotaryPairs,
    /// The default of `partial_rotary_factor`, if the family has the key.
    pub part: Option<f64>,
}

/// `attention_bias`, off.
const ATTENTION_BIAS: Flag = Some(("attention_bias", false));

/// `bias`, off.
const BIAS: Flag = Some(("bias", false));

/// Biases that no key turns off.
const ALWAYS: Flag = Some(("", true));

/// What most families have, and no biases.
const PLAIN: Defaults = Defaults {
    kv_heads: None,
    head_dim: None,
    eps: ("rms_norm_eps", 1e-6),
    tied: false,
    theta: 10_000.0,
    window: WindowKeys::Never,
    activation: Activation::SwiGlu,
    qkv_bias: None,
    out_bias: None,
    mlp_bias: None,
    pairs: RotaryPairs::Halves,
    part: None,
};
const BIASED: Defaults = Defaults { qkv_bias: ATTENTION_BIAS, out_bias: ATTENTION_BIAS, ..PLAIN };
const OLMO: Defaults = Defaults { eps: ("rms_norm_eps", 1e-5), ..BIASED };
const GEMMA: Defaults = Defaults {
    kv_heads: Some(4),
    head_dim: Some(256),
    tied: true,
    window: WindowKeys::Given(Some(4096)),
    activation: Activation::GeGlu,
    ..BIASED
};
const QWEN_NEXT: Defaults = Defaults { kv_heads: Some(2), head_dim: Some(256), part: Some(0.25), ..PLAIN };
/// Defaults of families with learned positions.
const LEARNED: Defaults = Defaults {
    eps: ("layer_norm_epsilon", 1e-5),
    tied: true,
    activation: Activation::Gelu,
    qkv_bias: ALWAYS,
    out_bias: ALWAYS,
    mlp_bias: ALWAYS,
    ..PLAIN
};
const GLM: Defaults = Defaults {
    kv_heads: Some(2),
    head_dim: Some(128),
    eps: ("rms_norm_eps", 0.00000015625),
    qkv_bias: Some(("attention_bias", true)),
    pairs: RotaryPairs::Adjacent,
    part: Some(0.5),
    ..PLAIN
};

impl Activation {
    /// The key that names it in a config, and transformers' name.
    pub(super) fn key(self) -> (&'static str, &'static str) {
        match self {
            Activation::SwiGlu => ("hidden_act", "silu"),
            Activation::GeGlu => ("hidden_activation", "gelu_pytorch_tanh"),
            Activation::Gelu => ("hidden_act", "gelu_pytorch_tanh"),
            Activation::GeluExact => ("hidden_act", "gelu"),
            Activation::Relu => ("hidden_act", "relu"),
            Activation::ReluSquared => ("hidden_act", "relu2"),
            Activation::Xielu => ("hidden_act", "xielu"),
        }
    }
}

impl Defaults {
    pub fn of(arch: Arch) -> Defaults {
        match arch {
            Arch::Llama => Defaults { mlp_bias: Some(("mlp_bias", false)), ..BIASED },
            Arch::Mistral | Arch::Ministral => {
                Defaults { kv_heads: Some(8), window: WindowKeys::Given(Some(4096)), ..PLAIN }
            }
            Arch::Ministral3 => Defaults { kv_heads: Some(8), window: WindowKeys::Given(None), ..PLAIN },
            Arch::Mixtral => Defaults {
                kv_heads: Some(8),
                eps: ("rms_norm_eps", 1e-5),
                theta: 1_000_000.0,
                window: WindowKeys::Given(None),
                ..PLAIN
            },
            Arch::Qwen2 => {
                Defaults { kv_heads: Some(32), window: WindowKeys::Switched(Some(4096)), qkv_bias: ALWAYS, ..PLAIN }
            }
            Arch::Qwen2Moe => Defaults {
                kv_heads: Some(16),
                window: WindowKeys::Unclear,
                qkv_bias: Some(("qkv_bias", true)),
                ..PLAIN
            },
            Arch::Qwen3 => {
                Defaults { kv_heads: Some(32), head_dim: Some(128), window: WindowKeys::Switched(Some(4096)), ..BIASED }
            }
            Arch::Qwen3Moe => Defaults { kv_heads: Some(4), window: WindowKeys::Unclear, ..BIASED },
            Arch::Olmoe | Arch::Olmo2 => OLMO,
            Arch::GraniteSwa => Defaults {
                kv_heads: Some(4),
                eps: ("rms_norm_eps", 1e-5),
                tied: true,
                window: WindowKeys::Given(Some(128)),
                ..Defaults::of(Arch::Granite)
            },
            Arch::NanoChat => Defaults { activation: Activation::ReluSquared, ..BIASED },
            Arch::FlexOlmo => Defaults { theta: 500_000.0, ..BIASED },
            Arch::Afmoe => Defaults {
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-5),
                window: WindowKeys::Given(Some(1024)),
                ..BIASED
            },
            Arch::GptJ => Defaults {
                eps: ("layer_norm_epsilon", 1e-5),
                activation: Activation::Gelu,
                mlp_bias: ALWAYS,
                pairs: RotaryPairs::Adjacent,
                ..PLAIN
            },
            Arch::CodeGen => Defaults::of(Arch::GptJ),
            Arch::Olmo3 => Defaults { theta: 500_000.0, window: WindowKeys::Given(Some(4096)), ..OLMO },
            Arch::Gemma2 | Arch::VaultGemma => GEMMA,
            Arch::Gemma3 => Defaults { theta: 1_000_000.0, ..GEMMA },
            Arch::Gemma4 => Defaults { window: WindowKeys::Given(Some(512)), ..GEMMA },
            Arch::SmolLm3 => Defaults {
                kv_heads: Some(4),
                tied: true,
                theta: 2_000_000.0,
                window: WindowKeys::Switched(None),
                mlp_bias: Some(("mlp_bias", false)),
                ..BIASED
            },
            Arch::Granite => Defaults { mlp_bias: Some(("mlp_bias", false)), ..BIASED },
            Arch::SeedOss => Defaults {
                kv_heads: Some(8),
                head_dim: Some(128),
                qkv_bias: Some(("attention_bias", true)),
                out_bias: Some(("attention_out_bias", false)),
                mlp_bias: Some(("mlp_bias", false)),
                ..PLAIN
            },
            Arch::HunyuanDense => Defaults { eps: ("rms_norm_eps", 1e-5), ..BIASED },
            Arch::Exaone4 | Arch::ExaoneMoe => Defaults {
                kv_heads: Some(32),
                eps: ("rms_norm_eps", 1e-5),
                window: WindowKeys::Given(Some(4096)),
                ..PLAIN
            },
            Arch::Phi3 => {
                Defaults { eps: ("rms_norm_eps", 1e-5), window: WindowKeys::Given(None), part: Some(1.0), ..PLAIN }
            }
            Arch::Glm | Arch::Glm4 => GLM,
            Arch::Ernie45 => Defaults {
                kv_heads: Some(2),
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-5),
                tied: true,
                theta: 500_000.0,
                qkv_bias: Some(("use_bias", false)),
                out_bias: Some(("use_bias", false)),
                mlp_bias: Some(("use_bias", false)),
                pairs: RotaryPairs::Adjacent,
                ..PLAIN
            },
            Arch::Cohere2 => {
                Defaults { theta: 10_000.0, window: WindowKeys::Given(Some(4096)), ..Defaults::of(Arch::Cohere) }
            }
            Arch::Cohere2Moe => Defaults { head_dim: Some(128), ..Defaults::of(Arch::Cohere2) },
            Arch::Starcoder2 => Defaults {
                kv_heads: Some(2),
                eps: ("norm_epsilon", 1e-5),
                tied: true,
                window: WindowKeys::Given(None),
                activation: Activation::Gelu,
                qkv_bias: Some(("use_bias", true)),
                out_bias: Some(("use_bias", true)),
                mlp_bias: Some(("use_bias", true)),
                ..PLAIN
            },
            Arch::GptOss => Defaults {
                kv_heads: Some(8),
                head_dim: Some(64),
                eps: ("rms_norm_eps", 1e-5),
                theta: 150_000.0,
                window: WindowKeys::Given(Some(128)),
                qkv_bias: Some(("attention_bias", true)),
                out_bias: Some(("attention_bias", true)),
                ..PLAIN
            },
            Arch::DeepseekV2 | Arch::DeepseekV3 => Defaults { pairs: RotaryPairs::Adjacent, ..BIASED },
            Arch::Glm4MoeLite => Defaults { eps: ("rms_norm_eps", 1e-5), pairs: RotaryPairs::Adjacent, ..BIASED },
            Arch::Glm4Moe => Defaults {
                kv_heads: Some(8),
                eps: ("rms_norm_eps", 1e-5),
                qkv_bias: ATTENTION_BIAS,
                part: Some(0.5),
                ..PLAIN
            },
            Arch::Dots1 => Defaults { kv_heads: Some(32), window: WindowKeys::Given(Some(4096)), ..BIASED },
            Arch::Gemma => Defaults { kv_heads: Some(16), window: WindowKeys::Never, ..GEMMA },
            Arch::Cohere => Defaults {
                eps: ("layer_norm_eps", 1e-5),
                tied: true,
                theta: 500_000.0,
                pairs: RotaryPairs::Adjacent,
                ..BIASED
            },
            Arch::Helium => Defaults {
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-8),
                theta: 100_000.0,
                qkv_bias: ATTENTION_BIAS,
                mlp_bias: Some(("mlp_bias", false)),
                pairs: RotaryPairs::Adjacent,
                ..PLAIN
            },
            Arch::StableLm => Defaults {
                eps: ("layer_norm_eps", 1e-5),
                qkv_bias: Some(("use_qkv_bias", false)),
                part: Some(0.25),
                ..PLAIN
            },
            Arch::Cwm => Defaults {
                kv_heads: Some(8),
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-5),
                theta: 1_000_000.0,
                window: WindowKeys::Given(Some(8192)),
                mlp_bias: Some(("mlp_bias", false)),
                ..PLAIN
            },
            Arch::HyperClovaX => Defaults::of(Arch::Granite),
            Arch::GraniteHybrid | Arch::GraniteMoe | Arch::GraniteMoeShared => BIASED,
            Arch::Youtu => Defaults { tied: true, pairs: RotaryPairs::Adjacent, ..BIASED },
            Arch::MiniCpm3 => {
                Defaults { eps: ("rms_norm_eps", 1e-5), tied: true, mlp_bias: Some(("mlp_bias", false)), ..BIASED }
            }
            Arch::Ernie45Moe => Defaults {
                kv_heads: Some(4),
                eps: ("rms_norm_eps", 1e-5),
                tied: true,
                theta: 500_000.0,
                pairs: RotaryPairs::Adjacent,
                ..PLAIN
            },
            Arch::HunyuanMoe => Defaults { eps: ("rms_norm_eps", 1e-5), ..BIASED },
            Arch::MiniMaxM2 => {
                Defaults { kv_heads: Some(8), head_dim: Some(128), theta: 5_000_000.0, part: Some(1.0), ..PLAIN }
            }
            Arch::SolarOpen => Defaults {
                kv_heads: Some(8),
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-5),
                theta: 1_000_000.0,
                part: Some(1.0),
                ..PLAIN
            },
            Arch::Qwen3VlMoe => Defaults { kv_heads: Some(16), theta: 500_000.0, tied: true, ..BIASED },
            Arch::Qwen3Next | Arch::Qwen35Moe => QWEN_NEXT,
            Arch::Qwen35 => Defaults { kv_heads: Some(4), ..QWEN_NEXT },
            Arch::Mellum => Defaults {
                kv_heads: Some(4),
                head_dim: Some(128),
                theta: 500_000.0,
                window: WindowKeys::Given(Some(1024)),
                ..BIASED
            },
            Arch::OlmoHybrid => BIASED,
            Arch::Lfm2 | Arch::Lfm2Moe => {
                Defaults { kv_heads: Some(8), eps: ("norm_eps", 1e-5), tied: true, theta: 1_000_000.0, ..PLAIN }
            }
            Arch::Lfm3 => Defaults {
                kv_heads: Some(4),
                head_dim: Some(128),
                eps: ("norm_eps", 1e-5),
                tied: true,
                window: WindowKeys::Given(Some(256)),
                ..BIASED
            },
            Arch::Arcee => Defaults {
                eps: ("rms_norm_eps", 1e-5),
                activation: Activation::ReluSquared,
                mlp_bias: Some(("mlp_bias", false)),
                ..BIASED
            },
            Arch::Jais2 => Defaults {
                eps: ("layer_norm_eps", 1e-5),
                activation: Activation::ReluSquared,
                qkv_bias: Some(("attention_bias", true)),
                out_bias: Some(("attention_bias", true)),
                mlp_bias: Some(("mlp_bias", true)),
                ..PLAIN
            },
            Arch::Nemotron => Defaults {
                eps: ("norm_eps", 1e-5),
                activation: Activation::ReluSquared,
                mlp_bias: Some(("mlp_bias", false)),
                part: Some(0.5),
                ..BIASED
            },
            Arch::Apertus => {
                Defaults { eps: ("rms_norm_eps", 1e-5), theta: 12_000_000.0, activation: Activation::Xielu, ..BIASED }
            }
            Arch::NemotronH => Defaults {
                kv_heads: Some(8),
                head_dim: Some(128),
                eps: ("layer_norm_epsilon", 1e-5),
                activation: Activation::ReluSquared,
                mlp_bias: Some(("mlp_bias", false)),
                ..PLAIN
            },
            Arch::Olmo => Defaults { eps: ("", 1e-5), ..BIASED },
            Arch::Bamba => Defaults {
                kv_heads: Some(8),
                eps: ("rms_norm_eps", 1e-5),
                mlp_bias: Some(("mlp_bias", false)),
                part: Some(0.5),
                ..BIASED
            },
            Arch::FalconH1 => Defaults { kv_heads: Some(8), eps: ("rms_norm_eps", 1e-5), ..PLAIN },
            Arch::Phi => Defaults {
                eps: ("layer_norm_eps", 1e-5),
                activation: Activation::Gelu,
                qkv_bias: ALWAYS,
                out_bias: ALWAYS,
                mlp_bias: ALWAYS,
                part: Some(0.5),
                ..PLAIN
            },
            Arch::Opt => {
                let bias = Some(("enable_bias", true));
                let of = Defaults { qkv_bias: bias, out_bias: bias, mlp_bias: bias, ..LEARNED };
                Defaults { eps: ("", 1e-5), activation: Activation::Relu, ..of }
            }
            Arch::BioGpt => Defaults { eps: ("", 1e-5), activation: Activation::GeluExact, ..LEARNED },
            Arch::GptBigCode => LEARNED,
            Arch::GptNeo => Defaults { qkv_bias: None, window: WindowKeys::Given(Some(256)), ..LEARNED },
            Arch::GptNeoX => Defaults {
                eps: ("layer_norm_eps", 1e-5),
                activation: Activation::GeluExact,
                qkv_bias: Some(("attention_bias", true)),
                out_bias: Some(("attention_bias", true)),
                mlp_bias: ALWAYS,
                part: Some(0.25),
                ..PLAIN
            },
            Arch::Persimmon => Defaults { activation: Activation::ReluSquared, ..Defaults::of(Arch::Phi) },
            Arch::Falcon => Defaults {
                eps: ("layer_norm_epsilon", 1e-5),
                tied: true,
                activation: Activation::GeluExact,
                qkv_bias: BIAS,
                out_bias: BIAS,
                mlp_bias: BIAS,
                ..PLAIN
            },
            Arch::GraniteMoeSwa => Defaults { window: WindowKeys::Given(Some(128)), ..BIASED },
            Arch::HyV3 => Defaults {
                kv_heads: Some(8),
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-5),
                theta: 11_158_840.0,
                ..BIASED
            },
            Arch::Axk1 => Defaults { pairs: RotaryPairs::Adjacent, ..BIASED },
            Arch::Llama4 => Defaults {
                kv_heads: Some(8),
                head_dim: Some(128),
                eps: ("rms_norm_eps", 1e-5),
                theta: 500_000.0,
                pairs: RotaryPairs::Adjacent,
                ..BIASED
            },
            Arch::PhiMoe => Defaults {
                kv_heads: Some(8),
                eps: ("rms_norm_eps", 1e-5),
                theta: 1_000_000.0,
                window: WindowKeys::Given(None),
                ..BIASED
            },
            Arch::Gpt => PLAIN,
        }
    }
}
