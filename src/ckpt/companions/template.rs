//! The files of chat templates, and how the one that a model was trained with becomes the default one of its directory:
//! in every place where a loader may find one, so that none contradicts another. Never compiles a template.
use crate::base::{Error, Result, open, quote};
use crate::ckpt::header;
use crate::ckpt::layout::pretty;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The folder of named templates, each in a file NAME.jinja.
pub const FOLDER: &str = "additional_chat_templates";
const JINJA: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
/// A processor's, of older transformers.
const PROCESSOR: &str = "chat_template.json";
const KEY: &str = "chat_template";
const DEFAULT: &str = "default";

/// (name, content); the name of a file in a folder has the folder's.
pub type CompanionFiles = Vec<(String, Vec<u8>)>;

/// Whether the folder of named templates may contain a file of this name.
pub fn is_template(name: &str) -> bool {
    name.ends_with(".jinja") && header::plain(name).is_ok()
}

/// Checks that the name of a file stays in its directory: a plain one, or that of a named template.
pub fn within(name: &str) -> Result<&str> {
    header::plain(name.strip_prefix(FOLDER).and_then(|rest| rest.strip_prefix('/')).unwrap_or(name)).map(|_| name)
}

/// The named templates in a tokenizer's directory.
pub fn read(dir: &Path) -> Result<CompanionFiles> {
    let folder = dir.join(FOLDER);
    let mut files = Vec::new();
    for path in open::listed(&folder).map_err(|e| Error::in_file(&folder, e))? {
        // Others, such as .DS_Store, are not templates.
        let name = path.file_name().and_then(|name| name.to_str()).filter(|name| is_template(name));
        let Some(name) = name else { continue };
        let content = open::read(&path).map_err(|e| Error::in_file(&path, e))?;
        files.push((format!("{FOLDER}/{name}"), content));
    }
    Ok(files)
}

/// Name and text of each named template among `files`.
pub fn named(files: &CompanionFiles) -> Vec<(String, String)> {
    let name = |path: &str| Some(path.strip_prefix(FOLDER)?.strip_prefix('/')?.strip_suffix(".jinja")?.to_string());
    let text = |content: &[u8]| String::from_utf8_lossy(content).into_owned();
    files.iter().filter_map(|(path, content)| Some((name(path)?, text(content)))).collect()
}

/// Makes `text` the default template. Changes nothing if the files agree that it is.
pub fn make_default(files: &mut CompanionFiles, text: &str) -> Result<()> {
    let file = |name: &str| files.iter().find(|(n, _)| n == name).map(|(_, content)| &content[..]);
    let object = |name: &str| -> Result<Option<Map<String, Value>>> {
        let parse = |text| serde_json::from_slice(text).map_err(|e| Error::in_file(Path::new(name), quote(e)));
        file(name).map(parse).transpose()
    };
    let (config, processor) = (object(CONFIG)?, object(PROCESSOR)?);
    let jinja = file(JINJA).map(String::from_utf8_lossy);
    let listed = config.as_ref().map_or(vec![], entries);
    let listed_default = listed.iter().find(|(name, _)| name == DEFAULT).map(|(_, text)| text.as_str());
    let of_processor = processor.as_ref().and_then(|p| p.get(KEY)?.as_str());
    let found: Vec<&str> = [jinja.as_deref(), listed_default].into_iter().flatten().collect();
    if !found.is_empty() && found.into_iter().chain(of_processor).all(|other| other == text) {
        return Ok(());
    }

    let mut all: Vec<(String, String)> = listed.into_iter().filter(|(name, _)| name != DEFAULT).collect();
    // A file takes precedence over an entry of its name.
    for (name, text) in named(files).into_iter().filter(|(name, _)| name != DEFAULT) {
        all.retain(|(other, _)| *other != name);
        all.push((name, text));
    }
    all.sort();
    // transformers 4 and llama.cpp's converter read the key first, where there is one.
    if config.as_ref().is_none_or(|config| config.contains_key(KEY)) {
        let mut config = config.unwrap_or_default();
        let entry = |name: &str, text: &str| json!({"name": name, "template": text});
        let list = || std::iter::once(entry(DEFAULT, text)).chain(all.iter().map(|(name, text)| entry(name, text)));
        config.insert(KEY.into(), if all.is_empty() { json!(text) } else { list().collect() });
        put(files, CONFIG, pretty(&Value::Object(config)));
    }
    if let Some(mut processor) = processor {
        processor.insert(KEY.into(), json!(text));
        put(files, PROCESSOR, pretty(&Value::Object(processor)));
    }
    put(files, JINJA, text.into());
    // With chat_template.jinja, transformers 5 reads named templates from their folder alone.
    files.retain(|(path, _)| *path != format!("{FOLDER}/{DEFAULT}.jinja"));
    for (name, text) in all {
        let file = format!("{name}.jinja");
        if is_template(&file) {
            put(files, &format!("{FOLDER}/{file}"), text);
        }
    }
    Ok(())
}

/// Adds or replaces a file.
fn put(files: &mut CompanionFiles, name: &str, content: String) {
    files.retain(|(other, _)| other != name);
    files.push((name.into(), content.into_bytes()));
}

/// The templates of tokenizer_config.json: one text, or a list of named ones.
fn entries(config: &Map<String, Value>) -> Vec<(String, String)> {
    match config.get(KEY) {
        Some(Value::String(text)) => vec![(DEFAULT.into(), text.clone())],
        Some(Value::Array(list)) => {
            let one = |entry: &Value| Some((entry["name"].as_str()?.into(), entry["template"].as_str()?.into()));
            list.iter().filter_map(one).collect()
        }
        _ => vec![],
    }
}
