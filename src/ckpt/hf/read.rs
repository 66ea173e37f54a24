//! From `config.json`, as written by transformers 4 or 5, to a [`Spec`]. Absent keys take the defaults of the family's
//! transformers class. Never reads a file.
use super::cohere;
use super::defaults::Defaults;
use super::experts;
use super::falcon;
use super::falcon_h1;
use super::gemma;
use super::granite;
use super::keys::ConfigKeys;
use super::kin;
use super::layers::{recurrent_layers, windows};
use super::learned;
use super::lfm2;
use super::lists::rotated_layers;
use super::llama4;
use super::nemotron_h;
use super::phimoe;
use super::rotary::{query_growth, rotaries};
use super::scored;
use super::tower;
use crate::base::{Error, Result, quote};
use crate::device::ops::{DeltaShape, StateRule};
use crate::nn::{Activation, Arch, DeltaForm, DeltaNet, Recurrence, RowNorm, Spec};
use serde_json::{Map, Value, json};

/// The model, and the keys of the file that transformers' class for it does not have.
pub fn spec(map: &Map<String, Value>) -> Result<(Spec, Vec<String>)> {
    match tower::text(map)? {
        Some(text) => {
            let (spec, inert) = text_spec(&text.map, text.prefix)?;
            Ok((spec, text.inert.into_iter().chain(inert).collect()))
        }
        None => {
            let mut all = tower::defaults(map.get("model_type").and_then(Value::as_str).unwrap_or_default());
            all.extend(map.clone());
            // A text model's own file has the sections of M-RoPE too.
            if map.get("model_type").and_then(Value::as_str).is_some_and(|name| name.starts_with("qwen3_5")) {
                tower::text_rope(&mut all);
            }
            text_spec(&all, "")
        }
    }
}

fn text_spec(map: &Map<String, Value>, prefix: &str) -> Result<(Spec, Vec<String>)> {
    let map = kin::translated(map)?;
    let keys = ConfigKeys::new(&map, prefix);
    // gpt-oss is published in 4 bits, which are read as what they stand for.
    match keys.object("quantization_config")? {
        Some(quantized)
            if keys.text("model_type")? == Some("gpt_oss") && quantized.text("quant_method")? == Some("mxfp4") => {}
        _ => keys.unquantized()?,
    }
    keys.only("is_causal", &[json!(true)])?;
    ["bos_token_id", "eos_token_id", "pad_token_id"].into_iter().try_for_each(|key| keys.ids(key))?;
    let score = has_score(&keys)?;
    let families = || {
        let names: Vec<&str> = Arch::all().map(|family| family.model_type).collect();
        format!("supported: {}, {}, and the text models of {}", names.join(", "), kin::TYPES, tower::names())
    };
    let Some(model_type) = keys.text("model_type")? else {
        return Err(Error::input(format!("model_type is missing; {}", families())));
    };
    // That of the vision-language model, which some text-only files use too.
    let name = if model_type == "gemma3" { "gemma3_text" } else { model_type };
    let spec = match Arch::all().find(|family| family.model_type == name).map(|family| family.arch) {
        Some(Arch::Gpt) => gpt2(&keys)?,
        Some(arch) => rotary_family(&keys, arch)?,
        None => {
            let why = tower::missing(model_type).map_or(String::new(), |why| format!(": {why}"));
            return Err(Error::input(format!("model_type is \"{}\"{why}; {}", quote(model_type), families())));
        }
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

/// The key of the activation, and its name there.
pub(super) fn activation_key(arch: Arch, activation: Activation) -> (&'static str, &'static str) {
    let (key, name) = activation.key();
    (if arch == Arch::NemotronH { "mlp_hidden_act" } else { key }, name)
}

/// The key of the feed-forward layer's width.
pub(super) fn width_key(arch: Arch) -> &'static str {
    match arch {
        Arch::Falcon => "ffn_hidden_size",
        Arch::GptJ | Arch::CodeGen | Arch::GptBigCode => "n_inner",
        Arch::Cohere2Moe => "prefix_dense_intermediate_size",
        Arch::Llama4 => "intermediate_size_mlp",
        Arch::Opt => "ffn_dim",
        _ => "intermediate_size",
    }
}

/// Whether all heads have equal shares of the model's width, and keys and values of their own: the class has no keys
/// that say otherwise.
pub(super) fn has_equal_heads(arch: Arch) -> bool {
    let others = [Arch::GptNeoX, Arch::GptJ, Arch::CodeGen, Arch::Falcon, Arch::Persimmon];
    arch.learns_positions() || others.contains(&arch)
}

/// Gemma's activation, and what else is only in its files.
fn geglu(keys: &ConfigKeys, arch: Arch) -> Result<()> {
    const TANH: &str = "gelu_pytorch_tanh";
    // The first class reads the first key, the others the second. The first files say "gelu" and mean the other.
    let (read, unused, names) = match arch {
        Arch::Gemma => ("hidden_act", "hidden_activation", &[TANH, "gelu"][..]),
        _ => ("hidden_activation", "hidden_act", &[TANH][..]),
    };
    keys.get(unused);
    keys.only(read, &names.iter().map(|name| json!(name)).collect::<Vec<_>>())?;
    match arch {
        // Text is causal with it.
        Arch::Gemma4 => keys.only("use_bidirectional_attention", &[json!(false), json!("vision")])?,
        Arch::Gemma3 => keys.only("use_bidirectional_attention", &[json!(false)])?,
        // transformers accepts the key and ignores it.
        _ => keys.known(["use_bidirectional_attention"]),
    }
    Ok(())
}

/// The form of GELU, or ReLU, that a file asks for.
fn gelu(keys: &ConfigKeys, key: &str, default: Activation) -> Result<Activation> {
    const TANH: [&str; 3] = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];
    const EXACT: &str = "gelu";
    const RELU: &str = "relu";
    match keys.text(key)? {
        None => Ok(default),
        Some(EXACT) => Ok(Activation::GeluExact),
        Some(RELU) => Ok(Activation::Relu),
        Some(name) if TANH.contains(&name) => Ok(Activation::Gelu),
        Some(_) => Err(keys.unsupported(key, &[EXACT, TANH[0], TANH[1], TANH[2], RELU].map(Value::from))),
    }
}

/// Llama and its descendants: first what they share, then what only some have ([`special`]).
fn rotary_family(keys: &ConfigKeys, arch: Arch) -> Result<Spec> {
    let of = Defaults::of(arch);
    let size = |key, setting| keys.need(key, |keys, key| keys.size(key, setting));
    let (dim, heads) = (size("hidden_size", "embed_dim")?, size("num_attention_heads", "num_heads")?);
    let layers = size("num_hidden_layers", "num_layers")?;
    let activation = match of.activation {
        Activation::GeGlu => {
            geglu(keys, arch)?;
            Activation::GeGlu
        }
        Activation::Gelu | Activation::GeluExact | Activation::Relu => gelu(keys, "hidden_act", of.activation)?,
        other => {
            let (key, name) = activation_key(arch, other);
            // Names of one function.
            let also = if name == "silu" { "swish" } else { name };
            keys.only(key, &[json!(name), json!(also)])?;
            other
        }
    };
    let flag = |key: Option<(&str, bool)>| match key {
        Some((key, default)) => Ok::<_, Error>(keys.flag(key)?.unwrap_or(default)),
        None => Ok(false),
    };
    let latent = scored::latent(keys, arch)?;
    let head_dim = match &latent {
        Some(latent) => latent.head_dim(),
        None if has_equal_heads(arch) => dim / heads.max(1),
        None => keys.size("head_dim", "head_dim")?.or(of.head_dim).unwrap_or(dim / heads.max(1)),
    };
    let (window, windowed) = windows(keys, arch, layers)?;
    let max_len = size("max_position_embeddings", "max_positions")?;
    let (rope, local_rope, part) = match arch.learns_positions() {
        true => (None, None, 1.0),
        false => {
            let width = latent.map_or(head_dim, |latent| latent.rope);
            let (rope, local, part) = rotaries(keys, arch, (max_len, width))?;
            (Some(rope), local, part)
        }
    };
    let ff = match arch {
        // All of its layers have experts.
        Arch::Qwen35Moe => keys.size("intermediate_size", "ff_hidden_dim")?.unwrap_or(512),
        Arch::Lfm2 => lfm2::width(keys)?,
        Arch::Cohere2Moe => cohere::width(keys)?,
        Arch::Llama4 => keys.size(width_key(arch), "ff_hidden_dim")?.unwrap_or(16_384),
        Arch::NemotronH => keys.size("intermediate_size", "ff_hidden_dim")?.unwrap_or(21504),
        // Its class has no such key: all of its layers have experts.
        Arch::SolarOpen => {
            let width = keys.size("intermediate_size", "ff_hidden_dim")?;
            width.or(keys.size("moe_intermediate_size", "ff_hidden_dim")?).unwrap_or(1280)
        }
        Arch::Falcon | Arch::GptJ | Arch::CodeGen | Arch::GptBigCode | Arch::GptNeo => {
            keys.size(width_key(arch), "ff_hidden_dim")?.unwrap_or(4 * dim)
        }
        _ => size(width_key(arch), "ff_hidden_dim")?,
    };
    let spec = Spec {
        arch,
        vocab: size("vocab_size", "vocab_size")?,
        dim,
        layers,
        heads,
        kv_heads: match has_equal_heads(arch) {
            true => heads,
            false => keys
                .or("num_key_value_heads", of.kv_heads.unwrap_or(heads), |keys, key| keys.size(key, "num_kv_heads"))?
                .unwrap_or(heads),
        },
        head_dim,
        ff,
        max_len,
        norm_eps: if of.eps.0.is_empty() { None } else { keys.fraction(of.eps.0)? }.unwrap_or(of.eps.1) as f32,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(of.tied),
        activation,
        rope,
        query_growth: if arch == Arch::Ministral3 { Some(query_growth(keys)?) } else { None },
        local_rope: local_rope.filter(|_| !windowed.is_empty()),
        rotary_dim: latent.map(|latent| latent.rope).or((part != 1.0).then_some((head_dim as f64 * part) as usize)),
        latent,
        rotary_pairs: of.pairs,
        window,
        windowed,
        qkv_bias: flag(of.qkv_bias)?,
        out_bias: flag(of.out_bias)?,
        mlp_bias: flag(of.mlp_bias)?,
        experts: experts::read(keys, arch, layers, ff)?,
        ..Spec::default()
    };
    special(keys, spec)
}

/// What only some families have.
fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let factor = |key: &str, default: f64| Ok::<_, Error>(keys.positive(key)?.unwrap_or(default) as f32);
    let cap =
        |key: &str, default: f64| Ok::<_, Error>(keys.or(key, default, ConfigKeys::positive)?.unwrap_or(0.0) as f32);
    let normed = |key: &str, norm| Ok::<_, Error>(keys.flag(key)?.unwrap_or(false).then_some(norm));
    let windows = || (0..spec.layers).map(|i| spec.window_of(i) > 0).collect();
    let gemma = |spec: Spec| {
        let query_scalar = keys.or("query_pre_attn_scalar", 256.0, ConfigKeys::positive)?;
        Ok::<_, Error>(Spec { query_scalar, post_norms: true, norm_from_one: true, scaled_embedding: true, ..spec })
    };
    Ok(match spec.arch {
        Arch::Qwen3 | Arch::Qwen3Moe | Arch::Qwen3VlMoe | Arch::Apertus => Spec { qk_norm: true, ..spec },
        Arch::Mellum => {
            // Keys of a layer that predicts later tokens, which transformers does not load.
            keys.known(["mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers"]);
            Spec { qk_norm: true, ..spec }
        }
        Arch::Gemma => Spec { norm_from_one: true, scaled_embedding: true, ..spec },
        Arch::Opt | Arch::BioGpt | Arch::GptBigCode | Arch::GptNeo => learned::special(keys, spec)?,
        Arch::Cohere | Arch::Cohere2 | Arch::Cohere2Moe => cohere::special(keys, spec)?,
        Arch::Bamba => granite::bamba(keys, spec)?,
        Arch::FalconH1 => falcon_h1::special(keys, spec)?,
        Arch::Phi => {
            let row_norm = normed("qk_layernorm", RowNorm::Heads)?;
            Spec { row_norm, parallel: true, layer_norm: true, norm_bias: true, head_bias: true, ..spec }
        }
        Arch::GptNeoX => {
            keys.known(["classifier_dropout"]); // of another class
            let parallel = keys.flag("use_parallel_residual")?.unwrap_or(true);
            let spec = Spec { parallel, own_norms: parallel, layer_norm: true, norm_bias: true, ..spec };
            Spec { fused_qkv: true, qkv_by_heads: true, ..spec }
        }
        Arch::Persimmon => {
            let row_norm = keys.flag("qk_layernorm")?.unwrap_or(true).then_some(RowNorm::Heads);
            let spec = Spec { row_norm, layer_norm: true, norm_bias: true, ..spec };
            Spec { fused_qkv: true, qkv_by_heads: true, ..spec }
        }
        Arch::StableLm => {
            let row_norm = normed("qk_layernorm", RowNorm::EachHead { apart: true })?;
            let parallel = keys.flag("use_parallel_residual")?.unwrap_or(false);
            Spec { row_norm, parallel, layer_norm: true, norm_bias: true, ..spec }
        }
        Arch::MiniCpm3 => {
            let depth = keys.or("scale_depth", 1.4, ConfigKeys::positive)?;
            let base = keys.or("dim_model_base", 256, |keys, key| keys.size(key, "embed_dim"))?;
            Spec {
                embed_multiplier: factor("scale_emb", 12.0)?,
                residual_multiplier: depth.map_or(1.0, |depth| depth / (spec.layers as f64).sqrt()) as f32,
                logit_scale: base.map_or(1.0, |base| base as f64 / spec.dim as f64) as f32,
                ..scored::special(keys, spec)?
            }
        }
        Arch::MiniMaxM2 => Spec { row_norm: Some(RowNorm::All), ..spec },
        Arch::Qwen3Next | Arch::Qwen35 | Arch::Qwen35Moe => {
            keys.only("attention_bias", &[json!(false)])?;
            let recurrent = recurrent_layers(keys, spec.layers)?;
            let recurrence = Some(Recurrence::Delta(delta_net(keys, &spec)?));
            Spec { qk_norm: true, norm_from_one: true, output_gate: true, recurrence, recurrent, ..spec }
        }
        Arch::OlmoHybrid => {
            // How the rule's parameters are initialized.
            keys.known([
                "linear_a_log_max",
                "linear_a_log_min",
                "linear_dt_init_floor",
                "linear_dt_max",
                "linear_dt_min",
            ]);
            let mut recurrent = recurrent_layers(keys, spec.layers)?;
            if let (false, Some(last)) = (recurrent.contains(&false), recurrent.last_mut()) {
                *last = false; // one layer has attention
            }
            let recurrence = Some(Recurrence::Delta(delta_net(keys, &spec)?));
            // Published files say null.
            let is_rotated =
                keys.object("rope_parameters")?.is_none_or(|rope| rope.get("rope_theta") != Some(&Value::Null));
            let rotated = if is_rotated { Vec::new() } else { vec![false; spec.layers] };
            let spec = Spec { row_norm: Some(RowNorm::All), pre_norms: false, post_norms: true, rotated, ..spec };
            Spec { recurrence, recurrent, ..spec }
        }
        Arch::Lfm2 | Arch::Lfm2Moe => lfm2::special(keys, spec)?,
        Arch::Lfm3 => lfm2::special3(keys, spec)?,
        Arch::NemotronH => nemotron_h::special(keys, spec)?,
        Arch::Olmoe | Arch::Olmo => {
            let qkv_clip = keys.positive("clip_qkv")?.map(|clip| clip as f32);
            let bare = spec.arch == Arch::Olmo;
            let row_norm = (!bare).then_some(RowNorm::All);
            Spec { qkv_clip, row_norm, layer_norm: bare, bare_norms: bare, ..spec }
        }
        Arch::Gemma2 | Arch::VaultGemma => Spec {
            score_cap: cap("attn_logit_softcapping", 50.0)?,
            logit_cap: cap("final_logit_softcapping", 30.0)?,
            post_norms: spec.arch == Arch::Gemma2,
            ..gemma(spec)?
        },
        Arch::Gemma3 => {
            // transformers accepts the key and ignores it.
            keys.known(["attn_logit_softcapping"]);
            let logit_cap = keys.positive("final_logit_softcapping")?.unwrap_or(0.0) as f32;
            Spec { logit_cap, qk_norm: true, ..gemma(spec)? }
        }
        Arch::Gemma4 => gemma::special(keys, spec)?,
        Arch::SmolLm3 => Spec { rotated: rotated_layers(keys, spec.layers)?, ..spec },
        Arch::Llama4 => llama4::special(keys, spec)?,
        Arch::PhiMoe => phimoe::special(keys, spec)?,
        Arch::NanoChat => {
            let logit_cap = cap("final_logit_softcapping", 15.0)?;
            let spec = Spec { bare_norms: true, embed_norm: true, logit_cap, ..spec };
            Spec { qk_norm: true, norm_after_rope: true, turns_back: true, ..spec }
        }
        Arch::Afmoe => {
            let scaled_embedding = keys.flag("mup_enabled")?.unwrap_or(false);
            let rotated = windows();
            let spec = Spec { qk_norm: true, post_norms: true, output_gate: true, gate_apart: true, ..spec };
            Spec { scaled_embedding, rotated, ..spec }
        }
        Arch::GptJ | Arch::CodeGen => {
            let rotary_dim = keys.or("rotary_dim", 64, |keys, key| keys.size(key, "head_dim"))?;
            let fused = spec.arch == Arch::CodeGen;
            if fused {
                keys.known(["n_ctx"]); // the class does not read it
            }
            // The ranks that CodeGen was pretrained on.
            let spec = Spec { fused_qkv: fused, qkv_by_heads: fused, qkv_blocks: fused.then_some(4), ..spec };
            Spec { parallel: true, layer_norm: true, norm_bias: true, head_bias: true, rotary_dim, ..spec }
        }
        Arch::FlexOlmo | Arch::Olmo2 | Arch::Olmo3 => {
            Spec { row_norm: Some(RowNorm::All), pre_norms: false, post_norms: true, ..spec }
        }
        Arch::Granite | Arch::GraniteMoe | Arch::GraniteMoeShared => granite::multiplied(keys, spec)?,
        Arch::GraniteSwa | Arch::GraniteMoeSwa => granite::swa(keys, spec)?,
        Arch::Falcon => falcon::special(keys, spec)?,
        Arch::GraniteHybrid => granite::hybrid(keys, spec)?,
        Arch::HyperClovaX => granite::hyperclovax(keys, spec)?,
        Arch::HunyuanDense | Arch::HunyuanMoe => Spec { qk_norm: true, norm_after_rope: true, ..spec },
        Arch::Exaone4 | Arch::ExaoneMoe => {
            // Without a window anywhere in the file, all layers have rotary positions.
            let rotated = match keys.or("sliding_window", 4096, |keys, key| keys.size(key, "max_len"))? {
                None => Vec::new(),
                Some(_) => windows(),
            };
            let after = spec.arch == Arch::Exaone4;
            Spec { qk_norm: true, pre_norms: !after, post_norms: after, rotated, ..spec }
        }
        Arch::Phi3 => Spec { fused_qkv: true, fused_gate_up: true, ..spec },
        Arch::Glm => Spec { fused_gate_up: true, ..spec },
        Arch::Glm4 => Spec { fused_gate_up: true, post_norms: true, ..spec },
        Arch::Starcoder2 | Arch::Jais2 => Spec { layer_norm: true, norm_bias: true, ..spec },
        Arch::Nemotron => Spec { layer_norm: true, norm_bias: true, norm_from_one: true, ..spec },
        Arch::GptOss => Spec { sinks: true, ..spec },
        Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Glm4MoeLite | Arch::Youtu => scored::special(keys, spec)?,
        Arch::Axk1 => {
            keys.only("moe_layer_freq", &[json!(1)])?;
            Spec { expert_norms: true, ..scored::special(keys, spec)? }
        }
        Arch::HyV3 => {
            keys.only("mlp_bias", &[json!(false)])?;
            keys.only("norm_topk_prob", &[json!(true)])?;
            ["n_group", "topk_group"].into_iter().try_for_each(|key| keys.only(key, &[json!(1)]))?;
            keys.known(["enable_moe_fp32_combine"]); // sums are in f32
            Spec { qk_norm: true, ..spec }
        }
        Arch::Glm4Moe => Spec { qk_norm: keys.flag("use_qk_norm")?.unwrap_or(false), ..spec },
        Arch::SolarOpen => {
            keys.only("use_qk_norm", &[json!(false)])?;
            spec
        }
        Arch::Dots1 => Spec { qk_norm: true, ..spec },
        _ => spec,
    })
}

/// The gated delta nets of a file; without layers that have them, their sizes are read all the same.
fn delta_net(keys: &ConfigKeys, spec: &Spec) -> Result<DeltaNet> {
    let size = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "num_heads")?.unwrap_or(default));
    let is_olmo = spec.arch == Arch::OlmoHybrid;
    let [keys_of, values_of] = if is_olmo { [spec.heads; 2] } else { [16, 32] };
    let key_heads = size("linear_num_key_heads", keys_of)?;
    let width = if is_olmo { (0.75 * spec.dim as f64 / key_heads.max(1) as f64) as usize } else { 128 };
    let key_dim = size("linear_key_head_dim", width)?;
    let shape = DeltaShape {
        key_heads,
        value_heads: size("linear_num_value_heads", values_of)?,
        key_dim,
        value_dim: size("linear_value_head_dim", if is_olmo { 2 * key_dim } else { 128 })?,
        rule: StateRule::Delta { doubled: is_olmo && keys.flag("linear_allow_neg_eigval")?.unwrap_or(true) },
    };
    let form = match spec.arch {
        Arch::OlmoHybrid => DeltaForm::Apart,
        Arch::Qwen3Next => DeltaForm::Fused,
        _ => DeltaForm::Joined,
    };
    Ok(DeltaNet { shape, taps: size("linear_conv_kernel_dim", 4)?, form })
}

fn gpt2(keys: &ConfigKeys) -> Result<Spec> {
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
        activation: gelu(keys, "activation_function", Activation::Gelu)?,
        ..Spec::default()
    })
}
