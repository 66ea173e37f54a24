//! Files of settings, and defaults < DeepSpeed's defaults < its file < file < flags. A file is read as a tree and laid
//! over the defaults key by key, so that an unknown key or a wrong type is named with its file and path. Never looks at
//! the machine.
use crate::base::{Error, Result, open, quote};
use crate::run::settings::args::Cli;
use crate::run::settings::deepspeed;
use crate::run::settings::defaults::defaults;
use crate::run::settings::effect;
use crate::run::settings::names::StrategyName;
use crate::run::settings::sections::Settings;
use crate::run::settings::stages;
use crate::run::settings::synonyms::{self, nearest};
use serde_json::{Map, Value, json};
use std::path::Path;

type Tree = Map<String, Value>;

/// Keys of a file beside the sections of [`Settings`].
const OTHER: [&str; 7] =
    ["runtime", "training", "distributed", "model_configs", "distributed_examples", "training_stages", "plan"];

/// The runs that the command line asks for: those of the file's stages in their order, or one. All
/// are read, so that a fault in the last is known before the first has run. `default` is what the binary is for.
pub fn runs(cli: &Cli, default: StrategyName) -> Result<Vec<Settings>> {
    let file = cli.files.config.as_deref().map(ConfigFile::read).transpose()?;
    let stages = file.as_ref().map_or(Ok(Vec::new()), ConfigFile::stages)?;
    let one = cli.files.stage.is_some() || cli.files.generate.is_some() || stages.is_empty();
    let names = if one { vec![cli.files.stage.clone()] } else { stages.into_iter().map(|s| Some(s.0)).collect() };
    names.iter().map(|name| one_run(cli, file.as_ref(), name.as_deref(), default)).collect()
}

/// The settings of one run: of the file's training stages, `stage`.
pub fn resolve(cli: &Cli, stage: Option<&str>, default: StrategyName) -> Result<Settings> {
    let file = cli.files.config.as_deref().map(ConfigFile::read).transpose()?;
    one_run(cli, file.as_ref(), stage, default)
}

/// Defaults (with a file of DeepSpeed's its own), that file, then the file, then the flags.
fn one_run(cli: &Cli, file: Option<&ConfigFile>, stage: Option<&str>, default: StrategyName) -> Result<Settings> {
    let mut asked = Value::Object(Tree::new());
    let mut names = Vec::new();
    if let Some(file) = file {
        layer(&mut asked, file.settings(cli.files.model_config.as_deref(), cli.files.fsdp_config.as_deref())?);
        for (name, body) in file.stages()? {
            let sections = file.sections(&body)?;
            if stage == Some(name.as_str()) {
                layer(&mut asked, sections);
            }
            names.push(name);
        }
    } else {
        for (flag, name) in [
            ("--model-config", &cli.files.model_config),
            ("--fsdp-config", &cli.files.fsdp_config),
            ("--stage", &cli.files.stage),
        ] {
            if let Some(name) = name {
                return Err(Error::input(format!(
                    "{flag} {name} names a block of a file: give the file with --config"
                )));
            }
        }
    }
    layer(&mut asked, to_tree(&cli.settings)?);
    let mut merged = defaults();
    if let Some(path) = asked["fsdp"]["deepspeed"].as_str() {
        let file = deepspeed::read(Path::new(path), &asked)?;
        overlay(&mut asked, file.given);
        overlay(&mut merged, file.defaults);
    }
    effect::imply(&asked, &mut merged);
    overlay(&mut merged, asked.clone());
    effect::idle(&asked, &merged)?;
    effect::check(&asked, &mut merged)?;
    if let Some(dir) = merged["model"]["pretrain"].as_str() {
        effect::shapes(&cli.settings.model, Path::new(dir))?;
    }
    let mut settings: Settings = serde_json::from_value(merged).map_err(|e| Error::input(format!("settings: {e}")))?;
    settings.check()?;
    effect::strategy(&mut settings, default)?;
    if let Some(stage) = stage {
        stages::place(&mut settings, &names, stages::find(&names, stage)?)?;
    }
    Ok(settings)
}

/// `upper` over `lower`, which may say the same thing in another way.
fn layer(lower: &mut Value, upper: Value) {
    effect::supersede(lower, &upper);
    overlay(lower, upper);
}

/// What is not null in `upper` replaces what is in `lower`.
fn overlay(lower: &mut Value, upper: Value) {
    match (lower, upper) {
        (Value::Object(lower), Value::Object(upper)) => {
            for (key, value) in upper {
                overlay(lower.entry(key).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (lower, value) => *lower = value,
    }
}

fn to_tree(settings: &Settings) -> Result<Value> {
    serde_json::to_value(settings).map_err(|e| Error::input(format!("settings: {e}")))
}

struct ConfigFile<'a> {
    path: &'a Path,
    tree: Tree,
}

/// The settings of a configuration file's bytes alone, without flags or defaults: YAML, or JSON where `path` ends so.
pub fn parse(text: &[u8], path: &Path) -> Result<Value> {
    let file = ConfigFile::parse(text, path)?;
    let mut settings = file.settings(None, None)?;
    for (_, body) in file.stages()? {
        overlay(&mut settings, file.sections(&body)?);
    }
    Ok(settings)
}

impl<'a> ConfigFile<'a> {
    fn read(path: &'a Path) -> Result<ConfigFile<'a>> {
        let text = open::read(path)
            .map_err(|e| Error::input(format!("{}: cannot read this configuration: {e}", path.display())))?;
        ConfigFile::parse(&text, path)
    }

    fn parse(text: &[u8], path: &'a Path) -> Result<ConfigFile<'a>> {
        let fault = |what: String| Error::input(format!("{}: {what}", path.display()));
        let text = std::str::from_utf8(text).map_err(|e| fault(format!("is not UTF-8: {e}")))?;
        let json = path.extension().is_some_and(|e| e == "json");
        let tree: Value = match json {
            true => serde_json::from_str(text.trim_start_matches('\u{feff}'))
                .map_err(|e| fault(format!("not JSON: {}", quote(e))))?,
            false => serde_saphyr::from_str(text).map_err(|e| {
                // Its first line says what and where; a drawing of the place follows.
                let text = e.to_string();
                let first = text.lines().next().unwrap_or_default();
                fault(format!("not YAML: {}", quote(first.trim_start_matches("error: "))))
            })?,
        };
        match tree {
            Value::Object(tree) => Ok(ConfigFile { path, tree }),
            Value::Null => Ok(ConfigFile { path, tree: Tree::new() }),
            other => Err(fault(format!("sections expected (model: ..., optim: ...), found {}", quote(other)))),
        }
    }

    fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }

    /// The file as a tree of [`Settings`], the named blocks `model` and `fsdp` laid over the plain sections.
    fn settings(&self, model: Option<&str>, fsdp: Option<&str>) -> Result<Value> {
        let schema = to_tree(&Settings::default())?;
        let mut out = self.sections(&Value::Object(self.tree.clone()))?;
        if let Some(body) = self.tree.get("distributed") {
            self.distributed(&mut out, &schema, "distributed", body)?;
        }
        if let Some(name) = model {
            self.section(&mut out, &schema, "model", self.named("model_configs", name)?)?;
        }
        if let Some(name) = fsdp {
            let body = self.named("distributed_examples", name)?;
            let at = format!("distributed_examples.{name}");
            self.distributed(&mut out, &schema, &at, body.get("distributed").unwrap_or(body))?;
        }
        Ok(out)
    }

    /// The plain sections of the file, or of one of its stages.
    fn sections(&self, tree: &Value) -> Result<Value> {
        let schema = to_tree(&Settings::default())?;
        let mut out = Value::Object(Tree::new());
        for (section, body) in self.body("sections", tree)?.into_iter().flatten() {
            match section.as_str() {
                "model_configs" | "distributed_examples" | "plan" | "distributed" | "training_stages" => {}
                "precision" if !body.is_object() => self.set(&mut out, &schema, "precision", "precision", body)?,
                key if schema["tune"].get(key).is_some() => self.set(&mut out, &schema, "tune", key, body)?,
                _ => self.section(&mut out, &schema, section, body)?,
            }
        }
        Ok(out)
    }

    fn stages(&self) -> Result<Vec<(String, Value)>> {
        stages::read(self.tree.get("training_stages").unwrap_or(&Value::Null)).map_err(|what| self.fault(what))
    }

    /// The block `name` of the mapping `list`.
    fn named(&self, list: &str, name: &str) -> Result<&Value> {
        let blocks = self.body(list, self.tree.get(list).unwrap_or(&Value::Null))?;
        blocks.and_then(|b| b.get(name)).ok_or_else(|| {
            let known: Vec<&str> = blocks.into_iter().flat_map(|b| b.keys().map(String::as_str)).collect();
            self.fault(format!(
                "{list} has no {name}; it has {}",
                if known.is_empty() { "none".into() } else { known.join(", ") }
            ))
        })
    }

    /// The keys at `at`; an empty section is none.
    fn body<'b>(&self, at: &str, value: &'b Value) -> Result<Option<&'b Tree>> {
        match value {
            Value::Object(tree) => Ok(Some(tree)),
            Value::Null => Ok(None),
            other => Err(self.fault(format!("{at}: expected keys with values, found {}", quote(other)))),
        }
    }

    fn section(&self, out: &mut Value, schema: &Value, section: &str, body: &Value) -> Result<()> {
        let name = synonyms::section(section);
        if schema.get(name).is_none() && !OTHER.contains(&section) {
            let known = schema.as_object().into_iter().flat_map(|s| s.keys().map(String::as_str)).chain(OTHER);
            return Err(self.fault(format!(
                "unknown section {}: the nearest known one is {}",
                quote(section),
                nearest(section, known)
            )));
        }
        for (key, value) in self.body(section, body)?.into_iter().flatten() {
            match synonyms::key(section, key) {
                Some((section, key)) => self.set(out, schema, section, key, value)?,
                None if schema[name].get(key).is_some() => self.set(out, schema, name, key, value)?,
                None => return Err(self.unknown(schema, section, name, key)),
            }
        }
        Ok(())
    }

    fn unknown(&self, schema: &Value, section: &str, name: &str, key: &str) -> Error {
        let keys = schema[name].as_object().into_iter().flat_map(|s| s.keys().map(String::as_str));
        // A key that exists in another section is a better hint than one that is spelt alike here.
        let elsewhere = schema.as_object().and_then(|s| s.iter().find(|(_, body)| body.get(key).is_some()));
        let hint = match elsewhere {
            Some((other, _)) => format!("it belongs to the section {other}"),
            None => {
                format!("the nearest known one is {section}.{}", nearest(key, keys.chain(synonyms::keys_of(section))))
            }
        };
        self.fault(format!("unknown key {section}.{}: {hint}", quote(key)))
    }

    /// `distributed: {strategy, num_nodes, devices, fsdp: {enabled, ...}}`.
    fn distributed(&self, out: &mut Value, schema: &Value, at: &str, body: &Value) -> Result<()> {
        for (key, value) in self.body(at, body)?.into_iter().flatten() {
            match key.as_str() {
                "fsdp" => {
                    let mut fsdp = self.body(&format!("{at}.fsdp"), value)?.cloned().unwrap_or_default();
                    match fsdp.remove("enabled") {
                        None | Some(Value::Null) => {}
                        Some(Value::Bool(true)) => {}
                        Some(Value::Bool(false)) => match body.get("strategy").and_then(Value::as_str) {
                            Some("fsdp") => {
                                return Err(self.fault(format!("{at}: strategy is fsdp, yet fsdp.enabled is false")));
                            }
                            _ => self.set(out, schema, "run", "strategy", &"ddp".into())?,
                        },
                        Some(other) => {
                            return Err(self
                                .fault(format!("{at}.fsdp.enabled: expected true or false, found {}", quote(other))));
                        }
                    }
                    self.section(out, schema, "fsdp", &Value::Object(fsdp))?;
                }
                "devices" if value == "auto" => {}
                // Said already, and louder, by `enabled: false`.
                "strategy" if value == "auto" => {}
                _ => match synonyms::key("distributed", key) {
                    Some((section, key)) => self.set(out, schema, section, key, value)?,
                    None => {
                        let near = nearest(key, ["strategy", "num_nodes", "devices", "fsdp"]);
                        return Err(self
                            .fault(format!("unknown key {at}.{}: the nearest known one is {at}.{near}", quote(key))));
                    }
                },
            }
        }
        Ok(())
    }

    /// Puts one value in its place, if it is of the key's type: a tree of this key alone must read as [`Settings`].
    fn set(&self, out: &mut Value, schema: &Value, section: &str, key: &str, value: &Value) -> Result<()> {
        debug_assert!(schema[section].get(key).is_some(), "{section}.{key} is a setting");
        let value = value.as_str().map_or_else(|| value.clone(), |text| synonyms::value(key, text).into());
        let tree = json!({section: {key: value}});
        if let Err(e) = serde_json::from_value::<Settings>(tree.clone()) {
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
            return Err(self.fault(format!("{section}.{key}: {}", quote(text))));
        }
        overlay(out, tree);
        Ok(())
    }
}
