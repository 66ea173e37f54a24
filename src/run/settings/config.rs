//! Files of settings, and defaults < DeepSpeed's defaults < its file < file < flags. A file is read as a tree and laid
//! over the defaults key by key, so that an unknown key or a wrong type is named with its file and path. Never looks at
//! the machine.
use crate::base::{Error, Result, open, quote};
use crate::run::settings::args::Cli;
use crate::run::settings::blocks::{self, Block, Layer};
use crate::run::settings::deepspeed;
use crate::run::settings::defaults::defaults;
use crate::run::settings::effect;
use crate::run::settings::names::StrategyName;
use crate::run::settings::sections::Settings;
use crate::run::settings::stages;
use serde_json::{Map, Value};
use std::path::Path;

type Tree = Map<String, Value>;

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
    let (mut asked, mut flags, mut notes) = (Value::Object(Tree::new()), to_tree(&cli.settings)?, Vec::new());
    if let Some(file) = file {
        let files = &cli.files;
        let layer = file.settings(files.model_config.as_deref(), files.fsdp_config.as_deref(), stage)?;
        if let (true, None, Some(stage)) = (layer.follows, &files.generate, stage) {
            stages::flags(stage, &mut flags)?;
        }
        (asked, notes) = (layer.settings, layer.notes);
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
    lay(&mut asked, flags);
    if asked["run"]["nproc_per_node"] == blocks::AUTO {
        asked["run"]["nproc_per_node"] = Value::Null;
    }
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
    settings.notes = notes;
    settings.check()?;
    effect::strategy(&mut settings, default)?;
    if let Some(stage) = stage {
        let names: Vec<String> = file.map_or(Ok(Vec::new()), ConfigFile::stages)?.into_iter().map(|s| s.0).collect();
        stages::place(&mut settings, &names, stages::find(&names, stage)?)?;
    }
    Ok(settings)
}

/// `upper` over `lower`, which may say the same thing in another way.
fn lay(lower: &mut Value, upper: Value) {
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
    ConfigFile::parse(text, path)?.settings(None, None, None).map(|layer| layer.settings)
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

    /// The top level's sections; the named blocks `model` and `fsdp` laid over them; and the stage `stage` over both.
    /// All others are read too, so that a fault is known wherever it stands.
    fn settings(&self, model: Option<&str>, fsdp: Option<&str>, stage: Option<&str>) -> Result<Layer> {
        let mut all = self.block("")?.sections(&Value::Object(self.tree.clone()))?;
        let mut chosen = None;
        let mut pick = |layer: Layer, picked: bool| {
            if picked {
                lay(&mut all.settings, layer.settings);
                all.notes.extend(layer.notes);
            }
        };
        for (name, body) in self.named("model_configs", model)? {
            pick(self.block(&format!("model_configs.{name}"))?.one_section("model", body)?, model == Some(name));
        }
        for (name, body) in self.named("distributed_examples", fsdp)? {
            pick(self.block(&format!("distributed_examples.{name}"))?.named_distributed(body)?, fsdp == Some(name));
        }
        let mut before: Option<(String, Value)> = None;
        for (name, body) in self.stages()? {
            let at = format!("training_stages.{name}");
            let layer = self.block(&at)?.sections(&body)?;
            let (mut whole, own) = (all.settings.clone(), !layer.settings["model"]["pretrain"].is_null());
            lay(&mut whole, layer.settings);
            if let Some((before, lower)) = before.as_ref().filter(|_| !own) {
                stages::follow(&at, &mut whole, before, lower).map_err(|what| self.fault(what))?;
            }
            if stage == Some(&name) {
                let follows = before.as_ref().is_some_and(|_| !own);
                chosen = Some(Layer { settings: whole.clone(), notes: layer.notes, follows });
            }
            before = Some((name, whole));
        }
        if let Some(mut layer) = chosen {
            layer.notes.splice(..0, all.notes);
            all = layer;
        }
        Ok(all)
    }

    fn block(&self, at: &str) -> Result<Block<'a>> {
        Block::new(self.path, at)
    }

    fn stages(&self) -> Result<Vec<(String, Value)>> {
        stages::read(self.tree.get("training_stages").unwrap_or(&Value::Null)).map_err(|what| self.fault(what))
    }

    /// The blocks of the mapping `list`; `picked` must be one of them.
    fn named(&self, list: &str, picked: Option<&str>) -> Result<Vec<(&str, &Value)>> {
        let blocks: Vec<(&str, &Value)> = match self.tree.get(list) {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Object(blocks)) => blocks.iter().map(|(name, body)| (name.as_str(), body)).collect(),
            Some(other) => return Err(self.fault(format!("{list}: expected blocks by name, found {}", quote(other)))),
        };
        match picked.filter(|picked| blocks.iter().all(|(name, _)| name != picked)) {
            None => Ok(blocks),
            Some(picked) => {
                let known: Vec<&str> = blocks.iter().map(|(name, _)| *name).collect();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                Err(self.fault(format!("{list} has no {}; it has {known}", quote(picked))))
            }
        }
    }
}
