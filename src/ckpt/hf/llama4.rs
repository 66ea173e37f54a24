//! The keys of Llama 4's text model that no other family has. Never reads other keys.
use super::keys::ConfigKeys;
use super::lists::{kinds, numbers, rotated, rotated_layers};
use super::rotary::up_to;
use crate::base::{Error, Result};
use crate::device::ops::RouteRule;
use crate::nn::{Experts, QueryGrowth, Spec};
use serde_json::{Value, json};

/// What each layer's attention is: whole, or in chunks.
const KINDS: [(&str, bool); 2] = [("full_attention", false), ("chunked_attention", true)];

pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let rotated = rotated_layers(keys, spec.layers)?;
    let chunk = keys.or("attention_chunk_size", 8192, |keys, key| keys.size(key, "max_len"))?;
    let listed = kinds(keys, "layer_types", spec.layers, &KINDS)?;
    let max_len = match (chunk, listed) {
        (None, Some(chunked)) if chunked.contains(&true) => {
            return Err(Error::input("layer_types says chunked_attention, but there is no attention_chunk_size"));
        }
        (Some(chunk), None) if rotated.contains(&true) => spec.max_len.min(chunk),
        // Attention within one chunk is whole.
        (Some(chunk), Some(chunked)) if chunked.contains(&true) => spec.max_len.min(chunk),
        _ => spec.max_len,
    };
    let growth = QueryGrowth {
        beta: keys.number("attn_scale")?.unwrap_or(0.1),
        original: keys.size("floor_scale", "max_positions")?.unwrap_or(8192),
        unrotated: true,
    };
    let grows = keys.flag("attn_temperature_tuning")?.unwrap_or(true) && rotated.contains(&false);
    let normed = keys.flag("use_qk_norm")?.unwrap_or(true);
    let spec = Spec { qk_norm: normed, norm_after_rope: normed, bare_head_norms: normed, ..spec };
    Ok(Spec { rotated, query_growth: grows.then_some(growth), ..up_to(max_len, spec) })
}

pub fn experts(keys: &ConfigKeys, layers: usize) -> Result<Experts> {
    let ff = keys.size("intermediate_size", "ff_hidden_dim")?.unwrap_or(8192);
    let step = keys.whole("interleave_moe_layer_step")?.unwrap_or(1).max(1);
    let sparse = numbers(keys, "moe_layers", layers)?;
    let is_sparse = |i: &usize| sparse.as_ref().map_or((i + 1).is_multiple_of(step), |sparse| sparse.contains(i));
    keys.only("num_experts_per_tok", &[json!(1)])?;
    // There is no load-balancing loss in transformers' class, which adds no noise either.
    keys.flag("output_router_logits")?;
    keys.known(["router_aux_loss_coef", "router_jitter_noise"]);
    Ok(Experts {
        count: keys.size("num_local_experts", "num_experts")?.unwrap_or(16),
        top_k: 1,
        ff,
        shared_ff: ff,
        dense: (0..layers).filter(|i| !is_sparse(i)).collect(),
        rule: Some(RouteRule { sigmoid: true, ..RouteRule::PLAIN }),
        weighs_inputs: true,
        ..Experts::default()
    })
}

pub fn json(spec: &Spec) -> Value {
    let growth = spec.query_growth.unwrap_or(QueryGrowth { beta: 0.1, original: 8192, unrotated: true });
    json!({
        "no_rope_layers": rotated(spec),
        "use_qk_norm": spec.qk_norm,
        // Without more positions, there is one chunk.
        "attention_chunk_size": spec.beyond.map(|_| spec.max_len),
        "attn_temperature_tuning": spec.query_growth.is_some(),
        "attn_scale": growth.beta,
        "floor_scale": growth.original,
    })
}

pub fn experts_json(spec: &Spec, experts: &Experts) -> Value {
    let sparse: Vec<usize> = (0..spec.layers).filter(|i| !experts.dense.contains(i)).collect();
    json!({
        "intermediate_size": experts.ff,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_layers": sparse,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{config, parse};
    use crate::base::Result;
    use crate::nn::Spec;
    use serde_json::{Value, json};

    fn read(more: Value) -> Result<Spec> {
        let mut map = json!({"model_type": "llama4_text", "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 6,
                             "num_attention_heads": 8, "max_position_embeddings": 10_000});
        map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(map.to_string().as_bytes())
    }

    #[test]
    fn sequences_fit_into_one_chunk() {
        let plain = read(json!({})).unwrap();
        let experts = plain.experts.as_ref().unwrap();
        assert_eq!((experts.count, experts.ff, experts.shared_ff, plain.ff), (16, 8192, 8192, 16_384));
        assert_eq!((plain.max_len, plain.beyond, &experts.dense[..]), (8192, Some(10_000), &[][..]));
        let saved: Value = serde_json::from_str(&config(&plain)).unwrap();
        assert_eq!((&saved["max_position_embeddings"], &saved["attention_chunk_size"]), (&json!(10_000), &json!(8192)));
        assert_eq!(plain.rotated, [true, true, true, false, true, true]);
        assert!(plain.qk_norm && plain.query_growth.is_some_and(|growth| growth.original == 8192));
        let whole = json!({"attention_chunk_size": null, "no_rope_layers": [], "interleave_moe_layer_step": 2,
                           "use_qk_norm": false, "attn_temperature_tuning": false});
        let whole = read(whole).unwrap();
        assert_eq!((whole.max_len, &whole.experts.as_ref().unwrap().dense[..]), (10_000, &[0, 2, 4][..]));
        assert!(!whole.qk_norm && whole.query_growth.is_none() && whole.rotated == plain.rotated);
        let listed = json!({"layer_types": vec!["full_attention"; 6], "no_rope_layers": [1, 1, 0, 1, 1, 1],
                            "moe_layers": [5], "attention_chunk_size": 20});
        let listed = read(listed).unwrap();
        assert_eq!((listed.max_len, listed.is_rotated(2), listed.sparse_blocks()), (10_000, false, 1));
        for spec in [plain, whole, listed] {
            assert_eq!(parse(config(&spec).as_bytes()).unwrap(), spec);
        }
        for (more, said) in [
            (json!({"num_experts_per_tok": 2}), "num_experts_per_tok is 2"),
            (
                json!({"attention_chunk_size": null, "layer_types": vec!["chunked_attention"; 6]}),
                "no attention_chunk_size",
            ),
            (json!({"layer_types": vec!["sliding_attention"; 6]}), "layer_types has \"sliding_attention\""),
            (json!({"moe_layers": [6]}), "moe_layers is [6]"),
        ] {
            let error = read(more).expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
