//! The `config.json` of a model from the keys of a GGUF file. Never guesses: a key of the model that is neither read
//! nor known to change nothing is an error that names it.
use super::super::family::{GgufFactors, factors};
use super::super::file::{GgufFile, GgufValue};
use crate::base::{Error, Result, quote};
use crate::ckpt::hf::decimal;
use crate::nn::{Rotary, Scaling};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// A GGUF architecture, and transformers' `model_type` and class for it.
const FAMILIES: [(&str, &str, &str); 8] = [
    ("gemma2", "gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
    ("llama", "llama", "LlamaForCausalLM"),
    ("olmoe", "olmoe", "OlmoeForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
];

const WINDOW: &str = "attention.sliding_window";

/// Keys of a model that change nothing here: what follows from the architecture or the tensors, and notes.
const IDLE: [&str; 6] = [
    "attention.layer_norm_epsilon",
    "attention.sliding_window_pattern", // the architecture's
    "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "vocab_size",
];

/// The config of the model in `file`, without token ids. `divisors`: those of its rotary frequencies, if it has any.
pub fn config(file: &GgufFile, divisors: &[f32]) -> Result<Map<String, Value>> {
    let Some(GgufValue::Text(arch)) = file.keys.get("general.architecture") else {
        return Err(Error::input("general.architecture is missing: this is not a GGUF file of a model"));
    };
    if file.keys.get("general.type").is_some_and(|kind| *kind != GgufValue::Text("model".into())) {
        return Err(Error::input("general.type says that this is not a model: name the file of the model itself"));
    }
    let Some((_, family, class)) = FAMILIES.iter().find(|(name, ..)| name == arch) else {
        let known: Vec<&str> = FAMILIES.iter().map(|(name, ..)| *name).collect();
        return Err(Error::input(format!(
            "general.architecture is {}; supported in GGUF files: {}. The model's Hugging Face directory may load",
            quote(arch),
            known.join(", ")
        )));
    };
    let keys = ModelKeys { file, arch, asked: RefCell::default() };
    let mixtral = arch == "llama" && keys.number("expert_count")?.is_some_and(|n| n > 0.0);
    let (family, class) = match (mixtral, keys.present(WINDOW) && arch == "llama") {
        (true, _) => ("mixtral", "MixtralForCausalLM"),
        (_, true) => ("mistral", "MistralForCausalLM"),
        _ => (*family, *class),
    };
    if keys.get("attention.causal").is_some_and(|value| *value != GgufValue::Bool(true)) {
        return Err(keys.wrong("attention.causal", "true: each token is predicted from those before"));
    }
    if !mixtral && keys.number("expert_count")? == Some(0.0) {
        keys.only("expert_used_count", 0)?;
    }
    let gemma = arch.starts_with("gemma");
    let mut map = object(json!({"architectures": [class], "model_type": family}));
    let mut put = |key: &str, value: Value| drop(map.insert(key.into(), value));

    let (dim, layers, heads) =
        (keys.size("embedding_length")?, keys.size("block_count")?, keys.size("attention.head_count")?);
    let given = keys.number("attention.key_length")?.or(keys.number("rope.dimension_count")?).map(|n| n as usize);
    let head_dim = given.unwrap_or(dim / heads.max(1));
    for key in ["attention.value_length", "rope.dimension_count"] {
        keys.only(key, head_dim)?;
    }
    put("hidden_size", json!(dim));
    put("num_hidden_layers", json!(layers));
    put("num_attention_heads", json!(heads));
    put("num_key_value_heads", json!(keys.each("attention.head_count_kv")?.unwrap_or(heads)));
    put("intermediate_size", json!(keys.each("feed_forward_length")?));
    put("max_position_embeddings", json!(keys.size("context_length")?));
    put("rms_norm_eps", json!(keys.need("attention.layer_norm_rms_epsilon")?));
    put("vocab_size", json!(rows(file, "token_embd.weight")?));
    put("tie_word_embeddings", json!(!file.tensors.contains_key("output.weight")));
    put("attention_dropout", json!(0.0));
    if given.is_some() {
        put("head_dim", json!(head_dim));
    }
    let has = |name: &str| file.tensors.contains_key(name);
    match family {
        "llama" => {
            put("attention_bias", json!(has("blk.0.attn_q.bias")));
            put("mlp_bias", json!(has("blk.0.ffn_up.bias")));
        }
        "mistral" => put("sliding_window", json!(keys.size(WINDOW)?)),
        "mixtral" => put("sliding_window", Value::Null),
        "qwen2" => put("use_sliding_window", json!(false)),
        "qwen3" | "qwen3_moe" => {
            put("use_sliding_window", json!(false));
            put("attention_bias", json!(has("blk.0.attn_q.bias")));
        }
        _ => {}
    }
    if gemma {
        put("hidden_activation", json!("gelu_pytorch_tanh"));
        // The first files of Gemma 2 have none of these keys: llama.cpp and transformers take the same values then.
        let first = arch == "gemma2";
        let window = if first { keys.each(WINDOW)?.unwrap_or(4096) } else { keys.size(WINDOW)? };
        put("sliding_window", json!(window));
        put("attn_logit_softcapping", json!(keys.number("attn_logit_softcapping")?.or(first.then_some(50.0))));
        put("final_logit_softcapping", json!(keys.number("final_logit_softcapping")?.or(first.then_some(30.0))));
        // llama.cpp knows the two models whose scale is another by their depth.
        let largest = if arch == "gemma2" { 46 } else { 62 };
        let scalar = if layers == largest { dim / heads.max(1) } else { head_dim };
        put("query_pre_attn_scalar", json!(scalar));
    } else {
        put("hidden_act", json!("silu"));
    }
    if mixtral || family.ends_with("moe") {
        experts(&keys, family, &mut put)?;
    }
    let base = keys.number("rope.freq_base")?;
    put("rope_theta", json!(base.unwrap_or(if arch == "gemma3" { 1_000_000.0 } else { 10_000.0 })));
    if arch == "gemma3" {
        put("rope_local_base_freq", json!(keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0)));
    }
    if let Some(scaling) = scaling(&keys, divisors, base.unwrap_or(10_000.0))? {
        put("rope_scaling", scaling);
    }
    keys.finish()?;
    Ok(map)
}

fn experts(keys: &ModelKeys, family: &str, put: &mut dyn FnMut(&str, Value)) -> Result<()> {
    let count = keys.size("expert_count")?;
    put(if family == "mixtral" { "num_local_experts" } else { "num_experts" }, json!(count));
    put("num_experts_per_tok", json!(keys.size("expert_used_count")?));
    let width = keys.number("expert_feed_forward_length")?.map(|n| n as usize);
    match family {
        "qwen2_moe" => {
            // What llama.cpp takes where the keys are missing: it wrote them later.
            let of = |name: &str| rows(keys.file, name).map(|n| n as usize);
            put("moe_intermediate_size", json!(width.map_or_else(|| of("blk.0.ffn_gate_exps.weight"), Ok)?));
            let shared = keys.number("expert_shared_feed_forward_length")?.map(|n| n as usize);
            put(
                "shared_expert_intermediate_size",
                json!(shared.map_or_else(|| of("blk.0.ffn_gate_shexp.weight"), Ok)?),
            );
            put("norm_topk_prob", json!(false));
        }
        "qwen3_moe" => {
            put("moe_intermediate_size", json!(width));
            put("norm_topk_prob", json!(true));
        }
        "olmoe" => put("norm_topk_prob", json!(false)),
        _ => {}
    }
    put("output_router_logits", json!(false));
    Ok(())
}

/// `rope_scaling` of transformers.
fn scaling(keys: &ModelKeys, divisors: &[f32], base: f64) -> Result<Option<Value>> {
    let factor = keys.number("rope.scaling.factor")?;
    // As in llama.cpp: 0 scales nothing.
    let unnamed = if factor.is_some_and(|factor| ![0.0, 1.0].contains(&factor)) { "linear" } else { "none" };
    let kind = keys.text("rope.scaling.type")?.unwrap_or(unnamed);
    let original = keys.number("rope.scaling.original_context_length")?.map(|n| n as usize);
    if !divisors.is_empty() {
        return match kind {
            "none" => llama3(divisors, base).map(Some),
            _ => Err(Error::input(format!("has {}, and rope.scaling.type {}", GgufFactors::FREQS, quote(kind)))),
        };
    }
    match kind {
        "none" => Ok(None),
        "linear" => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
        "yarn" => {
            let mut map = object(json!({"rope_type": "yarn", "factor": factor}));
            map.insert(
                "original_max_position_embeddings".into(),
                json!(original.map_or_else(|| keys.size("context_length"), Ok)?),
            );
            for (key, name) in [
                ("yarn_attn_factor", "attention_factor"),
                ("yarn_beta_fast", "beta_fast"),
                ("yarn_beta_slow", "beta_slow"),
            ] {
                if let Some(x) = keys.number(&format!("rope.scaling.{key}"))? {
                    map.insert(name.into(), json!(x));
                }
            }
            if keys.number("rope.scaling.yarn_ext_factor")?.is_some_and(|x| x != 1.0) {
                return Err(Error::input("rope.scaling.yarn_ext_factor must be 1"));
            }
            Ok(Some(Value::Object(map)))
        }
        other => Err(Error::input(format!("rope.scaling.type is {}; supported: none, linear and yarn", quote(other)))),
    }
}

/// Lengths that models were trained with, in the order in which they are tried.
fn originals() -> impl Iterator<Item = usize> {
    [8192].into_iter().chain((4..22).map(|bits| 1 << bits))
}

/// `rope_scaling` of the kind "llama3" that gives these divisors of the frequencies. The file has the divisors alone;
/// with the factors that every published model has (1 and 4), they determine the rest.
fn llama3(divisors: &[f32], theta: f64) -> Result<Value> {
    let (low, high) = (1.0, 4.0);
    let factor = decimal(divisors.iter().copied().fold(1.0, f32::max));
    let near = |(a, b): (&f32, f32)| (a - b).abs() <= 1e-4 * b.abs();
    let fits = |&original: &usize| {
        let rope = Rotary { theta, scaling: Scaling::Llama3 { factor, low, high, original } };
        divisors.iter().zip(factors(&rope, 2 * divisors.len())).all(near)
    };
    let original = originals().find(fits).ok_or_else(|| {
        Error::input(format!("{} scales rotary positions in a way that Llama 3 models do not", GgufFactors::FREQS))
    })?;
    Ok(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }))
}

/// Rows of a matrix, or of each expert's.
fn rows(file: &GgufFile, name: &str) -> Result<u64> {
    let place = file.tensors.get(name).filter(|place| place.shape.len() > 1);
    let rows = place.map(|place| place.shape[place.shape.len() - 2] as u64);
    rows.ok_or_else(|| Error::input(format!("has no matrix {name}, which every such model has")))
}

fn object(value: Value) -> Map<String, Value> {
    if let Value::Object(map) = value { map } else { Map::new() }
}

/// The keys that begin with the architecture, and which of them were read.
struct ModelKeys<'a> {
    file: &'a GgufFile,
    arch: &'a str,
    asked: RefCell<BTreeSet<String>>,
}

impl ModelKeys<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        let name = format!("{}.{key}", self.arch);
        let value = self.file.keys.get(&name);
        self.asked.borrow_mut().insert(name);
        value
    }
    fn present(&self, key: &str) -> bool {
        self.get(key).is_some()
    }
    fn wrong(&self, key: &str, must: &str) -> Error {
        let found = self.get(key).map_or_else(|| "missing".into(), GgufValue::to_string);
        Error::input(format!("{}.{key} is {}; it must be {must}", self.arch, quote(found)))
    }
    fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Int(n)) => Ok(Some(*n as f64)),
            // Files have f32: 1e-5 and not 0.000009999999747378752.
            Some(GgufValue::Float(x)) if *x as f32 as f64 == *x => Ok(Some(decimal(*x as f32))),
            Some(GgufValue::Float(x)) => Ok(Some(*x)),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }
    fn need(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| Error::input(format!("{}.{key} is missing", self.arch)))
    }
    fn size(&self, key: &str) -> Result<usize> {
        self.each(key)?.ok_or_else(|| Error::input(format!("{}.{key} is missing", self.arch)))
    }
    /// A size, given once or for each layer.
    fn each(&self, key: &str) -> Result<Option<usize>> {
        let size = |n: i128| usize::try_from(n).ok().filter(|n| *n < 1 << 40);
        let found = match self.get(key) {
            None => return Ok(None),
            Some(GgufValue::Int(n)) => size(*n),
            Some(GgufValue::Ints(list)) if list.iter().all(|n| *n == list[0]) => {
                list.first().and_then(|n| size((*n).into()))
            }
            Some(GgufValue::Ints(_)) => return Err(self.wrong(key, "equal in all layers")),
            Some(_) => None,
        };
        found.map(Some).ok_or_else(|| self.wrong(key, "a size"))
    }
    fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }
    /// Refuses another value.
    fn only(&self, key: &str, value: usize) -> Result<()> {
        match self.number(key)? {
            Some(found) if found != value as f64 => Err(self.wrong(key, &value.to_string())),
            _ => Ok(()),
        }
    }
    /// Refuses keys that nobody read and that are not known to change nothing.
    fn finish(&self) -> Result<()> {
        let asked = self.asked.borrow();
        let prefix = format!("{}.", self.arch);
        let mut unread = self.file.keys.iter().filter(|(key, _)| {
            let own = key.strip_prefix(&prefix);
            own.is_some_and(|own| !IDLE.contains(&own)) && !asked.contains(*key)
        });
        match unread.next() {
            None => Ok(()),
            Some((key, value)) => Err(Error::input(format!(
                "{} is {}: it may change what the model computes, which is not supported",
                quote(key),
                quote(value)
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::codes::GgmlCode;
    use super::super::super::file::GgufPlace;
    use super::*;

    /// The config of a file with these keys, and with the others that it needs.
    fn read(arch: &str, more: &[(&str, GgufValue)]) -> std::result::Result<Map<String, Value>, String> {
        let sizes = ["embedding_length", "block_count", "attention.head_count", "feed_forward_length"];
        let mut file = GgufFile::default();
        let mut put = |key: &str, value: GgufValue| drop(file.keys.insert(format!("{arch}.{key}"), value));
        sizes.iter().for_each(|key| put(key, GgufValue::Int(4)));
        put("context_length", GgufValue::Int(256));
        put("attention.layer_norm_rms_epsilon", GgufValue::Float(1e-5));
        more.iter().for_each(|(key, value)| put(key, value.clone()));
        file.keys.insert("general.architecture".into(), GgufValue::Text(arch.into()));
        let place = GgufPlace { file: 0, shape: vec![8, 4], code: GgmlCode::F32, offset: 0 };
        file.tensors.insert("token_embd.weight".into(), place);
        config(&file, &[]).map_err(|e| e.to_string())
    }

    /// What llama.cpp takes where a key is missing.
    #[test]
    fn missing_keys_mean_what_they_mean_in_llama_cpp() {
        let gemma = read("gemma2", &[]).unwrap();
        let of = |key: &str| gemma[key].as_f64();
        assert_eq!(
            [of("sliding_window"), of("attn_logit_softcapping"), of("final_logit_softcapping")],
            [Some(4096.0), Some(50.0), Some(30.0)]
        );
        let one = read("gemma2", &[("final_logit_softcapping", GgufValue::Float(20.0))]).unwrap();
        assert_eq!([&one["attn_logit_softcapping"], &one["final_logit_softcapping"]], [&json!(50.0), &json!(20.0)]);
        assert!(read("gemma3", &[]).unwrap_err().contains("gemma3.attention.sliding_window is missing"));

        let factor = ("rope.scaling.factor", GgufValue::Float(4.0));
        let kind = |name: &str| ("rope.scaling.type", GgufValue::Text(name.into()));
        let scaled = |keys: &[(&str, GgufValue)]| read("llama", keys).unwrap().get("rope_scaling").cloned();
        assert_eq!(scaled(std::slice::from_ref(&factor)), Some(json!({"rope_type": "linear", "factor": 4.0})));
        assert_eq!(scaled(&[factor.clone(), kind("none")]), None);
        assert_eq!(scaled(&[("rope.scaling.factor", GgufValue::Float(0.0))]), None);
        assert_eq!(scaled(&[factor, kind("yarn")]).unwrap()["original_max_position_embeddings"], 256);
        assert!(
            read("llama", &[("expert_count", GgufValue::Int(0)), ("expert_used_count", GgufValue::Int(0))]).is_ok()
        );
    }

    #[test]
    fn what_is_not_supported_is_named_with_its_value() {
        for (key, value, says) in [
            ("attention.causal", GgufValue::Bool(false), "llama.attention.causal is false; it must be true"),
            ("attention.head_count_kv", GgufValue::Ints(vec![2, 1]), "is [2, 1]; it must be equal in all layers"),
            ("rope.dimension_count", GgufValue::Int(2), "llama.rope.dimension_count is 2; it must be"),
            ("some.key", GgufValue::Bool(true), "llama.some.key is true: it may change what the model computes"),
        ] {
            let more = [(key, value), ("attention.key_length", GgufValue::Int(1))];
            let what = read("llama", &more).unwrap_err();
            assert!(what.contains(says), "{what}");
        }
        assert!(read("llama", &[("attention.causal", GgufValue::Bool(true))]).is_ok());
    }
}
