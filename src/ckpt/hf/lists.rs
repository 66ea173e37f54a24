//! Keys that say what layers are, one by one. Never knows a family.
use super::keys::ConfigKeys;
use crate::base::{Error, Result, quote};
use crate::nn::Spec;
use serde_json::{Value, json};

/// Whether each layer is of the second of two types, if the file lists layers one by one.
pub fn listed(keys: &ConfigKeys, layers: usize, [first, second]: [&str; 2]) -> Result<Option<Vec<bool>>> {
    kinds(keys, "layer_types", layers, &[(first, false), (second, true)])
}

/// What each layer is, by the names of types, if the file lists layers one by one.
pub fn kinds<T: Copy>(keys: &ConfigKeys, key: &str, layers: usize, names: &[(&str, T)]) -> Result<Option<Vec<T>>> {
    let Some(types) = keys.present(key) else { return Ok(None) };
    let kind = |value: &Value| {
        let named = names.iter().find(|(name, _)| value.as_str() == Some(name));
        named.map(|(_, kind)| *kind).ok_or_else(|| {
            let known: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
            Error::input(format!("{key} has {}, which is not supported; use {}", quote(value), known.join(" or ")))
        })
    };
    let Some(values) = types.as_array().filter(|values| values.len() == layers) else {
        let found = types.as_array().map_or(quote(types).to_string(), |values| format!("a list of {}", values.len()));
        return Err(Error::input(format!("{key} is {found}; it must list the type of each of {layers} layers")));
    };
    values.iter().map(kind).collect::<Result<_>>().map(Some)
}

/// Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th.
pub fn dense_layers(keys: &ConfigKeys, layers: usize) -> Result<Vec<usize>> {
    let step = keys.whole("decoder_sparse_step")?.unwrap_or(1).max(1);
    let only = numbers(keys, "mlp_only_layers", layers)?.unwrap_or_default();
    Ok((0..layers).filter(|i| only.contains(i) || (i + 1) % step != 0).collect())
}

/// The layers that a key lists by their numbers, if a file has it.
pub fn numbers(keys: &ConfigKeys, key: &str, layers: usize) -> Result<Option<Vec<usize>>> {
    let Some(list) = keys.present(key) else { return Ok(None) };
    let index = |value: &Value| value.as_u64().and_then(|i| usize::try_from(i).ok()).filter(|&i| i < layers);
    let all = list.as_array().and_then(|list| list.iter().map(index).collect());
    let wrong = || Error::input(format!("{key} is {}; it must be a list of layers below {layers}", quote(list)));
    all.map(Some).ok_or_else(wrong)
}

/// The layers that `mlp_layer_types` says have no experts, if a file has the key.
pub fn listed_dense(keys: &ConfigKeys, layers: usize) -> Result<Option<Vec<usize>>> {
    let Some(list) = keys.present("mlp_layer_types") else { return Ok(None) };
    let is_dense = |value: &Value| match value.as_str() {
        Some("dense") => Some(true),
        Some("sparse") => Some(false),
        _ => None,
    };
    let kinds = list.as_array().and_then(|list| list.iter().map(is_dense).collect::<Option<Vec<bool>>>());
    match kinds.filter(|kinds| kinds.len() == layers) {
        Some(kinds) => Ok(Some((0..layers).filter(|&i| kinds[i]).collect())),
        None => Err(Error::input(format!(
            "mlp_layer_types is {}; it must list dense or sparse for each of {layers} layers",
            quote(list)
        ))),
    }
}

/// `mlp_layer_types`
pub fn types(dense: &[usize], layers: usize) -> Value {
    (0..layers).map(|i| if dense.contains(&i) { "dense" } else { "sparse" }).collect()
}

/// Which layers have rotary positions: `no_rope_layers` lists 1 for those that have, and 0 for the others.
pub fn rotated_layers(keys: &ConfigKeys, layers: usize) -> Result<Vec<bool>> {
    let every = keys.whole("no_rope_layer_interval")?.unwrap_or(4).max(1);
    // Maverick's list is empty.
    let Some(list) = keys.present("no_rope_layers").filter(|list| **list != json!([])) else {
        return Ok((0..layers).map(|i| (i + 1) % every != 0).collect());
    };
    let rotated = |value: &Value| value.as_u64().map(|flag| flag != 0);
    let values = list.as_array().and_then(|list| list.iter().take(layers).map(rotated).collect::<Option<Vec<_>>>());
    values.filter(|values| values.len() == layers).ok_or_else(|| {
        Error::input(format!("no_rope_layers is {}; it must list 0 or 1 for each of {layers} layers", quote(list)))
    })
}

/// `no_rope_layers`
pub fn rotated(spec: &Spec) -> Vec<u8> {
    (0..spec.layers).map(|i| spec.is_rotated(i).into()).collect()
}
