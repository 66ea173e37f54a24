//! The keys of LFM 2 and 3: which layers have short convolutions, and how wide the others are. Never reads other keys.
use super::keys::{ConfigKeys, decimal};
use super::lists::{kinds, listed, numbers};
use crate::base::{Error, Result};
use crate::device::ops::RouteRule;
use crate::nn::{Arch, Experts, Recurrence, Spec};
use serde_json::{Value, json};

/// The width of dense feed-forward layers.
pub fn width(keys: &ConfigKeys) -> Result<usize> {
    let ff = |key: &str| keys.size(key, "ff_hidden_dim");
    // The first name is older, and takes precedence.
    let (old, new) = (ff("block_ff_dim")?, ff("intermediate_size")?);
    let given = old.or(new).unwrap_or(12_288);
    let multiple = keys.size("block_multiple_of", "ff_hidden_dim")?.unwrap_or(256).max(1);
    let multiplier = keys.or("block_ffn_dim_multiplier", 1.0, ConfigKeys::positive)?;
    if !keys.flag("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(given);
    }
    let two_thirds = (2.0 * given as f64 / 3.0) as usize;
    Ok(multiplier.map_or(two_thirds, |factor| ((factor * two_thirds as f64) as usize).next_multiple_of(multiple)))
}

/// What LFM 2 has besides.
pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    keys.only("conv_bias", &[json!(false)])?;
    keys.known(["full_attn_idxs"]); // without a list of layers
    // Another name, which takes precedence.
    let tied = keys.flag("tie_embedding")?.unwrap_or(spec.tied);
    let taps = keys.size("conv_L_cache", "max_len")?.unwrap_or(3);
    let recurrent = match listed(keys, spec.layers, ["full_attention", "conv"])? {
        Some(types) => types,
        None => attended(keys, spec.layers)?,
    };
    let recurrence = Some(Recurrence::Conv { channels: spec.dim, taps });
    Ok(Spec { qk_norm: true, tied, recurrence, recurrent, ..spec })
}

/// A layer of LFM 3.
#[derive(Clone, Copy, PartialEq)]
enum Lfm3Layer {
    Conv,
    Full,
    Window,
}

/// What layers of LFM 3 are: as the file lists them, or as by its class.
fn layer_kinds(keys: &ConfigKeys, layers: usize) -> Result<Vec<Lfm3Layer>> {
    let names =
        [("conv", Lfm3Layer::Conv), ("full_attention", Lfm3Layer::Full), ("sliding_attention", Lfm3Layer::Window)];
    let usual = |i: usize| match i % 4 {
        2 => Lfm3Layer::Full,
        0 if i > 0 => Lfm3Layer::Window,
        _ => Lfm3Layer::Conv,
    };
    Ok(kinds(keys, "layer_types", layers, &names)?.unwrap_or((0..layers).map(usual).collect()))
}

/// Which layers of LFM 3 have a window.
pub fn windowed(keys: &ConfigKeys, layers: usize) -> Result<Vec<bool>> {
    Ok(layer_kinds(keys, layers)?.iter().map(|kind| *kind == Lfm3Layer::Window).collect())
}

/// What LFM 3 has besides.
pub fn special3(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    keys.only("conv_bias", &[json!(false)])?;
    let taps = keys.size("conv_L_cache", "max_len")?.unwrap_or(7);
    let gated = keys.flag("use_attention_gate")?.unwrap_or(true);
    Ok(Spec {
        qk_norm: true,
        post_norms: keys.flag("use_sandwich_norm")?.unwrap_or(true),
        output_gate: gated,
        gate_apart: gated,
        gate_by_heads: gated,
        recurrence: Some(Recurrence::Conv { channels: spec.dim, taps }),
        recurrent: layer_kinds(keys, spec.layers)?.iter().map(|kind| *kind == Lfm3Layer::Conv).collect(),
        ..spec
    })
}

/// Without a list of layers: whether each has a convolution, if the file says which have attention.
fn attended(keys: &ConfigKeys, layers: usize) -> Result<Vec<bool>> {
    let Some(those) = numbers(keys, "full_attn_idxs", layers)? else { return Ok(Vec::new()) };
    Ok((0..layers).map(|i| !those.contains(&i)).collect())
}

/// The experts of the sparse model. transformers also adds 1e-6 to the sum that weights are divided by, which is below
/// the rounding of such sums.
pub fn experts(keys: &ConfigKeys, layers: usize) -> Result<Experts> {
    let size = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "num_experts")?.unwrap_or(default));
    // There is no load-balancing loss of them here.
    keys.only("output_router_logits", &[json!(false)])?;
    let scale = keys.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let biased = keys.flag("use_expert_bias")?.unwrap_or(true);
    Ok(Experts {
        count: size("num_experts", 32)?,
        top_k: size("num_experts_per_tok", 4)?,
        ff: keys.size("moe_intermediate_size", "ff_hidden_dim")?.unwrap_or(1792),
        normalize: keys.flag("norm_topk_prob")?.unwrap_or(true),
        dense: (0..keys.whole("num_dense_layers")?.unwrap_or(2).min(layers)).collect(),
        rule: Some(RouteRule { sigmoid: true, biased, scale, ..RouteRule::PLAIN }),
        ..Experts::default()
    })
}

/// The keys of the mixers, and of the width as it is.
pub fn json(spec: &Spec) -> Value {
    let kind = |i| match (spec.recurrence_of(i), spec.window_of(i)) {
        (Some(_), _) => "conv",
        (None, 0) => "full_attention",
        _ => "sliding_attention",
    };
    let layer_types: Vec<&str> = (0..spec.layers).map(kind).collect();
    let mut map = json!({
        "conv_L_cache": spec.recurrence.as_ref().map_or(3, Recurrence::taps),
        "conv_bias": false,
        "layer_types": layer_types,
    });
    if spec.arch == Arch::Lfm3 {
        map["use_attention_gate"] = json!(spec.output_gate);
        map["use_sandwich_norm"] = json!(spec.post_norms);
    } else {
        map["block_auto_adjust_ff_dim"] = json!(false);
    }
    map
}

/// The keys of experts.
pub fn experts_json(experts: &Experts, rule: &RouteRule) -> Value {
    json!({
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ff,
        "num_dense_layers": experts.dense.len(),
        "norm_topk_prob": experts.normalize,
        "use_expert_bias": rule.biased,
        "routed_scaling_factor": decimal(rule.scale),
    })
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use crate::nn::{Arch, Recurrence};
    use serde_json::{Value, json};

    /// The keys of LFM2-1.2B, as published for transformers 4.
    fn published() -> Value {
        json!({
            "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
            "block_use_swiglu": true, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048,
            "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
            "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0", "use_cache": true, "use_pos_enc": true, "vocab_size": 65536
        })
    }

    #[test]
    fn published_keys_are_those_of_transformers_4() {
        let spec = parse(published().to_string().as_bytes()).unwrap();
        assert_eq!((spec.arch, spec.ff, spec.head_dim, spec.tied), (Arch::Lfm2, 8192, 64, true));
        assert_eq!(spec.recurrence, Some(Recurrence::Conv { channels: 2048, taps: 3 }));
        let attended: Vec<usize> = (0..16).filter(|&i| spec.recurrence_of(i).is_none()).collect();
        assert_eq!(attended, [2, 5, 8, 10, 12, 14]);
        assert_eq!(parse(super::super::config(&spec).as_bytes()).unwrap(), spec);
    }

    #[test]
    fn layers_of_lfm3_are_those_of_its_class() {
        let read = |more: Value| {
            let mut map = json!({"model_type": "lfm3", "num_hidden_layers": 6});
            map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            parse(map.to_string().as_bytes())
        };
        let spec = read(json!({})).unwrap();
        assert_eq!((spec.arch, spec.tied, spec.head_dim, spec.window_of(4)), (Arch::Lfm3, true, 128, 256));
        assert_eq!(spec.recurrent, [true, true, false, true, false, true]);
        assert_eq!((spec.window_of(2), spec.rope.clone().unwrap().theta), (0, 1e6));
        assert_eq!(spec.recurrence, Some(Recurrence::Conv { channels: 2048, taps: 7 }));
        assert_eq!(parse(super::super::config(&spec).as_bytes()).unwrap(), spec);
        for (more, said) in [
            (json!({"conv_bias": true}), "conv_bias is true"),
            (json!({"sliding_window": null}), "there is no sliding_window"),
            (json!({"layer_types": vec!["mamba"; 6]}), "use conv or full_attention or sliding_attention"),
            (json!({"rope_parameters": {"rope_theta": 5.0}}), "rope_parameters.full_attention is missing"),
        ] {
            let error = read(more).expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (key, value, said) in [
            ("conv_bias", json!(true), "conv_bias is true"),
            ("full_attn_idxs", json!([2, 16]), "full_attn_idxs is [2,16]; it must be a list of layers below 16"),
            ("layer_types", json!(["conv"]), "layer_types is a list of 1"),
            ("conv_L_cache", json!(9), "short convolutions over 9 tokens"),
        ] {
            let mut map = published();
            map[key] = value;
            let error = parse(map.to_string().as_bytes()).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
