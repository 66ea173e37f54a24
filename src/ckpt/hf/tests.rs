//! Every family's config round-trips, and unsupported keys are named. Never reads a file.
mod published;

use super::*;
use crate::device::ops::{DeltaShape, RouteRule, StateRule};
use crate::nn::{Activation, DeltaForm, Experts, Latent, Mamba};

fn llama() -> Spec {
    Spec {
        vocab: 97,
        dim: 32,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        ff: 44,
        max_len: 64,
        rope: Some(Rotary::new(500_000.0)),
        tied: true,
        ..Spec::default()
    }
}
fn gemma(arch: Arch) -> Spec {
    Spec {
        arch,
        activation: Activation::GeGlu,
        post_norms: true,
        norm_from_one: true,
        scaled_embedding: true,
        query_scalar: Some(144.0),
        window: 7,
        windowed: vec![true, false, true],
        logit_cap: 30.0,
        ..llama()
    }
}
fn specs() -> Vec<Spec> {
    let scaled = |scaling| Spec { rope: Some(Rotary { theta: 1e4, scaling }), ..llama() };
    let yarn =
        Scaling::Yarn { factor: 4.0, original: 16, attention: 1.25, beta_fast: 32.0, beta_slow: 1.0, truncate: false };
    vec![
        llama(),
        Spec { qkv_bias: true, out_bias: true, mlp_bias: true, tied: false, ..llama() },
        scaled(Scaling::Linear { factor: 2.5 }),
        scaled(Scaling::Dynamic { factor: 2.0, original: 64 }),
        scaled(Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16 }),
        scaled(yarn.clone()),
        Spec { arch: Arch::Mistral, window: 9, windowed: vec![true; 3], ..llama() },
        Spec { arch: Arch::Mistral, ..llama() },
        Spec { arch: Arch::Ministral, window: 9, windowed: vec![true, false, true], ..llama() },
        Spec {
            arch: Arch::Ministral3,
            query_growth: Some(QueryGrowth { beta: 0.1, original: 16, unrotated: false }),
            ..scaled(yarn)
        },
        Spec { arch: Arch::Qwen2, qkv_bias: true, ..llama() },
        Spec { arch: Arch::Qwen2, qkv_bias: true, window: 9, windowed: vec![false, true, true], ..llama() },
        Spec { arch: Arch::Qwen3, qk_norm: true, ..llama() },
        Spec { score_cap: 50.0, ..gemma(Arch::Gemma2) },
        Spec { qk_norm: true, local_rope: Some(Rotary::new(1e3)), ..gemma(Arch::Gemma3) },
        Spec {
            arch: Arch::Gpt,
            kv_heads: 4,
            head_dim: 8,
            rope: None,
            activation: Activation::Gelu,
            dropout: 0.1,
            ..llama()
        },
    ]
}
fn map(spec: &Spec) -> Map<String, Value> {
    serde_json::from_str(&config(spec)).unwrap()
}
fn spec(value: Value) -> Result<Spec> {
    parse(value.to_string().as_bytes())
}

#[test]
fn specs_round_trip_through_their_config() {
    for s in specs() {
        s.validate().unwrap();
        assert_eq!(parse(config(&s).as_bytes()).unwrap(), s, "{}", config(&s));
        assert!(config(&s).contains("1e-5") || config(&s).contains("0.00001,"), "{}", config(&s));
    }
}

#[test]
fn unsupported_keys_are_named() {
    let of = |arch, i: usize| specs().into_iter().filter(|s| s.arch == arch).nth(i).unwrap();
    let (llama, mistral, qwen2) = (of(Arch::Llama, 0), of(Arch::Mistral, 0), of(Arch::Qwen2, 0));
    let (qwen3, gemma2, gemma3, gpt) = (of(Arch::Qwen3, 0), of(Arch::Gemma2, 0), of(Arch::Gemma3, 0), of(Arch::Gpt, 0));
    let cases = [
        (&llama, "rope_scaling", json!({"rope_type": "proportional"}), "rope_scaling.rope_type"),
        (&llama, "rope_scaling", json!({"rope_type": "longrope", "long_factor": [1.0]}), "rope_scaling.short_factor"),
        (&llama, "rope_scaling", json!({"rope_type": "longrope", "short_factor": [1.0]}), "must list 5 numbers"),
        (&llama, "rope_scaling", json!({"type": "mrope", "mrope_section": [1]}), "rope_scaling.type"),
        (&llama, "rope_scaling", json!({"type": "linear"}), "rope_scaling.factor is missing"),
        (&llama, "rope_scaling", json!({"type": "linear", "factor": -1}), "rope_scaling.factor"),
        (&llama, "rope_scaling", json!({"type": "linear", "factor": 2, "beta_fast": 8}), "rope_scaling.beta_fast"),
        (
            &llama,
            "rope_scaling",
            json!({"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}),
            "partial_rotary",
        ),
        (&llama, "rope_parameters", json!({"full_attention": {"rope_theta": 1e4}}), "rope_parameters.full_attention"),
        (&llama, "is_causal", json!("no"), "is_causal"),
        (&llama, "is_causal", json!(false), "is_causal"),
        (&llama, "per_layer_config", json!({"0": {"head_dim": 4}}), "per_layer_config"),
        (&llama, "layer_types", json!(vec!["sliding_attention"; 3]), "layer_types"),
        (&llama, "hidden_act", json!("gelu"), "hidden_act"),
        (&llama, "hidden_size", json!("32"), "hidden_size"),
        (&llama, "model_type", json!("mamba"), "model_type"),
        (&llama, "num_key_value_heads", json!(3), "num_kv_heads"),
        (&llama, "quantization_config", json!({"bits": 4}), "quantization_config"),
        (&mistral, "layer_types", json!(vec!["full_attention"; 3]), "layer_types"),
        (&qwen2, "layer_types", json!(vec!["sliding_attention"; 3]), "layer_types"),
        (&qwen2, "use_sliding_window", json!("yes"), "use_sliding_window"),
        (&qwen3, "layer_types", json!(["full_attention", "linear_attention", "full_attention"]), "linear_attention"),
        (&qwen3, "layer_types", json!(["full_attention"]), "each of 3 layers"),
        (&gemma2, "hidden_activation", json!("gelu"), "hidden_activation"),
        (&gemma2, "attn_logit_softcapping", json!("50"), "attn_logit_softcapping"),
        (&gemma3, "use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
        (&gemma3, "rope_parameters", json!({"rope_type": "default", "rope_theta": 1e4}), "rope_parameters.rope_t"),
        (&gemma3, "rope_scaling", json!({"type": "linear", "factor": 8.0}), "rope_scaling has no rope_type"),
        (&gpt, "activation_function", json!("silu"), "activation_function"),
        (&gpt, "scale_attn_by_inverse_layer_idx", json!(true), "scale_attn_by_inverse_layer_idx"),
        (&gpt, "n_head", json!(5), "num_heads"),
        (&gpt, "hidden_size", json!(64), "hidden_size"),
    ];
    // The model's own code is not run, and numbers that only Python reads are no one's.
    let text =
        Value::Object(map(&llama)).to_string().replacen('{', r#"{"auto_map": {"AutoModel": "x.Y"}, "x": [NaN], "#, 1);
    assert_eq!(parsed(text.as_bytes()).unwrap().1, ["auto_map", "x"]);
    for (base, key, value, said) in cases {
        let mut map = map(base);
        map.insert(key.into(), value);
        let error = spec(Value::Object(map)).expect_err(key);
        assert!(error.to_string().contains(said) && error.exit_status() == 2, "{key}: {error}");
    }
}

/// Keys that transformers' class does not have change nothing and are listed; every key that it has is read, or known
/// to be harmless. `tests/golden/config_keys.py` wrote the keys of the classes.
#[test]
fn keys_that_no_class_has_are_inert_and_all_others_are_known() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/config_keys.json");
    let classes: Map<String, Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let inert =
        |map: &Map<String, Value>| parsed(Value::Object(map.clone()).to_string().as_bytes()).map(|found| found.1);
    for (family, keys) in classes {
        let (name, within) = family.split_once('.').map_or((&family[..], false), |(name, _)| (name, true));
        let arch = Arch::all().find(|known| known.model_type == name).map_or(Arch::Llama, |known| known.arch);
        let of = Defaults::of(arch);
        let activation = if arch == Arch::Gpt { Activation::Gelu } else { of.activation };
        let rope = sized(arch).rope.map(|_| Rotary::new(of.theta));
        let mut base = map(&Spec { arch, activation, rope, ..sized(arch) });
        base.insert("model_type".into(), json!(name));
        if name == "ministral3" {
            base.insert("rope_parameters".into(), grown());
        }
        let tower = is_tower(&Map::from_iter([("model_type".into(), json!(name)), ("text_config".into(), json!({}))]));
        if tower {
            base.retain(|key, _| !["architectures", "model_type"].contains(&&key[..]));
            base = object(json!({"model_type": name, "text_config": base}));
        }
        let put = |map: &mut Map<String, Value>, key: &str, value: Value| match within {
            true => map["text_config"][key] = value,
            false => drop(map.insert(key.into(), value)),
        };
        assert_eq!(inert(&base).unwrap(), [""; 0], "{family}");
        for key in keys.as_array().unwrap().iter().map(|key| key.as_str().unwrap()) {
            let mut map = base.clone();
            put(&mut map, key, json!(["strange"]));
            assert!(inert(&map).map_or(true, |inert| inert.is_empty()), "{family}: {key} would have no effect");
        }
        let mut map = base.clone();
        let strange = json!({
            "is_llama_config": true, "rope_interleaved": false, "transformers.js_config": {"dtype": "fp16"},
            "num_nextn_predict_layers": 1, "_note": "none",
        });
        object(strange).into_iter().for_each(|(key, value)| put(&mut map, &key, value));
        let plain = spec(Value::Object(base.clone())).unwrap();
        assert_eq!(spec(Value::Object(map.clone())).unwrap(), plain);
        let found = ["is_llama_config", "transformers.js_config", "num_nextn_predict_layers"];
        let found = found.map(|key| if within { format!("text_config.{key}") } else { key.into() });
        assert_eq!(inert(&map).unwrap(), found, "{family}");
    }
    let mut map = map(&llama());
    map.insert("rope_scaling".into(), json!({"type": "linear", "factor": 2, "finetuned": true}));
    assert_eq!(inert(&map).unwrap(), ["rope_scaling.finetuned"]);
}

/// transformers 5.24 computes the same loss with and without these, for every family but those that read them.
#[test]
fn keys_that_other_classes_read_have_no_effect() {
    let of = |arch| specs().into_iter().find(|s| s.arch == arch).unwrap();
    let (llama, gemma2, gemma3) = (llama(), of(Arch::Gemma2), of(Arch::Gemma3));
    let cases = [
        (&llama, json!({"sliding_window": 4, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}), 3),
        (&llama, json!({"add_cross_attention": true, "is_encoder_decoder": true, "pruned_heads": {"0": [1]}}), 0),
        (&llama, json!({"is_causal": true, "use_bidirectional_attention": false}), 0),
        (&gemma2, json!({"use_bidirectional_attention": true, "original_max_position_embeddings": 16}), 1),
        (&gemma3, json!({"use_bidirectional_attention": false, "attn_logit_softcapping": 5.0}), 0),
    ];
    for (base, keys, named) in cases {
        let mut map = map(base);
        map.extend(object(keys.clone()));
        let (found, inert) = parsed(Value::Object(map).to_string().as_bytes()).unwrap();
        assert_eq!((&found, inert.len()), (base, named), "{keys}: {inert:?}");
    }
    let mut rope = map(&llama);
    rope.insert("rope_parameters".into(), json!({"rope_type": "default", "partial_rotary_factor": 0.5, "factor": 8.0}));
    rope.retain(|key, _| key != "rope_theta" && key != "rope_scaling");
    assert!(parsed(Value::Object(rope).to_string().as_bytes()).is_ok());
    // A scaling reads them.
    for key in ["partial_rotary_factor", "original_max_position_embeddings"] {
        let mut map = map(&llama);
        map.insert("rope_scaling".into(), json!({"type": "linear", "factor": 2.0}));
        map.insert(key.into(), json!(0.5));
        assert!(spec(Value::Object(map)).unwrap_err().to_string().contains(key), "{key}");
    }
}

#[test]
fn keys_that_a_class_rotates_by_are_honored_or_refused() {
    let refused = |arch: &str, keys: Value, key: &str| {
        let mut map = object(json!({
            "model_type": arch, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64,
        }));
        map.extend(object(keys));
        let fault = spec(Value::Object(map)).unwrap_err().to_string();
        assert!(fault.contains(key), "{arch}: {fault}");
    };
    let half = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5});
    refused("glm4_moe_lite", json!({"rope_parameters": half}), "rope_parameters.partial_rotary_factor");
    refused("glm4_moe_lite", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor");
    let both = json!({"full_attention": half, "sliding_attention": half});
    refused("mellum", json!({"rope_parameters": both}), "full_attention.partial_rotary_factor");
    for arch in ["glm4_moe_lite", "youtu", "axk1", "deepseek_v3"] {
        refused(arch, json!({"head_dim": 32, "qk_rope_head_dim": 64}), "head_dim");
    }
}

/// A Llama, with what the configs of some families cannot leave out.
fn sized(arch: Arch) -> Spec {
    let is_v2 = arch == Arch::DeepseekV2;
    let rule = RouteRule { sigmoid: !is_v2, biased: !is_v2, ..RouteRule::PLAIN };
    let experts = Some(Experts { count: 6, top_k: 2, ff: 8, rule: Some(rule), ..Experts::default() });
    let scored = Spec { experts, ..llama() };
    let latent = Latent { q_rank: 8, kv_rank: 8, nope: 4, rope: 4, value: 8 };
    match arch {
        Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Axk1 | Arch::Glm4MoeLite => Spec {
            kv_heads: scored.heads,
            head_dim: latent.head_dim(),
            rotary_dim: Some(latent.rope),
            latent: Some(latent),
            ..scored
        },
        Arch::Glm4Moe | Arch::Dots1 | Arch::HyV3 => scored,
        arch if arch.learns_positions() => Spec { rope: None, kv_heads: llama().heads, head_dim: 8, ..llama() },
        Arch::GptNeoX | Arch::GptJ | Arch::CodeGen | Arch::Falcon | Arch::Persimmon => {
            Spec { kv_heads: llama().heads, head_dim: 8, ..llama() }
        }
        Arch::Bamba | Arch::FalconH1 => {
            let rule = StateRule::Decay { limits: [0.0, f32::INFINITY] };
            let shape = DeltaShape { key_heads: 1, value_heads: 4, key_dim: 8, value_dim: 2 * llama().dim / 4, rule };
            let net = DeltaNet { shape, taps: 4, form: DeltaForm::Mamba(Mamba::default()) };
            let recurrence = Some(Recurrence::Delta(net));
            let side_by_side = arch == Arch::FalconH1;
            Spec { recurrence, recurrent: vec![true; llama().layers], side_by_side, ..llama() }
        }
        Arch::Gemma4 => Spec { local_rope: Some(Rotary::new(10_000.0)), ..llama() },
        _ => llama(),
    }
}

/// The scaling of Ministral 3.
fn grown() -> Value {
    json!({
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "max_position_embeddings": 262_144, "original_max_position_embeddings": 16_384,
        "rope_theta": 1e6, "rope_type": "yarn", "type": "yarn",
    })
}

/// The config of a mixture: sizes that all families have, and `more`.
fn sparse(more: Value) -> Result<Spec> {
    let mut map = object(json!({
        "hidden_size": 40, "intermediate_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 97, "num_hidden_layers": 6, "max_position_embeddings": 64, "hidden_act": "silu",
        "tie_word_embeddings": false,
    }));
    map.extend(object(more));
    spec(Value::Object(map))
}

/// Both names of the number of experts, and both keys that leave blocks without experts.
#[test]
fn experts_are_counted_and_placed_by_either_key() {
    for family in ["qwen2_moe", "qwen3_moe"] {
        let dense = |more: Value| {
            let mut map = object(more);
            map.insert("model_type".into(), json!(family));
            sparse(Value::Object(map)).map(|spec| spec.experts.unwrap().dense)
        };
        // Every second block has experts, beginning with the second.
        assert_eq!(dense(json!({"decoder_sparse_step": 2})).unwrap(), [0, 2, 4], "{family}");
        assert_eq!(dense(json!({"decoder_sparse_step": 3})).unwrap(), [0, 1, 3, 4], "{family}");
        assert_eq!(dense(json!({"mlp_only_layers": [4, 1]})).unwrap(), [1, 4], "{family}");
        let both = json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]});
        assert_eq!(dense(both).unwrap(), [0, 2, 3, 4], "{family}");
        let error = dense(json!({"mlp_only_layers": [6]})).unwrap_err().to_string();
        assert!(error.contains("mlp_only_layers is [6]; it must be a list of layers below 6"), "{error}");
    }
    for family in ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] {
        for names in [&["num_experts"][..], &["num_local_experts"], &["num_experts", "num_local_experts"]] {
            let mut map = object(json!({"model_type": family, "num_experts_per_tok": 2}));
            map.extend(names.iter().map(|name| (name.to_string(), json!(5))));
            let spec = sparse(Value::Object(map)).unwrap();
            assert_eq!(spec.experts.unwrap().count, 5, "{family}: {names:?}");
        }
        let two = json!({"model_type": family, "num_experts": 5, "num_local_experts": 6});
        let error = sparse(two).unwrap_err().to_string();
        assert!(error.contains("num_experts is 5 and num_local_experts is 6: remove one"), "{family}: {error}");
    }
}

#[test]
fn differences_that_no_shape_reveals() {
    let then = llama();
    let now = Spec { heads: 2, kv_heads: 1, head_dim: 20, norm_eps: 1e-6, dropout: 0.5, ..then.clone() };
    let found = differences(&then, &now);
    // The scale of attention scores follows from head_dim.
    assert_eq!(found.len(), 5, "{found:?}");
    assert_eq!(found[0], "num_heads: 4 in the checkpoint, 2 now");
    let stretched = Rotary { theta: 500_000.0, scaling: Scaling::Linear { factor: 2.0 } };
    let found = differences(&then, &Spec { rope: Some(stretched), ..then.clone() });
    assert!(found.len() == 1 && found[0].contains("Linear"), "{found:?}");
}
