//! The models that llama.cpp does not compute as transformers does, or cannot load: they are refused by name. Never
//! names a tensor.
use super::family::{attention_interval, is_deepseek, is_gemma, is_llama};
use crate::base::{Error, Result};
use crate::device::ops::RotaryPairs;
use crate::nn::{Arch, Recurrence, Rotary, Scaling, Spec};

/// The families whose converter is followed, and GPT-2, which is refused for its positions.
const EXPORTED: [Arch; 34] = [
    Arch::Llama,
    Arch::Mistral,
    Arch::Mixtral,
    Arch::Qwen2,
    Arch::Qwen2Moe,
    Arch::Qwen3,
    Arch::Qwen3Moe,
    Arch::Olmoe,
    Arch::Gemma2,
    Arch::Gemma3,
    Arch::Gpt,
    Arch::SmolLm3,
    Arch::Granite,
    Arch::Phi3,
    Arch::Olmo2,
    Arch::Olmo3,
    Arch::SeedOss,
    Arch::Exaone4,
    Arch::Starcoder2,
    Arch::Lfm2,
    Arch::Qwen35,
    Arch::Qwen35Moe,
    Arch::Ministral3,
    Arch::Glm4,
    Arch::Cohere2,
    Arch::Ernie45,
    Arch::HunyuanDense,
    Arch::Lfm2Moe,
    Arch::Gemma4,
    Arch::GptOss,
    Arch::DeepseekV2,
    Arch::DeepseekV3,
    Arch::Glm4MoeLite,
    Arch::Qwen3Next,
];
const NAMES: &str = "Llama, Ministral 3, Mixtral, OLMo 2 and 3, OLMoE, Qwen 2, 3 and 3.5 with their mixtures, Gemma 2 to 4, \
                     SmolLM 3, Granite, Phi 3 and 4, Seed-OSS, EXAONE 4, StarCoder 2, LFM 2 with its mixture, GLM 4, \
                     GLM 4.7 Flash, DeepSeek V2 and V3, Qwen3-Next, gpt-oss, Cohere 2, ERNIE 4.5, Hunyuan";

/// An error if llama.cpp does not compute what this model computes, or its converter's bytes are not known.
pub fn check(spec: &Spec) -> Result<()> {
    if !EXPORTED.contains(&spec.arch) {
        return Err(Error::input(format!(
            "`save_gguf`: {} models cannot be exported yet: only {NAMES} can. Use `save_hf` DIR, which llama.cpp's \
             converter reads",
            spec.arch.name()
        )));
    }
    let what = unusual_mixture(spec).or_else(|| unusual_rotation(spec)).or_else(|| unusual_attention(spec));
    what.map_or(Ok(()), |what| {
        Err(Error::input(format!(
            "`save_gguf`: llama.cpp does not run {what}: only {NAMES} can be exported. `save_hf` DIR exports this model"
        )))
    })
}

/// What llama.cpp leaves out of a model that it runs: the window of all layers, or the exact bounds of YaRN.
pub fn left_out(spec: &Spec) -> Option<String> {
    let (name, window) = (spec.arch.name(), spec.window);
    match &spec.rope {
        _ if reads_no_window(spec) => Some(format!(
            "llama.cpp reads no sliding window of {name}: it computes the same up to {window} tokens, and sees all of longer texts"
        )),
        Some(Rotary { scaling: Scaling::Yarn { truncate: false, .. }, .. }) => Some(format!(
            "llama.cpp rounds the bounds of YaRN, and {name} has truncate: false: the rotations of some pairs differ a little"
        )),
        _ => None,
    }
}

/// All layers have a window, which llama.cpp does not read.
fn reads_no_window(spec: &Spec) -> bool {
    let all = (0..spec.layers).all(|i| spec.window_of(i) > 0) && !sees_all(spec);
    all && matches!(spec.arch, Arch::Mistral | Arch::Mixtral | Arch::Phi3 | Arch::Starcoder2)
}

/// llama.cpp multiplies by this weight without a look at adapters.
pub fn ignores_adapters(spec: &Spec, source: &str) -> bool {
    let of_latent = source.contains(".self_attn.") && !source.contains(".o_proj.");
    is_deepseek(spec.arch) && (of_latent || source.starts_with("lm_head."))
}

/// Its windows are as long as its texts.
fn sees_all(spec: &Spec) -> bool {
    spec.window >= spec.beyond.unwrap_or(spec.max_len)
}

/// Every fourth layer, from the one with index 3 on.
fn is_fourth(layer: usize) -> bool {
    (layer + 1).is_multiple_of(4)
}

fn unusual_mixture(spec: &Spec) -> Option<String> {
    let (experts, name) = (spec.experts.as_ref()?, spec.arch.name());
    // Files have no key for it: llama.cpp knows it of each family.
    let normalizes = matches!(
        spec.arch,
        Arch::Mixtral
            | Arch::Qwen3Moe
            | Arch::Qwen35Moe
            | Arch::Qwen3Next
            | Arch::Lfm2Moe
            | Arch::Gemma4
            | Arch::GptOss
    );
    let deepseek = is_deepseek(spec.arch);
    // The first blocks may be dense.
    let (leads, dense) = (deepseek || spec.arch == Arch::Lfm2Moe, &experts.dense);
    let first = dense.iter().enumerate().all(|(i, block)| *block == i);
    let rule = match (spec.arch, experts.rule) {
        // Scores are sigmoids with a bias of the choice.
        (Arch::Lfm2Moe, Some(rule)) => rule.sigmoid && rule.biased && rule.groups <= 1 && rule.scale == 1.0,
        // A group's score is that of its best two experts.
        (Arch::DeepseekV2, Some(rule)) => rule.groups <= 1,
        (Arch::DeepseekV3 | Arch::Glm4MoeLite, Some(_)) => true,
        (Arch::Lfm2Moe | Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Glm4MoeLite, None) => false,
        (_, rule) => rule.is_none(),
    };
    let clamp = experts.clamp.is_some_and(|clamp| (clamp.alpha, clamp.limit) != (1.702, 7.0));
    // Its norms are over all queries and all keys, which have one width in llama.cpp.
    let narrow = || [spec.heads, spec.kv_heads].iter().any(|n| n * spec.head_dim != spec.dim);
    match () {
        _ if !(dense.is_empty() || leads && first) => Some(format!("dense layers in {name}")),
        _ if !rule => Some(format!("this choice of experts in {name}")),
        _ if deepseek && experts.shared_ff == 0 => Some(format!("a {name} model without shared experts")),
        _ if clamp => Some(format!("another swiglu_limit than 7 in {name}")),
        _ if !deepseek && experts.normalize != normalizes => Some(format!("norm_topk_prob: {} in {name}", !normalizes)),
        _ if spec.arch == Arch::Olmoe && narrow() => Some("keys that are narrower than the model in olmoe".into()),
        _ => None,
    }
}

fn unusual_rotation(spec: &Spec) -> Option<String> {
    let name = spec.arch.name();
    let Some(rope) = &spec.rope else { return Some("these models with learned positions".into()) };
    let theta = rope.theta;
    match &rope.scaling {
        // The file of a Gemma 2 has no key for it, and that of a Gemma 3 a base alone for its windows.
        scaling if spec.arch == Arch::Gemma2 && (*scaling != Scaling::None || theta != 10_000.0) => {
            Some("another rotation than the usual in a gemma2 model".into())
        }
        _ if spec.local_rope.as_ref().is_some_and(|local| local.scaling != Scaling::None) => {
            Some(format!("scaled rotations of windows in a {name} model"))
        }
        scaling if spec.arch == Arch::Gemma4 => {
            let usual = matches!(scaling, Scaling::Proportional { factor: 1.0, .. });
            (!usual).then(|| format!("another rotation of layers without a window in {name}"))
        }
        Scaling::Dynamic { .. } => Some("dynamic rotary scaling".into()),
        Scaling::Long { .. } if spec.arch != Arch::Phi3 => Some(format!("longrope in a {name} model")),
        Scaling::Linear { .. } | Scaling::Yarn { .. } if spec.arch == Arch::Phi3 => {
            Some("this rotary scaling in a phi3 model".into())
        }
        Scaling::Llama3 { .. } if !is_llama(spec.arch) && spec.arch != Arch::Exaone4 => {
            Some(format!("Llama 3's scaling in a {name} model"))
        }
        // Its converter and llama.cpp round all the same.
        Scaling::Yarn { truncate: false, .. } if spec.arch != Arch::GptOss => Some("YaRN with truncate: false".into()),
        Scaling::Yarn { attention, beta_fast, beta_slow, .. } if is_deepseek(spec.arch) => {
            let usual = (attention - 1.0).abs() < 1e-6 && (*beta_fast, *beta_slow) == (32.0, 1.0);
            (!usual).then(|| {
                format!("YaRN in {name} whose `mscale` is not its `mscale_all_dim`, or with other betas than 32 and 1")
            })
        }
        scaling if spec.arch == Arch::Ministral3 => {
            let grown = spec.query_growth.filter(|growth| growth.beta > 0.0 && !growth.unrotated);
            match (scaling, grown) {
                (Scaling::Yarn { attention, original, .. }, Some(growth))
                    if (attention - 1.0).abs() < 1e-6 && *original == growth.original =>
                {
                    None
                }
                _ => {
                    Some("a ministral3 model without YaRN whose queries grow, with `mscale` as `mscale_all_dim`".into())
                }
            }
        }
        // It reads the key, and computes the usual factor all the same.
        Scaling::Yarn { factor, attention, .. }
            if (attention / Scaling::yarn_attention(*factor) - 1.0).abs() > 1e-6 =>
        {
            Some(format!("YaRN with an attention_factor of {attention}"))
        }
        Scaling::Yarn { beta_fast, beta_slow, .. } if (*beta_fast, *beta_slow) != (32.0, 1.0) => {
            Some(format!("YaRN with a beta_fast of {beta_fast} and a beta_slow of {beta_slow} in {name}"))
        }
        scaling if spec.arch == Arch::Cohere2 && *scaling != Scaling::None => {
            Some(format!("scaled rotary positions in {name}"))
        }
        _ if spec.arch == Arch::SmolLm3
            && (spec.rotated.is_empty() || !spec.rotated.iter().enumerate().all(|(i, on)| *on != is_fourth(i))) =>
        {
            Some("other layers without rotary positions than every fourth in a smollm3 model".into())
        }
        _ => None,
    }
}

/// llama.cpp reads no width of heads: together they are as wide as the model.
fn has_narrow_heads(arch: Arch) -> bool {
    matches!(
        arch,
        Arch::Olmo2
            | Arch::Olmo3
            | Arch::Qwen2
            | Arch::Qwen2Moe
            | Arch::Starcoder2
            | Arch::Cohere2
            | Arch::Granite
            | Arch::Phi3
            | Arch::Exaone4
    )
}

/// llama.cpp knows a model like DeepSeek's without a latent of queries by its size.
fn is_lite(spec: &Spec) -> bool {
    matches!(spec.layers, 26 | 27) || (spec.layers, spec.vocab) == (48, 128_256)
}

fn unusual_attention(spec: &Spec) -> Option<String> {
    let (gemma, name) = (is_gemma(spec.arch), spec.arch.name());
    // Whatever the file says, EXAONE 4 has windows in the 32 B model alone.
    let exaone = spec.arch == Arch::Exaone4 && (spec.layers, spec.window) == (64, 4096);
    // In Gemma 2 every other layer sees its window only, in Gemma 3 five of six.
    let every = if spec.arch == Arch::Gemma2 { 2 } else { 6 };
    let windows = |i: usize| match spec.arch {
        _ if gemma => !(i + 1).is_multiple_of(every),
        Arch::GptOss => i.is_multiple_of(2),
        _ => (exaone || spec.arch == Arch::Cohere2) && !is_fourth(i),
    };
    let largest = if spec.arch == Arch::Gemma2 { 46 } else { 62 };
    let scalar = if gemma && spec.layers == largest { spec.dim / spec.heads } else { spec.head_dim };
    let reads_qkv = matches!(spec.arch, Arch::Qwen2 | Arch::Qwen2Moe | Arch::SeedOss | Arch::Glm4);
    let reads_all = matches!(spec.arch, Arch::Llama | Arch::Mistral | Arch::Granite | Arch::Starcoder2 | Arch::GptOss);
    let biased = spec.out_bias || spec.mlp_bias || spec.qkv_bias && !reads_qkv;
    match () {
        _ if spec.qkv_clip.is_some() => Some(format!("clip_qkv in {name}")),
        _ if !reads_no_window(spec)
            && !sees_all(spec)
            && !matches!(spec.arch, Arch::Olmo3 | Arch::Gemma4)
            && (0..spec.layers).any(|i| (spec.window_of(i) > 0) != windows(i)) =>
        {
            Some(format!("sliding windows in these layers of {name}"))
        }
        _ if spec.query_scalar.is_some_and(|given| given != scalar as f64) => {
            Some(format!("another query_pre_attn_scalar than {scalar} in a {name} model of {} layers", spec.layers))
        }
        _ if (spec.score_cap > 0.0) != (spec.arch == Arch::Gemma2) => Some("these softcaps of attention scores".into()),
        _ if spec.arch == Arch::Gemma2 && spec.logit_cap == 0.0 => Some("Gemma 2 without a softcap of logits".into()),
        _ if matches!(spec.arch, Arch::Gemma2 | Arch::Cohere2 | Arch::Lfm2Moe) && !spec.tied => {
            Some(format!("{name} with a head of its own"))
        }
        _ if matches!(spec.arch, Arch::Olmo2 | Arch::Olmo3 | Arch::Olmoe | Arch::Qwen2Moe | Arch::GptOss)
            && spec.tied =>
        {
            Some(format!("{name} without a head of its own"))
        }
        _ if biased && !reads_all => Some(format!("these biases in a {name} model")),
        _ if spec.arch == Arch::GptOss && !(spec.qkv_bias && spec.out_bias) => {
            Some("a gpt_oss model without biases of attention".into())
        }
        _ if is_deepseek(spec.arch) && spec.rotary_pairs != RotaryPairs::Adjacent => {
            Some(format!("rope_interleave: false in {name}"))
        }
        _ if spec.latent.is_some_and(|latent| (latent.q_rank == 0) != is_lite(spec)) => {
            Some(format!("queries from this latent in a {name} model of {} layers", spec.layers))
        }
        _ if matches!(spec.recurrence, Some(Recurrence::Delta(_))) && attention_interval(spec).is_none() => {
            Some(format!("attention in irregular layers of {name}"))
        }
        _ if matches!(&spec.recurrence, Some(Recurrence::Delta(net)) if net.shape.key_dim != net.shape.value_dim) => {
            Some(format!("value heads that are not as wide as key heads in {name}"))
        }
        _ if has_narrow_heads(spec.arch) && spec.heads * spec.head_dim != spec.dim => {
            Some(format!("heads that together are not as wide as the model in {name}"))
        }
        _ if spec.arch == Arch::Starcoder2 && !(spec.qkv_bias && spec.out_bias && spec.mlp_bias) => {
            Some("a starcoder2 model without biases".into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ops::{GluClamp, RouteRule};
    use crate::nn::{Experts, Latent};

    #[test]
    fn families_that_cannot_be_exported_are_named() {
        for family in Arch::all().filter(|family| !EXPORTED.contains(&family.arch)) {
            let refused = check(&Spec { arch: family.arch, layers: 2, ..Spec::default() });
            let says = format!("{} models cannot", family.name);
            assert!(refused.unwrap_err().to_string().contains(&says), "{}", family.name);
        }
    }

    /// llama.cpp knows of each family what its files have no key for.
    #[test]
    fn unusual_mixtures_are_refused() {
        let experts =
            |normalize, dense| Some(Experts { count: 4, top_k: 2, ff: 16, normalize, dense, ..Experts::default() });
        let of = |arch, experts| Spec {
            arch,
            layers: 2,
            experts,
            rope: Some(Rotary { theta: 1e4, scaling: Scaling::None }),
            ..Spec::default()
        };
        for (spec, what) in [
            (of(Arch::Qwen3Moe, experts(true, vec![0])), "dense layers in qwen3_moe"),
            (of(Arch::Qwen3Moe, experts(false, vec![])), "norm_topk_prob: false in qwen3_moe"),
            (of(Arch::Olmoe, experts(true, vec![])), "norm_topk_prob: true in olmoe"),
            (
                Spec { dim: 64, heads: 4, head_dim: 16, kv_heads: 2, ..of(Arch::Olmoe, experts(false, vec![])) },
                "keys that are",
            ),
            (Spec { qkv_clip: Some(8.0), ..of(Arch::Olmoe, experts(false, vec![])) }, "clip_qkv in olmoe"),
        ] {
            let refused = check(&spec).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
        for (arch, normalize) in
            [(Arch::Mixtral, true), (Arch::Qwen2Moe, false), (Arch::Qwen3Moe, true), (Arch::Olmoe, false)]
        {
            check(&of(arch, experts(normalize, vec![]))).unwrap();
        }
    }

    /// llama.cpp ignores what files say of these.
    #[test]
    fn rotations_and_windows_that_it_does_not_read_are_refused() {
        let yarn = |attention| Scaling::Yarn {
            factor: 4.0,
            original: 32,
            attention,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
        };
        let of = |arch, layers, attention| Spec {
            arch,
            layers,
            max_len: 8192,
            rope: Some(Rotary { theta: 1e4, scaling: yarn(attention) }),
            ..Spec::default()
        };
        let usual = Scaling::yarn_attention(4.0);
        check(&of(Arch::Qwen3, 2, usual)).unwrap();
        let windowed = |layers: usize| Spec {
            window: 4096,
            windowed: (1..=layers).map(|i: usize| !i.is_multiple_of(4)).collect(),
            ..of(Arch::Exaone4, layers, usual)
        };
        check(&windowed(64)).unwrap();
        let smollm = |rotated: &[bool]| Spec { rotated: rotated.to_vec(), ..of(Arch::SmolLm3, 4, usual) };
        check(&smollm(&[true, true, true, false])).unwrap();
        let slower = Scaling::Yarn {
            factor: 4.0,
            original: 32,
            attention: usual,
            beta_fast: 32.0,
            beta_slow: 2.0,
            truncate: true,
        };
        // A window of all layers is said, and one that hides nothing is not.
        let all = |window| Spec {
            window,
            windowed: vec![true; 2],
            rope: Some(Rotary { theta: 1e4, scaling: Scaling::None }),
            ..of(Arch::Mistral, 2, usual)
        };
        check(&all(4096)).unwrap();
        assert_eq!([4096, 8192].map(|window| left_out(&all(window)).is_some()), [true, false]);
        for (spec, what) in [
            (of(Arch::Qwen3, 2, 0.7), "YaRN with an attention_factor of 0.7"),
            (
                Spec { rope: Some(Rotary { theta: 1e4, scaling: slower }), ..of(Arch::Qwen3, 2, usual) },
                "a beta_fast of 32 and a beta_slow of 2",
            ),
            (windowed(8), "sliding windows in these layers of exaone4"),
            (Spec { window: 8, windowed: vec![true; 2], ..of(Arch::Phi3, 2, usual) }, "this rotary scaling in a phi3"),
            (smollm(&[]), "than every fourth in a smollm3"),
            (Spec { out_bias: true, ..of(Arch::SeedOss, 2, usual) }, "these biases in a seed_oss"),
        ] {
            let refused = check(&spec).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }

    /// llama.cpp has DeepSeek's parts in one way, and gpt-oss's.
    #[test]
    fn unusual_latents_and_clamps_are_refused() {
        let rule = |groups| RouteRule { sigmoid: true, biased: true, groups, ..RouteRule::PLAIN };
        let deepseek = |arch, groups| Spec {
            arch,
            layers: 2,
            rotary_pairs: RotaryPairs::Adjacent,
            latent: Some(Latent { q_rank: 8, kv_rank: 8, nope: 8, rope: 8, value: 8 }),
            experts: Some(Experts {
                count: 4,
                top_k: 2,
                ff: 16,
                shared_ff: 16,
                dense: vec![0],
                rule: Some(rule(groups)),
                ..Experts::default()
            }),
            ..Spec::default()
        };
        let clamp = |limit| Experts {
            count: 4,
            top_k: 2,
            ff: 16,
            normalize: true,
            clamp: Some(GluClamp { alpha: 1.702, limit }),
            ..Experts::default()
        };
        let gpt_oss = |limit, out_bias| Spec {
            arch: Arch::GptOss,
            layers: 2,
            qkv_bias: true,
            out_bias,
            max_len: 64,
            window: 8,
            windowed: vec![true, false],
            experts: Some(clamp(limit)),
            ..Spec::default()
        };
        check(&deepseek(Arch::DeepseekV3, 2)).unwrap();
        check(&gpt_oss(7.0, true)).unwrap();
        let v3 = || deepseek(Arch::DeepseekV3, 1);
        let without_q = Some(Latent { q_rank: 0, kv_rank: 8, nope: 8, rope: 8, value: 8 });
        check(&Spec { latent: without_q, layers: 27, ..v3() }).unwrap();
        for (spec, what) in [
            (deepseek(Arch::DeepseekV2, 2), "this choice of experts in deepseek_v2"),
            (Spec { rotary_pairs: RotaryPairs::Halves, ..v3() }, "rope_interleave: false in deepseek_v3"),
            (Spec { latent: without_q, ..v3() }, "queries from this latent in a deepseek_v3 model of 2 layers"),
            (gpt_oss(5.0, true), "another swiglu_limit than 7"),
            (gpt_oss(7.0, false), "a gpt_oss model without biases of attention"),
            (Spec { windowed: vec![false, true], ..gpt_oss(7.0, true) }, "sliding windows in these layers of gpt_oss"),
        ] {
            let refused = check(&spec).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }

    /// The file of a Gemma has no keys for them.
    #[test]
    fn unusual_rotations_of_gemma_are_refused() {
        let rope = |theta, scaling| Some(Rotary { theta, scaling });
        let linear = || Scaling::Linear { factor: 2.0 };
        let gemma2 =
            Spec { arch: Arch::Gemma2, layers: 2, score_cap: 50.0, logit_cap: 30.0, tied: true, ..Spec::default() };
        for (spec, what) in [
            (
                Spec { rope: rope(500.0, Scaling::None), ..gemma2.clone() },
                "another rotation than the usual in a gemma2",
            ),
            (Spec { rope: rope(1e4, linear()), ..gemma2 }, "another rotation than the usual in a gemma2"),
            (
                Spec {
                    arch: Arch::Gemma3,
                    layers: 2,
                    rope: rope(1e6, Scaling::None),
                    local_rope: rope(1e4, linear()),
                    ..Spec::default()
                },
                "scaled rotations of windows in a gemma3",
            ),
        ] {
            let refused = check(&spec).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }
}
