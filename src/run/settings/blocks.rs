//! One block of a file, read as a tree of settings: its top level, a named block, or a training stage. Every key is
//! understood or refused with its place in the file; none is passed over. Never lays one block over another.
use crate::base::{Error, Result, quote};
use crate::run::settings::sections::Settings;
use crate::run::settings::synonyms::{self, nearest};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What a file may hold once, at its top, and a stage may not.
pub const TOP: [&str; 4] = ["model_configs", "distributed_examples", "training_stages", "plan"];
/// Sections of keys that belong to several sections of [`Settings`].
const MIXED: [&str; 2] = ["training", "distributed"];
/// Leaves the number of ranks of a host to the machine, whatever a lower layer says.
pub const AUTO: &str = "auto";

pub struct Block<'a> {
    path: &'a Path,
    /// Where the block stands in the file, with a dot behind it.
    at: String,
    /// All settings, without values.
    schema: Value,
    out: Value,
    /// Settings that have a value, and where in the file.
    given: Vec<(String, String)>,
    notes: Vec<String>,
}

/// What a block says.
pub struct Layer {
    pub settings: Value,
    pub notes: Vec<String>,
    /// A stage that starts from the weights of the one before it.
    pub follows: bool,
}

impl<'a> Block<'a> {
    /// A block at `at` of the file: empty is the top.
    pub fn new(path: &'a Path, at: &str) -> Result<Block<'a>> {
        let at = if at.is_empty() { String::new() } else { format!("{at}.") };
        let (out, given, notes) = (Value::Object(Map::new()), Vec::new(), Vec::new());
        Ok(Block { path, at, schema: schema()?, out, given, notes })
    }

    /// Sections, `distributed` among them. At the top of the file, [`TOP`] stands beside them.
    pub fn sections(mut self, tree: &Value) -> Result<Layer> {
        for (name, body) in self.body(self.at.trim_end_matches('.'), tree)?.into_iter().flatten() {
            let at = format!("{}{}", self.at, quote(name));
            match name.as_str() {
                name if TOP.contains(&name) && self.at.is_empty() => {}
                name if TOP.contains(&name) => {
                    let why = "belongs to the top level of the file, not into a stage or a named block";
                    return Err(self.fault(format!("{at} {why}")));
                }
                "distributed" => self.distributed(&at, body)?,
                "precision" if !body.is_object() => self.set(&at, "precision", "precision", body)?,
                key if self.schema["tune"].get(key).is_some() => self.set(&at, "tune", key, body)?,
                _ => self.section(&at, name, body)?,
            }
        }
        Ok(self.layer())
    }

    /// The keys of one section, without its name.
    pub fn one_section(mut self, section: &str, body: &Value) -> Result<Layer> {
        let at = self.at.trim_end_matches('.').to_string();
        self.section(&at, section, body)?;
        Ok(self.layer())
    }

    /// `{distributed: {...}}`, perhaps with sections beside it, or the keys of `distributed` alone.
    pub fn named_distributed(mut self, body: &Value) -> Result<Layer> {
        if body.get("distributed").is_some() {
            return self.sections(body);
        }
        let at = self.at.trim_end_matches('.').to_string();
        self.distributed(&at, body)?;
        Ok(self.layer())
    }

    fn layer(self) -> Layer {
        Layer { settings: self.out, notes: self.notes, follows: false }
    }

    fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }

    /// The keys at `at`; an empty section is none.
    fn body<'b>(&self, at: &str, value: &'b Value) -> Result<Option<&'b Map<String, Value>>> {
        match value {
            Value::Object(tree) => Ok(Some(tree)),
            Value::Null => Ok(None),
            other => Err(self.fault(format!("{at}: expected keys with values, found {}", quote(other)))),
        }
    }

    fn section(&mut self, at: &str, section: &str, body: &Value) -> Result<()> {
        let name = synonyms::section(section);
        if self.schema.get(name).is_none() && !MIXED.contains(&section) {
            let sections = self.schema.as_object().into_iter().flat_map(|s| s.keys().map(String::as_str));
            let near = nearest(section, sections.chain(MIXED).chain(TOP));
            return Err(self.fault(format!("unknown section {at}: the nearest known one is {near}")));
        }
        for (key, value) in self.body(at, body)?.into_iter().flatten() {
            let at_key = format!("{at}.{}", quote(key));
            match synonyms::key(section, key) {
                Some((section, key)) => self.set(&at_key, section, key, value)?,
                None if self.schema[name].get(key).is_some() => self.set(&at_key, name, key, value)?,
                None => return Err(self.unknown(at, section, name, key)),
            }
        }
        Ok(())
    }

    fn unknown(&self, at: &str, section: &str, name: &str, key: &str) -> Error {
        let keys = self.schema[name].as_object().into_iter().flat_map(|s| s.keys().map(String::as_str));
        // A key that exists in another section is a better hint than one that is spelt alike here.
        let elsewhere = self.schema.as_object().and_then(|s| s.iter().find(|(_, body)| body.get(key).is_some()));
        let hint = match elsewhere {
            Some((other, _)) => format!("it belongs to the section {other}"),
            None => format!("the nearest known one is {at}.{}", nearest(key, keys.chain(synonyms::keys_of(section)))),
        };
        self.fault(format!("unknown key {at}.{}: {hint}", quote(key)))
    }

    /// `distributed: {strategy, num_nodes, devices, fsdp: {enabled, ...}}`.
    fn distributed(&mut self, at: &str, body: &Value) -> Result<()> {
        let strategy = body.get("strategy").unwrap_or(&Value::Null);
        let enabled = body.get("fsdp").and_then(|fsdp| fsdp.get("enabled")).unwrap_or(&Value::Null);
        for (key, value) in self.body(at, body)?.into_iter().flatten() {
            let at_key = format!("{at}.{}", quote(key));
            match (key.as_str(), synonyms::key("distributed", key)) {
                ("fsdp", _) => {
                    let mut fsdp = self.body(&at_key, value)?.cloned().unwrap_or_default();
                    fsdp.remove("enabled");
                    self.section(&at_key, "fsdp", &Value::Object(fsdp))?;
                }
                ("strategy", _) => {}
                (_, Some((section, key))) => self.set(&at_key, section, key, value)?,
                _ => {
                    let near = nearest(key, synonyms::keys_of("distributed").chain(["fsdp"]));
                    return Err(self.fault(format!("unknown key {at_key}: the nearest known one is {at}.{near}")));
                }
            }
        }
        let chosen = match (strategy.as_str(), enabled) {
            (Some("fsdp"), Value::Bool(false)) | (Some("ddp"), Value::Bool(true)) => {
                let (strategy, why) = (strategy.as_str().unwrap_or_default(), "give one, or let them agree");
                return Err(self.fault(format!("{at}: strategy is {strategy}, yet fsdp.enabled is {enabled}: {why}")));
            }
            (None | Some("auto"), Value::Bool(on)) => json!(if *on { "fsdp" } else { "ddp" }),
            (_, Value::Bool(_) | Value::Null) => strategy.clone(),
            (_, other) => {
                let what = format!("{at}.fsdp.enabled: expected true or false, found {}", quote(other));
                return Err(self.fault(what));
            }
        };
        self.set(&format!("{at}.strategy"), "run", "strategy", &chosen)
    }

    /// Puts one value in its place, if it is of the key's type: a tree of this key alone must read as [`Settings`].
    fn set(&mut self, at: &str, section: &str, key: &str, value: &Value) -> Result<()> {
        debug_assert!(self.schema[section].get(key).is_some(), "{section}.{key} is a setting");
        if value.is_null() {
            return Ok(());
        }
        let value = value.as_str().map_or_else(|| value.clone(), |text| synonyms::value(key, text).into());
        let setting = format!("{section}.{key}");
        if let Some((_, before)) = self.given.iter().find(|(given, _)| *given == setting)
            && self.out[section][key] != value
        {
            let what = format!("{before} and {at} are the same setting with two values: give one");
            return Err(self.fault(what));
        }
        let auto = setting == "run.nproc_per_node" && value == AUTO;
        if let Err(e) = serde_json::from_value::<Settings>(json!({section: {key: &value}}))
            && !auto
        {
            let mut text = e.to_string();
            for (rust, plain) in [
                ("usize", "a whole number"),
                ("u64", "a whole number"),
                ("u8", "a whole number"),
                ("f64", "a number"),
                ("a boolean", "true or false"),
            ] {
                text = text.replace(&format!("expected {rust}"), &format!("expected {plain}"));
            }
            return Err(self.fault(format!("{at}: {}", quote(text))));
        }
        self.given.push((setting, at.to_string()));
        self.out[section][key] = value;
        Ok(())
    }
}

fn schema() -> Result<Value> {
    serde_json::to_value(Settings::default()).map_err(|e| Error::input(format!("settings: {e}")))
}
