//! One block of a file, read as a tree of settings: its top level, a named block, or a training stage. Every key is
//! understood or refused with its place in the file; none is passed over. A key of another tool is read as that tool's
//! flag. Never lays one block over another.
use crate::base::{Error, Result, quote};
use crate::run::settings::foreign::{self, ForeignKeys};
use crate::run::settings::sections::Settings;
use crate::run::settings::synonyms::{self, nearest};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What a file may hold once, at its top, and a stage may not.
pub const TOP: [&str; 4] = ["model_configs", "distributed_examples", "training_stages", "plan"];
/// Sections that other tools have, whose keys belong to several sections of [`Settings`]: what a flag is called.
const MIXED: [&str; 14] = [
    "training",
    "trainer",
    "train",
    "training_args",
    "training_arguments",
    "logging",
    "logger",
    "evaluation",
    "eval",
    "optimizer",
    "scheduler",
    "lr_scheduler",
    "fsdp_config",
    "deepspeed_config",
];
/// Leaves the number of ranks of a host to the machine, whatever a lower layer says.
pub const AUTO: &str = "auto";

pub struct FileBlock<'a> {
    path: &'a Path,
    /// Where the block stands in the file, with a dot behind it.
    at: String,
    /// All settings, without values.
    schema: Value,
    out: Value,
    /// Settings that have a value, and where in the file.
    given: Vec<(String, String)>,
    foreign: ForeignKeys,
}

/// What a block says.
pub struct FileLayer {
    pub settings: Value,
    pub notes: Vec<String>,
    /// A stage that starts from the weights of the one before it.
    pub follows: bool,
}

impl<'a> FileBlock<'a> {
    /// A block at `at` of the file: empty is the top.
    pub fn new(path: &'a Path, at: &str) -> Result<FileBlock<'a>> {
        let at = if at.is_empty() { String::new() } else { format!("{at}.") };
        let (out, given, foreign) = (Value::Object(Map::new()), Vec::new(), ForeignKeys::default());
        Ok(FileBlock { path, at, schema: schema()?, out, given, foreign })
    }

    /// Sections, `distributed` among them. At the top of the file, [`TOP`] stands beside them.
    pub fn sections(mut self, tree: &Value) -> Result<FileLayer> {
        for (name, body) in self.body(self.at.trim_end_matches('.'), tree)?.into_iter().flatten() {
            let at = format!("{}{}", self.at, quote(name));
            match name.as_str() {
                name if TOP.contains(&name) && self.at.is_empty() => {}
                name if TOP.contains(&name) => {
                    let why = "belongs to the top level of the file, not into a stage or a named block";
                    return Err(self.fault(format!("{at} {why}")));
                }
                "distributed" => self.distributed(&at, body)?,
                name if self.is_section(name) && (body.is_object() || body.is_null()) => {
                    self.section(&at, name, body)?
                }
                name => self.key_of_none(&at, name, body)?,
            }
        }
        self.layer()
    }

    /// The keys of one section, without its name.
    pub fn one_section(mut self, section: &str, body: &Value) -> Result<FileLayer> {
        let at = self.at.trim_end_matches('.').to_string();
        self.section(&at, section, body)?;
        self.layer()
    }

    /// `{distributed: {...}}`, perhaps with sections beside it, or the keys of `distributed` alone.
    pub fn named_distributed(mut self, body: &Value) -> Result<FileLayer> {
        if body.get("distributed").is_some() {
            return self.sections(body);
        }
        let at = self.at.trim_end_matches('.').to_string();
        self.distributed(&at, body)?;
        self.layer()
    }

    fn layer(self) -> Result<FileLayer> {
        let file = self.path.display();
        let place =
            if self.at.is_empty() { format!("{file}") } else { format!("{file}: {}", self.at.trim_end_matches('.')) };
        let (settings, notes) = self.foreign.read(self.out).map_err(|e| Error::input(format!("{place}: {e}")))?;
        let notes = notes.into_iter().map(|note| format!("{place}: {note}")).collect();
        Ok(FileLayer { settings, notes, follows: false })
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

    /// A section of ours or of another tool.
    fn is_section(&self, name: &str) -> bool {
        let own = self.schema.get(synonyms::section(name)).is_some();
        own || MIXED.contains(&name) || foreign::has_section(name)
    }

    /// A key outside of sections: what a flag is called.
    fn key_of_none(&mut self, at: &str, key: &str, value: &Value) -> Result<()> {
        if self.flag(at, "", key, value)? {
            return Ok(());
        }
        if self.is_section(key) {
            return self.body(at, value).map(drop);
        }
        let within = self.schema.as_object().into_iter().flatten().filter(|(_, body)| body.get(key).is_some());
        let within: Vec<&str> = within.map(|(section, _)| section.as_str()).collect();
        Err(self.fault(match (within.first(), value.is_object()) {
            (Some(section), _) => format!(
                "{at} is ambiguous here: write it in its section ({}), or as the flag is called, {section}_{key}",
                within.join(", ")
            ),
            (None, true) => {
                let sections = self.schema.as_object().into_iter().flat_map(|s| s.keys().map(String::as_str));
                let near = nearest(key, sections.chain(MIXED).chain(TOP).chain(["distributed"]));
                format!("unknown section {at}: the nearest known one is {near}")
            }
            (None, false) => format!("unknown key {at}: {}", foreign::hint(key)),
        }))
    }

    /// Takes a key that is called as a flag of ours or of another tool, perhaps with its section before a dot.
    fn flag(&mut self, at: &str, section: &str, key: &str, value: &Value) -> Result<bool> {
        let name = synonyms::section(section);
        let strict = self.schema.get(name).is_some();
        let own = foreign::own(&self.schema, key).filter(|_| !strict);
        if let Some((section, key)) = own {
            return self.set(at, &section, &key, value).map(|()| true);
        }
        match foreign::flag(section, key, strict.then_some(name)) {
            None => Ok(false),
            Some(flag) if self.foreign.add(&flag, value) => Ok(true),
            Some(_) => Err(self.fault(format!("{at}: expected a value or a list of them, found {}", quote(value)))),
        }
    }

    fn section(&mut self, at: &str, section: &str, body: &Value) -> Result<()> {
        let name = synonyms::section(section);
        for (key, value) in self.body(at, body)?.into_iter().flatten() {
            let at_key = format!("{at}.{}", quote(key));
            let dotted = format!("{section}.{key}");
            match synonyms::key(section, key) {
                Some((section, key)) => self.set(&at_key, section, key, value)?,
                None if self.schema[name].get(key).is_some() => self.set(&at_key, name, key, value)?,
                None if self.flag(&at_key, section, key, value)? => {}
                // `logging: {wandb: {...}}` and `ds: {lora: {...}}`
                None if value.is_object() && foreign::has_section(&dotted) => self.section(&at_key, &dotted, value)?,
                None if MIXED.contains(&section) && self.schema.get(key).is_some() => {
                    self.section(&at_key, key, value)?;
                }
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
            None if self.schema.get(name).is_none() => foreign::hint(key),
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
                // Keys of FSDP may stand beside the strategy, too.
                (key, None) if self.schema["fsdp"].get(key).is_some() || synonyms::key("fsdp", key).is_some() => {
                    self.section(at, "fsdp", &json!({ key: value }))?;
                }
                (key, None) if self.flag(&at_key, "distributed", key, value)? => {}
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
        // Null is no value; and the table has a meaning, or a reason, for some that are not of the type.
        if value.is_null() || foreign::names_value(key, value) && self.foreign.add(key, value) {
            return Ok(());
        }
        let text = value.as_str().map_or_else(|| value.to_string(), String::from);
        let value = synonyms::value_row(key, &text).map_or_else(|| value.clone(), |row| row.value.into());
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
