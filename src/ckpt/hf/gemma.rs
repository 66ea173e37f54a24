//! Gemma 4's keys: heads of two sizes, experts, and what its layers have that Gemma 3's do not. Never reads rotary
//! positions.
use super::keys::{ConfigKeys, object};
use crate::base::{Error, Result, quote};
use crate::nn::{Experts, HeadSizes, Spec};
use serde_json::{Map, Value, json};

/// What the family has besides heads of two sizes.
pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let flag = |key: &str| Ok::<_, Error>(keys.flag(key)?.unwrap_or(false));
    let layer_inputs = keys.size("hidden_size_per_layer_input", "embed_dim")?.unwrap_or(256);
    let layer_words = keys.size("vocab_size_per_layer_input", "vocab_size")?.unwrap_or(262_144);
    let keys_are_values = flag("attention_k_eq_v")?;
    let shared_kv = keys.whole("num_kv_shared_layers")?.unwrap_or(0);
    let wide_shared = flag("use_double_wide_mlp")? && shared_kv > 0;
    Ok(Spec {
        global_heads: global_heads(keys, &spec, keys_are_values)?,
        shared_kv,
        wide_shared,
        logit_cap: keys.positive("final_logit_softcapping")?.unwrap_or(0.0) as f32,
        score_scale: Some(1.0),
        qk_norm: true,
        post_norms: true,
        scaled_embedding: true,
        value_norm: true,
        keys_are_values,
        layer_inputs,
        layer_words: if layer_inputs > 0 { layer_words } else { 0 },
        layer_scalar: true,
        ..spec
    })
}

/// The experts next to the feed-forward layer of every block, if the file has them.
pub fn experts(keys: &ConfigKeys) -> Result<Option<Experts>> {
    if !keys.flag("enable_moe_block")?.unwrap_or(false) {
        keys.known(["num_experts", "top_k_experts", "moe_intermediate_size"]);
        return Ok(None);
    }
    let size = |key, setting| keys.need(key, |keys, key| keys.size(key, setting));
    Ok(Some(Experts {
        count: size("num_experts", "num_experts")?,
        top_k: size("top_k_experts", "num_experts")?,
        ff: size("moe_intermediate_size", "ff_hidden_dim")?,
        normalize: true,
        beside: true,
        ..Experts::default()
    }))
}

/// The heads of layers without a window: in `per_layer_config`, or in the keys of published files.
fn global_heads(keys: &ConfigKeys, spec: &Spec, keys_are_values: bool) -> Result<Option<HeadSizes>> {
    let head_dim = keys.size("global_head_dim", "head_dim")?.unwrap_or(512);
    let kv_heads = keys.size("num_global_key_value_heads", "num_kv_heads")?.filter(|_| keys_are_values);
    let mut sizes = HeadSizes { head_dim, kv_heads: kv_heads.unwrap_or(spec.kv_heads) };
    if let Some(layers) = keys.get("per_layer_config") {
        let bad = || {
            Error::input(format!(
                "per_layer_config is {}; it must give the layers without a sliding window, and only those, one head_dim \
                 and num_key_value_heads",
                quote(layers)
            ))
        };
        let own = HeadSizes { head_dim: spec.head_dim, kv_heads: spec.kv_heads };
        let mut of_layers = vec![own; spec.layers];
        let empty = Map::new();
        let listed = if layers.is_null() { &empty } else { layers.as_object().ok_or_else(bad)? };
        for (layer, of) in listed {
            let of_layer = layer.parse().ok().and_then(|i: usize| of_layers.get_mut(i)).ok_or_else(bad)?;
            let of = ConfigKeys::new(of.as_object().ok_or_else(bad)?, format!("per_layer_config.{layer}."));
            *of_layer = HeadSizes {
                head_dim: of.size("head_dim", "head_dim")?.unwrap_or(own.head_dim),
                kv_heads: of.size("num_key_value_heads", "num_kv_heads")?.unwrap_or(own.kv_heads),
            };
            of.finish()?;
            if !of.inert().is_empty() {
                return Err(bad());
            }
        }
        let global = |i: &usize| spec.window_of(*i) == 0;
        sizes = (0..spec.layers).find(global).map_or(own, |i| of_layers[i]);
        if (0..spec.layers).any(|i| of_layers[i] != if global(&i) { sizes } else { own }) {
            return Err(bad());
        }
    }
    let same = sizes == HeadSizes { head_dim: spec.head_dim, kv_heads: spec.kv_heads };
    Ok(Some(sizes).filter(|_| !same))
}

/// The keys of a model, for transformers of all versions that have the family. Rotary positions: those of layers
/// without a window, and of the others.
pub fn write(spec: &Spec, [full, sliding]: [Value; 2], map: &mut Map<String, Value>) {
    map.shift_remove("rope_theta");
    map.shift_remove("rope_scaling");
    let global: Vec<usize> = (0..spec.layers).filter(|&i| spec.window_of(i) == 0).collect();
    let sizes = spec.global_heads.unwrap_or(HeadSizes { head_dim: spec.head_dim, kv_heads: spec.kv_heads });
    let mut of_layer = json!({"head_dim": sizes.head_dim});
    if sizes.kv_heads != spec.kv_heads {
        of_layer["num_key_value_heads"] = json!(sizes.kv_heads);
    }
    let layers: Map<String, Value> = global.iter().map(|i| (i.to_string(), of_layer.clone())).collect();
    map.extend(object(json!({
        "attention_k_eq_v": spec.keys_are_values,
        "enable_moe_block": spec.experts.is_some(),
        "global_head_dim": sizes.head_dim,
        "hidden_size_per_layer_input": spec.layer_inputs,
        "num_global_key_value_heads": sizes.kv_heads,
        "num_kv_shared_layers": spec.shared_kv,
        "per_layer_config": layers,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "use_double_wide_mlp": spec.wide_shared,
    })));
    if let Some(Experts { count, top_k, ff, .. }) = spec.experts {
        map.extend(object(json!({"num_experts": count, "top_k_experts": top_k, "moe_intermediate_size": ff})));
    }
    if spec.layer_inputs > 0 {
        map.insert("vocab_size_per_layer_input".into(), json!(spec.layer_words));
    }
}
