//! Reads a DeepSpeed file key by key, by tables of how each key is handled. Never names a key.
use crate::base::{Error, Result, quote};
use crate::run::settings::sections::Settings;
use crate::run::settings::synonyms::nearest;
use serde_json::{Value, json};
use std::path::Path;

/// How a key is handled.
pub enum DeepSpeedKey {
    /// Sets this setting: section and name.
    Set(&'static str, &'static str),
    /// The same, and "auto" is a value of the setting.
    Size(&'static str, &'static str),
    /// Must have this value, the only supported one; and why.
    Is(Value, &'static str),
    /// Accepted without effect.
    Any,
    /// Refused with any value; and why.
    Never(&'static str),
    /// A block of keys.
    Block(fn() -> Vec<(&'static str, DeepSpeedKey)>),
    /// A block that must be off: `enabled: false`.
    Off(&'static str),
    By(fn(&mut DeepSpeedFile, &str, &Value) -> Result<()>),
}

pub struct DeepSpeedFile<'a> {
    pub path: &'a Path,
    /// The settings of flags and configuration files.
    pub requested: &'a Value,
    pub out: Value,
    /// The 16-bit dtype that is enabled.
    pub half: Option<&'static str>,
    pub exports_half: bool,
    /// Paths of the blocks whose device is the host.
    pub offloaded: Vec<String>,
}

impl DeepSpeedFile<'_> {
    pub fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }
    pub fn refuse(&self, at: &str, value: &Value, why: &str) -> Error {
        self.fault(format!("{} is {}: {why}", quote(at), quote(value)))
    }

    /// Handles each key of `body` as the table says.
    pub fn keys(&mut self, at: &str, body: &Value, table: Vec<(&'static str, DeepSpeedKey)>) -> Result<()> {
        let Some(body) = body.as_object() else {
            return match body {
                Value::Null => Ok(()),
                other => Err(self.fault(format!("{at}: expected keys with values, found {}", quote(other)))),
            };
        };
        for (name, value) in body {
            let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
            let Some((_, key)) = table.iter().find(|(known, _)| known == name) else {
                let near = nearest(name, table.iter().map(|(known, _)| *known));
                let near = if at.is_empty() { near.to_string() } else { format!("{at}.{near}") };
                return Err(self.fault(format!("unknown key {}: the nearest known one is {near}", quote(path))));
            };
            if !value.is_null() {
                self.key(&path, value, key)?;
            }
        }
        Ok(())
    }

    pub fn key(&mut self, at: &str, value: &Value, key: &DeepSpeedKey) -> Result<()> {
        match key {
            DeepSpeedKey::Size(section, name) => self.put(at, section, name, value.clone()),
            DeepSpeedKey::Block(table) => self.keys(at, value, table()),
            DeepSpeedKey::By(read) => read(self, at, value),
            DeepSpeedKey::Never(why) => Err(self.refuse(at, value, why)),
            DeepSpeedKey::Off(why) => match value["enabled"] == true {
                true => Err(self.refuse(at, value, why)),
                false => Ok(()),
            },
            _ if value == "auto" => Ok(()),
            DeepSpeedKey::Set(section, name) => self.put(at, section, name, value.clone()),
            DeepSpeedKey::Is(only, why) if !same(value, only) => {
                Err(self.refuse(at, value, &format!("{why}; only {only} is supported")))
            }
            DeepSpeedKey::Is(..) | DeepSpeedKey::Any => Ok(()),
        }
    }

    /// `type` and `params` of a block.
    pub fn kind<'b>(&self, at: &str, body: &'b Value) -> Result<(&'b str, &'b Value)> {
        if let Some(key) = body.as_object().and_then(|b| b.keys().find(|k| !["type", "params"].contains(&k.as_str()))) {
            return Err(self.fault(format!("unknown key {at}.{}: expected {at}.type or {at}.params", quote(key))));
        }
        match body["type"].as_str() {
            Some(kind) => Ok((kind, &body["params"])),
            None => Err(self.fault(format!("{at}.type is missing: set it to the name of the {at}"))),
        }
    }

    /// Makes `--save-hf` export in the 16-bit compute dtype.
    pub fn half_export(&mut self, at: &str, value: &Value) -> Result<()> {
        self.exports_half = value == true;
        match value.is_boolean() || value == "auto" {
            true => Ok(()),
            false => Err(self.refuse(at, value, "expected true, false or auto")),
        }
    }

    /// Sets one setting, unless it contradicts a flag, a configuration file or an earlier key.
    pub fn put(&mut self, at: &str, section: &str, name: &str, value: Value) -> Result<()> {
        let value = match value {
            // 3.0 and 1e3 are whole numbers too.
            Value::Number(n) if n.as_f64().is_some_and(|x| x.fract() == 0.0 && x.abs() < 9e15) => {
                let x = n.as_f64().unwrap_or_default();
                if x < 0.0 { json!(x as i64) } else { json!(x as u64) }
            }
            other => other,
        };
        let shown = name.replace('_', "-");
        for (other, who) in [(&self.requested[section][name], "--"), (&self.out[section][name], "another key's ")] {
            if !other.is_null() && !same(other, &value) {
                return Err(self.fault(format!(
                    "{at} is {}, which contradicts {who}{shown} {}: make them equal, or set {at} to \"auto\"",
                    quote(&value),
                    quote(other)
                )));
            }
        }
        if let Err(e) = serde_json::from_value::<Settings>(json!({section: {name: value}})) {
            return Err(self.fault(format!("{at}: {}", quote(e))));
        }
        let out = self.out.as_object_mut().map(|out| out.entry(section).or_insert_with(|| json!({})));
        out.into_iter().for_each(|body| body[name] = value.clone());
        Ok(())
    }
}

/// Equal, numbers by their values.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b),
    }
}
