//! The keys that describe a model in a GGUF file, in the order of llama.cpp's converter. Never reads or writes a file.
use super::family::{architecture, attention_interval, is_llama, says_head_dim, says_windows};
use super::header::{GgufKeys, KeyValue};
use super::model::{GgufTensors, GgufType};
use crate::ckpt::hf::decimal;
use crate::nn::{Arch, HeadSizes, Recurrence, Rotary, Scaling, Spec};
use serde_json::{Map, Value};

/// The positions of a Hunyuan whose base grew, which its config has as fewer.
const HUNYUAN_LENGTH: usize = 256 << 10;
const HUNYUAN_SAYS: usize = 32 << 10;

/// Puts the keys that describe the model. `config` is its `config.json`, `generation` its `generation_config.json`.
pub fn put(
    keys: &mut GgufKeys,
    name: &str,
    spec: &Spec,
    config: &Map<String, Value>,
    generation: &Value,
    tensors: &GgufTensors,
    kind: GgufType,
) {
    let arch = architecture(spec.arch);
    keys.put("general.architecture", KeyValue::Text(arch));
    if let Some(Rotary { scaling: Scaling::Long { attention, .. }, .. }) = &spec.rope {
        keys.put(&format!("{arch}.rope.scaling.attn_factor"), KeyValue::F32(*attention));
    }
    keys.put("general.type", KeyValue::Text("model"));
    if let Some(k) = generation["top_k"].as_i64() {
        keys.put("general.sampling.top_k", KeyValue::I32(k));
    }
    for (key, from) in [("top_p", "top_p"), ("min_p", "min_p"), ("temp", "temperature")]
        .into_iter()
        .chain([("penalty_repeat", "repetition_penalty")])
    {
        if let Some(x) = generation[from].as_f64() {
            keys.put(&format!("general.sampling.{key}"), KeyValue::F32(x));
        }
    }
    keys.put("general.name", KeyValue::Text(name));
    keys.put("general.size_label", KeyValue::Text(&sizes(spec, tensors)));

    let mut put = |key: &str, value: KeyValue| keys.put(&format!("{arch}.{key}"), value);
    if spec.arch == Arch::Phi3 {
        phi3(&mut put, spec, config);
        keys.put("general.file_type", KeyValue::U32(kind.id()));
        keys.put("phi3.attention.sliding_window", KeyValue::U32(spec.window));
        keys.put("general.quantization_version", KeyValue::U32(2));
        return;
    }
    let length = config.get("max_position_embeddings").and_then(Value::as_u64).unwrap_or(spec.max_len as u64) as usize;
    let alpha = rotation(config, "alpha").is_some();
    let length = if alpha && length == HUNYUAN_SAYS { HUNYUAN_LENGTH } else { length };
    let wide = config.get("intermediate_size").and_then(Value::as_u64).map(|n| n as usize);
    let wide = if spec.experts.is_some() { wide } else { Some(spec.ff) };
    let global = spec.global_heads.unwrap_or(HeadSizes { head_dim: spec.head_dim, kv_heads: spec.kv_heads });
    let windowed: Vec<bool> = (0..spec.layers).map(|i| spec.window_of(i) > 0).collect();
    let each = |of: &dyn Fn(usize) -> usize| (0..spec.layers).map(|i| of(i) as i32).collect::<Vec<i32>>();
    let heads = |put: &mut dyn FnMut(&str, KeyValue)| {
        match wide {
            _ if spec.wide_shared => put("feed_forward_length", KeyValue::I32s(&each(&|i| spec.of_block(i).ff))),
            Some(wide) => put("feed_forward_length", KeyValue::U32(wide)),
            None => {}
        }
        put("attention.head_count", KeyValue::U32(spec.heads));
        match spec.arch {
            Arch::Lfm2 | Arch::Lfm2Moe => {
                let of = |i| if spec.recurrence_of(i).is_some() { 0 } else { spec.kv_heads };
                put("attention.head_count_kv", KeyValue::I32s(&each(&of)));
            }
            Arch::Gemma4 if config.get("num_global_key_value_heads").is_some_and(Value::is_u64) => {
                put("attention.head_count_kv", KeyValue::I32s(&each(&|i| spec.heads_of(i).kv_heads)));
            }
            _ => put("attention.head_count_kv", KeyValue::U32(spec.kv_heads)),
        }
    };
    // The converter writes these keys in another order for Gemma 2.
    if spec.arch == Arch::Gemma2 {
        put("context_length", KeyValue::U32(length));
        put("embedding_length", KeyValue::U32(spec.dim));
        put("block_count", KeyValue::U32(spec.layers));
        heads(&mut put);
    } else {
        put("block_count", KeyValue::U32(spec.layers));
        put("context_length", KeyValue::U32(length));
        put("embedding_length", KeyValue::U32(spec.dim));
        heads(&mut put);
        rope(&mut put, spec, config);
    }
    let norm = if spec.layer_norm { "attention.layer_norm_epsilon" } else { "attention.layer_norm_rms_epsilon" };
    put(norm, KeyValue::F32(decimal(spec.norm_eps)));
    if let Some(experts) = &spec.experts {
        put("expert_count", KeyValue::U32(experts.count));
        put("expert_used_count", KeyValue::U32(experts.top_k));
    }
    if says_head_dim(spec.arch) || spec.arch != Arch::Granite && config.get("head_dim").is_some_and(Value::is_u64) {
        put("attention.key_length", KeyValue::U32(global.head_dim));
        put("attention.value_length", KeyValue::U32(global.head_dim));
    }
    keys.put("general.file_type", KeyValue::U32(kind.id()));
    let mut put = |key: &str, value: KeyValue| keys.put(&format!("{arch}.{key}"), value);
    if is_llama(spec.arch) || spec.arch == Arch::Exaone4 {
        put("vocab_size", KeyValue::U32(spec.vocab));
    }
    if is_llama(spec.arch) {
        put("rope.dimension_count", KeyValue::U32(spec.head_dim));
    }
    if says_windows(spec.arch) && spec.window > 0 {
        put("attention.sliding_window", KeyValue::U32(spec.window));
        put("attention.sliding_window_pattern", KeyValue::Bools(&windowed));
    }
    match spec.arch {
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
            put("attention.sliding_window_pattern", KeyValue::Bools(&windowed));
            put("attention.key_length_swa", KeyValue::U32(spec.head_dim));
            put("attention.value_length_swa", KeyValue::U32(spec.head_dim));
            if let Some(experts) = &spec.experts {
                put("expert_feed_forward_length", KeyValue::U32(experts.ff));
            }
            put("rope.dimension_count", KeyValue::U32(global.head_dim));
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
        Arch::HunyuanDense if alpha => {
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
        Arch::Qwen2Moe | Arch::Qwen3Moe | Arch::Qwen35 | Arch::Qwen35Moe => {
            let experts = spec.experts.as_ref();
            for (key, width) in [
                ("expert_feed_forward_length", experts.map_or(0, |experts| experts.ff)),
                ("expert_shared_feed_forward_length", experts.map_or(0, |experts| experts.shared_ff)),
            ] {
                if width > 0 {
                    put(key, KeyValue::U32(width));
                }
            }
            delta(&mut put, spec, config);
        }
        _ => {}
    }
    keys.put("general.quantization_version", KeyValue::U32(2));
}

/// How many pairs of a head turn by time, height and width, of models that see.
fn sections(config: &Map<String, Value>) -> Option<[i32; 4]> {
    let given = ["rope_parameters", "rope_scaling"].iter().find_map(|key| config.get(*key)?.get("mrope_section"))?;
    let mut sections = [0; 4];
    sections.iter_mut().zip(given.as_array()?).for_each(|(section, n)| *section = n.as_i64().unwrap_or(0) as i32);
    Some(sections)
}

/// The gated delta nets of Qwen 3.5, and its rotation; nothing for models without them.
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
    if sections(config).is_none() {
        put("rope.dimension_sections", KeyValue::I32s(&[11, 11, 10, 0])); // as the published models have it
    }
}

/// The keys of Phi 3 and 4, in the converter's order.
fn phi3(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
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

/// A number that the config gives for the rotation of layers without windows.
fn rotation(config: &Map<String, Value>, key: &str) -> Option<f64> {
    let given = ["rope_parameters", "rope_scaling"].iter().find_map(|key| config.get(*key).filter(|v| v.is_object()));
    given.map(|map| map.get("full_attention").unwrap_or(map))?.get(key)?.as_f64()
}

fn rope(put: &mut dyn FnMut(&str, KeyValue), spec: &Spec, config: &Map<String, Value>) {
    let Some(rope) = &spec.rope else { return };
    let scaled = |put: &mut dyn FnMut(&str, KeyValue), kind, factor| {
        put("rope.scaling.type", KeyValue::Text(kind));
        put("rope.scaling.factor", KeyValue::F32(factor));
    };
    match rope.scaling {
        Scaling::Linear { factor } => scaled(put, "linear", factor),
        Scaling::Yarn { factor, original, .. } => {
            scaled(put, "yarn", factor);
            put("rope.scaling.original_context_length", KeyValue::U32(original));
            // llama.cpp and transformers have the same defaults for keys that the config leaves out.
            for (key, name) in [
                ("extrapolation_factor", "yarn_ext_factor"),
                ("attention_factor", "yarn_attn_factor"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ] {
                if let Some(x) = rotation(config, key) {
                    put(&format!("rope.scaling.{name}"), KeyValue::F32(x));
                }
            }
        }
        Scaling::None
        | Scaling::Llama3 { .. }
        | Scaling::Dynamic { .. }
        | Scaling::Proportional { .. }
        | Scaling::Long { .. } => {}
    }
    if let Some(sections) = sections(config) {
        put("rope.dimension_sections", KeyValue::I32s(&sections));
    }
    put("rope.freq_base", KeyValue::F32(rope.theta));
    if let Some(local) = &spec.local_rope {
        put("rope.freq_base_swa", KeyValue::F32(local.theta));
    }
}

/// Parameters: 1.2B, or 8x7.2B, with one expert of eight.
fn sizes(spec: &Spec, tensors: &GgufTensors) -> String {
    let counted = tensors.list.iter().filter(|tensor| tensor.is_first());
    let params: usize = counted.map(|tensor| tensor.of_expert().iter().product::<usize>()).sum();
    let factors: usize = tensors.factors.iter().map(|factors| factors.values.len()).sum();
    let label = size_label(factors + params);
    spec.experts.as_ref().map_or(label.clone(), |experts| format!("{}x{label}", experts.count))
}

/// Parameters with two digits or more: 1.2B, 350M.
fn size_label(params: usize) -> String {
    let (scale, unit) = [(1e12, "T"), (1e9, "B"), (1e6, "M")]
        .into_iter()
        .find(|(scale, _)| params as f64 > *scale)
        .unwrap_or((1e3, "K"));
    let scaled = params as f64 / scale;
    let digits = scaled.round_ties_even().to_string().trim_start_matches('0').len();
    format!("{scaled:.*}{unit}", 2usize.saturating_sub(digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_labels_have_two_digits() {
        let labels = [
            (999, "1.0K"),
            (9_960, "10K"),
            (21_500, "22K"),
            (1_235_814_400, "1.2B"),
            (494_032_768, "494M"),
            (95, "0.10K"),
        ];
        labels.iter().for_each(|(params, label)| assert_eq!(size_label(*params), *label));
    }
}
