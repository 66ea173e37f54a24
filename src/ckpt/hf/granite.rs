//! The keys of Granite and its descendants: multipliers, and which layers of Granite 4 are supported. Never reads other
//! keys.
use super::keys::{ConfigKeys, decimal};
use crate::base::{Error, Result, quote};
use crate::nn::Spec;
use serde_json::{Value, json};

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

/// Granite 4, if it has neither experts nor Mamba layers: its feed-forward layer is what is a shared expert otherwise.
pub fn hybrid(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let ff = keys.size("shared_intermediate_size", "ff_hidden_dim")?.unwrap_or(1024);
    let rotated = match keys.text("position_embedding_type")? {
        Some("rope") => Vec::new(),
        None | Some("nope") => vec![false; spec.layers],
        Some(_) => return Err(keys.unsupported("position_embedding_type", &[json!("rope"), json!("nope")])),
    };
    Ok(Spec { ff, rotated, fused_gate_up: true, ..multiplied(keys, spec)? })
}

/// HyperCLOVA X, whose logits are multiplied where Granite's are divided.
pub fn hyperclovax(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let post_norms = keys.flag("use_post_norm")?.unwrap_or(true);
    let scale = keys.positive("attention_multiplier")?.unwrap_or((spec.head_dim as f64).sqrt().recip());
    let spec = multiplied(keys, spec)?;
    Ok(Spec { post_norms, score_scale: Some(scale), logit_scale: spec.logit_scale.recip(), ..spec })
}

/// Refuses Granite 4 with experts.
pub fn no_experts(keys: &ConfigKeys) -> Result<()> {
    keys.known(["num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"]);
    match keys.get("num_local_experts") {
        Some(count) if *count == json!(0) => Ok(()),
        count => Err(Error::input(format!(
            "num_local_experts is {}: of Granite 4, only models without experts are supported, which say 0",
            quote(count.unwrap_or(&json!(8)))
        ))),
    }
}

/// Refuses layers of Granite 4 that are not attention.
pub fn only_attention(keys: &ConfigKeys) -> Result<()> {
    keys.known([
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "time_step_limit",
    ]);
    let kinds = keys.present("layer_types").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let is_attention = |kind: &Value| *kind == json!("attention") || *kind == json!("full_attention");
    match kinds.iter().find(|kind| !is_attention(kind)) {
        None if !kinds.is_empty() => Ok(()),
        other => Err(Error::input(format!(
            "layer_types has {}: Mamba layers are not supported yet; only models whose layers are all attention are",
            quote(other.unwrap_or(&json!("mamba")))
        ))),
    }
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
