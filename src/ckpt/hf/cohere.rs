//! The keys of Cohere's families: the factor of logits, and experts next to attention. Never reads other keys.
use super::keys::{ConfigKeys, decimal};
use super::lists::{listed, listed_dense, types};
use crate::base::{Error, Result};
use crate::device::ops::RouteRule;
use crate::nn::{Arch, Experts, RowNorm, Spec};
use serde_json::{Value, json};

pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let logit_scale = keys.positive("logit_scale")?.unwrap_or(0.0625) as f32;
    let spec = Spec { logit_scale, parallel: true, layer_norm: true, ..spec };
    let has_window = |i: usize| spec.window_of(i) > 0;
    Ok(match spec.arch {
        Arch::Cohere => {
            let normed = keys.flag("use_qk_norm")?.unwrap_or(false);
            Spec { row_norm: normed.then_some(RowNorm::EachHead { apart: false }), ..spec }
        }
        Arch::Cohere2 => Spec { rotated: (0..spec.layers).map(has_window).collect(), ..spec },
        _ => {
            // Then dense layers rotate without a window too.
            let forced = prefix_pattern(keys)? == 1;
            let rotated = (0..spec.layers).map(|i| has_window(i) || forced && spec.experts_of(i).is_none()).collect();
            let rms = keys.fraction("rms_norm_eps")?;
            let norm_eps = rms.map_or(spec.norm_eps, |eps| eps as f32);
            Spec { rotated, layer_norm: rms.is_none(), norm_eps, ..spec }
        }
    })
}

/// The width of dense layers: by default that of an expert.
pub fn width(keys: &ConfigKeys) -> Result<usize> {
    match keys.size("prefix_dense_intermediate_size", "ff_hidden_dim")? {
        Some(width) => Ok(width),
        None => expert_width(keys),
    }
}
fn expert_width(keys: &ConfigKeys) -> Result<usize> {
    Ok(keys.size("intermediate_size", "ff_hidden_dim")?.unwrap_or(22_528))
}

fn prefix_pattern(keys: &ConfigKeys) -> Result<usize> {
    Ok(keys.whole("prefix_dense_sliding_window_pattern")?.unwrap_or(1))
}

/// The number of dense layers, which are the first ones, where no list says which they are.
fn prefix(keys: &ConfigKeys, layers: usize) -> Result<usize> {
    Ok(keys.whole("first_k_dense_replace")?.unwrap_or(0).min(layers))
}

/// Whether each layer has a window: as the file lists them, or all but every nth of the dense ones and of the others.
pub fn windowed(keys: &ConfigKeys, layers: usize) -> Result<Vec<bool>> {
    let (first, all) = (prefix(keys, layers)?, listed(keys, layers, ["full_attention", "sliding_attention"])?);
    let every = [prefix_pattern(keys)?, keys.whole("sliding_window_pattern")?.unwrap_or(4)].map(|every| every.max(1));
    let has = |i: usize| match i.checked_sub(first) {
        None => !(i + 1).is_multiple_of(every[0]),
        Some(i) => !(i + 1).is_multiple_of(every[1]),
    };
    Ok(all.unwrap_or_else(|| (0..layers).map(has).collect()))
}

pub fn experts(keys: &ConfigKeys, layers: usize) -> Result<Experts> {
    let size = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "num_experts")?.unwrap_or(default));
    let one_of = |key: &str, [default, other]: [&str; 2]| match keys.text(key)? {
        None => Ok(default.to_string()),
        Some(name) if name == default || name == other => Ok(name.to_string()),
        Some(_) => Err(keys.unsupported(key, &[json!(default), json!(other)])),
    };
    // There is no load-balancing loss in transformers' class.
    keys.flag("output_router_logits")?;
    let (ff, shared) = (expert_width(keys)?, keys.whole("num_shared_experts")?.unwrap_or(0));
    let sigmoid = one_of("expert_selection_fn", ["softmax", "sigmoid"])? == "sigmoid";
    let is_mean = one_of("shared_expert_combination_strategy", ["average", "sum"])? == "average";
    let (first, dense) = (prefix(keys, layers)?, listed_dense(keys, layers)?);
    Ok(Experts {
        count: size("num_experts", 8)?,
        top_k: size("num_experts_per_tok", 2)?,
        ff,
        shared_ff: shared * ff,
        averaged: is_mean && shared > 0,
        // A softmax over the chosen ones.
        normalize: keys.flag("norm_topk_prob")?.unwrap_or(true) || !sigmoid,
        dense: dense.unwrap_or_else(|| (0..first).collect()),
        rule: Some(RouteRule { sigmoid, ..RouteRule::PLAIN }),
        ..Experts::default()
    })
}

pub fn json(spec: &Spec) -> Value {
    let mut map = json!({"logit_scale": decimal(spec.logit_scale)});
    match spec.arch {
        Arch::Cohere => map["use_qk_norm"] = json!(spec.row_norm.is_some()),
        Arch::Cohere2Moe => {
            let forced = (0..spec.layers).any(|i| spec.is_rotated(i) && spec.window_of(i) == 0);
            map["prefix_dense_sliding_window_pattern"] = json!(if forced { 1 } else { 4 });
            map["rms_norm_eps"] = if spec.layer_norm { Value::Null } else { json!(decimal(spec.norm_eps)) };
        }
        _ => {}
    }
    map
}

pub fn experts_json(spec: &Spec, experts: &Experts, rule: &RouteRule) -> Value {
    json!({
        "intermediate_size": experts.ff,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "num_shared_experts": experts.shared_ff.checked_div(experts.ff).unwrap_or(0),
        "shared_expert_combination_strategy": if experts.averaged { "average" } else { "sum" },
        "expert_selection_fn": if rule.sigmoid { "sigmoid" } else { "softmax" },
        "norm_topk_prob": experts.normalize,
        "mlp_layer_types": types(&experts.dense, spec.layers),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{config, parse};
    use crate::base::Result;
    use crate::nn::Spec;
    use serde_json::{Value, json};

    fn read(more: Value) -> Result<Spec> {
        let mut map = json!({"model_type": "cohere2_moe", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 20,
                             "num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 64});
        map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(map.to_string().as_bytes())
    }

    #[test]
    fn layers_follow_from_patterns_or_lists() {
        let plain = read(json!({})).unwrap();
        let experts = plain.experts.as_ref().unwrap();
        assert_eq!((experts.count, experts.top_k, experts.ff, experts.shared_ff, plain.ff), (8, 2, 20, 0, 20));
        assert!(experts.normalize && !experts.averaged && plain.layer_norm && plain.tied);
        assert_eq!((plain.head_dim, plain.window, &plain.windowed), (128, 4096, &plain.rotated));
        assert_eq!(plain.windowed, [true, true, true, false, true, true]);
        // Patterns of dense layers and of the others begin anew.
        let dense = read(json!({"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 30,
                                "num_shared_experts": 2, "rms_norm_eps": 1e-3}));
        let dense = dense.unwrap();
        let experts = dense.experts.as_ref().unwrap();
        assert_eq!(dense.windowed, [false, false, true, true, true, false]);
        assert_eq!(dense.rotated, [true, true, true, true, true, false]);
        assert_eq!((&experts.dense[..], experts.ff, experts.shared_ff, dense.ff), (&[0, 1][..], 20, 40, 30));
        assert!(experts.averaged && !dense.layer_norm && dense.norm_eps == 1e-3);
        let kinds = ["full_attention", "sliding_attention"].repeat(3);
        let listed = read(json!({"layer_types": kinds, "mlp_layer_types": vec!["dense"; 6], "num_experts": 4,
                                 "prefix_dense_sliding_window_pattern": 4, "expert_selection_fn": "sigmoid",
                                 "norm_topk_prob": false}));
        let listed = listed.unwrap();
        assert_eq!(listed.rotated, [false, true, false, true, false, true]);
        assert_eq!(listed.sparse_blocks(), 0);
        for spec in [plain, dense, listed] {
            assert_eq!(parse(config(&spec).as_bytes()).unwrap(), spec);
        }
        for (more, said) in [
            (json!({"expert_selection_fn": "topk"}), "expert_selection_fn is \"topk\""),
            (json!({"num_shared_experts": 1, "shared_expert_combination_strategy": "max"}), "combination_strategy is"),
            (
                json!({"sliding_window": null, "layer_types": vec!["sliding_attention"; 6]}),
                "there is no sliding_window",
            ),
            (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\""),
        ] {
            let error = read(more).expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
