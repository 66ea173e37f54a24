//! The keys that describe a model in a GGUF file, in the order of llama.cpp's converter. Never reads or writes a file.
use super::family::{architecture, is_deepseek, is_llama, says_head_dim, says_windows};
use super::family_keys::{choice, global_heads, has_alpha, of_family, phi3, rotation, sections, windowed};
use super::header::{GgufKeys, KeyValue};
use super::model::{GgufTensor, GgufTensors, GgufType};
use crate::ckpt::hf::decimal;
use crate::nn::{Arch, Rotary, Scaling, Spec};
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
    let arch = architecture(spec.arch, config);
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
    let length = if has_alpha(config) && length == HUNYUAN_SAYS { HUNYUAN_LENGTH } else { length };
    let wide = config.get("intermediate_size").and_then(Value::as_u64).map(|n| n as usize);
    let wide = if spec.experts.is_some() { wide } else { Some(spec.ff) };
    let global = global_heads(spec);
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
            // The latent is the only key and value of all heads.
            _ => put("attention.head_count_kv", KeyValue::U32(if spec.latent.is_some() { 1 } else { spec.kv_heads })),
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
        if is_deepseek(spec.arch) {
            choice(&mut put, spec, config);
        }
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
        put("attention.sliding_window_pattern", KeyValue::Bools(&windowed(spec)));
    }
    of_family(&mut put, spec, config, length);
    keys.put("general.quantization_version", KeyValue::U32(2));
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
    // The converter counts the biases of all experts.
    let of = |tensor: &GgufTensor| {
        if tensor.shape.len() < 3 { &tensor.shape } else { tensor.of_expert() }.iter().product::<usize>()
    };
    let params: usize = counted.map(of).sum();
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
