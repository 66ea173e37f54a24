//! The keys of Phi 3.5 MoE that no other family has. Never reads other keys.
//!
//! Documents longer than before scaling are refused: transformers rotates them with the factors of short documents, and
//! the published model's own code with those of long ones.
use super::keys::{ConfigKeys, decimal};
use super::rotary::up_to;
use crate::base::Result;
use crate::device::ops::RouteRule;
use crate::nn::{Experts, Scaling, Spec};
use serde_json::{Map, Value, json};

pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let max_len = match spec.rope.as_ref().map(|rope| &rope.scaling) {
        Some(Scaling::Long { original, .. }) => spec.max_len.min(*original),
        _ => spec.max_len,
    };
    let head_bias = keys.flag("lm_head_bias")?.unwrap_or(false);
    Ok(Spec { layer_norm: true, norm_bias: true, head_bias, ..up_to(max_len, spec) })
}

pub fn experts(keys: &ConfigKeys, ff: usize) -> Result<Experts> {
    // The class always chooses two.
    keys.only("num_experts_per_tok", &[json!(2)])?;
    // There is no load-balancing loss of such experts here, and training adds no noise to what routers read.
    keys.only("output_router_logits", &[json!(false)])?;
    keys.known(["router_aux_loss_coef", "input_jitter_noise"]);
    let jitter = keys.fraction("router_jitter_noise")?.unwrap_or(0.01);
    Ok(Experts {
        count: keys.size("num_local_experts", "num_experts")?.unwrap_or(16),
        top_k: 2,
        ff,
        rule: Some(RouteRule { mixer: Some((2.0 * jitter) as f32), ..RouteRule::PLAIN }),
        ..Experts::default()
    })
}

pub fn json(spec: &Spec, map: &mut Map<String, Value>) -> Value {
    if let Some(Scaling::Long { short, long, original, attention }) = spec.rope.as_ref().map(|rope| &rope.scaling) {
        let scaling = json!({
            "type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "short_mscale": attention,
            "long_mscale": attention,
            "original_max_position_embeddings": original,
        });
        map.insert("rope_scaling".into(), scaling);
    }
    json!({"lm_head_bias": spec.head_bias})
}

pub fn experts_json(experts: &Experts, rule: &RouteRule) -> Value {
    json!({
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_jitter_noise": decimal(rule.mixer.unwrap_or(0.0)) / 2.0,
        "output_router_logits": false,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{config, parse};
    use crate::base::Result;
    use crate::nn::{Scaling, Spec};
    use serde_json::{Value, json};

    fn read(more: Value) -> Result<Spec> {
        let mut map = json!({"model_type": "phimoe", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 20,
                             "num_hidden_layers": 2, "num_attention_heads": 16, "max_position_embeddings": 128});
        map.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(map.to_string().as_bytes())
    }

    #[test]
    fn published_keys_are_read() {
        let longrope = |kind: &str| {
            json!({"type": kind, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "short_mscale": 1.25,
                   "long_mscale": 1.25, "original_max_position_embeddings": 32})
        };
        let published = read(json!({
            "attention_bias": true, "lm_head_bias": true, "input_jitter_noise": 0.01, "router_jitter_noise": 0.01,
            "num_local_experts": 16, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "rope_theta": 10_000.0,
            "original_max_position_embeddings": 32, "sliding_window": 128, "rope_scaling": longrope("longrope"),
        }));
        let published = published.unwrap();
        assert_eq!((published.max_len, published.beyond), (32, Some(128)));
        assert_eq!((published.kv_heads, published.head_dim), (8, 4));
        assert!(published.qkv_bias && published.out_bias && published.head_bias && published.norm_bias);
        let Scaling::Long { attention, original, .. } = published.rope.as_ref().unwrap().scaling else { panic!() };
        assert_eq!(
            (attention, original, published.experts.as_ref().unwrap().rule.unwrap().mixer),
            (1.25, 32, Some(0.02))
        );
        let plain = read(json!({})).unwrap();
        assert_eq!((plain.max_len, plain.rope.as_ref().unwrap().theta), (128, 1_000_000.0));
        assert!(!plain.qkv_bias && !plain.head_bias && plain.windowed.is_empty());
        for spec in [published, plain] {
            assert_eq!(parse(config(&spec).as_bytes()).unwrap(), spec, "{}", config(&spec));
        }
        let mut unsized_rope = longrope("longrope");
        unsized_rope.as_object_mut().unwrap().remove("short_mscale");
        for (more, said) in [
            (json!({"num_experts_per_tok": 1}), "num_experts_per_tok is 1"),
            (json!({"output_router_logits": true}), "output_router_logits is true"),
            (json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "rope_scaling.type is \"linear\""),
            (json!({"rope_scaling": unsized_rope}), "short_mscale is missing"),
        ] {
            let error = read(more).expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
