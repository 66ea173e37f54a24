//! `config.json` of `LlamaForCausalLM` and `GPT2LMHeadModel`, from a [`Spec`] and back. Never guesses: a key that would
//! change the computation and that we do not implement is an error that names it.
use super::layout::pretty;
use crate::base::{Error, Result};
use crate::nn::{Arch, Spec};
use serde_json::{Map, Value, json};
use std::{fs, path::Path};

pub const FILE: &str = "config.json";

/// The file's text, as `transformers` 4 and 5 read it.
pub fn config(spec: &Spec) -> String {
    pretty(&match spec.arch {
        Arch::Llama => json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": spec.dim,
            "intermediate_size": spec.ff,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "num_hidden_layers": spec.layers,
            "vocab_size": spec.vocab,
            "max_position_embeddings": spec.max_len,
            "rms_norm_eps": decimal(spec.norm_eps),
            "rope_theta": spec.rope_theta,
            "hidden_act": "silu",
            "attention_bias": false,
            "attention_dropout": 0.0,
            "mlp_bias": false,
            "tie_word_embeddings": spec.tied,
            "bos_token_id": null,
            "eos_token_id": null,
            "torch_dtype": "float32",
        }),
        Arch::Gpt => json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": spec.dim,
            "n_inner": spec.ff,
            "n_head": spec.heads,
            "n_layer": spec.layers,
            "n_positions": spec.max_len,
            "n_ctx": spec.max_len,
            "vocab_size": spec.vocab,
            "layer_norm_epsilon": decimal(spec.norm_eps),
            "activation_function": "gelu_new",
            "embd_pdrop": decimal(spec.dropout),
            "resid_pdrop": decimal(spec.dropout),
            "attn_pdrop": 0.0,
            "tie_word_embeddings": spec.tied,
            "bos_token_id": null,
            "eos_token_id": null,
            "torch_dtype": "float32",
        }),
    })
}

/// The model that `dir` holds.
pub fn read(dir: &Path) -> Result<Spec> {
    let path = dir.join(FILE);
    let bad = |what: String| Error::input(format!("{}: {what}", path.display()));
    let text = fs::read(&path).map_err(|e| {
        bad(format!("{e}; a Hugging Face model directory holds {FILE} and model.safetensors or its parts"))
    })?;
    let map: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| bad(format!("is not a JSON object ({e})")))?;
    spec(&map).map_err(|e| bad(e.to_string()))
}

/// Keys that change the computation, each with the values that leave it as we compute it. Absent and null are fine.
const LLAMA: &[(&str, &[&str])] = &[
    ("hidden_act", &["\"silu\""]),
    ("attention_bias", &["false"]),
    ("mlp_bias", &["false"]),
    ("rope_scaling", &[]),
    ("sliding_window", &[]),
    ("quantization_config", &[]),
    ("partial_rotary_factor", &["1", "1.0"]),
];
const GPT2: &[(&str, &[&str])] = &[
    ("activation_function", &["\"gelu_new\"", "\"gelu_pytorch_tanh\""]),
    ("scale_attn_weights", &["true"]),
    ("scale_attn_by_inverse_layer_idx", &["false"]),
    ("add_cross_attention", &["false"]),
    ("quantization_config", &[]),
];

fn spec(map: &Map<String, Value>) -> Result<Spec> {
    let present = |key: &str| map.get(key).filter(|v| !v.is_null());
    let whole = |key: &str| match present(key) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(n) => Ok(Some(n as usize)),
            None => Err(Error::input(format!("{key} is {value}; it must be a whole number"))),
        },
    };
    let number = |key: &str, default: f64| match present(key) {
        None => Ok(default),
        Some(value) => value.as_f64().ok_or_else(|| Error::input(format!("{key} is {value}; it must be a number"))),
    };
    let need = |key: &str| whole(key)?.ok_or_else(|| Error::input(format!("{key} is missing")));
    let flag = |key: &str, default: bool| match present(key) {
        None => Ok(default),
        Some(value) => {
            value.as_bool().ok_or_else(|| Error::input(format!("{key} is {value}; it must be true or false")))
        }
    };
    let check = |keys: &[(&str, &[&str])]| {
        for (key, allowed) in keys {
            match present(key) {
                Some(value) if !allowed.contains(&value.to_string().as_str()) => {
                    let instead = if allowed.is_empty() { "null".into() } else { allowed.join(" or ") };
                    return Err(Error::input(format!(
                        "{key} is {value}, which is not supported; it must be {instead}"
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    };
    let spec = match present("model_type").and_then(Value::as_str) {
        Some("llama") => {
            check(LLAMA)?;
            let (dim, heads) = (need("hidden_size")?, need("num_attention_heads")?);
            Spec {
                arch: Arch::Llama,
                vocab: need("vocab_size")?,
                dim,
                layers: need("num_hidden_layers")?,
                heads,
                kv_heads: whole("num_key_value_heads")?.unwrap_or(heads),
                head_dim: whole("head_dim")?.unwrap_or(dim / heads.max(1)),
                ff: need("intermediate_size")?,
                max_len: need("max_position_embeddings")?,
                rope_theta: rope_theta(map, number("rope_theta", 10_000.0)?)?,
                norm_eps: number("rms_norm_eps", 1e-6)? as f32,
                tied: flag("tie_word_embeddings", false)?,
                dropout: 0.0,
            }
        }
        Some("gpt2") => {
            check(GPT2)?;
            let (dim, heads) = (need("n_embd")?, need("n_head")?);
            let dropout = number("resid_pdrop", 0.1)?;
            Spec {
                arch: Arch::Gpt,
                vocab: need("vocab_size")?,
                dim,
                layers: need("n_layer")?,
                heads,
                kv_heads: heads,
                head_dim: dim / heads.max(1),
                ff: whole("n_inner")?.unwrap_or(4 * dim),
                max_len: need("n_positions")?,
                rope_theta: 0.0,
                norm_eps: number("layer_norm_epsilon", 1e-5)? as f32,
                tied: flag("tie_word_embeddings", true)?,
                dropout: dropout as f32,
            }
        }
        Some(other) => {
            return Err(Error::input(format!("model_type is {other:?}; llama and gpt2 are the supported ones")));
        }
        None => return Err(Error::input("model_type is missing; llama and gpt2 are the supported ones")),
    };
    spec.validate()?;
    Ok(spec)
}

/// transformers 5 keeps theta in `rope_parameters`, beside the kind of rotation.
fn rope_theta(map: &Map<String, Value>, default: f64) -> Result<f64> {
    let Some(Value::Object(rope)) = map.get("rope_parameters") else { return Ok(default) };
    for (key, value) in rope {
        match (key.as_str(), value) {
            ("rope_theta", Value::Number(_)) => {}
            ("rope_type", Value::String(kind)) if kind == "default" => {}
            _ => return Err(Error::input(format!("rope_parameters.{key} is {value}, which is not supported"))),
        }
    }
    Ok(rope.get("rope_theta").and_then(Value::as_f64).unwrap_or(default))
}

/// What the two models compute differently although every tensor of theirs may be alike (head counts, constants), as
/// "num_heads: 12 in the checkpoint, 6 now". Dropout and the length of a rotation table are the run's own affair.
pub fn differences(then: &Spec, now: &Spec) -> Vec<String> {
    let fields = |s: &Spec| {
        [
            ("arch", format!("{:?}", s.arch).to_lowercase()),
            ("vocab_size", s.vocab.to_string()),
            ("embed_dim", s.dim.to_string()),
            ("num_layers", s.layers.to_string()),
            ("num_heads", s.heads.to_string()),
            ("num_kv_heads", s.kv_heads.to_string()),
            ("head_dim", s.head_dim.to_string()),
            ("ff_hidden_dim", s.ff.to_string()),
            ("norm_eps", s.norm_eps.to_string()),
            ("rope_theta", if s.arch == Arch::Llama { s.rope_theta.to_string() } else { String::new() }),
            ("tied head", s.tied.to_string()),
        ]
    };
    let pairs = fields(then).into_iter().zip(fields(now));
    pairs.filter(|(a, b)| a.1 != b.1).map(|(a, b)| format!("{}: {} in the checkpoint, {} now", a.0, a.1, b.1)).collect()
}

/// The decimal number that a person wrote: 1e-5 and not 0.000009999999747378752.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(x as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs() -> [Spec; 2] {
        let llama = Spec {
            arch: Arch::Llama,
            vocab: 97,
            dim: 32,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 10,
            ff: 44,
            max_len: 64,
            rope_theta: 500_000.0,
            norm_eps: 1e-5,
            tied: true,
            dropout: 0.0,
        };
        let gpt = Spec { arch: Arch::Gpt, kv_heads: 4, head_dim: 8, rope_theta: 0.0, dropout: 0.1, ..llama.clone() };
        [llama, gpt]
    }
    fn map(spec: &Spec) -> Map<String, Value> {
        serde_json::from_str(&config(spec)).unwrap()
    }

    #[test]
    fn a_spec_survives_its_config() {
        for s in specs() {
            assert_eq!(spec(&map(&s)).unwrap(), s);
            assert!(config(&s).contains("1e-5") || config(&s).contains("0.00001,"), "{}", config(&s));
        }
    }

    #[test]
    fn unsupported_keys_are_named() {
        let [llama, gpt] = specs();
        let cases = [
            (&llama, "rope_scaling", json!({"type": "yarn", "factor": 4.0})),
            (&llama, "rope_parameters", json!({"rope_type": "llama3", "rope_theta": 5e5})),
            (&llama, "attention_bias", json!(true)),
            (&llama, "hidden_act", json!("gelu")),
            (&llama, "hidden_size", json!("32")),
            (&llama, "model_type", json!("mamba")),
            (&llama, "num_key_value_heads", json!(3)),
            (&gpt, "activation_function", json!("relu")),
            (&gpt, "scale_attn_by_inverse_layer_idx", json!(true)),
            (&gpt, "n_head", json!(5)),
        ];
        for (base, key, value) in cases {
            let mut map = map(base);
            map.insert(key.into(), value);
            let error = spec(&map).unwrap_err();
            let named = error.to_string();
            let alias = match key {
                "num_key_value_heads" => "num_kv_heads",
                "n_head" => "num_heads",
                key => key,
            };
            assert!(named.contains(alias) && error.exit_status() == 2, "{key}: {named}");
        }
    }

    #[test]
    fn differences_that_no_shape_shows() {
        let [llama, _] = specs();
        let now = Spec { heads: 2, kv_heads: 1, head_dim: 20, norm_eps: 1e-6, dropout: 0.5, ..llama.clone() };
        let found = differences(&llama, &now);
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0], "num_heads: 4 in the checkpoint, 2 now");
    }
}
