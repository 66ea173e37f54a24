//! Prompts of a command line, or of the rows of a file, and their tokens. Never runs a model.
use crate::base::{Error, Result, open, quote};
use crate::data::{Format, Tokenizer};
use crate::nn::Spec;
use crate::run::settings::Settings;
use serde_json::{Map, Value};
use std::path::Path;

/// How the name of a file of prompts ends.
pub const FILE: &str = ".jsonl";

/// What a row asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptKind {
    Text(String),
    /// A row whose field of that name is text or messages.
    Row(&'static str, Map<String, Value>),
    Ids(Vec<u32>),
}

/// A prompt, and where it is from, for messages.
#[derive(Clone, Debug)]
pub struct PromptRow {
    pub place: String,
    pub asked: PromptKind,
}

impl PromptRow {
    /// The prompt for people, without a template.
    pub fn shown(&self, tokenizer: &Tokenizer) -> String {
        match &self.asked {
            PromptKind::Text(text) => text.clone(),
            PromptKind::Row(key, row) => shown(&row[*key]),
            PromptKind::Ids(ids) => tokenizer.decode(ids),
        }
    }
}

/// Text, the text of one message, or all messages of a conversation with their roles.
fn shown(asked: &Value) -> String {
    match asked {
        Value::String(text) => text.clone(),
        Value::Object(message) => message.get("content").map_or(String::new(), shown),
        Value::Array(messages) if messages.len() == 1 => shown(&messages[0]),
        Value::Array(messages) => {
            let line = |of: &Value| format!("{}: {}", of["role"].as_str().unwrap_or_default(), shown(of));
            messages.iter().map(line).collect::<Vec<_>>().join("\n")
        }
        other => other.to_string(),
    }
}

/// The rows of a file of JSON lines: `prompt` (text or messages), `messages`, `text`, or `prompt_ids`.
pub fn read(path: &Path) -> Result<Vec<PromptRow>> {
    Ok(rows(path)?.into_iter().map(|(prompt, _)| prompt).collect())
}

/// The same with all fields of each row.
pub fn rows(path: &Path) -> Result<Vec<(PromptRow, Map<String, Value>)>> {
    let bytes = open::read(path).map_err(|e| Error::input(format!("{}: {e}", path.display())))?;
    let text = String::from_utf8(bytes).map_err(|_| Error::input(format!("{}: is not UTF-8", path.display())))?;
    let mut rows = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = format!("{}:{}", path.display(), i + 1);
        let bad = |what: String| Error::input(format!("{place}: {what}"));
        let row: Map<String, Value> =
            serde_json::from_str(line).map_err(|e| bad(format!("is not a JSON object ({e})")))?;
        let asked = asked(&row).map_err(bad)?;
        rows.push((PromptRow { place, asked }, row));
    }
    if rows.is_empty() {
        return Err(Error::input(format!("{}: has no prompts; each line is one, as a JSON object", path.display())));
    }
    Ok(rows)
}

fn asked(row: &Map<String, Value>) -> std::result::Result<PromptKind, String> {
    let field = |name| row.get(name).filter(|value| !value.is_null()).map(|value| (name, value));
    let Some((name, value)) = ["prompt_ids", "prompt", "messages", "text"].into_iter().find_map(field) else {
        return Err("has no prompt: name it `prompt`, `messages`, `text` or `prompt_ids`".into());
    };
    match value {
        Value::Array(ids) if name == "prompt_ids" => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let all: Option<Vec<u32>> = ids.iter().map(id).collect();
            all.map(PromptKind::Ids).ok_or_else(|| "has prompt_ids that are no token ids".into())
        }
        Value::String(_) | Value::Array(_) | Value::Object(_) if name != "prompt_ids" => {
            Ok(PromptKind::Row(name, row.clone()))
        }
        other => Err(format!("has {name} {}; text, or a list of messages, is expected", quote(other))),
    }
}

/// Turns prompts into tokens, as the settings say.
pub struct PromptEncoder<'a> {
    format: Format,
    tokenizer: &'a Tokenizer,
    system: Option<&'a str>,
    vocab: usize,
    max_len: usize,
}

impl<'a> PromptEncoder<'a> {
    pub fn new(s: &'a Settings, format: Format, tokenizer: &'a Tokenizer, spec: &Spec) -> PromptEncoder<'a> {
        let system = s.generate.system_prompt.as_deref();
        PromptEncoder { format, tokenizer, system, vocab: spec.vocab, max_len: spec.max_len }
    }
    /// The tokens, with room for at least one more.
    pub fn encode(&self, row: &PromptRow) -> Result<Vec<u32>> {
        let place = &row.place;
        let mut tokens = Vec::new();
        let bad = |e| Error::input(format!("{place} {e}"));
        match &row.asked {
            PromptKind::Ids(ids) => {
                if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab) {
                    return Err(Error::input(format!("{place} has token id {id}, but vocab_size is {}", self.vocab)));
                }
                tokens.clone_from(ids);
            }
            PromptKind::Row(key, row) => {
                let asked = self.format.asked_by(row, key, self.system);
                match asked.map_err(|what| Error::input(format!("{place} {what}")))? {
                    Some(asked) => self.tokenizer.encode(&asked, &mut tokens).map_err(bad)?,
                    None => tokens = self.text(place, row[*key].as_str().unwrap_or_default())?,
                }
            }
            PromptKind::Text(prompt) => tokens = self.text(place, prompt)?,
        }
        if tokens.is_empty() {
            return Err(Error::input(format!("{place} is empty: give it at least one token")));
        }
        if tokens.len() >= self.max_len {
            return Err(Error::input(format!(
                "{place} has {} tokens, but the model's max_positions is {}: shorten it",
                tokens.len(),
                self.max_len
            )));
        }
        Ok(tokens)
    }
    /// The tokens of a prompt that is text.
    fn text(&self, place: &str, prompt: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        let bad = |e| Error::input(format!("{place} {e}"));
        match (self.tokenizer, self.format.asked(self.system, prompt)?) {
            (Tokenizer::None(why), asked) => {
                tokens = ids(place, &asked.unwrap_or(prompt.to_string()), self.vocab, why)?;
            }
            (_, Some(asked)) => self.tokenizer.encode(&asked, &mut tokens).map_err(bad)?,
            (_, None) => {
                tokens.extend(self.tokenizer.affixes().0);
                self.tokenizer.encode(prompt, &mut tokens).map_err(bad)?;
            }
        }
        Ok(tokens)
    }
}

/// The prompt of a model without a tokenizer: token ids, separated by spaces or commas.
fn ids(place: &str, prompt: &str, vocab: usize, why: &str) -> Result<Vec<u32>> {
    let words = prompt.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let id = |word: &str| match word.parse() {
        Ok(id) if (id as usize) < vocab => Ok(id),
        Ok(id) => Err(Error::input(format!("{place} has token id {id}, but vocab_size is {vocab}"))),
        Err(_) => Err(Error::input(format!("{place} has no tokenizer: {why}. Or give token ids, such as \"3 17 5\""))),
    };
    words.map(id).collect()
}
