//! Prompts of a command line, or of rows, and their tokens. Never runs a model.
use crate::base::{Error, Result, quote};
use crate::data::{Format, JsonRow, RowFiles, RowResult, Tokenizer, each_row};
use crate::nn::Spec;
use crate::run::settings::Settings;
use crate::run::settings::defaults::defaults;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// How names of files of rows end.
const FILES: [&str; 9] =
    [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"];
const IDS: &str = "prompt_ids";
const MESSAGES: &str = "messages";
/// Fields that hold a prompt; the first of a row counts.
const FIELDS: [&str; 5] = [IDS, "prompt", MESSAGES, "conversations", TEXT];
const TEXT: &str = "text";

/// What a prompt is.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptKind {
    Text(String),
    /// Text or messages in this field of the row.
    Field(String),
    Ids(Vec<u32>),
}

/// A prompt, where it is from, for messages, and all fields of its row.
#[derive(Clone, Debug)]
pub struct PromptRow {
    pub place: String,
    pub asked: PromptKind,
    pub fields: JsonRow,
}

impl PromptRow {
    /// The prompt for people, without a template. `answered`: it ends before the last message.
    pub fn shown(&self, tokenizer: &Tokenizer, answered: bool) -> String {
        match &self.asked {
            PromptKind::Text(text) => text.clone(),
            PromptKind::Field(key) => match &self.fields[key] {
                Value::Array(messages) if answered => shown(&Value::Array(messages[..messages.len() - 1].to_vec())),
                asked => shown(asked),
            },
            PromptKind::Ids(ids) => tokenizer.decode(ids),
        }
    }
}

/// Text, the text of one message, or all messages of a conversation with their roles.
fn shown(asked: &Value) -> String {
    match asked {
        Value::String(text) => text.clone(),
        Value::Object(message) => message.get("content").or(message.get("value")).map_or(String::new(), shown),
        Value::Array(messages) if messages.len() == 1 => shown(&messages[0]),
        Value::Array(messages) => {
            let role = |of: &Value| of["role"].as_str().or(of["from"].as_str()).unwrap_or_default().to_string();
            let line = |of: &Value| format!("{}: {}", role(of), shown(of));
            messages.iter().map(line).collect::<Vec<_>>().join("\n")
        }
        other => other.to_string(),
    }
}

/// Whether `prompt` names a file of prompts: it is a path, or a word that ends like one, as hardly any text does.
pub fn is_file(prompt: &str) -> bool {
    let word = !prompt.contains(char::is_whitespace);
    Path::new(prompt).exists() || word && FILES.iter().any(|ending| prompt.ends_with(ending))
}

/// `prompt_key` and `input_key`, if they are given.
fn keys(s: &Settings) -> [Option<&str>; 2] {
    let prompt = s.objective.prompt_key.as_deref().filter(|key| defaults()["objective"]["prompt_key"] != *key);
    [prompt, s.data.input_key.as_deref()]
}

/// What is said of settings about rows of prompts where there are none.
pub fn without_rows(s: &Settings) -> impl Iterator<Item = String> {
    let ([prompt, input], most) = (keys(s), s.data.max_samples.map(|n| n.to_string()));
    let given = [
        ("prompt-key", prompt.map(|key| format!(" {key}"))),
        ("input-key", input.map(|key| format!(" {key}"))),
        ("max-samples", most.map(|most| format!(" {most}"))),
        ("rename-fields", s.data.rename_fields.as_ref().map(|names| format!(" {}", names.join(" ")))),
        ("rename-roles", s.data.rename_roles.as_ref().map(|names| format!(" {}", names.join(" ")))),
        ("skip-bad-rows", s.data.skip_bad_rows.filter(|&skip| skip).map(|_| String::new())),
    ];
    let says = |(flag, value): (&str, Option<String>)| {
        value.map(|value| format!("--{flag}{value} has no effect here: there are no rows of prompts"))
    };
    given.into_iter().filter_map(says)
}

/// Which field of a row is the prompt.
#[derive(Clone, Copy)]
pub enum PromptField<'a> {
    Named(&'a str),
    /// The first that a row has of the fields for prompts; a setting may name another.
    Unnamed,
    /// The same, and no setting names another.
    Known,
}

/// The field of the prompt that the settings name.
pub fn field(s: &Settings) -> Result<PromptField<'_>> {
    match keys(s).into() {
        (Some(one), Some(other)) if one != other => Err(Error::input(format!(
            "--prompt-key {one} and --input-key {other} both name the field of the prompt: remove one"
        ))),
        (prompt, input) => Ok(prompt.or(input).map_or(PromptField::Unnamed, PromptField::Named)),
    }
}

/// Passes on the prompts in the rows at `paths`, in order, or what is wrong with one. They are in `field`, by the names
/// of the settings.
pub fn each(
    s: &Settings,
    paths: &[PathBuf],
    field: PromptField,
    each: &mut dyn FnMut(Result<PromptRow>) -> Result<()>,
) -> Result<RowFiles> {
    let mut any = false;
    let made = each_row(paths, &s.data.renames()?, &mut |place, row| {
        any = true;
        let row = row.and_then(|mut fields| Ok((asked(&mut fields, field)?, fields)));
        each(match row {
            Ok((asked, fields)) => Ok(PromptRow { place, asked, fields }),
            Err(fault) => Err(Error::input(format!("{place} {fault}"))),
        })
    })?;
    match any {
        true => Ok(made),
        false => Err(Error::input(format!("`dataset` {}: no rows: the file is empty", made.what))),
    }
}

/// Rows that are no prompts and were skipped.
#[derive(Clone, Debug, Default)]
pub struct SkippedRows {
    pub count: u64,
    /// What is wrong with the first.
    pub first: Option<String>,
}

impl SkippedRows {
    /// What was made of a row; None if nothing was, and bad rows are to be skipped.
    pub fn unless<T>(&mut self, skip: bool, made: Result<T>) -> Result<Option<T>> {
        match made {
            Err(Error::Input(what)) if skip => {
                self.count += 1;
                self.first.get_or_insert(what);
                Ok(None)
            }
            made => made.map(Some),
        }
    }
    /// How many there were in `what`.
    pub fn note(&self, what: &str) -> Option<String> {
        let (count, first) = (self.count, self.first.as_ref()?);
        Some(format!("{what}: {count} bad row{} skipped (the first: {first})", if count == 1 { "" } else { "s" }))
    }
    /// The error of a `what` that has no other rows.
    pub fn all(&self, what: &str) -> Error {
        let (count, first) = (self.count, self.first.as_deref().unwrap_or_default());
        Error::input(format!("{what}: none of its {count} rows has a prompt: {first}"))
    }
}

/// Passes on the prompts in the rows at `paths`, which `flag` names, in order, until one is the last.
pub fn read(
    s: &Settings,
    flag: &str,
    paths: &[PathBuf],
    field: PromptField,
    more: &mut dyn FnMut(Result<PromptRow>) -> Result<bool>,
) -> Result<()> {
    let read = each(s, paths, field, &mut |prompt| match more(prompt)? {
        true => Ok(()),
        false => Err(Error::Reported), // ends the reader
    });
    match read {
        Err(Error::Input(text)) => Err(Error::Input(text.replace("`dataset`", flag))),
        Err(Error::Reported) | Ok(_) => Ok(()),
        Err(other) => Err(other),
    }
}

fn asked(row: &mut JsonRow, field: PromptField) -> RowResult<PromptKind> {
    let is_given = |name: &&str| row.get(*name).is_some_and(|value| !value.is_null());
    let keys = || row.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let remedy = match field {
        PromptField::Unnamed => ". Name the field of the prompt with `input_key`",
        _ => "",
    };
    let name = match field {
        PromptField::Named(key) => {
            Some(key).filter(is_given).ok_or_else(|| format!("has no `{key}`; its keys are: {}", keys()))?
        }
        _ => FIELDS.into_iter().find(is_given).ok_or_else(|| {
            let known = "`prompt`, `messages`, `conversations`, `text` or `prompt_ids`";
            format!("has no prompt in {known}; its keys are: {}{remedy}", keys())
        })?,
    };
    if name == TEXT && !matches!(field, PromptField::Named(_)) && row.contains_key("instruction") {
        return Err(format!("has `text` next to `instruction`, whose answer it may hold{remedy}"));
    }
    // Columns of CSV and Parquet files may hold lists as JSON text.
    let is_list = |text: &&str| (name == IDS || FIELDS[2..4].contains(&name)) && text.trim_start().starts_with('[');
    if let Some(text) = row[name].as_str().filter(is_list) {
        let list = serde_json::from_str(text).map_err(|e| format!("has {name} that are text, but not JSON ({e})"))?;
        row.insert(name.into(), list);
    }
    match &row[name] {
        Value::Array(ids) if name == IDS => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let all: Option<Vec<u32>> = ids.iter().map(id).collect();
            all.map(PromptKind::Ids).ok_or_else(|| format!("has {IDS} that are no token ids"))
        }
        Value::String(_) | Value::Array(_) | Value::Object(_) if name != IDS => Ok(PromptKind::Field(name.into())),
        other => Err(format!("has {name} {}; text, or a list of messages, is expected", quote(other))),
    }
}

/// The tokens of a prompt.
pub struct EncodedPrompt {
    pub ids: Vec<u32>,
    /// The row goes on with an answer, which is not in it.
    pub answered: bool,
}

/// What is said of such rows.
pub const ANSWERED: &str = "answers that end conversations (what comes before is the prompt)";

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
    pub fn encode(&self, row: &PromptRow) -> Result<EncodedPrompt> {
        let PromptRow { place, asked, fields } = row;
        let (mut tokens, mut answered) = (Vec::new(), false);
        let bad = |e| Error::input(format!("{place} {e}"));
        match asked {
            PromptKind::Ids(ids) => {
                if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab) {
                    return Err(Error::input(format!("{place} has token id {id}, but vocab_size is {}", self.vocab)));
                }
                tokens.clone_from(ids);
            }
            PromptKind::Field(key) => {
                let asked = self.format.asked_by(fields, key, self.system);
                match asked.map_err(|what| Error::input(format!("{place} {what}")))? {
                    Some((asked, has_answer)) => {
                        answered = has_answer;
                        self.tokenizer.encode(&asked, &mut tokens).map_err(bad)?;
                    }
                    None => tokens = self.text(place, fields[key].as_str().unwrap_or_default())?,
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
        Ok(EncodedPrompt { ids: tokens, answered })
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
                if self.format.begins_texts() {
                    tokens.extend(self.tokenizer.before(prompt));
                }
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
