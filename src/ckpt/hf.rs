//! Converts a [`Spec`] to the `config.json` of the family's `...ForCausalLM` or, for a reward model,
//! `...ForSequenceClassification`, and back. Never guesses: a key that changes what transformers computes and is not
//! implemented is an error that names it.
mod cohere; // experts next to attention
mod defaults;
mod dropout;
mod experts; // chosen by probabilities
mod falcon; // layouts of queries, keys and values
mod falcon_h1; // factors of what matrices give
mod gemma; // heads of two sizes
mod granite; // multipliers
mod keys;
mod learned; // positions
mod layers; // with windows, and with recurrences
mod lfm2; // short convolutions
mod lists; // of layers
mod llama4; // experts with weighted inputs
mod mamba; // Mamba 2
mod nemotron_h; // blocks of one branch
mod phimoe; // experts chosen one after the other
mod kin; // model types that differ in names of keys
mod read;
mod rotary;
mod scored; // latent attention, and experts chosen by scores
mod tower;

pub use dropout::unused_dropout;
pub(super) use kin::is_rewritten;
pub(crate) use tower::flat;
pub(super) use tower::{is_tower, retype};

use self::defaults::{Defaults, WindowKeys};
pub(super) use self::keys::decimal;
use self::keys::object;
use super::layout::pretty;
use crate::base::{Error, Result, open, quote};
use crate::data::{Tokenizer, json_object, number_in};
use crate::nn::tp_plan::TpPlan;
use crate::nn::{Activation, Arch, DeltaNet, Experts, QueryGrowth, Recurrence, Rotary, Scaling, Spec};
use serde_json::{Map, Value, json};
use std::path::Path;

pub const FILE: &str = "config.json";
/// The tensor-parallel plan, a key of [`FILE`].
const TP_PLAN: &str = "base_model_tp_plan";

/// Reads the model in `dir`.
pub fn read(dir: &Path) -> Result<Spec> {
    let path = dir.join(FILE);
    let bad = |what: String| Error::input(format!("{}: {what}", path.display()));
    let text = open::read(&path)
        .map_err(|e| bad(format!("{e}: a Hugging Face model directory has {FILE} and one or more *.safetensors")))?;
    parse(&text).map_err(|e| bad(e.to_string()))
}

/// Whether the model in `dir` has a vision tower next to its text model, which [`read`] returns.
pub fn has_tower(dir: &Path) -> Result<bool> {
    let path = dir.join(FILE);
    let text = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
    Ok(is_tower(&map(&text).map_err(|what| Error::in_file(&path, what))?))
}

/// Whether the model in `dir` says that the token of the byte tokenizer ends its texts, as models that were trained on
/// bytes do.
pub fn is_of_bytes(dir: &Path) -> bool {
    let config = open::read(&dir.join(FILE)).ok().and_then(|text| map(&text).ok()).unwrap_or_default();
    config.get("eos_token_id").is_some_and(|id| id.as_u64() == Tokenizer::Bytes.eos().map(u64::from))
}

/// The tensor-parallel plan in the model's own config, if there is one. It covers the base model; the head's place
/// follows from the class.
pub fn tp_plan(dir: &Path) -> Result<Option<TpPlan>> {
    let path = dir.join(FILE);
    let bad = |what: String| Error::input(format!("{}: {what}", path.display()));
    let text = open::read(&path).map_err(|e| bad(e.to_string()))?;
    let map = map(&text).map_err(bad)?;
    let Some(plan) = map.get(TP_PLAN).filter(|plan| !plan.is_null()) else { return Ok(None) };
    let mut plan: TpPlan = serde_json::from_value(plan.clone())
        .map_err(|e| bad(format!("{TP_PLAN} must be an object of module names and styles ({})", quote(e))))?;
    plan.entry("lm_head".into()).or_insert_with(|| "colwise_gather_output".into());
    Ok(Some(plan))
}

/// Parses the text of a `config.json`.
pub fn parse(text: &[u8]) -> Result<Spec> {
    parsed(text).map(|(spec, _)| spec)
}

fn parsed(text: &[u8]) -> Result<(Spec, Vec<String>)> {
    read::spec(&map(text).map_err(Error::input)?)
}

/// The keys of a config, also with the numbers that Python's `json` writes and JSON does not have: objects stand for
/// them.
pub(crate) fn map(text: &[u8]) -> std::result::Result<Map<String, Value>, String> {
    json_object(text).map(|(map, _)| map).map_err(|what| quote(what).to_string())
}

/// The keys of the config in `dir`.
pub(super) fn map_in(dir: &Path) -> Result<Map<String, Value>> {
    let path = dir.join(FILE);
    let text = open::read(&path).map_err(|e| Error::io("read", &path, e))?;
    map(&text).map_err(|what| Error::in_file(&path, what))
}

/// The text of a config, with such numbers as they were.
pub(super) fn text(map: &Map<String, Value>) -> String {
    /// Marks them in what a JSON writer sees.
    fn marked(value: &Value, numbers: &mut Vec<String>) -> Value {
        match value {
            Value::Array(list) => list.iter().map(|value| marked(value, numbers)).collect(),
            Value::Object(map) => match number_in(map) {
                Some(number) => {
                    numbers.push(number.into());
                    json!(format!("\0{number}"))
                }
                None => map.iter().map(|(key, value)| (key.clone(), marked(value, numbers))).collect(),
            },
            other => other.clone(),
        }
    }
    let mut numbers = Vec::new();
    let text = pretty(&marked(&Value::Object(map.clone()), &mut numbers));
    numbers.iter().fold(text, |text, number| text.replace(&format!(r#""\u0000{number}""#), number))
}

/// The keys in the config of `dir` that transformers' class for the model does not have, and that therefore have no
/// effect; without those that are known to be harmless.
pub fn inert_keys(dir: &Path) -> Result<Vec<String>> {
    let path = dir.join(FILE);
    let text = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
    parsed(&text).map(|(_, inert)| inert).map_err(|e| Error::in_file(&path, e))
}

/// The text for a model without a source file, in the format of transformers 4, which 5 reads too.
pub fn config(spec: &Spec) -> String {
    let mut map = match spec.arch {
        Arch::Gpt => gpt2(spec),
        _ => rotary_family(spec),
    };
    map.extend(object(json!({
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": null,
        "eos_token_id": null,
        "pad_token_id": null,
        "torch_dtype": "float32",
    })));
    if spec.score {
        map.extend(object(json!({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}})));
    }
    pretty(&Value::Object(kin::named(map, names(spec).0)))
}

/// transformers' `model_type` and class name.
fn names(spec: &Spec) -> (&'static str, &'static str) {
    let family = spec.arch.family();
    (family.model_type, family.scored.filter(|_| spec.score).unwrap_or(family.class))
}

fn rotary_family(spec: &Spec) -> Map<String, Value> {
    let ((model_type, class), of) = (names(spec), Defaults::of(spec.arch));
    let rope = spec.rope.clone().unwrap_or(Rotary::new(10_000.0));
    let mut map = object(json!({
        "architectures": [class],
        "model_type": model_type,
        "hidden_size": spec.dim,
        read::width_key(spec.arch): spec.ff,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": spec.layers,
        "max_position_embeddings": spec.beyond.unwrap_or(spec.max_len),
        "rope_theta": rope.theta,
        "attention_dropout": 0.0,
    }));
    if !of.eps.0.is_empty() {
        map.insert(of.eps.0.into(), json!(decimal(spec.norm_eps)));
    }
    // The classes of gpt-oss, CWM and Apertus scale where their configs do not say otherwise.
    let unscaled =
        matches!(spec.arch, Arch::GptOss | Arch::Cwm | Arch::Apertus).then(|| json!({"rope_type": "default"}));
    if let Some(mut scaling) = scaling(&rope.scaling).or(unscaled) {
        if let (Arch::Phi3, Scaling::Long { short, long, .. }) = (spec.arch, &rope.scaling) {
            // Its class in transformers 4 takes no other key; the original length is one of the model's.
            scaling = json!({"type": "longrope", "short_factor": short, "long_factor": long});
        }
        map.insert("rope_scaling".into(), scaling);
    }
    if let Some(QueryGrowth { beta, original, unrotated: false }) = spec.query_growth {
        // Only transformers 5 has models with this key.
        map.shift_remove("rope_scaling");
        let mut keys = rotary_keys(&rope);
        keys["llama_4_scaling_beta"] = json!(beta);
        keys["original_max_position_embeddings"] = json!(original);
        map.insert("rope_parameters".into(), keys);
    }
    match rope.scaling {
        Scaling::Dynamic { original, .. } => map.insert("max_position_embeddings".into(), json!(original)),
        Scaling::Long { original, .. } => map.insert("original_max_position_embeddings".into(), json!(original)),
        _ => None,
    };
    for (flag, on) in [(of.qkv_bias, spec.qkv_bias), (of.out_bias, spec.out_bias), (of.mlp_bias, spec.mlp_bias)] {
        if let Some((key, _)) = flag.filter(|(key, _)| !key.is_empty()) {
            map.insert(key.into(), json!(on));
        }
    }
    let (key, activation) = read::activation_key(spec.arch, spec.activation);
    map.insert(key.into(), json!(activation));
    if of.part.is_some() {
        map.insert(PART.into(), json!(spec.rotary_dim() as f64 / spec.head_dim as f64));
    }
    if read::has_equal_heads(spec.arch) {
        ["num_key_value_heads", "head_dim"].iter().for_each(|key| drop(map.shift_remove(*key)));
    }
    map.extend(object(windows(spec, of.window)));
    if let Some(Recurrence::Delta(net)) = spec.recurrence.as_ref().filter(|_| !layers::has_mamba(spec.arch)) {
        map.extend(object(delta_json(net, &spec.recurrent)));
    }
    let more = match spec.arch {
        Arch::Gemma2 | Arch::VaultGemma | Arch::Gemma3 => json!({
            "query_pre_attn_scalar": whole(spec.query_scalar.unwrap_or(spec.head_dim as f64)),
            "final_logit_softcapping": cap(spec.logit_cap),
            "attn_logit_softcapping": cap(spec.score_cap),
        }),
        Arch::Gemma4 | Arch::NanoChat => json!({"final_logit_softcapping": cap(spec.logit_cap)}),
        Arch::SmolLm3 => json!({"no_rope_layers": lists::rotated(spec)}),
        Arch::Llama4 => llama4::json(spec),
        Arch::PhiMoe => phimoe::json(spec, &mut map),
        Arch::Granite | Arch::GraniteMoe | Arch::GraniteMoeShared => granite::json(spec),
        Arch::HyperClovaX => {
            let mut map = granite::json(spec);
            map["logits_scaling"] = json!(decimal(spec.logit_scale));
            map["use_post_norm"] = json!(spec.post_norms);
            map
        }
        Arch::Falcon => falcon::json(spec),
        Arch::Opt | Arch::BioGpt | Arch::GptBigCode | Arch::GptNeo => {
            ["rope_theta", "layer_types"].iter().for_each(|key| drop(map.shift_remove(*key)));
            learned::json(spec)
        }
        Arch::Olmo | Arch::Olmoe => json!({"clip_qkv": spec.qkv_clip.map(decimal)}),
        Arch::Phi | Arch::Persimmon => json!({"qk_layernorm": spec.row_norm.is_some()}),
        Arch::GraniteSwa | Arch::GraniteMoeSwa => {
            map.extend(granite::swa_json(spec));
            granite::json(spec)
        }
        Arch::GraniteHybrid => {
            map.extend(granite::hybrid_json(spec));
            granite::json(spec)
        }
        Arch::NemotronH => nemotron_h::json(spec),
        Arch::OlmoHybrid => {
            if !spec.is_rotated(0) {
                map.shift_remove("rope_theta");
                map.insert("rope_parameters".into(), json!({"rope_type": "default", "rope_theta": null}));
            }
            let doubled = matches!(spec.recurrence, Some(Recurrence::Delta(net)) if net.shape.most() > 1.0);
            json!({"linear_allow_neg_eigval": doubled})
        }
        Arch::Lfm2 | Arch::Lfm2Moe | Arch::Lfm3 => lfm2::json(spec),
        Arch::GptNeoX => json!({"use_parallel_residual": spec.parallel}),
        Arch::StableLm => json!({"use_parallel_residual": spec.parallel, "qk_layernorm": spec.row_norm.is_some()}),
        Arch::Bamba => {
            // The class reads the part of a head here only.
            let mut keys = rotary_keys(&rope);
            let [.., part] = ["rope_theta", "rope_scaling", PART].map(|key| map.shift_remove(key));
            keys[PART] = json!(part);
            map.insert("rope_parameters".into(), keys);
            Value::Object(granite::bamba_json(spec))
        }
        Arch::FalconH1 => falcon_h1::json(spec),
        Arch::MiniCpm3 => json!({
            "scale_emb": decimal(spec.embed_multiplier),
            "scale_depth": spec.residual_multiplier as f64 * (spec.layers as f64).sqrt(),
            "dim_model_base": (spec.logit_scale as f64 * spec.dim as f64).round() as usize,
        }),
        Arch::Afmoe => json!({"mup_enabled": spec.scaled_embedding}),
        Arch::GptJ | Arch::CodeGen => {
            map.shift_remove("rope_theta");
            json!({"rotary_dim": spec.rotary_dim()})
        }
        Arch::Glm4Moe => json!({"use_qk_norm": spec.qk_norm}),
        Arch::Gemma => json!({"hidden_act": "gelu_pytorch_tanh"}),
        Arch::Cohere | Arch::Cohere2 | Arch::Cohere2Moe => cohere::json(spec),
        _ => json!({}),
    };
    map.extend(object(more));
    if let Some(keys) = experts::json(spec) {
        map.extend(object(keys));
    }
    scored::write_latent(spec, &mut map);
    if spec.arch == Arch::Gemma4 {
        let local = spec.local_rope.as_ref().unwrap_or(&rope);
        gemma::write(spec, [&rope, local].map(rotary_keys), &mut map);
    }
    let plain = Rotary::new(10_000.0);
    let local = spec.local_rope.as_ref().unwrap_or(if spec.arch == Arch::Gemma3 { &plain } else { &rope });
    match spec.arch {
        arch if has_sections(arch, of.theta, [&rope, local]) => {
            for key in ["rope_theta", "rope_scaling", "original_max_position_embeddings"] {
                map.shift_remove(key);
            }
            let [full, sliding] = [&rope, local].map(rotary_keys);
            map.insert("rope_parameters".into(), json!({"full_attention": full, "sliding_attention": sliding}));
        }
        Arch::Gemma3 => _ = map.insert("rope_local_base_freq".into(), json!(local.theta)),
        _ => {}
    }
    map
}

const PART: &str = "partial_rotary_factor";

/// Whether `rope_parameters` must have a section for each kind of layers, which transformers 4 does not read: its keys
/// cannot say what these do. `theta` is the class's.
fn has_sections(arch: Arch, theta: f64, [rope, local]: [&Rotary; 2]) -> bool {
    let is_long = matches!(rope.scaling, Scaling::Long { .. });
    match arch {
        // The class reads the base of each kind of layers here, and nowhere else.
        Arch::Mellum | Arch::Lfm3 => true,
        Arch::Gemma3 => is_long || local.scaling != Scaling::None,
        Arch::Olmo3 => is_long || rope.theta != theta || *local != Rotary::new(theta),
        _ => false,
    }
}

/// The keys of sliding windows.
fn windows(spec: &Spec, window: WindowKeys) -> Value {
    let size = if spec.windowed.is_empty() { Value::Null } else { json!(spec.window) };
    let kind = |i| if spec.window_of(i) > 0 { "sliding_attention" } else { "full_attention" };
    let layer_types: Vec<&str> = (0..spec.layers).map(kind).collect();
    let mut map = match window {
        WindowKeys::Never | WindowKeys::Unclear => json!({}),
        WindowKeys::Given(_) => json!({"sliding_window": size}),
        WindowKeys::Switched(_) => json!({"use_sliding_window": !spec.windowed.is_empty(), "sliding_window": size}),
    };
    let alike = [Arch::Mistral, Arch::Ministral3, Arch::Mixtral, Arch::Phi3, Arch::Starcoder2, Arch::PhiMoe];
    let alike = alike.contains(&spec.arch);
    if !alike && !matches!(window, WindowKeys::Never | WindowKeys::Unclear) {
        map["layer_types"] = json!(layer_types);
    }
    map
}

/// The keys of gated delta nets.
fn delta_json(net: &DeltaNet, recurrent: &[bool]) -> Value {
    let kind = |&recurrent: &bool| if recurrent { "linear_attention" } else { "full_attention" };
    let layer_types: Vec<&str> = recurrent.iter().map(kind).collect();
    json!({
        "attention_bias": false,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": net.taps,
        "linear_key_head_dim": net.shape.key_dim,
        "linear_value_head_dim": net.shape.value_dim,
        "linear_num_key_heads": net.shape.key_heads,
        "linear_num_value_heads": net.shape.value_heads,
    })
}

/// An entry of `rope_parameters`.
fn rotary_keys(rope: &Rotary) -> Value {
    let mut keys = scaling(&rope.scaling).unwrap_or(json!({"rope_type": "default"}));
    keys["rope_theta"] = json!(rope.theta);
    keys
}

/// `rope_scaling`; None if frequencies are not scaled.
fn scaling(scaling: &Scaling) -> Option<Value> {
    Some(match *scaling {
        Scaling::Long { ref short, ref long, original, attention } => json!({
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }),
        Scaling::None => return None,
        Scaling::Proportional { part, factor } => {
            json!({"rope_type": "proportional", "partial_rotary_factor": part, "factor": factor})
        }
        Scaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        Scaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
        Scaling::Llama3 { factor, low, high, original } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }),
        Scaling::Yarn { factor, original, attention, beta_fast, beta_slow, truncate } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "truncate": truncate,
        }),
    })
}

fn gpt2(spec: &Spec) -> Map<String, Value> {
    let (model_type, class) = names(spec);
    object(json!({
        "architectures": [class],
        "model_type": model_type,
        "n_embd": spec.dim,
        "n_inner": spec.ff,
        "n_head": spec.heads,
        "n_layer": spec.layers,
        "n_positions": spec.max_len,
        "n_ctx": spec.max_len,
        "layer_norm_epsilon": decimal(spec.norm_eps),
        "activation_function": if spec.activation == Activation::Gelu { "gelu_new" } else { spec.activation.key().1 },
        "embd_pdrop": decimal(spec.dropout),
        "resid_pdrop": decimal(spec.dropout),
        "attn_pdrop": 0.0,
    }))
}

/// What the two models compute differently even with identical tensor shapes (head counts, constants), as "num_heads:
/// 12 in the checkpoint, 6 now". Dropout and the length of the rotary table may differ.
pub fn differences(then: &Spec, now: &Spec) -> Vec<String> {
    // The factor of the auxiliary loss is the run's own.
    let computed = |e: &Experts| {
        let Experts {
            count, top_k, ff, shared_ff, averaged, normalize, dense, clamp, rule, beside, weighs_inputs, ..
        } = e;
        format!(
            "{top_k} of {count} of width {ff}, shared {shared_ff} {averaged}, normalized {normalize}, dense blocks {dense:?}, \
             clamped {clamp:?}, chosen by {rule:?}, next to a dense layer {beside}, weighted inputs {weighs_inputs}"
        )
    };
    let fields = |s: &Spec| {
        [
            ("arch", s.arch.name().to_string()),
            ("vocab_size", s.vocab.to_string()),
            ("embed_dim", s.dim.to_string()),
            ("num_layers", s.layers.to_string()),
            ("num_heads", s.heads.to_string()),
            ("num_kv_heads", s.kv_heads.to_string()),
            ("head_dim", s.head_dim.to_string()),
            ("heads of layers without a window", format!("{:?}", s.global_heads)),
            ("layers with keys and values of others", format!("{} {}", s.shared_kv, s.wide_shared)),
            ("inputs of layers", format!("{} {}", s.layer_inputs, s.layer_words)),
            ("values that are keys", s.keys_are_values.to_string()),
            ("ff_hidden_dim", s.ff.to_string()),
            ("norm_eps", s.norm_eps.to_string()),
            ("rotary positions", format!("{:?}", s.rope)),
            ("local rotary positions", format!("{:?}", s.local_rope)),
            ("growth of queries", format!("{:?}", s.query_growth)),
            ("sliding window", s.window.to_string()),
            ("layers with a window", format!("{:?}", s.windowed)),
            ("rotated elements of a head", format!("{:?}", s.rotary_dim)),
            ("layers with rotary positions", format!("{:?}", s.rotated)),
            ("factors", format!("{} {} {}", s.embed_multiplier, s.residual_multiplier, s.logit_scale)),
            ("factors within blocks", format!("{:?}", s.block_factors)),
            ("query scalar", format!("{:?}", s.query_scalar.unwrap_or(s.head_dim as f64))),
            ("score scale", format!("{:?}", s.score_scale)),
            ("score softcap", s.score_cap.to_string()),
            ("logit softcap", s.logit_cap.to_string()),
            ("norms and limits of queries and keys", format!("{:?} {:?}", s.row_norm, s.qkv_clip)),
            ("activation", format!("{:?}", s.activation)),
            ("parallel branches", s.parallel.to_string()),
            ("attention bias", format!("{} {}", s.qkv_bias, s.out_bias)),
            ("mlp bias", s.mlp_bias.to_string()),
            ("tied head", s.tied.to_string()),
            ("latents", format!("{:?} {:?}", s.latent, s.rotary_pairs)),
            ("mixers other than attention", format!("{:?} in layers {:?}", s.recurrence, s.recurrent)),
            ("layers of one branch", format!("{:?}", s.single)),
            ("experts", s.experts.as_ref().map_or("none".into(), computed)),
            ("score head", s.score.to_string()),
        ]
    };
    let pairs = fields(then).into_iter().zip(fields(now));
    pairs.filter(|(a, b)| a.1 != b.1).map(|(a, b)| format!("{}: {} in the checkpoint, {} now", a.0, a.1, b.1)).collect()
}

/// 256 and not 256.0: transformers requires an integer for this key.
fn whole(x: f64) -> Value {
    if x.fract() == 0.0 { json!(x as u64) } else { json!(x) }
}
fn cap(x: f32) -> Value {
    if x > 0.0 { json!(decimal(x)) } else { Value::Null }
}

#[cfg(test)]
mod tests;
