//! The keys of Granite and its descendants: multipliers, and the layers of Granite 4 and of Bamba. Never reads other
//! keys.
use super::keys::{ConfigKeys, decimal, object};
use super::lists::{kinds, numbers};
use super::mamba::MambaKeys;
use crate::base::{Error, Result, quote};
use crate::nn::{Recurrence, Rotary, Spec};
use serde_json::{Map, Value, json};

/// The multipliers of Granite.
pub fn multiplied(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let factor = |key: &str| Ok::<_, Error>(keys.positive(key)?.unwrap_or(1.0));
    Ok(Spec {
        embed_multiplier: factor("embedding_multiplier")? as f32,
        score_scale: Some(factor("attention_multiplier")?),
        residual_multiplier: factor("residual_multiplier")? as f32,
        logit_scale: (factor("logits_scaling")? as f32).recip(),
        ..spec
    })
}

/// The names of the keys of Mamba layers, in Granite 4, Bamba and Falcon H1.
pub(super) const MAMBA: MambaKeys = MambaKeys {
    heads: ("mamba_n_heads", 128),
    groups: ("mamba_n_groups", 1),
    state: ("mamba_d_state", 256),
    head_dim: ("mamba_d_head", None),
    taps: "mamba_d_conv",
    expand: "mamba_expand",
    chunk: "mamba_chunk_size",
    conv_bias: "mamba_conv_bias",
    proj_bias: "mamba_proj_bias",
    least_step: None,
};

/// Granite 4. Without experts, the shared one is its feed-forward layer.
pub fn hybrid(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let shared = keys.size("shared_intermediate_size", "ff_hidden_dim")?.unwrap_or(1024);
    let ff = if spec.experts.is_some() { spec.ff } else { shared };
    let rotated = match keys.text("position_embedding_type")? {
        Some("rope") => Vec::new(),
        None | Some("nope") => vec![false; spec.layers],
        Some(_) => return Err(keys.unsupported("position_embedding_type", &[json!("rope"), json!("nope")])),
    };
    let names = [("attention", false), ("full_attention", false), ("mamba", true), ("linear_attention", true)];
    let recurrent = kinds(keys, "layer_types", spec.layers, &names)?.unwrap_or(vec![true; spec.layers]);
    let net = MAMBA.read(keys, spec.dim)?;
    let (recurrence, recurrent) = match recurrent.contains(&true) {
        true => (Some(Recurrence::Delta(net)), recurrent),
        false => (None, Vec::new()),
    };
    Ok(Spec { ff, rotated, recurrence, recurrent, fused_gate_up: true, ..multiplied(keys, spec)? })
}

/// The keys of Granite 4 besides the multipliers and those of experts.
pub fn hybrid_json(spec: &Spec) -> Map<String, Value> {
    let kind = |i| if spec.recurrence_of(i).is_some() { "mamba" } else { "attention" };
    let layer_types: Vec<&str> = (0..spec.layers).map(kind).collect();
    let mut map = object(json!({
        "layer_types": layer_types,
        "position_embedding_type": if spec.is_rotated(0) { "rope" } else { "nope" },
    }));
    if spec.experts.is_none() {
        map.extend(object(json!({"shared_intermediate_size": spec.ff, "num_local_experts": 0})));
    }
    match &spec.recurrence {
        Some(Recurrence::Delta(net)) => map.extend(MAMBA.json(net, spec.dim)),
        // The class checks that its default divides the width.
        _ => drop(map.insert(MAMBA.heads.0.into(), json!(1))),
    }
    map
}

/// Granite with windows. Each layer has a rotary base of its own, 0 without rotary positions; here all layers with a
/// window have one, and all others.
pub fn swa(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let spec = Spec { sinks: true, ..multiplied(keys, spec)? };
    let (Some(list), Some(rope)) = (keys.present(THETAS), spec.rope.clone()) else { return Ok(spec) };
    let theta = |value: &Value| value.as_f64().filter(|theta| *theta >= 0.0 && theta.is_finite());
    let thetas = list.as_array().and_then(|list| list.iter().map(theta).collect::<Option<Vec<f64>>>());
    let Some(thetas) = thetas.filter(|thetas| thetas.len() == spec.layers) else {
        let what =
            format!("{THETAS} is {}; it must list a number from 0 for each of {} layers", quote(list), spec.layers);
        return Err(Error::input(what));
    };
    let of = |windowed: bool| {
        let mut own =
            (0..spec.layers).filter(|&i| (spec.window_of(i) > 0) == windowed && thetas[i] > 0.0).map(|i| thetas[i]);
        let first = own.next();
        match own.find(|theta| Some(*theta) != first) {
            Some(_) => Err(Error::input(format!(
                "{THETAS} is {}; layers with a window must have one base, and so must the others",
                quote(list)
            ))),
            None => Ok(first),
        }
    };
    let (full, local) = (of(false)?, of(true)?);
    let with = |theta: Option<f64>| Rotary { theta: theta.unwrap_or(rope.theta), ..rope.clone() };
    let local_rope = local.filter(|_| full.is_some() && full != local).map(|_| with(local));
    let rotated = if thetas.contains(&0.0) { thetas.iter().map(|theta| *theta > 0.0).collect() } else { Vec::new() };
    Ok(Spec { rope: Some(with(full.or(local))), local_rope, rotated, ..spec })
}
const THETAS: &str = "layer_rope_theta";

/// The keys of Granite with windows besides the multipliers.
pub fn swa_json(spec: &Spec) -> Map<String, Value> {
    let theta = |i| match [&spec.rope, &spec.local_rope] {
        _ if !spec.is_rotated(i) => 0.0,
        [_, Some(local)] if spec.uses_local_rope(i) => local.theta,
        [rope, _] => rope.as_ref().map_or(0.0, |rope| rope.theta),
    };
    object(json!({THETAS: (0..spec.layers).map(theta).collect::<Vec<f64>>()}))
}

/// Bamba: Mamba layers but for those that the file lists.
pub fn bamba(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    keys.only("z_loss_coefficient", &[json!(0), json!(0.0)])?;
    // The class ignores the model's own key, and reads the one in `rope_parameters`.
    keys.only("partial_rotary_factor", &[json!(0.5)])?;
    keys.known(["num_logits_to_keep"]);
    let attends = numbers(keys, ATTENTION, spec.layers)?.unwrap_or_default();
    let recurrent: Vec<bool> = (0..spec.layers).map(|i| !attends.contains(&i)).collect();
    Ok(Spec { recurrence: Some(Recurrence::Delta(MAMBA.read(keys, spec.dim)?)), recurrent, ..spec })
}
const ATTENTION: &str = "attn_layer_indices";

/// The keys of Bamba's layers.
pub fn bamba_json(spec: &Spec) -> Map<String, Value> {
    let attends: Vec<usize> = (0..spec.layers).filter(|&i| spec.attends(i)).collect();
    let mut map = object(json!({ATTENTION: attends}));
    if let Some(Recurrence::Delta(net)) = &spec.recurrence {
        map.extend(MAMBA.json(net, spec.dim));
    }
    map
}

/// HyperCLOVA X, whose logits are multiplied where Granite's are divided.
pub fn hyperclovax(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let post_norms = keys.flag("use_post_norm")?.unwrap_or(true);
    let scale = keys.positive("attention_multiplier")?.unwrap_or((spec.head_dim as f64).sqrt().recip());
    let spec = multiplied(keys, spec)?;
    Ok(Spec { post_norms, score_scale: Some(scale), logit_scale: spec.logit_scale.recip(), ..spec })
}

/// Whether the file of a Granite 4 says that it has no experts.
pub fn has_none(keys: &ConfigKeys) -> bool {
    let none = keys.get("num_local_experts") == Some(&json!(0));
    if none {
        keys.known(["num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"]);
    }
    none
}

/// The keys of the multipliers.
pub fn json(spec: &Spec) -> Value {
    json!({
        "embedding_multiplier": decimal(spec.embed_multiplier),
        "attention_multiplier": spec.score_scale.unwrap_or(1.0),
        "residual_multiplier": decimal(spec.residual_multiplier),
        "logits_scaling": decimal(spec.logit_scale.recip()),
    })
}
