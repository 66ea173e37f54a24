//! What llama.cpp knows of each family: files have no key for what is usual in one. Never names a tensor, and never
//! refuses a model.
use super::quant::GgmlType;
use crate::nn::{Arch, Rotary, Scaling, Spec};
use serde_json::{Map, Value};
use std::f32::consts::TAU;

/// llama.cpp's name of a family; `config` is the model's, with its text model's keys.
pub fn architecture(arch: Arch, config: &Map<String, Value>) -> &'static str {
    match arch {
        Arch::Qwen3 if config.contains_key("vision_config") => "qwen3vl",
        Arch::Mistral | Arch::Mixtral => Arch::Llama.name(),
        Arch::Qwen2Moe => "qwen2moe",
        Arch::Qwen3Moe => "qwen3moe",
        Arch::Olmo3 => Arch::Olmo2.name(),
        Arch::Qwen35 => "qwen35",
        Arch::Qwen35Moe => "qwen35moe",
        Arch::Ministral3 => "mistral3",
        Arch::HunyuanDense => "hunyuan-dense",
        Arch::Lfm2Moe => "lfm2moe",
        Arch::GptOss => "gpt-oss",
        Arch::Qwen3Next => "qwen3next",
        Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Glm4MoeLite => "deepseek2",
        arch => arch.name(),
    }
}

/// The converter treats it as a Llama: rows of queries and keys are interleaved, since llama.cpp rotates neighbors.
pub fn is_llama(arch: Arch) -> bool {
    matches!(arch, Arch::Llama | Arch::Mistral | Arch::Ministral3 | Arch::Mixtral | Arch::SmolLm3 | Arch::Granite)
}

/// It has gated delta nets, whose value heads llama.cpp has in another order.
pub fn is_qwen35(arch: Arch) -> bool {
    matches!(arch, Arch::Qwen35 | Arch::Qwen35Moe)
}

/// It has latent attention, and experts like DeepSeek's.
pub fn is_deepseek(arch: Arch) -> bool {
    matches!(arch, Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Glm4MoeLite)
}

pub fn is_gemma(arch: Arch) -> bool {
    matches!(arch, Arch::Gemma2 | Arch::Gemma3)
}

/// transformers' class has a width of heads, whether or not the config gives one.
pub fn says_head_dim(arch: Arch) -> bool {
    is_gemma(arch)
        || is_qwen35(arch)
        || matches!(
            arch,
            Arch::Llama
                | Arch::Mistral
                | Arch::Ministral3
                | Arch::Qwen3
                | Arch::SeedOss
                | Arch::Glm4
                | Arch::Gemma4
                | Arch::Cohere2
                | Arch::Ernie45
                | Arch::GptOss
                | Arch::Qwen3Next
                | Arch::DeepseekV2
                | Arch::DeepseekV3
        )
}

/// Its files say which layers have a window.
pub fn says_windows(arch: Arch) -> bool {
    matches!(arch, Arch::Olmo3 | Arch::Exaone4)
}

/// Factors of the rotary frequencies, which are tensors of f32 in a file, before all others.
pub struct GgufFactors {
    pub name: &'static str,
    pub values: Vec<f32>,
}

impl GgufFactors {
    pub const FREQS: &str = "rope_freqs.weight";

    /// The factors of a model like `spec`.
    pub fn of(spec: &Spec) -> Vec<GgufFactors> {
        let Some(rope) = &spec.rope else { return Vec::new() };
        let singles = |values: &[f64]| values.iter().map(|x| *x as f32).collect();
        match &rope.scaling {
            Scaling::Llama3 { .. } => {
                vec![GgufFactors { name: GgufFactors::FREQS, values: factors(rope, spec.head_dim) }]
            }
            Scaling::Long { short, long, .. } => vec![
                GgufFactors { name: "rope_factors_long.weight", values: singles(long) },
                GgufFactors { name: "rope_factors_short.weight", values: singles(short) },
            ],
            // Pairs that do not rotate have a factor that stops them.
            Scaling::Proportional { part, .. } => {
                let dim = spec.global_heads.map_or(spec.head_dim, |heads| heads.head_dim);
                let turned = (dim as f64 * part / 2.0) as usize;
                let values = (0..dim / 2).map(|i| if i < turned { 1.0 } else { 1e30 }).collect();
                vec![GgufFactors { name: GgufFactors::FREQS, values }]
            }
            _ => Vec::new(),
        }
    }
    pub fn bytes(&self) -> usize {
        GgmlType::F32.bytes(self.values.len())
    }
}

/// The divisor of each frequency in llama3 rotary scaling, with the converter's steps and precision.
pub fn factors(rope: &Rotary, head_dim: usize) -> Vec<f32> {
    let Scaling::Llama3 { factor, low, high, original } = &rope.scaling else { return Vec::new() };
    let (factor, low, high, original) = (*factor as f32, *low as f32, *high as f32, *original as f32);
    let one = |i: usize| {
        let exponent = (2 * i) as f32 / head_dim as f32;
        let wave = TAU / (1.0 / (rope.theta as f32).powf(exponent));
        if wave < original / high {
            1.0
        } else if wave > original / low {
            factor
        } else {
            let smooth = (original / wave - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(one).collect()
}

/// Every so many layers of a Qwen 3.5 have attention, if they do so regularly.
pub fn attention_interval(spec: &Spec) -> Option<usize> {
    let attends = |i: usize| spec.recurrence_of(i).is_none();
    let every = 1 + (0..spec.layers).find(|i| attends(*i))?;
    (0..spec.layers).all(|i| attends(i) == (i + 1).is_multiple_of(every)).then_some(every)
}
