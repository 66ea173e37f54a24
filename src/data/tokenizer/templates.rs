//! The chat templates of a tokenizer's directory: those of tokenizer_config.json, and the files that transformers reads
//! before it. Never compiles one.
use crate::base::{Error, Result, open, quote};
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The template used when none is named.
pub const DEFAULT: &str = "default";
/// The folder of named templates, each in a file NAME.jinja.
const FOLDER: &str = "additional_chat_templates";

/// Name and text of each template of `dir`, the default one first. A file takes precedence over the entry of
/// tokenizer_config.json (`config`) with its name.
pub fn read(dir: &Path, config: &Map<String, Value>) -> Result<Vec<(String, String)>> {
    let mut all = listed(config).map_err(|e| Error::input(format!("{}: {e}", dir.join(CONFIG).display())))?;
    let default = dir.join("chat_template.jinja");
    let files = Some((DEFAULT.to_string(), default)).into_iter().chain(named(dir)?);
    for (name, path) in files {
        let text = match open::read(&path) {
            Ok(text) => {
                String::from_utf8(text).map_err(|_| Error::input(format!("{}: is not UTF-8", path.display())))?
            }
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(Error::in_file(&path, e)),
        };
        match all.iter_mut().find(|(n, _)| *n == name) {
            Some((_, old)) => *old = text,
            None => all.push((name, text)),
        }
    }
    all.sort_by_key(|(name, _)| name != DEFAULT);
    Ok(all)
}

/// The default template of a directory that may have no tokenizer, such as an adapter's.
pub fn default_of(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(CONFIG);
    let config = match open::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map_err(|e| Error::in_file(&path, quote(e)))?,
        Err(e) if e.kind() == ErrorKind::NotFound => Map::new(),
        Err(e) => return Err(Error::in_file(&path, e)),
    };
    Ok(read(dir, &config)?.into_iter().find(|(name, _)| name == DEFAULT).map(|(_, text)| text))
}

const CONFIG: &str = "tokenizer_config.json";

/// The files of named templates, by name.
pub fn named(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let folder = dir.join(FOLDER);
    let named = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_suffix(".jinja").filter(|name| !name.is_empty())?.to_string();
        Some((name, path))
    };
    let paths = open::listed(&folder).map_err(|e| Error::in_file(&folder, e))?;
    let mut files: Vec<_> = paths.into_iter().filter_map(named).collect();
    files.sort();
    Ok(files)
}

/// `chat_template` of tokenizer_config.json: a string, or a list of `{"name", "template"}`.
fn listed(config: &Map<String, Value>) -> std::result::Result<Vec<(String, String)>, String> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(vec![]),
        Some(Value::String(text)) => Ok(vec![(DEFAULT.into(), text.clone())]),
        Some(Value::Array(list)) => {
            let one =
                |entry: &Value| Some((entry.get("name")?.as_str()?.into(), entry.get("template")?.as_str()?.into()));
            let all: Option<Vec<_>> = list.iter().map(one).collect();
            all.ok_or_else(|| "chat_template is a list whose entries are not all {\"name\", \"template\"}".into())
        }
        Some(other) => Err(format!("chat_template is {}; it must be a string or a list of named ones", quote(other))),
    }
}
