//! The keys of Mamba 2 layers, under the names that a family has for them. Never reads other keys.
use super::keys::{ConfigKeys, decimal, object};
use crate::base::{Error, Result, quote};
use crate::device::ops::{DeltaShape, StateRule};
use crate::nn::{DeltaForm, DeltaNet, Mamba};
use serde_json::{Map, Value, json};

/// The names of a family's keys, with defaults where families differ.
pub struct MambaKeys {
    pub heads: (&'static str, usize),
    pub groups: (&'static str, usize),
    pub state: (&'static str, usize),
    /// None: the width of all heads, divided by their number.
    pub head_dim: (&'static str, Option<usize>),
    pub taps: &'static str,
    /// Without a width of heads, they have so many times the model's width.
    pub expand: &'static str,
    pub chunk: &'static str,
    pub conv_bias: &'static str,
    pub proj_bias: &'static str,
    /// The key of the least step, and its default, if the class reads that instead of `time_step_limit`.
    pub least_step: Option<(&'static str, f32)>,
}

const LIMIT: &str = "time_step_limit";

impl MambaKeys {
    /// `dim`: the model's width.
    pub fn read(&self, keys: &ConfigKeys, dim: usize) -> Result<DeltaNet> {
        let size = |key: &str, default: usize| Ok::<_, Error>(keys.size(key, "num_heads")?.unwrap_or(default));
        keys.known([self.chunk]); // how transformers divides the sequence
        keys.only(self.proj_bias, &[json!(false)])?;
        let value_heads = size(self.heads.0, self.heads.1)?;
        let expand = size(self.expand, 2)?;
        let given = match keys.get(self.head_dim.0).and_then(Value::as_str) {
            Some("auto") => None,
            _ => keys.size(self.head_dim.0, "head_dim")?.or(self.head_dim.1),
        };
        let shape = DeltaShape {
            key_heads: size(self.groups.0, self.groups.1)?,
            value_heads,
            key_dim: size(self.state.0, self.state.1)?,
            value_dim: given.unwrap_or(expand * dim / value_heads.max(1)),
            rule: StateRule::Decay { limits: self.limits(keys)? },
        };
        let conv_bias = keys.flag(self.conv_bias)?.unwrap_or(true);
        let form = DeltaForm::Mamba(Mamba { conv_bias, ..Mamba::default() });
        Ok(DeltaNet { shape, taps: size(self.taps, 4)?, form })
    }

    fn limits(&self, keys: &ConfigKeys) -> Result<[f32; 2]> {
        let (limits, free) = (limits(keys)?, [0.0, f32::INFINITY]);
        match self.least_step {
            None => Ok(limits),
            Some((key, default)) if limits == free => {
                Ok([keys.number(key)?.map_or(default, |least| least as f32), f32::INFINITY])
            }
            Some((key, _)) => {
                let what = format!("{LIMIT} is {limits:?}, which transformers ignores: remove it, and use {key}");
                Err(Error::input(what))
            }
        }
    }

    pub fn json(&self, net: &DeltaNet, dim: usize) -> Map<String, Value> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, rule } = net.shape;
        let mut map = Map::new();
        for (key, value) in [
            (self.heads.0, json!(value_heads)),
            (self.groups.0, json!(key_heads)),
            (self.state.0, json!(key_dim)),
            (self.head_dim.0, json!(value_dim)),
            (self.taps, json!(net.taps)),
            (self.expand, json!(value_heads * value_dim / dim.max(1))),
            (self.conv_bias, json!(net.has_bias())),
            (self.proj_bias, json!(false)),
        ] {
            map.insert(key.into(), value);
        }
        let StateRule::Decay { limits: [least, most] } = rule else { return map };
        // JSON has no infinity: without the key, there are no limits.
        if let Some((key, _)) = self.least_step {
            map.insert(key.into(), json!(decimal(least)));
        } else if least > 0.0 || most.is_finite() {
            let most = if most.is_finite() { json!(decimal(most)) } else { json!({"__float__": "Infinity"}) };
            map.extend(object(json!({LIMIT: [decimal(least), most]})));
        }
        map
    }
}

/// The limits of a token's step: two numbers, of which files write the infinite one in several ways.
fn limits(keys: &ConfigKeys) -> Result<[f32; 2]> {
    let Some(value) = keys.present(LIMIT) else { return Ok([0.0, f32::INFINITY]) };
    let infinite = |text: &str| ["Infinity", "inf"].contains(&text).then_some(f32::INFINITY);
    let number = |value: &Value| match value {
        Value::String(text) => infinite(text),
        Value::Object(map) if map.len() == 1 => map.values().next().and_then(Value::as_str).and_then(infinite),
        other => other.as_f64().map(|x| x as f32),
    };
    match value.as_array().map(Vec::as_slice) {
        Some([least, most]) => Some([least, most]),
        _ => None,
    }
    .and_then(|[least, most]| Some([number(least)?, number(most)?]))
    .ok_or_else(|| Error::input(format!("{LIMIT} is {}; it must be two numbers", quote(value))))
}
