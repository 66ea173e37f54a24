//! The keys of families with learned positions that are Llamas in other names. Never reads those of GPT-2.
use super::keys::ConfigKeys;
use crate::base::{Error, Result, quote};
use crate::nn::{Arch, Spec};
use serde_json::{Map, Value, json};

/// Rows of the tables of OPT and BioGPT that no position has.
const RESERVED: usize = 2;

/// What these families have besides.
pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    let spec = Spec { layer_norm: true, norm_bias: true, ..spec };
    // Keys of other classes, of dropout that the run decides, and of initialization.
    keys.known(["classifier_dropout", "dropout", "activation_dropout", "hidden_dropout_prob"]);
    keys.known(["attention_probs_dropout_prob", "embed_dropout", "resid_dropout", "init_std"]);
    match spec.arch {
        Arch::Opt => {
            for on in ["do_layer_norm_before", "layer_norm_elementwise_affine"] {
                keys.only(on, &[json!(true)])?;
            }
            keys.only("_remove_final_layer_norm", &[json!(false)])?;
            keys.only("word_embed_proj_dim", &[json!(spec.dim)])?;
            keys.only("layerdrop", &[json!(0), json!(0.0)])?;
            Ok(Spec { first_position: RESERVED, ..spec })
        }
        Arch::BioGpt => {
            keys.known(["layer_norm_eps"]); // norms have another
            keys.only("layerdrop", &[json!(0), json!(0.0)])?;
            // The head of its own has another name.
            keys.only("tie_word_embeddings", &[json!(true)])?;
            let scaled_embedding = keys.flag("scale_embedding")?.unwrap_or(true);
            Ok(Spec { first_position: RESERVED, scaled_embedding, ..spec })
        }
        Arch::GptNeo => {
            keys.known(["attention_layers"]); // follows from the types
            Ok(Spec { score_scale: Some(1.0), ..spec })
        }
        _ => {
            keys.only("add_cross_attention", &[json!(false)])?;
            // The precision of scores.
            keys.known(["attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"]);
            let score_scale = (!keys.flag("scale_attn_weights")?.unwrap_or(true)).then_some(1.0);
            let kv_heads = if keys.flag("multi_query")?.unwrap_or(true) { 1 } else { spec.heads };
            Ok(Spec { kv_heads, score_scale, fused_qkv: true, qkv_by_heads: true, ..spec })
        }
    }
}

/// The keys of a model, but for those that all families have.
pub fn json(spec: &Spec) -> Value {
    match spec.arch {
        Arch::Opt => json!({"word_embed_proj_dim": spec.dim, "dropout": 0.0}),
        Arch::BioGpt => json!({
            "scale_embedding": spec.scaled_embedding,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }),
        Arch::GptNeo => {
            let kind = |i| if spec.window_of(i) > 0 { TYPES[1].0 } else { TYPES[0].0 };
            let types: Vec<Value> = (0..spec.layers).map(|i| json!([[kind(i)], 1])).collect();
            json!({ATTENTION_TYPES: types, "sliding_window": spec.window.max(1)})
        }
        _ => json!({
            "multi_query": spec.kv_heads == 1,
            "scale_attn_weights": spec.score_scale.is_none(),
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }),
    }
}

const ATTENTION_TYPES: &str = "attention_types";
/// GPT-Neo's names of types of layers, and ours.
const TYPES: [(&str, &str); 2] = [("global", "full_attention"), ("local", "sliding_attention")];

/// Makes a list of the types of layers of GPT-Neo, which are lists of types and how often each is repeated.
pub fn list_layers(map: &mut Map<String, Value>) -> Result<()> {
    let types = map.shift_remove(ATTENTION_TYPES).filter(|types| !types.is_null());
    let types = types.unwrap_or_else(|| json!([[["global", "local"], 12]]));
    let name = |kind: &Value| TYPES.iter().find(|(theirs, _)| kind.as_str() == Some(theirs)).map(|(_, ours)| *ours);
    let repeated = |item: &Value| {
        let kinds: Vec<&str> = item.get(0)?.as_array()?.iter().map(name).collect::<Option<_>>()?;
        let times = usize::try_from(item.get(1)?.as_u64()?).ok()?;
        // More would be too many layers anyway.
        Some(kinds.repeat(times.min(1 << 16)))
    };
    let layers: Option<Vec<_>> = types.as_array().and_then(|list| list.iter().map(repeated).collect());
    let Some(layers) = layers else {
        let what = "it must be a list of [types, number], with types global or local";
        return Err(Error::input(format!("{ATTENTION_TYPES} is {}; {what}", quote(types))));
    };
    map.insert("layer_types".into(), json!(layers.concat()));
    Ok(())
}
