//! A configuration file: its top level, named blocks and training stages, overlaid. Never reads flags or defaults.
use crate::base::{Error, Result, open, quote};
use crate::ckpt::KeysOnce;
use crate::run::settings::blocks::{FileBlock, FileLayer};
use crate::run::settings::effect;
use crate::run::settings::stages;
use crate::run::settings::tools::{self, FileTool, FileTree};
use crate::run::settings::value::overlay;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Named models and distributed blocks that ship with the binaries; a file's own block of the same name wins.
const SHIPPED: &str = include_str!("../../../configs/distributed.yaml");
/// A mapping of named blocks, and the flag that picks one.
const MODELS: (&str, &str) = ("model_configs", "--model-config");
const EXAMPLES: (&str, &str) = ("distributed_examples", "--fsdp-config");

/// Empty without a file.
#[derive(Default)]
pub struct ConfigFile {
    path: PathBuf,
    tree: FileTree,
    tool: FileTool,
    /// About keys that were rewritten.
    notes: Vec<String>,
    /// What is wrong with them.
    faults: Vec<String>,
    /// Flags of the command line that decide what a key of another tool means.
    pub around: Vec<String>,
}

impl ConfigFile {
    pub fn read(path: &Path) -> Result<ConfigFile> {
        let text = open::read(path)
            .map_err(|e| Error::input(format!("{}: cannot read this configuration: {e}", path.display())))?;
        ConfigFile::parse(&text, path)
    }

    pub fn parse(text: &[u8], path: &Path) -> Result<ConfigFile> {
        let fault = |what: String| Error::input(format!("{}: {what}", path.display()));
        let text = std::str::from_utf8(text).map_err(|e| fault(format!("is not UTF-8: {e}")))?;
        let text = text.trim_start_matches('\u{feff}');
        let tree: Value = match path.extension().and_then(|e| e.to_str()) {
            Some("json") => {
                let read = serde_json::from_str(text).map(|KeysOnce(tree)| tree);
                read.map_err(|e| fault(format!("not JSON: {}", quote(e))))?
            }
            Some("toml") => toml::from_str(text).map_err(|e| fault(format!("not TOML: {}", quote(e.message()))))?,
            _ => serde_saphyr::from_str(text).map_err(|e| {
                // The first line has the message and the position; a rendered excerpt follows.
                let text = e.to_string();
                let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
                // What follows is advice for those who call the library.
                let ends = [", set DuplicateKeyPolicy", "; use from_str_multiple", " by the configured policy"];
                let end = ends.iter().find_map(|end| first.find(end)).unwrap_or(first.len());
                fault(format!("not YAML: {}", quote(&first[..end])))
            })?,
        };
        match tree {
            Value::Object(tree) => {
                let read = tools::translate(tree, path)?;
                let tools::Translated { tool, tree, notes, faults } = read;
                Ok(ConfigFile { path: path.into(), tree, tool, notes, faults, around: Vec::new() })
            }
            Value::Null => Ok(ConfigFile { path: path.into(), ..ConfigFile::default() }),
            other => Err(fault(format!("expected sections (model: ..., optim: ...), found {}", quote(other)))),
        }
    }

    /// Whether `--fsdp-config` is what transformers' Trainer takes: a JSON file, or JSON.
    pub fn is_trainers(text: &str) -> bool {
        text.ends_with(".json") || text.trim_start().starts_with('{')
    }

    /// The keys of that.
    pub fn of_trainer(text: &str) -> Result<ConfigFile> {
        let fault = |what: String| Error::input(format!("--fsdp-config {}: {what}", quote(text)));
        let json = match text.ends_with(".json") {
            true => open::read(Path::new(text)).map_err(|e| fault(format!("cannot read this file: {e}")))?,
            false => text.as_bytes().to_vec(),
        };
        let tree: FileTree = serde_json::from_slice(&json).map_err(|e| fault(format!("not a JSON object: {e}")))?;
        let tree = FileTree::from_iter([("fsdp_config".to_string(), Value::Object(tree))]);
        let path = if text.ends_with(".json") { text } else { "--fsdp-config" };
        Ok(ConfigFile { path: path.into(), tree, ..ConfigFile::default() })
    }

    fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }

    /// The top level, overlaid with the named blocks `model` and `fsdp`, then with the stage `stage`. The other blocks
    /// and stages are read too, to report their errors.
    pub fn settings(&self, model: Option<&str>, fsdp: Option<&str>, stage: Option<&str>) -> Result<FileLayer> {
        let mut all = self.block("")?.with_faults(&self.faults).sections(&Value::Object(self.tree.clone()))?;
        all.notes.splice(..0, self.notes.iter().map(|note| format!("{}: {note}", self.path.display())));
        for ((list, flag), picked) in [(MODELS, model), (EXAMPLES, fsdp)] {
            let mut found = None;
            for name in self.named(list)? {
                let layer = self.named_block(list, name)?;
                found = if picked == Some(name) { Some(layer) } else { found };
            }
            if let Some(name) = picked {
                let layer = found.map_or_else(|| self.shipped_block(list, flag, name), Ok)?;
                lay(&mut all.settings, layer.settings);
                all.notes.extend(layer.notes);
            }
        }
        let (mut before, mut chosen, mut tunes): (Option<(String, Value)>, _, _) = (None, None, false);
        for (name, body) in self.stages()? {
            let at = format!("training_stages.{name}");
            let layer = self.block(&at)?.sections(&body)?;
            let (mut whole, own) = (all.settings.clone(), !layer.settings["model"]["pretrain"].is_null());
            lay(&mut whole, layer.settings);
            tunes |= !whole["model"]["pretrain"].is_null();
            if let Some((before, lower)) = before.as_ref().filter(|_| !own) {
                stages::follow(&at, &mut whole, before, lower).map_err(|what| self.fault(what))?;
            }
            if stage == Some(&name) {
                let follows = before.as_ref().is_some_and(|_| !own);
                chosen = Some(FileLayer { settings: whole.clone(), notes: layer.notes, follows, tunes });
            }
            before = Some((name, whole));
        }
        if let Some(mut layer) = chosen {
            layer.notes.splice(..0, all.notes);
            all = layer;
        }
        Ok(all)
    }

    fn block(&self, at: &str) -> Result<FileBlock<'_>> {
        FileBlock::new(&self.path, at, self.tool, &self.around)
    }

    /// `notes`, the notes about its keys, as two lines at most: how many are read as settings, and how many have no
    /// effect. Few notes are kept; those of a file with many are for `--verbose`.
    pub fn summary(&self, notes: Vec<String>, verbose: bool) -> Vec<String> {
        const FEW: usize = 3;
        if verbose || notes.len() <= FEW {
            return notes;
        }
        let idle = notes.iter().filter(|note| note.contains("no effect here")).count();
        let read = notes.len() - idle;
        let keys = |n: usize, what: [&str; 2]| format!("{n} {}", what[(n != 1) as usize]);
        let said = match (read, idle) {
            (0, n) => keys(n, ["key of FILE has no effect here", "keys of FILE have no effect here"]),
            (n, 0) => {
                keys(n, ["key of FILE is read as a setting of ours", "keys of FILE are read as settings of ours"])
            }
            (n, idle) => format!(
                "{}, and {}",
                keys(n, ["key of FILE is read as a setting of ours", "keys of FILE are read as settings of ours"]),
                keys(idle, ["has no effect here", "have no effect here"])
            ),
        };
        vec![format!("{}: --verbose lists them", said.replace("FILE", &self.path.display().to_string()))]
    }

    pub fn stages(&self) -> Result<Vec<(String, Value)>> {
        stages::read(self.tree.get("training_stages").unwrap_or(&Value::Null)).map_err(|what| self.fault(what))
    }

    /// The names of the blocks of `list`.
    fn named(&self, list: &str) -> Result<Vec<&str>> {
        match self.tree.get(list) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Object(blocks)) => Ok(blocks.keys().map(String::as_str).collect()),
            Some(other) => {
                Err(self.fault(format!("{list}: expected a mapping of named blocks, found {}", quote(other))))
            }
        }
    }

    fn named_block(&self, list: &str, name: &str) -> Result<FileLayer> {
        let (block, body) = (self.block(&format!("{list}.{}", quote(name)))?, &self.tree[list][name]);
        if list == MODELS.0 { block.one_section("model", body) } else { block.named_distributed(body) }
    }

    /// The shipped block `name`, where this file has none.
    fn shipped_block(&self, list: &str, flag: &str, name: &str) -> Result<FileLayer> {
        let shipped = ConfigFile::parse(SHIPPED.as_bytes(), Path::new("configs/distributed.yaml"))?;
        let (own, ships) = (self.named(list)?, shipped.named(list)?);
        if ships.contains(&name) {
            return shipped.named_block(list, name);
        }
        let of_file = match own.is_empty() {
            true => String::new(),
            false => format!("; {list} of {}: {}", self.path.display(), own.join(", ")),
        };
        Err(Error::input(format!("{flag} {}: no such block; built in: {}{of_file}", quote(name), ships.join(", "))))
    }
}

/// Overlays `upper` on `lower`, where alternatives to what `upper` sets are removed.
pub fn lay(lower: &mut Value, upper: Value) {
    effect::supersede(lower, &upper);
    overlay(lower, upper);
}
