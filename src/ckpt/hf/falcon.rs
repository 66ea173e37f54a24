//! The keys of Falcon: which of three layouts its queries, keys and values have, and how its branches follow each
//! other. Never reads other keys.
use super::keys::ConfigKeys;
use crate::base::{Error, Result};
use crate::nn::Spec;
use serde_json::{Value, json};

/// Falcon has one key/value head, or one for each query head; in the new architecture any number.
pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let flag = |key: &str, default: bool| Ok::<_, Error>(keys.flag(key)?.unwrap_or(default));
    keys.only("alibi", &[json!(false)])?;
    // Older files have it, and no class reads it.
    keys.only("apply_residual_connection_post_layernorm", &[json!(false)])?;
    let is_new = flag("new_decoder_architecture", false)?;
    let (shared, parallel) = (flag("multi_query", true)?, flag("parallel_attn", true)?);
    if is_new {
        // The class ignores it, but for the norms that it makes.
        keys.only("parallel_attn", &[json!(true)])?;
    }
    let given = keys.size(KV_HEADS, "num_kv_heads")?.unwrap_or(spec.heads);
    let kv_heads = match (is_new, shared) {
        (true, _) => given,
        (false, true) => 1,
        (false, false) => {
            keys.only(KV_HEADS, &[json!(spec.heads)])?;
            spec.heads
        }
    };
    let own_norms = match keys.whole(NORMS)? {
        None => is_new,
        Some(1) => false,
        Some(2) if is_new => true,
        Some(_) if is_new => return Err(keys.unsupported(NORMS, &[json!(1), json!(2)])),
        Some(_) => return Err(keys.unsupported(NORMS, &[json!(1)])),
    };
    let spec = Spec { kv_heads, parallel, own_norms, layer_norm: true, norm_bias: true, ..spec };
    Ok(Spec { fused_qkv: true, qkv_by_heads: true, ..spec })
}
const KV_HEADS: &str = "num_kv_heads";
const NORMS: &str = "num_ln_in_parallel_attn";

/// The keys of a model: in the new architecture, if its branches are parallel.
pub fn json(spec: &Spec) -> Value {
    let norms = spec.parallel.then_some(1 + usize::from(spec.own_norms));
    json!({
        KV_HEADS: spec.kv_heads,
        "new_decoder_architecture": spec.parallel,
        "multi_query": spec.kv_heads == 1,
        "parallel_attn": spec.parallel,
        NORMS: norms,
    })
}
