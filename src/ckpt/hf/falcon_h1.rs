//! The keys of Falcon H1: attention and Mamba 2 side by side, with factors of what their matrices give. Factors that
//! multiply each other are one number of a [`Spec`], so a file that is written from it has 1 for some. Never reads
//! other keys.
use super::granite::MAMBA;
use super::keys::{ConfigKeys, decimal};
use super::lists::kinds;
use crate::base::{Error, Result, quote};
use crate::nn::{BlockFactors, DeltaForm, DeltaNet, Mamba, Recurrence, Spec};
use serde_json::{Value, json};

const WIDTH: &str = "mamba_d_ssm";
const NORM: &str = "mamba_rms_norm";
const NORM_FIRST: &str = "mamba_norm_before_gate";

pub fn special(keys: &ConfigKeys, spec: Spec) -> Result<Spec> {
    ["attention_bias", "mlp_bias", "projectors_bias"]
        .into_iter()
        .try_for_each(|key| keys.only(key, &[json!(false)]))?;
    kinds(keys, "layer_types", spec.layers, &[("hybrid", ())])?;
    // Keys of the class that files were first published for.
    keys.known(["num_logits_to_keep", "attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor"]);
    let factor = |key: &str| Ok::<_, Error>(keys.positive(key)?.unwrap_or(1.0));
    let into = factor("attention_in_multiplier")?;
    let [gate, mlp] = factors(keys, "mlp_multipliers")?;
    let block_factors = BlockFactors {
        // Queries and keys have the first factor each, and values too.
        scores: (into * into * factor("key_multiplier")?) as f32,
        attention: (into * factor("attention_out_multiplier")?) as f32,
        other: factor("ssm_out_multiplier")? as f32,
        gate: gate as f32,
        mlp: mlp as f32,
    };
    Ok(Spec {
        embed_multiplier: factor("embedding_multiplier")? as f32,
        logit_scale: factor("lm_head_multiplier")? as f32,
        block_factors,
        recurrence: Some(Recurrence::Delta(net(keys, spec.dim)?)),
        recurrent: vec![true; spec.layers],
        side_by_side: true,
        ..spec
    })
}

fn net(keys: &ConfigKeys, dim: usize) -> Result<DeltaNet> {
    let mut net = MAMBA.read(keys, dim)?;
    let width = keys.or(WIDTH, 1024, |keys, key| keys.size(key, "ff_hidden_dim"))?;
    if let Some(width) = width {
        let (head_dim, heads) = (MAMBA.head_dim.0, net.shape.value_heads);
        if keys.present(head_dim).is_none_or(Value::is_string) {
            net.shape.value_dim = width / heads.max(1);
        }
        if net.shape.values() != width {
            return Err(Error::input(format!(
                "{WIDTH} is {width}, but {} is {heads} and {head_dim} {}: it must be their product",
                MAMBA.heads.0, net.shape.value_dim
            )));
        }
    }
    let (conv_bias, normed) = (net.has_bias(), keys.flag(NORM)?.unwrap_or(false));
    if normed && keys.flag(NORM_FIRST)?.unwrap_or(true) {
        let what = "is true, which transformers' kernels ignore when they train";
        return Err(Error::input(format!("{NORM_FIRST} {what}: with {NORM}, it must be false")));
    }
    keys.known([NORM_FIRST]); // without a norm, the order does not matter
    let into = keys.positive("ssm_in_multiplier")?.unwrap_or(1.0);
    let factors = factors::<5>(keys, "ssm_multipliers")?.map(|factor| (into * factor) as f32);
    Ok(DeltaNet { form: DeltaForm::Mamba(Mamba { conv_bias, normed, factors }), ..net })
}

/// A list of numbers above 0, or ones.
fn factors<const N: usize>(keys: &ConfigKeys, key: &str) -> Result<[f64; N]> {
    let Some(list) = keys.present(key) else { return Ok([1.0; N]) };
    let factor = |value: &Value| value.as_f64().filter(|x| *x as f32 > 0.0 && (*x as f32).is_finite());
    let all = list.as_array().and_then(|list| list.iter().map(factor).collect::<Option<Vec<f64>>>());
    all.and_then(|all| all.try_into().ok())
        .ok_or_else(|| Error::input(format!("{key} is {}; it must be a list of {N} numbers above 0", quote(list))))
}

pub fn json(spec: &Spec) -> Value {
    let BlockFactors { scores, attention, other, gate, mlp } = spec.block_factors;
    let mut map = json!({
        "embedding_multiplier": decimal(spec.embed_multiplier),
        "lm_head_multiplier": decimal(spec.logit_scale),
        "key_multiplier": decimal(scores),
        "attention_out_multiplier": decimal(attention),
        "ssm_out_multiplier": decimal(other),
        "mlp_multipliers": [decimal(gate), decimal(mlp)],
    });
    if let Some(Recurrence::Delta(net)) = &spec.recurrence {
        let Mamba { normed, factors, .. } = net.mamba().copied().unwrap_or_default();
        map[WIDTH] = json!(net.shape.values());
        map[NORM] = json!(normed);
        map[NORM_FIRST] = json!(false);
        map["ssm_multipliers"] = json!(factors.map(decimal));
        MAMBA.json(net, spec.dim).into_iter().for_each(|(key, value)| map[key] = value);
    }
    map
}

#[cfg(test)]
mod tests {
    use super::super::{config, parse};
    use crate::base::Result;
    use crate::nn::{BlockFactors, Recurrence, Spec};
    use serde_json::{Value, json};

    /// The keys that files of its first class have, with the sizes of a model of 0.5B parameters.
    fn published() -> Value {
        let mut map = json!({
            "architectures": ["FalconH1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": null, "bos_token_id": 1,
            "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048, "key_multiplier": 0.390625,
            "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": true, "mamba_d_conv": 4,
            "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
            "mamba_n_heads": 24, "mamba_norm_before_gate": false, "mamba_proj_bias": false, "mamba_rms_norm": false,
            "mamba_use_mlp": true, "max_position_embeddings": 16384,
        });
        let more = json!({
            "mlp_bias": false, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2,
            "num_logits_to_keep": 1, "pad_token_id": 0, "projectors_bias": false, "rms_norm_eps": 1e-5,
            "rope_scaling": null, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": false, "vocab_size": 32784,
        });
        map.as_object_mut().unwrap().extend(super::super::object(more));
        map
    }
    fn read(map: &Value) -> Result<Spec> {
        parse(map.to_string().as_bytes())
    }

    #[test]
    fn published_keys_are_those_of_two_mixers_in_a_block() {
        let spec = read(&published()).unwrap();
        let Some(Recurrence::Delta(net)) = spec.recurrence else { panic!("no Mamba") };
        let mamba = net.mamba().unwrap();
        assert_eq!((net.shape.value_heads, net.shape.value_dim, mamba.normed), (24, 64, false));
        assert!((0..36).all(|i| spec.attends(i) && spec.recurrence_of(i).is_some()));
        assert_eq!(mamba.factors[1], 0.3125);
        let BlockFactors { scores, attention, .. } = spec.block_factors;
        assert_eq!((scores, attention, spec.params()), (0.390625, 0.9375, 521_411_104)); // as transformers counts them
        assert_eq!(read(&serde_json::from_str(&config(&spec)).unwrap()).unwrap(), spec);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (keys, named) in [
            (json!({"attention_bias": true}), "attention_bias"),
            (json!({"projectors_bias": true}), "projectors_bias"),
            (json!({"mamba_proj_bias": true}), "mamba_proj_bias"),
            (json!({"mamba_rms_norm": true, "mamba_norm_before_gate": true}), "mamba_norm_before_gate"),
            (json!({"mamba_d_head": 32}), "mamba_d_ssm is 1536"),
            (json!({"ssm_multipliers": [1.0, 0.0, 1.0, 1.0, 1.0]}), "ssm_multipliers"),
            (json!({"mlp_multipliers": [1.0]}), "mlp_multipliers"),
        ] {
            let mut map = published();
            map.as_object_mut().unwrap().extend(super::super::object(keys));
            let refused = read(&map).unwrap_err().to_string();
            assert!(refused.contains(named), "{refused}");
        }
    }
}
