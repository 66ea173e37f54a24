//! Reads one block of a file as settings: its top level, a named block, or a training stage. Every key is read, or
//! refused with its path in the file; a key of another tool is read as that tool's flag. Never overlays blocks.
use crate::base::{Error, Result, quote};
use crate::run::settings::foreign::{self, ForeignKeys};
use crate::run::settings::help::is_plain;
use crate::run::settings::sections::Settings;
use crate::run::settings::spellings::is_switch;
use crate::run::settings::synonyms::{self, nearest, one_of};
use crate::run::settings::tools::FileTool;
use clap::Args;
use serde_json::{Map, Value, json};
use std::any::TypeId;
use std::path::Path;

/// Keys that only the top level of a file may have.
pub const TOP: [&str; 4] = ["model_configs", "distributed_examples", "training_stages", "plan"];
/// Sections of other tools whose keys belong to several sections of [`Settings`]; the keys are named like flags.
const MIXED: [&str; 15] = [
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
    "parallelism_config",
];
/// The machine decides the number of ranks per host, whatever a lower layer sets.
pub const AUTO: &str = "auto";

pub struct FileBlock<'a> {
    path: &'a Path,
    /// The block's path in the file, with a trailing dot.
    at: String,
    /// All settings, without values.
    schema: Value,
    out: Value,
    /// Settings that have a value, each with its path in the file.
    given: Vec<(String, String)>,
    foreign: ForeignKeys,
    /// What is wrong with keys that no table has: all of them are reported at once.
    faults: Vec<String>,
    /// Whose file this is: rows of `synonyms.tsv` for its keys alone come first.
    tool: FileTool,
    /// Flags of the command line that decide what a key of another tool means.
    around: &'a [String],
    /// About keys that no table has.
    notes: Vec<String>,
}

/// A recipe of another tool has such values where its template names a key that this one does not use.
fn asks_for_nothing(value: &Value) -> bool {
    [Value::Null, json!(false), json!(""), json!([]), json!({})].contains(value)
}

/// The settings of one block.
pub struct FileLayer {
    pub settings: Value,
    pub notes: Vec<String>,
    /// A stage that starts from the previous stage's weights.
    pub follows: bool,
    /// A stage of a file whose stages started from a pretrained model.
    pub tunes: bool,
}

impl<'a> FileBlock<'a> {
    /// The block at the path `at` of the file; empty is the top level.
    pub fn new(path: &'a Path, at: &str, tool: FileTool, around: &'a [String]) -> Result<FileBlock<'a>> {
        let at = if at.is_empty() { String::new() } else { format!("{at}.") };
        Ok(FileBlock {
            path,
            at,
            schema: schema()?,
            out: Value::Object(Map::new()),
            given: Vec::new(),
            foreign: ForeignKeys::default(),
            faults: Vec::new(),
            tool,
            around,
            notes: Vec::new(),
        })
    }

    /// Reports these faults too.
    pub fn with_faults(mut self, faults: &[String]) -> FileBlock<'a> {
        self.faults.extend_from_slice(faults);
        self
    }

    /// Sections, including `distributed`; at the top level of the file also [`TOP`].
    pub fn sections(mut self, tree: &Value) -> Result<FileLayer> {
        for (name, body) in self.body(self.at.trim_end_matches('.'), tree)?.into_iter().flatten() {
            let at = format!("{}{}", self.at, quote(name));
            match name.as_str() {
                name if TOP.contains(&name) && self.at.is_empty() => {}
                name if TOP.contains(&name) => {
                    let why = "is allowed only at the top level of the file, not in a stage or a named block";
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

    /// `{distributed: {...}}` and optional sections, or only the keys of `distributed`.
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
        let prefix = format!("--{}.", self.tool.section());
        let plain = |text: String| text.replace(&prefix, "--");
        let read = self.foreign.read(self.out, self.around);
        let mut faults = self.faults;
        match read {
            Ok((settings, notes)) if faults.is_empty() => {
                let notes = self.notes.into_iter().chain(notes).map(|note| plain(format!("{place}: {note}"))).collect();
                return Ok(FileLayer { settings, notes, follows: false, tunes: false });
            }
            Ok(_) => {}
            Err(e) => faults.push(plain(format!("{place}: {e}"))),
        }
        Err(Error::input(faults.join("\n")))
    }

    fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }

    /// Notes a fault of the block, which is reported together with the others.
    fn report(&mut self, what: String) {
        self.faults.push(format!("{}: {what}", self.path.display()));
    }

    /// The keys at `at`; `None` for an empty section.
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

    /// A key outside of sections, named like a flag.
    fn key_of_none(&mut self, at: &str, key: &str, value: &Value) -> Result<()> {
        // `model: NAME` is a flag of other tools, and `model: 3` our section with a fault.
        if key == "model" && !value.is_string() {
            return self.body(at, value).map(drop);
        }
        if self.flag(at, self.tool.section(), key, value)? {
            return Ok(());
        }
        if self.is_section(key) {
            return self.body(at, value).map(drop);
        }
        if self.tool != FileTool::Own && asks_for_nothing(value) {
            self.notes.push(format!("{at}: {value} has no effect here: it asks for nothing"));
            return Ok(());
        }
        let within = self.schema.as_object().into_iter().flatten().filter(|(_, body)| body.get(key).is_some());
        let within: Vec<&str> = within.map(|(section, _)| section.as_str()).collect();
        let fault = match (within.first(), value.is_object()) {
            (Some(section), _) => format!(
                "{at} is ambiguous here: move it into its section ({}), or use the flag's name, {section}_{key}",
                within.join(", ")
            ),
            (None, true) => {
                let sections = self.schema.as_object().into_iter().flat_map(|s| s.keys().map(String::as_str));
                let near = nearest(key, sections.chain(MIXED).chain(TOP).chain(["distributed"]));
                format!("unknown section {at}: the nearest known one is {near}")
            }
            (None, false) => format!("unknown key {at}: {}", foreign::hint(key)),
        };
        self.report(fault);
        Ok(())
    }

    /// Reads a key named like a flag of ours or of another tool, with or without its section and a dot.
    fn flag(&mut self, at: &str, section: &str, key: &str, value: &Value) -> Result<bool> {
        let name = synonyms::section(section);
        let strict = self.schema.get(name).is_some();
        let own = foreign::own(&self.schema, key).filter(|own| !strict && !foreign::overrides(section, key, own));
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
                None => self.unknown(at, section, name, key),
            }
        }
        Ok(())
    }

    fn unknown(&mut self, at: &str, section: &str, name: &str, key: &str) {
        let keys = self.schema[name].as_object().into_iter().flat_map(|s| s.keys().map(String::as_str));
        // The same key in another section is a better hint than a similar key in this one.
        let elsewhere = self.schema.as_object().and_then(|s| s.iter().find(|(_, body)| body.get(key).is_some()));
        let hint = match elsewhere {
            Some((other, _)) => format!("it belongs to the section {other}"),
            None if self.schema.get(name).is_none() => foreign::hint(key),
            None => format!("the nearest known one is {at}.{}", nearest(key, keys.chain(synonyms::keys_of(section)))),
        };
        self.report(format!("unknown key {at}.{}: {hint}", quote(key)));
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
                // FSDP keys are also accepted next to the strategy.
                (key, None) if self.schema["fsdp"].get(key).is_some() || synonyms::key("fsdp", key).is_some() => {
                    self.section(at, "fsdp", &json!({ key: value }))?;
                }
                (key, None) if self.flag(&at_key, "distributed", key, value)? => {}
                _ => {
                    let near = nearest(key, synonyms::keys_of("distributed").chain(["fsdp"]));
                    self.report(format!("unknown key {at_key}: the nearest known one is {at}.{near}"));
                }
            }
        }
        let chosen = match (strategy.as_str(), enabled) {
            (Some("fsdp"), Value::Bool(false)) | (Some("ddp"), Value::Bool(true)) => {
                let (strategy, why) = (strategy.as_str().unwrap_or_default(), "remove one of them");
                return Err(self.fault(format!("{at}: strategy is {strategy}, but fsdp.enabled is {enabled}: {why}")));
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

    /// Sets one value after checking its type: a tree of this key alone must deserialize as [`Settings`].
    fn set(&mut self, at: &str, section: &str, key: &str, value: &Value) -> Result<()> {
        debug_assert!(self.schema[section].get(key).is_some(), "{section}.{key} is a setting");
        // Null is no value. Some values of the wrong type have a row in `synonyms.tsv`.
        if value.is_null() || foreign::names_value(key, value) && self.foreign.add(key, value) {
            return Ok(());
        }
        let text = value.as_str().map_or_else(|| value.to_string(), String::from);
        let value = synonyms::value_row(key, &text).map_or_else(|| value.clone(), |row| row.value.into());
        let setting = format!("{section}.{key}");
        if let Some((_, before)) = self.given.iter().find(|(given, _)| *given == setting)
            && self.out[section][key] != value
        {
            let what = format!("{before} and {at} set the same setting to different values: remove one");
            return Err(self.fault(what));
        }
        let auto = setting == "run.nproc_per_node" && value == AUTO;
        let reads = |value: &Value| serde_json::from_value::<Settings>(json!({section: {key: value}}));
        // The Trainer's documentation has what is on or off as text.
        let switch = value.as_str().and_then(|text| text.to_lowercase().parse::<bool>().ok()).map(Value::from);
        let value = switch.filter(|on| reads(&value).is_err() && reads(on).is_ok()).unwrap_or(value);
        if let Err(e) = reads(&value)
            && !auto
        {
            return Err(self.fault(format!("{at}{}", misfit(section, key, &value, &e.to_string()))));
        }
        self.given.push((setting, at.to_string()));
        self.out[section][key] = value;
        Ok(())
    }
}

/// What is wrong with a value that is not of its setting's type; `why`: serde's words.
fn misfit(section: &str, key: &str, value: &Value, why: &str) -> String {
    let command = Settings::augment_args(clap::Command::new(""));
    let ids = [format!("{section}_{key}"), key.to_string()];
    let arg = ids.iter().find_map(|id| command.get_arguments().find(|arg| arg.get_id() == id));
    let mut names: Vec<String> =
        arg.iter().flat_map(|arg| arg.get_possible_values()).map(|name| name.get_name().to_string()).collect();
    if arg.is_some_and(|arg| is_switch(arg) && !is_plain(arg)) {
        names.splice(..1, ["true".into(), "false".into()]); // off
    }
    let of = arg.map(|arg| arg.get_value_parser().type_id());
    let is = |types: &[TypeId]| types.iter().any(|id| of.is_some_and(|of| of == *id));
    let text = value.as_str().map_or_else(|| value.to_string(), String::from);
    if !names.is_empty() {
        format!(" is {}: it must be {}", quote(&text), one_of(&text, names.iter().map(String::as_str)))
    } else if is(&[TypeId::of::<f64>(), TypeId::of::<f32>()]) {
        // Known once `Command` is built: flags with two names of values have two of them.
        let number = if arg.and_then(|arg| arg.get_value_names()).is_some_and(|names| names.len() == 2) {
            "two numbers"
        } else {
            "a number"
        };
        format!(" is {}: it must be {number}", quote(value))
    } else if is(&[TypeId::of::<usize>(), TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<u8>()]) {
        format!(" is {}: it must be a whole number, 0 or more", quote(value))
    } else {
        format!(" is {}: {}", quote(value), quote(why))
    }
}

fn schema() -> Result<Value> {
    serde_json::to_value(Settings::default()).map_err(|e| Error::input(format!("settings: {e}")))
}
