//! The keys of Nemotron-H: what each layer is, its Mamba layers and its experts. Never reads other keys.
use super::keys::{ConfigKeys, decimal, object};
use super::lists::kinds;
use super::mamba::MambaKeys;
use crate::base::{Error, Result, quote};
use crate::device::ops::RouteRule;
use crate::nn::{Branch, Experts, Recurrence, Spec};
use serde_json::{Map, Value, json};

/// What a layer is: its letter in `hybrid_override_pattern`, and its names in `layers_block_type`.
#[derive(Clone, Copy, PartialEq)]
enum LayerKind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}
const LETTERS: [(char, LayerKind); 4] =
    [('M', LayerKind::Mamba), ('*', LayerKind::Attention), ('-', LayerKind::Mlp), ('E', LayerKind::Experts)];
const NAMES: [(&str, LayerKind); 6] = [
    ("mamba", LayerKind::Mamba),
    ("linear_attention", LayerKind::Mamba),
    ("attention", LayerKind::Attention),
    ("full_attention", LayerKind::Attention),
    ("mlp", LayerKind::Mlp),
    ("moe", LayerKind::Experts),
];
const LIST: &str = "layers_block_type";
const PATTERN: &str = "hybrid_override_pattern";

const MAMBA: MambaKeys = MambaKeys {
    heads: ("mamba_num_heads", 128),
    groups: ("n_groups", 8),
    state: ("ssm_state_size", 128),
    head_dim: ("mamba_head_dim", Some(64)),
    taps: "conv_kernel",
    expand: "expand",
    chunk: "chunk_size",
    conv_bias: "use_conv_bias",
    proj_bias: "mamba_proj_bias",
    least_step: Some(("time_step_min", 0.001)),
};

/// Makes a pattern a list, which has the number of layers. The list takes precedence, as in transformers.
pub fn list_layers(map: &mut Map<String, Value>) -> Result<()> {
    let pattern = map.shift_remove(PATTERN).unwrap_or_default();
    if let (Some(pattern), None) = (pattern.as_str(), map.get(LIST).filter(|list| !list.is_null())) {
        let name = |letter: char| {
            let kind = LETTERS.iter().find(|(of, _)| *of == letter).map(|(_, kind)| *kind);
            NAMES.iter().find(|(_, of)| Some(*of) == kind).map(|(name, _)| *name)
        };
        let names: Option<Vec<&str>> = pattern.chars().map(name).collect();
        let Some(names) = names else {
            let what = format!("{PATTERN} is {}; it must have one of M, *, - and E for each layer", quote(pattern));
            return Err(Error::input(what));
        };
        map.insert(LIST.into(), json!(names));
    }
    let Some(layers) = map.get(LIST).and_then(Value::as_array).map(Vec::len) else {
        return Err(Error::input(format!("{LIST} and {PATTERN} are missing: one of them says what layers are")));
    };
    map.entry("num_hidden_layers").or_insert(json!(layers));
    Ok(())
}

fn layers(keys: &ConfigKeys, layers: usize) -> Result<Vec<LayerKind>> {
    Ok(kinds(keys, LIST, layers, &NAMES)?.unwrap_or_default())
}

/// What Nemotron-H has besides.
pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    // How parameters are initialized, and what transformers has no use for.
    keys.known(["time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"]);
    keys.known(["use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap"]);
    // Layers that predict later tokens, which transformers does not load.
    keys.known(["num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"]);
    for off in ["attention_bias", "use_bias"] {
        keys.only(off, &[json!(false)])?;
    }
    keys.only("mamba_hidden_act", &[json!("silu")])?;
    keys.only("sliding_window", &[])?;
    let kinds = layers(keys, spec.layers)?;
    let net = MAMBA.read(keys, spec.dim)?;
    let is_mixer = |kind: &LayerKind| matches!(kind, LayerKind::Mamba | LayerKind::Attention);
    let has_mamba = kinds.contains(&LayerKind::Mamba);
    let has_experts = kinds.contains(&LayerKind::Experts);
    if has_experts && spec.mlp_bias {
        return Err(Error::input("mlp_bias is true, which is not supported with experts; it must be false"));
    }
    let dense = (0..spec.layers).filter(|&i| kinds[i] == LayerKind::Mlp).collect();
    Ok(Spec {
        rotated: vec![false; spec.layers],
        recurrence: has_mamba.then_some(Recurrence::Delta(net)),
        recurrent: if has_mamba { kinds.iter().map(|kind| *kind == LayerKind::Mamba).collect() } else { Vec::new() },
        single: kinds.iter().map(|kind| if is_mixer(kind) { Branch::Mixer } else { Branch::FeedForward }).collect(),
        experts: spec.experts.filter(|_| has_experts).map(|experts| Experts { dense, ..experts }),
        ..spec
    })
}

/// The experts, whichever layers have them.
pub fn experts(keys: &ConfigKeys) -> Result<Option<Experts>> {
    let size = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "num_experts")?.unwrap_or(default));
    let width = |key: &str| Ok::<_, Error>(keys.size(key, "ff_hidden_dim")?.unwrap_or(7688));
    keys.known(["n_shared_experts"]); // there is one, of a width of its own
    keys.only("moe_latent_size", &[])?;
    // There is no load-balancing loss of them here.
    keys.only("output_router_logits", &[json!(false)])?;
    Ok(Some(Experts {
        count: size("n_routed_experts", 8)?,
        top_k: size("num_experts_per_tok", 2)?,
        ff: width("moe_intermediate_size")?,
        shared_ff: width("moe_shared_expert_intermediate_size")?,
        normalize: keys.flag("norm_topk_prob")?.unwrap_or(true),
        rule: Some(RouteRule {
            sigmoid: true,
            biased: true,
            groups: size("n_group", 1)?,
            top_groups: size("topk_group", 1)?,
            scale: keys.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            mixer: None,
        }),
        ..Experts::default()
    }))
}

/// The keys of layers and of Mamba.
pub fn json(spec: &Spec) -> Value {
    let kind = |i| match (spec.recurrence_of(i), spec.has(i, Branch::Mixer), spec.experts_of(i)) {
        (Some(_), ..) => LayerKind::Mamba,
        (None, true, _) => LayerKind::Attention,
        (None, false, Some(_)) => LayerKind::Experts,
        (None, false, None) => LayerKind::Mlp,
    };
    let letter = |i| LETTERS.iter().find(|(_, of)| *of == kind(i)).map(|(letter, _)| *letter);
    let pattern: String = (0..spec.layers).filter_map(letter).collect();
    let mut map = object(json!({PATTERN: pattern, "attention_bias": false}));
    if let Some(Recurrence::Delta(net)) = &spec.recurrence {
        map.extend(MAMBA.json(net, spec.dim));
    }
    Value::Object(map)
}

/// The keys of experts.
pub fn experts_json(experts: &Experts, rule: &RouteRule) -> Value {
    json!({
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ff,
        "moe_shared_expert_intermediate_size": experts.shared_ff,
        "n_shared_experts": 1,
        "norm_topk_prob": experts.normalize,
        "n_group": rule.groups,
        "topk_group": rule.top_groups,
        "routed_scaling_factor": decimal(rule.scale),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{config, map, parse, text};
    use super::object;
    use crate::nn::{Branch, Recurrence};
    use serde_json::{Value, json};

    /// The keys of Nemotron Nano 9B v2, as published for the class in its repository.
    fn published() -> Value {
        let mut map = json!({
            "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
            "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 12, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 4480,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "initializer_range": 0.02, "intermediate_size": 15680, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 80,
            "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": false, "max_position_embeddings": 131072,
            "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
        });
        let more = json!({
            "num_attention_heads": 40, "num_hidden_layers": 56, "num_key_value_heads": 8, "num_logits_to_keep": 1,
            "pad_token_id": 0, "rescale_prenorm_residual": true, "residual_in_fp32": false, "rms_norm_eps": 1e-5,
            "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 1e-4,
            "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1, "time_step_min": 0.001,
            "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_conv_bias": true,
            "use_mamba_kernels": true, "vocab_size": 131072
        });
        map.as_object_mut().unwrap().extend(object(more));
        map
    }
    fn read(map: &Value) -> crate::base::Result<crate::nn::Spec> {
        parse(map.to_string().as_bytes())
    }

    #[test]
    fn published_keys_are_those_of_a_hybrid() {
        let spec = read(&published()).unwrap();
        assert_eq!((spec.layers, spec.head_dim, spec.heads, spec.kv_heads), (56, 128, 40, 8));
        let Some(Recurrence::Delta(net)) = spec.recurrence else { panic!("no Mamba layers") };
        let shape = net.shape;
        assert_eq!((shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim), (8, 128, 128, 80));
        let attends: Vec<usize> = (0..56).filter(|&i| spec.attends(i)).collect();
        assert_eq!(attends, [14, 21, 30, 39]);
        assert!(spec.has(1, Branch::FeedForward) && !spec.has(1, Branch::Mixer) && spec.experts.is_none());
        assert_eq!(read(&serde_json::from_str(&config(&spec)).unwrap()).unwrap(), spec);
        // As transformers 4 writes it, and as we write it again.
        let infinite = published().to_string().replace(r#"{"__float__":"Infinity"}"#, "Infinity");
        assert_eq!(parse(infinite.as_bytes()).unwrap(), spec);
        let again = text(&map(infinite.as_bytes()).unwrap());
        assert!(again.contains("Infinity\n") && !again.contains("\"Infinity"), "{again}");
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (key, value, said) in [
            ("use_bias", json!(true), "use_bias is true"),
            ("mamba_proj_bias", json!(true), "mamba_proj_bias is true"),
            ("mamba_hidden_act", json!("gelu"), "mamba_hidden_act is"),
            ("mlp_hidden_act", json!("silu"), "mlp_hidden_act is"),
            ("moe_latent_size", json!(64), "moe_latent_size is 64"),
            ("sliding_window", json!(64), "sliding_window is 64"),
            ("time_step_limit", json!([0.0, 0.5]), "time_step_limit is [0.0, 0.5], which transformers ignores"),
            ("num_hidden_layers", json!(55), "layers_block_type is a list of 56"),
            ("hybrid_override_pattern", json!("M+"), "hybrid_override_pattern is M+"),
            ("hybrid_override_pattern", Value::Null, "layers_block_type and hybrid_override_pattern are missing"),
        ] {
            let mut map = published();
            map[key] = value;
            let error = read(&map).expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
