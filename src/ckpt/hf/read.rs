//! From `config.json`, as written by transformers 4 or 5, to a [`Spec`]. Absent keys take the defaults of the family's
//! transformers class. Never reads a file.
use super::keys::ConfigKeys;
use crate::base::{Error, Result, quote};
use crate::nn::{Activation, Arch, Experts, Rotary, Scaling, Spec};
use serde_json::{Map, Value, json};

const FAMILIES: &str = "supported: llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, olmoe, gemma2, gemma3_text \
                        and gpt2";

/// The model, and the keys of the file that transformers' class for it does not have.
pub fn spec(map: &Map<String, Value>) -> Result<(Spec, Vec<String>)> {
    let keys = ConfigKeys::new(map, "");
    keys.only("quantization_config", &[])?;
    ["bos_token_id", "eos_token_id", "pad_token_id"].into_iter().try_for_each(|key| keys.ids(key))?;
    let score = has_score(&keys)?;
    let spec = match keys.text("model_type")? {
        None => return Err(Error::input(format!("model_type is missing; {FAMILIES}"))),
        Some("llama") => rotary_family(&keys, Arch::Llama)?,
        Some("mistral") => rotary_family(&keys, Arch::Mistral)?,
        Some("qwen2") => rotary_family(&keys, Arch::Qwen2)?,
        Some("qwen3") => rotary_family(&keys, Arch::Qwen3)?,
        Some("mixtral") => rotary_family(&keys, Arch::Mixtral)?,
        Some("qwen2_moe") => rotary_family(&keys, Arch::Qwen2Moe)?,
        Some("qwen3_moe") => rotary_family(&keys, Arch::Qwen3Moe)?,
        Some("olmoe") => rotary_family(&keys, Arch::Olmoe)?,
        Some("gemma2") => rotary_family(&keys, Arch::Gemma2)?,
        Some("gemma3_text") => rotary_family(&keys, Arch::Gemma3)?,
        // "gemma3" is the multimodal model; some text-only files use the name too.
        Some("gemma3") if keys.present("text_config").is_none() => rotary_family(&keys, Arch::Gemma3)?,
        Some("gpt2") => gpt2(&keys)?,
        Some(other) => return Err(Error::input(format!("model_type is \"{}\"; {FAMILIES}", quote(other)))),
    };
    keys.finish()?;
    let spec = Spec { score, ..spec };
    spec.validate()?;
    Ok((spec, keys.inert()))
}

/// Whether the head is a score: the class is `...ForSequenceClassification`, with one label.
fn has_score(keys: &ConfigKeys) -> Result<bool> {
    let class = keys.present("architectures").and_then(|classes| classes.get(0)?.as_str());
    let Some(class) = class.filter(|class| class.ends_with("ForSequenceClassification")) else { return Ok(false) };
    let named = keys.present("id2label").and_then(Value::as_object).map(Map::len);
    let labels = keys.whole("num_labels")?.or(named).unwrap_or(2); // transformers' default
    match labels {
        1 => Ok(true),
        n => Err(Error::input(format!(
            "{}: its score head has {n} labels; a reward model has one: set num_labels to 1, or use another model",
            quote(class)
        ))),
    }
}

/// Llama and its descendants: first what they share, then what only some have.
fn rotary_family(keys: &ConfigKeys, arch: Arch) -> Result<Spec> {
    let gemma = matches!(arch, Arch::Gemma2 | Arch::Gemma3);
    let size = |key, setting| keys.need(key, |keys, key| keys.size(key, setting));
    let (dim, heads) = (size("hidden_size", "embed_dim")?, size("num_attention_heads", "num_heads")?);
    let layers = size("num_hidden_layers", "num_layers")?;
    keys.only("partial_rotary_factor", &[json!(1), json!(1.0)])?;
    if gemma {
        keys.get("hidden_act"); // present in many files, but unused
        keys.only("hidden_activation", &[json!("gelu_pytorch_tanh")])?;
        keys.only("use_bidirectional_attention", &[json!(false)])?;
    } else {
        keys.only("hidden_act", &[json!("silu")])?;
    }
    let kv_default = match arch {
        Arch::Mistral | Arch::Mixtral => 8,
        Arch::Qwen2Moe => 16,
        Arch::Qwen3Moe => 4,
        Arch::Gemma2 | Arch::Gemma3 => 4,
        Arch::Qwen2 | Arch::Qwen3 => 32,
        _ => heads,
    };
    let head_dim = match arch {
        Arch::Qwen3 => Some(128),
        _ if gemma => Some(256),
        _ => None,
    };
    let bias = match arch {
        Arch::Llama | Arch::Qwen3 | Arch::Qwen3Moe | Arch::Olmoe | Arch::Gemma2 | Arch::Gemma3 => {
            keys.flag("attention_bias")?.unwrap_or(false)
        }
        _ => false,
    };
    let (window, windowed) = windows(keys, arch, layers)?;
    let max_len = size("max_position_embeddings", "max_positions")?;
    let (rope, local_rope) = rotaries(keys, arch, max_len)?;
    let ff = size("intermediate_size", "ff_hidden_dim")?;
    let eps = if matches!(arch, Arch::Mixtral | Arch::Olmoe) { 1e-5 } else { 1e-6 };
    let qkv_bias = arch == Arch::Qwen2 || arch == Arch::Qwen2Moe && keys.flag("qkv_bias")?.unwrap_or(true);
    if arch == Arch::Olmoe {
        keys.only("clip_qkv", &[])?;
    }
    let mut spec = Spec {
        arch,
        vocab: size("vocab_size", "vocab_size")?,
        dim,
        layers,
        heads,
        kv_heads: keys
            .or("num_key_value_heads", kv_default, |keys, key| keys.size(key, "num_kv_heads"))?
            .unwrap_or(heads),
        head_dim: keys.size("head_dim", "head_dim")?.or(head_dim).unwrap_or(dim / heads.max(1)),
        ff,
        max_len,
        norm_eps: keys.fraction("rms_norm_eps")?.unwrap_or(eps) as f32,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(gemma),
        rope: Some(rope),
        local_rope: local_rope.filter(|_| !windowed.is_empty()),
        window,
        windowed,
        qkv_bias: bias || qkv_bias,
        out_bias: bias,
        mlp_bias: arch == Arch::Llama && keys.flag("mlp_bias")?.unwrap_or(false),
        qk_norm: matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe | Arch::Gemma3),
        row_norm: arch == Arch::Olmoe,
        experts: experts(keys, arch, layers, ff)?,
        ..Spec::default()
    };
    if gemma {
        spec.activation = Activation::GeGlu;
        (spec.post_norms, spec.norm_from_one, spec.scaled_embedding) = (true, true, true);
        spec.query_scalar = keys.or("query_pre_attn_scalar", 256.0, ConfigKeys::positive)?;
        let softcap = |key| keys.positive(key).map(|cap| cap.unwrap_or(0.0) as f32);
        if arch == Arch::Gemma2 {
            spec.score_cap = keys.or("attn_logit_softcapping", 50.0, ConfigKeys::positive)?.unwrap_or(0.0) as f32;
            spec.logit_cap = keys.or("final_logit_softcapping", 30.0, ConfigKeys::positive)?.unwrap_or(0.0) as f32;
        } else {
            // transformers accepts the key and ignores it.
            keys.only("attn_logit_softcapping", &[])?;
            spec.logit_cap = softcap("final_logit_softcapping")?;
        }
    }
    Ok(spec)
}

/// The experts of the families that have them.
fn experts(keys: &ConfigKeys, arch: Arch, layers: usize, ff: usize) -> Result<Option<Experts>> {
    let qwen = matches!(arch, Arch::Qwen2Moe | Arch::Qwen3Moe);
    // Both names of the number of experts are in use, whatever the family.
    let (count, top_k) = match arch {
        Arch::Mixtral => (8, 2),
        Arch::Qwen2Moe => (60, 4),
        Arch::Qwen3Moe => (128, 8),
        Arch::Olmoe => (64, 8),
        _ => return Ok(None),
    };
    let size = |key: &str| keys.size(key, "num_experts");
    let given = match (size("num_experts")?, size("num_local_experts")?) {
        (Some(a), Some(b)) if a != b => {
            return Err(Error::input(format!("num_experts is {a} and num_local_experts is {b}: remove one")));
        }
        (a, b) => a.or(b),
    };
    keys.only("router_jitter_noise", &[json!(0), json!(0.0)])?;
    let width = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "ff_hidden_dim")?.unwrap_or(default));
    let dense = if qwen { dense_layers(keys, layers)? } else { Vec::new() };
    let aux_coef = keys.number("router_aux_loss_coef")?.unwrap_or(if arch == Arch::Olmoe { 0.01 } else { 0.001 });
    if !(aux_coef.is_finite() && aux_coef >= 0.0) {
        return Err(Error::input(format!("router_aux_loss_coef is {aux_coef}; it must be 0 or more")));
    }
    Ok(Some(Experts {
        count: given.unwrap_or(count),
        top_k: size("num_experts_per_tok")?.unwrap_or(top_k),
        ff: match arch {
            Arch::Qwen2Moe => width("moe_intermediate_size", 1408)?,
            Arch::Qwen3Moe => width("moe_intermediate_size", 768)?,
            _ => ff,
        },
        shared_ff: if arch == Arch::Qwen2Moe { width("shared_expert_intermediate_size", 5632)? } else { 0 },
        normalize: arch == Arch::Mixtral || keys.flag("norm_topk_prob")?.unwrap_or(false),
        dense,
        aux_coef,
        aux_loss: keys.flag("output_router_logits")?.unwrap_or(false),
    }))
}

/// Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th.
fn dense_layers(keys: &ConfigKeys, layers: usize) -> Result<Vec<usize>> {
    let step = keys.whole("decoder_sparse_step")?.unwrap_or(1).max(1);
    let index = |value: &Value| value.as_u64().and_then(|i| usize::try_from(i).ok()).filter(|&i| i < layers);
    let only = match keys.present("mlp_only_layers") {
        None => Vec::new(),
        Some(list) => {
            list.as_array().and_then(|list| list.iter().map(index).collect::<Option<Vec<_>>>()).ok_or_else(|| {
                Error::input(format!("mlp_only_layers is {}; it must be a list of layers below {layers}", quote(list)))
            })?
        }
    };
    Ok((0..layers).filter(|i| only.contains(i) || (i + 1) % step != 0).collect())
}

/// The window size, and which layers use it; (0, none) without a window.
fn windows(keys: &ConfigKeys, arch: Arch, layers: usize) -> Result<(usize, Vec<bool>)> {
    let within = |keys: &ConfigKeys, key: &str| keys.size(key, "max_len");
    let window = match arch {
        Arch::Mistral | Arch::Gemma2 | Arch::Gemma3 => keys.or("sliding_window", 4096, within)?,
        Arch::Mixtral => keys.size("sliding_window", "max_len")?,
        Arch::Qwen2Moe | Arch::Qwen3Moe => {
            // Which layers have windows differs between versions of transformers.
            keys.only("use_sliding_window", &[json!(false)])?;
            for unused in ["sliding_window", "max_window_layers"] {
                keys.get(unused);
            }
            None
        }
        Arch::Qwen2 | Arch::Qwen3 => {
            let window = keys.or("sliding_window", 4096, within)?;
            window.filter(|_| matches!(keys.flag("use_sliding_window"), Ok(Some(true))))
        }
        _ => {
            keys.only("sliding_window", &[])?;
            None
        }
    };
    keys.flag("use_sliding_window").map(|_| ())?;
    let every = match arch {
        Arch::Gemma2 => 2,
        Arch::Gemma3 => keys.whole("sliding_window_pattern")?.unwrap_or(6).max(1),
        _ => 0,
    };
    let first = match arch {
        Arch::Qwen2 | Arch::Qwen3 => keys.whole("max_window_layers")?.unwrap_or(28),
        _ => 0,
    };
    let windowed = match layer_types(keys, layers)? {
        Some(types) if window.is_none() && types.contains(&true) => {
            return Err(Error::input("layer_types says sliding_attention, but there is no sliding_window"));
        }
        Some(types) if arch == Arch::Mistral && window.is_some() && types.contains(&false) => {
            return Err(keys.unsupported("layer_types", &[]));
        }
        Some(types) => types,
        None if every > 0 => (0..layers).map(|i| (i + 1) % every != 0).collect(),
        None => (0..layers).map(|i| i >= first).collect(),
    };
    Ok(match window {
        Some(window) if windowed.contains(&true) => (window, windowed),
        _ => (0, Vec::new()),
    })
}

/// Whether each layer uses the window, if the file lists layers one by one.
fn layer_types(keys: &ConfigKeys, layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(types) = keys.present("layer_types") else { return Ok(None) };
    let kind = |value: &Value| match value.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(Error::input(format!(
            "layer_types has {}, which is not supported; use full_attention or sliding_attention",
            quote(value)
        ))),
    };
    let Some(values) = types.as_array().filter(|values| values.len() == layers) else {
        let found = types.as_array().map_or(quote(types).to_string(), |values| format!("a list of {}", values.len()));
        return Err(Error::input(format!("layer_types is {found}; it must list the type of each of {layers} layers")));
    };
    values.iter().map(kind).collect::<Result<_>>().map(Some)
}

/// The rotary embedding of most layers, and that of windowed layers if the family has two.
fn rotaries(keys: &ConfigKeys, arch: Arch, max_len: usize) -> Result<(Rotary, Option<Rotary>)> {
    let two = arch == Arch::Gemma3;
    let theta =
        keys.positive("rope_theta")?.unwrap_or(if two || arch == Arch::Mixtral { 1_000_000.0 } else { 10_000.0 });
    let local = if two { keys.positive("rope_local_base_freq")? } else { None }.unwrap_or(10_000.0);
    let (old, new) = (keys.object("rope_scaling")?, keys.object("rope_parameters")?);
    match (old, new) {
        (Some(_), Some(_)) => Err(Error::input("rope_scaling and rope_parameters are both present; remove one")),
        (None, Some(new)) if two => {
            let of = |key, theta| match new.object(key)? {
                Some(keys) => rotary(&keys, theta, max_len),
                None => Ok(Rotary::new(theta)),
            };
            let both = (of("full_attention", theta)?, Some(of("sliding_attention", local)?));
            new.finish()?;
            Ok(both)
        }
        (old, new) => {
            let rope = match old.or(new) {
                Some(keys) => rotary(&keys, theta, max_len)?,
                None => Rotary::new(theta),
            };
            Ok((rope, two.then(|| Rotary::new(local))))
        }
    }
}

/// One rotary embedding: `rope_scaling` of transformers 4, or `rope_parameters` (or its part for one layer type) of 5.
fn rotary(keys: &ConfigKeys, theta: f64, max_len: usize) -> Result<Rotary> {
    keys.only("partial_rotary_factor", &[json!(1), json!(1.0)])?;
    let theta = keys.positive("rope_theta")?.unwrap_or(theta);
    let key = if keys.present("rope_type").is_some() { "rope_type" } else { "type" };
    keys.get("type");
    let original = || Ok(keys.size("original_max_position_embeddings", "max_positions")?.unwrap_or(max_len));
    let need = |key| keys.need(key, ConfigKeys::positive);
    let scaling = match keys.text(key)? {
        None | Some("default") => Scaling::None,
        Some("linear") => Scaling::Linear { factor: need("factor")? },
        Some("dynamic") => Scaling::Dynamic { factor: need("factor")?, original: max_len },
        Some("llama3") => Scaling::Llama3 {
            factor: need("factor")?,
            low: need("low_freq_factor")?,
            high: need("high_freq_factor")?,
            original: original()?,
        },
        Some("yarn") => yarn(keys, original()?, max_len)?,
        Some(_) => {
            let known = ["default", "linear", "dynamic", "llama3", "yarn"].map(Value::from);
            return Err(keys.unsupported(key, &known));
        }
    };
    keys.finish()?;
    Ok(Rotary { theta, scaling })
}

fn yarn(keys: &ConfigKeys, original: usize, max_len: usize) -> Result<Scaling> {
    let factor = keys.positive("factor")?.unwrap_or(max_len as f64 / original as f64);
    let (mscale, all) = (keys.number("mscale")?.unwrap_or(0.0), keys.number("mscale_all_dim")?.unwrap_or(0.0));
    let size = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let implied = if mscale != 0.0 && all != 0.0 { size(mscale) / size(all) } else { size(1.0) };
    Ok(Scaling::Yarn {
        factor,
        original,
        attention: keys.positive("attention_factor")?.unwrap_or(implied),
        beta_fast: keys.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.positive("beta_slow")?.unwrap_or(1.0),
        truncate: keys.flag("truncate")?.unwrap_or(true),
    })
}

fn gpt2(keys: &ConfigKeys) -> Result<Spec> {
    keys.only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
    keys.only("scale_attn_weights", &[json!(true)])?;
    for off in ["scale_attn_by_inverse_layer_idx", "add_cross_attention", "reorder_and_upcast_attn"] {
        keys.only(off, &[json!(false)])?;
    }
    keys.get("n_ctx"); // the same as n_positions
    let size = |key, setting| keys.need(key, |keys, key| keys.size(key, setting));
    let (dim, heads) = (size("n_embd", "embed_dim")?, size("n_head", "num_heads")?);
    // Other names of the same, of which transformers takes one or the other.
    for (other, name) in [
        ("hidden_size", "n_embd"),
        ("max_position_embeddings", "n_positions"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
    ] {
        keys.only(other, &[keys.get(name).cloned().unwrap_or_default()])?;
    }
    Ok(Spec {
        arch: Arch::Gpt,
        vocab: size("vocab_size", "vocab_size")?,
        dim,
        layers: size("n_layer", "num_layers")?,
        heads,
        kv_heads: heads,
        head_dim: dim / heads.max(1),
        ff: keys.size("n_inner", "ff_hidden_dim")?.unwrap_or(4 * dim),
        max_len: size("n_positions", "max_positions")?,
        norm_eps: keys.fraction("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(true),
        dropout: keys.fraction("resid_pdrop")?.unwrap_or(0.1) as f32,
        rope: None,
        activation: Activation::Gelu,
        ..Spec::default()
    })
}
