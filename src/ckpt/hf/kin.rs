//! Model types whose configs another family's reader understands once their keys have other names. Never reads a value
//! for what it means.
use super::keys::{ConfigKeys, object};
use super::learned;
use super::nemotron_h;
use crate::base::{Error, Result, quote};
use serde_json::{Map, Value, json};

/// Model types, their name for a key, and ours.
const NAMES: [(&str, &str, &str); 23] = [
    ("ernie4_5_moe", "moe_k", "num_experts_per_tok"),
    ("ernie4_5_moe", "moe_num_experts", "num_experts"),
    ("ernie4_5_moe", "moe_num_shared_experts", "n_shared_experts"),
    ("exaone_moe", "num_experts", "n_routed_experts"),
    ("exaone_moe", "num_shared_experts", "n_shared_experts"),
    ("falcon", "activation", "hidden_act"),
    ("gpt_neo", "num_heads", "num_attention_heads"),
    ("gpt_neo", "num_layers", "num_hidden_layers"),
    ("gpt_neo", "window_size", "sliding_window"),
    ("gpt_neox", "rotary_emb_base", "rope_theta"),
    ("gpt_neox", "rotary_pct", "partial_rotary_factor"),
    ("codegen gpt_bigcode gpt_neo gptj opt", "activation_function", "hidden_act"),
    ("codegen gpt_bigcode gptj", "n_embd", "hidden_size"),
    ("codegen gpt_bigcode gptj", "n_head", "num_attention_heads"),
    ("codegen gpt_bigcode gptj", "n_layer", "num_hidden_layers"),
    ("codegen gpt_bigcode gptj", "n_positions", "max_position_embeddings"),
    ("granitemoehybrid", "layers_block_type", "layer_types"),
    ("hunyuan_v1_moe", "moe_topk", "num_experts_per_tok"),
    ("hy_v3", "num_experts", "n_routed_experts"),
    ("hy_v3", "num_shared_experts", "n_shared_experts"),
    ("hy_v3", "router_scaling_factor", "routed_scaling_factor"),
    ("internlm3", "bias", "mlp_bias"),
    ("internlm3", "qkv_bias", "attention_bias"),
];

/// Older names of keys, which are read and not written.
const OLDER: [(&str, &str, &str); 19] = [
    ("exaone", "activation_function", "hidden_act"),
    ("exaone", "layer_norm_epsilon", "rms_norm_eps"),
    ("exaone", "num_layers", "num_hidden_layers"),
    ("falcon", "n_embed", "hidden_size"),
    ("lfm3", "rms_norm_eps", "norm_eps"),
    ("nemotron_h", "attention_head_dim", "head_dim"),
    ("nemotron_h", "layer_types", "layers_block_type"),
    ("nemotron_h", "mamba_chunk_size", "chunk_size"),
    ("nemotron_h", "mamba_conv_bias", "use_conv_bias"),
    ("nemotron_h", "mamba_d_conv", "conv_kernel"),
    ("nemotron_h", "mamba_dt_limit", "time_step_limit"),
    ("nemotron_h", "mamba_expand", "expand"),
    ("nemotron_h", "mamba_n_groups", "n_groups"),
    ("nemotron_h", "num_local_experts", "n_routed_experts"),
    ("sarvam_mla sarvam_moe", "num_experts", "n_routed_experts"),
    ("sarvam_mla sarvam_moe", "num_shared_experts", "n_shared_experts"),
    ("sarvam_moe", "num_local_experts", "n_routed_experts"),
    ("sarvam_moe", "num_mtp_layers", "num_nextn_predict_layers"),
    ("sarvam_moe", "use_qkv_bias", "attention_bias"),
];

/// Keys of which a file may have one value for each layer.
const EACH: [(&str, &str); 2] = [("hunyuan_v1_moe", "num_experts"), ("hunyuan_v1_moe", "num_experts_per_tok")];

/// The family that computes the same as a model type, with what is absent in its files.
fn kin(model_type: &str) -> Option<(&'static str, Map<String, Value>)> {
    let llama = |kv_heads: usize, head_dim: usize| {
        ("llama", json!({"num_key_value_heads": kv_heads, "head_dim": head_dim, "rms_norm_eps": 1e-5}))
    };
    let (family, absent) = match model_type {
        "internlm3" => llama(2, 128),
        "iquestcoder" => llama(8, 128),
        "apertus1p5_text" => ("apertus", json!({})),
        "gemma4_unified_text" => ("gemma4_text", json!({"sliding_window": 1024})),
        "sarvam_mla" => (
            "deepseek_v3",
            json!({"q_lora_rank": null, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "first_k_dense_replace": 1}),
        ),
        "exaone" => ("llama", json!({"num_key_value_heads": 8, "rms_norm_eps": 1e-5})),
        "sarvam_moe" => (
            "glm4_moe",
            json!({
                "num_key_value_heads": 4,
                "head_dim": 64,
                "rms_norm_eps": 1e-6,
                "partial_rotary_factor": 1.0,
                "use_qk_norm": true,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1024,
                "routed_scaling_factor": 2.5,
            }),
        ),
        _ => return None,
    };
    Some((family, object(absent)))
}

/// The model types of [`kin`], for messages.
pub const TYPES: &str = "internlm3, iquestcoder, exaone, apertus1p5_text, gemma4_unified_text, sarvam_mla, sarvam_moe";

/// Whether an export has the family's config in the place of the model's own, and the family's names of tensors: those
/// of published files are others.
pub fn is_rewritten(map: &Map<String, Value>) -> bool {
    map.get("model_type").and_then(Value::as_str).is_some_and(|name| ["exaone", "sarvam_moe"].contains(&name))
}

/// The base of rotary positions, where a file says none.
fn rotated_by(map: &mut Map<String, Value>, theta: f64) {
    let within = map.get("rope_parameters").is_some_and(|rope| rope.get("rope_theta").is_some());
    if !within {
        map.entry("rope_theta").or_insert(json!(theta));
    }
}

/// What a model type has in other ways than its family.
fn differs(map: &mut Map<String, Value>, model_type: &str) -> Result<()> {
    match model_type {
        // One key decides about both kinds of biases.
        "internlm3" => {
            let flags = ["attention_bias", "mlp_bias"].map(|key| map.get(key) == Some(&json!(true)));
            if flags[0] != flags[1] {
                return Err(Error::input("qkv_bias and bias differ, which transformers does not support"));
            }
        }
        // A head of fewer tokens than there are embeddings.
        "apertus1p5_text" => {
            let all = map.get("vocab_size").cloned().unwrap_or_default();
            ConfigKeys::new(map, "").only("output_vocab_size", &[all])?;
            map.shift_remove("output_vocab_size");
        }
        // Its class has neither inputs of layers nor experts, whatever the file says.
        "gemma4_unified_text" => {
            map.insert("hidden_size_per_layer_input".into(), json!(0));
            map.shift_remove("enable_moe_block");
        }
        "exaone" => rotated_by(map, 500_000.0),
        "sarvam_moe" => rotated_by(map, 8_000_000.0),
        // The published files' name of YaRN.
        "sarvam_mla" => {
            let scaling = map.get_mut("rope_scaling").and_then(Value::as_object_mut);
            for (_, kind) in scaling.into_iter().flatten().filter(|(_, kind)| *kind == "deepseek_yarn") {
                *kind = json!("yarn");
            }
        }
        _ => {}
    }
    Ok(())
}

fn is_of(types: &str, model_type: &str) -> bool {
    types.split(' ').any(|of| of == model_type)
}

/// The config in the terms of its family here.
pub fn translated(map: &Map<String, Value>) -> Result<Map<String, Value>> {
    let (mut map, model_type) = (map.clone(), map.get("model_type").and_then(Value::as_str).unwrap_or_default());
    let model_type = model_type.to_string();
    // Its class reads these under other names only.
    for inert in ["rope_theta", "partial_rotary_factor"].iter().filter(|_| model_type == "gpt_neox") {
        map.shift_remove(*inert);
    }
    for (_, theirs, ours) in NAMES.iter().chain(&OLDER).filter(|(of, ..)| is_of(of, &model_type)) {
        let Some(value) = map.shift_remove(*theirs) else { continue };
        if map.get(*ours).is_some_and(|other| *other != value) {
            return Err(Error::input(format!("{theirs} and {ours} mean the same and differ: remove one")));
        }
        map.insert((*ours).into(), value);
    }
    for (_, key) in EACH.iter().filter(|(of, _)| *of == model_type) {
        let Some(Value::Array(list)) = map.get(*key) else { continue };
        let Some(first) = list.first().filter(|first| list.iter().all(|value| value == *first)).cloned() else {
            let what = format!("{key} is {}; values that differ among layers are not supported", quote(json!(list)));
            return Err(Error::input(what));
        };
        map.insert((*key).into(), first);
    }
    match &model_type[..] {
        "nemotron_h" => nemotron_h::list_layers(&mut map)?,
        "gpt_neo" => learned::list_layers(&mut map)?,
        _ => {}
    }
    if let Some((family, mut all)) = kin(&model_type) {
        all.append(&mut map);
        all.insert("model_type".into(), json!(family));
        differs(&mut all, &model_type)?;
        return Ok(all);
    }
    Ok(map)
}

/// The keys of a written config under the names of its model type.
pub fn named(mut map: Map<String, Value>, model_type: &str) -> Map<String, Value> {
    for (_, theirs, ours) in NAMES.iter().filter(|(of, ..)| is_of(of, model_type)) {
        if let Some(value) = map.shift_remove(*ours) {
            map.insert((*theirs).into(), value);
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::{TYPES, kin};
    use crate::base::Result;
    use crate::nn::{Arch, Scaling, Spec};
    use serde_json::{Value, json};

    fn read(more: Value) -> Result<Spec> {
        let mut map = json!({"vocab_size": 64, "hidden_size": 48, "intermediate_size": 44, "num_hidden_layers": 2,
                             "num_attention_heads": 6, "max_position_embeddings": 64});
        map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(map.to_string().as_bytes())
    }

    #[test]
    fn keys_and_types_have_other_names() {
        let internlm =
            read(json!({"model_type": "internlm3", "qkv_bias": true, "bias": true, "head_dim": null})).unwrap();
        assert_eq!(internlm.arch, Arch::Llama);
        assert!(internlm.qkv_bias && internlm.mlp_bias && internlm.kv_heads == 2);
        let sarvam =
            read(json!({"model_type": "sarvam_mla", "num_experts": 8, "num_shared_experts": 2, "rope_scaling": {
            "type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32}}))
            .unwrap();
        let experts = sarvam.experts.unwrap();
        assert_eq!((sarvam.arch, sarvam.latent.unwrap().q_rank, experts.count), (Arch::DeepseekV3, 0, 8));
        assert_eq!((experts.shared_ff, experts.rule.unwrap().groups, experts.dense), (2 * experts.ff, 1, vec![0]));
        assert!(matches!(sarvam.rope.unwrap().scaling, Scaling::Yarn { .. }));
        // Keys of published files; the base is the class's.
        let exaone = json!({"model_type": "exaone", "num_layers": 2, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-3,
                            "activation_function": "silu", "num_attention_heads": 8});
        let exaone = read(exaone).unwrap();
        assert_eq!((exaone.arch, exaone.kv_heads, exaone.norm_eps), (Arch::Llama, 8, 1e-3));
        assert_eq!(exaone.rope.unwrap().theta, 500_000.0);
        let within = json!({"model_type": "exaone", "num_attention_heads": 8, "rope_parameters": {"rope_theta": 7.0}});
        assert_eq!(read(within).unwrap().rope.unwrap().theta, 7.0);
        let sarvam =
            json!({"model_type": "sarvam_moe", "num_experts": 8, "num_attention_heads": 8, "use_qkv_bias": true});
        let sarvam = read(sarvam).unwrap();
        let experts = sarvam.experts.as_ref().unwrap();
        assert_eq!((sarvam.arch, sarvam.head_dim, sarvam.qkv_bias, experts.top_k), (Arch::Glm4Moe, 64, true, 6));
        assert_eq!((sarvam.rotary_dim(), sarvam.rope.unwrap().theta, sarvam.qk_norm), (64, 8_000_000.0, true));
        let unified = read(json!({"model_type": "gemma4_unified_text", "num_key_value_heads": 2})).unwrap();
        assert_eq!((unified.arch, unified.layer_inputs, unified.window), (Arch::Gemma4, 0, 1024));
        TYPES.split(", ").for_each(|name| assert!(kin(name).is_some(), "{name}"));
        let hunyuan = |more: Value| {
            let mut all = json!({"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2, 2]});
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read(all)
        };
        assert_eq!(hunyuan(json!({})).unwrap().experts.unwrap().top_k, 2);
        // As published with transformers 4.
        let pythia =
            read(json!({"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_emb_base": 2000, "rotary_pct": 0.25,
                                 "num_key_value_heads": 2}));
        let pythia = pythia.unwrap();
        assert_eq!((pythia.rotary_dim, pythia.rope.unwrap().theta, pythia.kv_heads), (Some(2), 2000.0, 6));
        // transformers reads the other families' names of these nowhere.
        let inert = read(json!({"model_type": "gpt_neox", "rope_theta": 500.0, "partial_rotary_factor": 1.0})).unwrap();
        assert_eq!((inert.rotary_dim, inert.rope.unwrap().theta), (Some(2), 10_000.0));
        let gpt_j =
            read(json!({"model_type": "gptj", "n_embd": 48, "n_head": 6, "n_inner": 40, "rotary_dim": 4})).unwrap();
        assert_eq!((gpt_j.arch, gpt_j.ff, gpt_j.rotary_dim), (Arch::GptJ, 40, Some(4)));
        let granite = json!({"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["attention", "attention"]});
        assert_eq!(read(granite.clone()).unwrap().ff, 1024);
        let changed = |key: &str, value: Value| {
            let mut all = granite.clone();
            all[key] = value;
            read(all)
        };
        for (spec, said) in [
            (read(json!({"model_type": "internlm3", "bias": true})), "qkv_bias and bias differ"),
            (read(json!({"model_type": "apertus1p5_text", "output_vocab_size": 60})), "output_vocab_size is 60"),
            (hunyuan(json!({"moe_topk": [1, 2]})), "values that differ among layers"),
            (hunyuan(json!({"num_experts_per_tok": 3})), "moe_topk and num_experts_per_tok mean the same"),
            (changed("layer_types", json!(["attention", "mamba2"])), "layer_types has \"mamba2\""),
            (changed("mamba_proj_bias", json!(true)), "mamba_proj_bias is true"),
            (changed("time_step_limit", json!([0.1])), "time_step_limit is [0.1]"),
            (read(json!({"model_type": "ernie4_5_moe", "use_bias": true})), "use_bias is true"),
            (read(json!({"model_type": "phi", "hidden_act": "selu"})), "must be \"gelu\" or"),
            (read(json!({"model_type": "falcon", "alibi": true})), "alibi is true"),
            (read(json!({"model_type": "falcon", "multi_query": false, "num_kv_heads": 2})), "num_kv_heads is 2"),
            (read(json!({"model_type": "falcon", "num_ln_in_parallel_attn": 2})), "num_ln_in_parallel_attn is 2"),
            (read(json!({"model_type": "codegen"})), "num_heads 6 is not a multiple of 4"),
            (read(json!({"model_type": "gpt_neo", "attention_types": [[["global", "far"], 1]]})), "attention_types is"),
            (read(json!({"model_type": "gpt_bigcode", "add_cross_attention": true})), "add_cross_attention is true"),
            (read(json!({"model_type": "axk1", "moe_layer_freq": 2})), "moe_layer_freq is 2"),
            (read(json!({"model_type": "hy_v3", "mlp_bias": true})), "mlp_bias is true"),
            (read(json!({"model_type": "bamba", "partial_rotary_factor": 1.0})), "partial_rotary_factor is 1.0"),
            (read(json!({"model_type": "olmo", "clip_qkv": -1})), "clip_qkv is -1"),
            (
                read(json!({"model_type": "opt", "ffn_dim": 44, "do_layer_norm_before": false})),
                "do_layer_norm_before is false",
            ),
            (read(json!({"model_type": "opt", "ffn_dim": 44, "word_embed_proj_dim": 24})), "word_embed_proj_dim is 24"),
            (read(json!({"model_type": "biogpt", "tie_word_embeddings": false})), "tie_word_embeddings is false"),
            (read(json!({"model_type": "gpt_neo", "attention_types": [[["far"], 2]]})), "with types global or local"),
            (read(json!({"model_type": "gpt_neo"})), "layer_types is a list of 24"),
        ] {
            let error = spec.expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
