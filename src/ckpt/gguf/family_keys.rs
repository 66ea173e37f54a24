//! The keys of a GGUF file that a family has besides those of all, in the order of llama.cpp's converter. Never reads
//! or writes a file.
use super::family::{attention_interval, is_deepseek};
use super::header::KeyValue;
use crate::ckpt::hf::decimal;
use crate::nn::{Arch, HeadSizes, Recurrence, Spec};
use serde_json::{Map, Value};

/// Puts the keys of the family, behind the file's type.
pub fn of_family(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>, length: usize) {
    match spec.arch {
        _ if is_deepseek(spec.arch) => deepseek(put, spec, config),
        Arch::Qwen3 => {
            if let Some(eyes) = config.get("vision_config") {
                let layers = eyes["deepstack_visual_indexes"].as_array().map_or(0, Vec::len);
                put("n_deepstack_layers", KeyValue::U32(layers));
            }
        }
        Arch::GptOss => {
            put("attention.sliding_window", KeyValue::U32(spec.window));
            put("expert_feed_forward_length", KeyValue::U32(spec.experts.as_ref().map_or(0, |experts| experts.ff)));
        }
        Arch::Lfm2 | Arch::Lfm2Moe => {
            if let Some(experts) = &spec.experts {
                put("expert_feed_forward_length", KeyValue::U32(experts.ff));
                put("leading_dense_block_count", KeyValue::U32(experts.dense.len()));
                put("expert_gating_func", KeyValue::U32(2)); // sigmoids
            }
            put("vocab_size", KeyValue::U32(spec.vocab));
            put("shortconv.l_cache", KeyValue::U32(spec.recurrence.as_ref().map_or(0, Recurrence::taps)));
        }
        Arch::Ministral3 => {
            for (key, name) in [
                ("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
                ("attention.temperature_scale", "llama_4_scaling_beta"),
            ] {
                if let Some(factor) = rotation(config, name) {
                    put(key, KeyValue::F32(factor));
                }
            }
        }
        Arch::Gemma4 => {
            if spec.logit_cap > 0.0 {
                put("final_logit_softcapping", KeyValue::F32(spec.logit_cap as f64));
            }
            put("attention.sliding_window", KeyValue::U32(spec.window));
            put("attention.shared_kv_layers", KeyValue::U32(spec.shared_kv));
            put("embedding_length_per_layer_input", KeyValue::U32(spec.layer_inputs));
            put("attention.sliding_window_pattern", KeyValue::Bools(&windowed(spec)));
            put("attention.key_length_swa", KeyValue::U32(spec.head_dim));
            put("attention.value_length_swa", KeyValue::U32(spec.head_dim));
            if let Some(experts) = &spec.experts {
                put("expert_feed_forward_length", KeyValue::U32(experts.ff));
            }
            put("rope.dimension_count", KeyValue::U32(global_heads(spec).head_dim));
            put("rope.dimension_count_swa", KeyValue::U32(spec.head_dim));
        }
        Arch::Glm4 => put("rope.dimension_count", KeyValue::U32(spec.rotary_dim.unwrap_or(spec.head_dim))),
        Arch::Cohere2 => {
            put("logit_scale", KeyValue::F32(config.get("logit_scale").and_then(Value::as_f64).unwrap_or(0.0625)));
            put("attention.sliding_window", KeyValue::U32(spec.window));
            put("vocab_size", KeyValue::U32(spec.vocab));
            put("rope.dimension_count", KeyValue::U32(spec.head_dim));
            put("rope.scaling.type", KeyValue::Text("none"));
        }
        Arch::HunyuanDense if has_alpha(config) => {
            put("rope.scaling.type", KeyValue::Text("none"));
            put("rope.scaling.factor", KeyValue::F32(1.0));
            put("rope.scaling.original_context_length", KeyValue::U32(length));
        }
        Arch::Granite => {
            for (key, name) in [
                ("attention.scale", "attention_multiplier"),
                ("embedding_scale", "embedding_multiplier"),
                ("residual_scale", "residual_multiplier"),
                ("logit_scale", "logits_scaling"),
            ] {
                put(key, KeyValue::F32(config.get(name).and_then(Value::as_f64).unwrap_or(1.0)));
            }
        }
        Arch::Gemma2 | Arch::Gemma3 => {
            for (key, cap) in [("attn_logit_softcapping", spec.score_cap), ("final_logit_softcapping", spec.logit_cap)]
            {
                if cap > 0.0 {
                    put(key, KeyValue::F32(cap as f64));
                }
            }
            put("attention.sliding_window", KeyValue::U32(spec.window));
        }
        Arch::Qwen2Moe | Arch::Qwen3Moe | Arch::Qwen35 | Arch::Qwen35Moe | Arch::Qwen3Next => {
            let experts = spec.experts.as_ref();
            for (key, width) in [
                ("expert_feed_forward_length", experts.map_or(0, |experts| experts.ff)),
                ("expert_shared_feed_forward_length", experts.map_or(0, |experts| experts.shared_ff)),
            ] {
                if width > 0 {
                    put(key, KeyValue::U32(width));
                }
            }
            delta(put, spec, config);
        }
        _ => {}
    }
}

/// Which layers have a window.
pub fn windowed(spec: &Spec) -> Vec<bool> {
    (0..spec.layers).map(|i| spec.window_of(i) > 0).collect()
}
/// The heads of layers without a window.
pub fn global_heads(spec: &Spec) -> HeadSizes {
    spec.global_heads.unwrap_or(HeadSizes { head_dim: spec.head_dim, kv_heads: spec.kv_heads })
}
/// The base of a Hunyuan's rotation grew.
pub fn has_alpha(config: &Map<String, Value>) -> bool {
    rotation(config, "alpha").is_some()
}

/// A number that the config gives for the rotation of layers without windows.
pub fn rotation(config: &Map<String, Value>, key: &str) -> Option<f64> {
    let given = ["rope_parameters", "rope_scaling"].iter().find_map(|key| config.get(*key).filter(|v| v.is_object()));
    given.map(|map| map.get("full_attention").unwrap_or(map))?.get(key)?.as_f64()
}

/// How many pairs of a head turn by time, height and width, of models that see.
pub fn sections(config: &Map<String, Value>) -> Option<[i32; 4]> {
    let given = ["rope_parameters", "rope_scaling"].iter().find_map(|key| config.get(*key)?.get("mrope_section"))?;
    let mut sections = [0; 4];
    sections.iter_mut().zip(given.as_array()?).for_each(|(section, n)| *section = n.as_i64().unwrap_or(0) as i32);
    Some(sections)
}

/// How experts are chosen by scores, as transformers' class has it.
pub fn choice(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
    let Some(rule) = spec.experts.as_ref().and_then(|experts| experts.rule) else { return };
    for (key, name, groups) in
        [("expert_group_count", "n_group", rule.groups), ("expert_group_used_count", "topk_group", rule.top_groups)]
    {
        if spec.arch != Arch::DeepseekV2 || config.get(name).is_some_and(Value::is_u64) {
            put(key, KeyValue::U32(groups));
        }
    }
    // What llama.cpp takes a model for whose config does not say it.
    let flash = matches!(spec.layers, 47 | 48) && spec.vocab == 154_880;
    if config.contains_key("scoring_func") || rule.sigmoid != flash {
        put("expert_gating_func", KeyValue::U32(if rule.sigmoid { 2 } else { 1 }));
    }
}

/// Latent attention and the experts of DeepSeek.
fn deepseek(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
    let (Some(latent), Some(experts)) = (&spec.latent, &spec.experts) else { return };
    put("leading_dense_block_count", KeyValue::U32(experts.dense.len()));
    put("vocab_size", KeyValue::U32(spec.vocab));
    if latent.q_rank > 0 {
        put("attention.q_lora_rank", KeyValue::U32(latent.q_rank));
    }
    for (key, size) in [
        ("attention.kv_lora_rank", latent.kv_rank),
        ("attention.key_length", latent.kv_rank + latent.rope),
        ("attention.value_length", latent.kv_rank),
        ("attention.key_length_mla", latent.nope + latent.rope),
        ("attention.value_length_mla", latent.value),
        ("expert_feed_forward_length", experts.ff),
        ("expert_count", experts.count),
        ("expert_shared_count", experts.shared_ff / experts.ff),
    ] {
        put(key, KeyValue::U32(size));
    }
    put("expert_weights_scale", KeyValue::F32(decimal(experts.rule.map_or(1.0, |rule| rule.scale))));
    if experts.normalize {
        put("expert_weights_norm", KeyValue::Bool(true));
    }
    put("rope.dimension_count", KeyValue::U32(latent.rope));
    if let Some(factor) = rotation(config, "mscale_all_dim") {
        put("rope.scaling.yarn_log_multiplier", KeyValue::F32(0.1 * factor));
    }
}

/// The gated delta nets of Qwen 3.5 and Qwen3-Next, and their rotation; nothing for models without them.
fn delta(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
    let Some(Recurrence::Delta(net)) = &spec.recurrence else { return };
    for (key, size) in [
        ("ssm.conv_kernel", net.taps),
        ("ssm.state_size", net.shape.key_dim),
        ("ssm.group_count", net.shape.key_heads),
        ("ssm.time_step_rank", net.shape.value_heads),
        ("ssm.inner_size", net.shape.values()),
    ] {
        put(key, KeyValue::U32(size));
    }
    let recurrent: Vec<bool> = (0..spec.layers).map(|i| spec.recurrence_of(i).is_some()).collect();
    put("attention.recurrent_layers", KeyValue::Bools(&recurrent));
    put("full_attention_interval", KeyValue::U32(attention_interval(spec).unwrap_or(4)));
    put("rope.dimension_count", KeyValue::U32(spec.rotary_dim.unwrap_or(spec.head_dim)));
    if spec.arch != Arch::Qwen3Next && sections(config).is_none() {
        put("rope.dimension_sections", KeyValue::I32s(&[11, 11, 10, 0])); // as the published models have it
    }
}

/// The keys of Phi 3 and 4, in the converter's order.
pub fn phi3(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
    let size = |key: &str, usual: usize| config.get(key).and_then(Value::as_u64).map_or(usual, |n| n as usize);
    put("context_length", KeyValue::U32(size("max_position_embeddings", spec.max_len)));
    put("rope.scaling.original_context_length", KeyValue::U32(size("original_max_position_embeddings", 4096)));
    put("embedding_length", KeyValue::U32(spec.dim));
    put("feed_forward_length", KeyValue::U32(spec.ff));
    put("block_count", KeyValue::U32(spec.layers));
    put("attention.head_count", KeyValue::U32(spec.heads));
    put("attention.head_count_kv", KeyValue::U32(spec.kv_heads));
    put("attention.layer_norm_rms_epsilon", KeyValue::F32(decimal(spec.norm_eps)));
    put("rope.dimension_count", KeyValue::U32(spec.rotary_dim.unwrap_or(spec.head_dim)));
    if let Some(rope) = &spec.rope {
        put("rope.freq_base", KeyValue::F32(rope.theta));
    }
}
