//! `--deepspeed ds_config.json`, read as settings. Every key is honoured, or refused with the reason why it cannot be; an
//! unknown one is named with its nearest. Never decides what a run does: the settings that come of it go the way of all others.
//!
//! As in Hugging Face's integration, `"auto"` leaves a key to flags and files, and a key that contradicts one of those is
//! refused. A key that is left out has DeepSpeed's default (`defaults`). Keys: `docs/_pages/config-json.md` of DeepSpeed.
mod defaults;
mod keys;

use crate::base::{Error, Result, open, quote};
use crate::run::settings::Settings;
use crate::run::settings::config::nearest;
use keys::Key;
use serde_json::{Value, json};
use std::path::Path;

/// Trees of settings.
pub struct Read {
    /// What the file says.
    pub given: Value,
    /// DeepSpeed's defaults for what it leaves out.
    pub defaults: Value,
}

/// The settings of the file at `path`. `asked`: what flags and configuration files say.
pub fn read(path: &Path, asked: &Value) -> Result<Read> {
    parse(&text(path)?, path, asked)
}

/// The same of the file's bytes.
pub fn parse(text: &[u8], path: &Path, asked: &Value) -> Result<Read> {
    let mut file = File { path, asked, out: json!({}), half: None, exports_half: false, offloaded: Vec::new() };
    let tree = tree(text).map_err(|what| file.fault(what))?;
    file.keys("", &tree, keys::top())?;
    if tree["zero_optimization"].is_null() && asked["fsdp"]["zero_stage"].is_null() {
        return Err(file.fault("zero_optimization.stage is missing: say 1, 2 or 3, or pass --zero-stage".into()));
    }
    file.put("zero_optimization", "fsdp", "backend", json!("zero"))?;
    let offloaded = |key: &str| file.offloaded.iter().find(|at| at.ends_with(key)).cloned();
    match (offloaded("offload_optimizer"), offloaded("offload_param")) {
        (None, None) => {}
        (Some(at), None) => file.put(&at, "fsdp", "cpu_offload", json!("optimizer"))?,
        (Some(_), Some(at)) => file.put(&at, "fsdp", "cpu_offload", json!(true))?,
        (None, Some(at)) => {
            let why =
                "parameters are offloaded with the optimizer: say \"offload_optimizer\": {\"device\": \"cpu\"} too";
            return Err(file.refuse(&format!("{at}.device"), &json!("cpu"), why));
        }
    }
    if let (true, Some(half)) = (file.exports_half, file.half) {
        let key = "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        file.put(key, "checkpoint", "save_dtype", json!(half))?;
    }
    file.peak_of_decay(&tree)?;
    let precision = file.half.or(asked["precision"]["precision"].as_str());
    let mut defaults = json!({});
    for (_, section, name, value) in
        defaults::missing(&tree, asked["optim"]["optimizer"].as_str(), precision == Some("fp16"))
    {
        defaults[section][name] = value;
    }
    Ok(Read { given: file.out, defaults })
}

fn text(path: &Path) -> Result<Vec<u8>> {
    open::read(path).map_err(|e| Error::input(format!("{}: cannot read this file: {e}", path.display())))
}

fn tree(text: &[u8]) -> std::result::Result<Value, String> {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    serde_json::from_slice(text).map_err(|e| format!("not JSON: {}", quote(e)))
}

/// What is to be said of a run whose file leaves out clipping; see [Note: DeepSpeed's versions].
pub fn unclipped(path: &Path) -> Option<String> {
    let silent = tree(&text(path).ok()?).ok()?["gradient_clipping"].is_null();
    silent.then(|| {
        format!(
            "{} has no gradient_clipping: gradients are not clipped; DeepSpeed clips at 1 since 0.19.3",
            path.display()
        )
    })
}

struct File<'a> {
    path: &'a Path,
    asked: &'a Value,
    out: Value,
    /// The 16 bits that are switched on.
    half: Option<&'static str>,
    exports_half: bool,
    /// The blocks whose device is the host.
    offloaded: Vec<String>,
}

impl File<'_> {
    fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }
    fn refuse(&self, at: &str, value: &Value, why: &str) -> Error {
        self.fault(format!("{} is {}: {why}", quote(at), quote(value)))
    }

    /// DeepSpeed's default of this one key overrules another key, so it is not taken without a word.
    fn peak_of_decay(&self, tree: &Value) -> Result<()> {
        let scheduler = &tree["scheduler"];
        let (lr, default) = (&self.out["optim"]["lr"], json!(defaults::DECAY_MAX_LR));
        let silent = scheduler["type"] == "WarmupDecayLR" && scheduler["params"]["warmup_max_lr"].is_null();
        match silent && self.asked["optim"]["lr"].is_null() && !lr.is_null() && !same(lr, &default) {
            false => Ok(()),
            true => Err(self.fault(format!(
                "scheduler.params.warmup_max_lr is missing: DeepSpeed would take {default} and ignore the optimizer's lr {lr}; \
                 set it, or \"auto\""
            ))),
        }
    }

    /// What the table says of each key of `body`.
    fn keys(&mut self, at: &str, body: &Value, table: Vec<(&'static str, Key)>) -> Result<()> {
        let Some(body) = body.as_object() else {
            return match body {
                Value::Null => Ok(()),
                other => Err(self.fault(format!("{at}: keys with values are expected, found {}", quote(other)))),
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

    fn key(&mut self, at: &str, value: &Value, key: &Key) -> Result<()> {
        match key {
            Key::Size(section, name) => self.put(at, section, name, value.clone()),
            Key::Block(table) => self.keys(at, value, table()),
            Key::By(read) => read(self, at, value),
            Key::Never(why) => Err(self.refuse(at, value, why)),
            Key::Off(why) => match value["enabled"] == true {
                true => Err(self.refuse(at, value, why)),
                false => Ok(()),
            },
            _ if value == "auto" => Ok(()),
            Key::Set(section, name) => self.put(at, section, name, value.clone()),
            Key::Is(only, why) if !same(value, only) => {
                Err(self.refuse(at, value, &format!("{why}; it can be {only} only")))
            }
            Key::Is(..) | Key::Any => Ok(()),
        }
    }

    /// `type` and `params` of a block.
    fn kind<'b>(&self, at: &str, body: &'b Value) -> Result<(&'b str, &'b Value)> {
        if let Some(key) = body.as_object().and_then(|b| b.keys().find(|k| !["type", "params"].contains(&k.as_str()))) {
            return Err(self.fault(format!("unknown key {at}.{}: there are {at}.type and {at}.params", quote(key))));
        }
        match body["type"].as_str() {
            Some(kind) => Ok((kind, &body["params"])),
            None => Err(self.fault(format!("{at}.type is missing: it is the name of one"))),
        }
    }

    /// The model of `--save-hf` is in the 16 bits that it was computed with.
    fn half_export(&mut self, at: &str, value: &Value) -> Result<()> {
        self.exports_half = value == true;
        match value.is_boolean() || value == "auto" {
            true => Ok(()),
            false => Err(self.refuse(at, value, "true, false or auto is expected")),
        }
    }

    /// One setting, unless it contradicts what was asked for, or what the file said before.
    fn put(&mut self, at: &str, section: &str, name: &str, value: Value) -> Result<()> {
        let value = match value {
            // 3.0 and 1e3 are whole numbers too.
            Value::Number(n) if n.as_f64().is_some_and(|x| x.fract() == 0.0 && x.abs() < 9e15) => {
                let x = n.as_f64().unwrap_or_default();
                if x < 0.0 { json!(x as i64) } else { json!(x as u64) }
            }
            other => other,
        };
        let shown = name.replace('_', "-");
        for (said, who) in [(&self.asked[section][name], "--"), (&self.out[section][name], "another key says ")] {
            if !said.is_null() && !same(said, &value) {
                return Err(self.fault(format!(
                    "{at} is {}, but {who}{shown} {}: make them equal, or set {at} to \"auto\"",
                    quote(&value),
                    quote(said)
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
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b),
    }
}
