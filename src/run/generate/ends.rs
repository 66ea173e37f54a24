//! What ends a text: tokens, and strings. Never samples one.
use crate::base::{Error, Result, open};
use crate::ckpt;
use crate::data::{ChatTemplate, Tokenizer};
use crate::run::plan::data;
use crate::run::settings::Settings;
use serde_json::Value;
use std::path::Path;

/// What files have in the place of a token that there is not.
const NONE: i64 = -1;

/// End-of-text tokens: `eos_token_id` of generation_config.json, else of config.json, and the tokenizer's own.
pub(super) fn stop_tokens(model: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut stop: Vec<u32> = tokenizer.eos().into_iter().collect();
    for name in ["generation_config.json", ckpt::hf::FILE] {
        let path = model.join(name);
        let Ok(text) = open::read(&path) else { continue };
        let bad = |what: String| Error::input(format!("{}: {what}", path.display()));
        let parsed = Value::Object(ckpt::hf::flat(&ckpt::hf::map(&text).map_err(bad)?));
        let ids = match &parsed["eos_token_id"] {
            Value::Null => continue,
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        for id in ids.iter().filter(|id| **id != NONE) {
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            stop.push(number.ok_or_else(|| bad(format!("eos_token_id {id}: it must be a token id")))?);
        }
        break;
    }
    Ok(stop)
}

/// The token that ends an answer in the template, if it is one.
pub(super) fn end_of_turn(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<u32> {
    one_token(template.end_of_turn()?, tokenizer)
}
fn one_token(text: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids).ok()?;
    if let [id] = ids[..] { Some(id) } else { None }
}

/// The strings of --stop that are a special token each, which a text does not show.
pub(super) fn special_stops(s: &Settings, tokenizer: &Tokenizer) -> impl Iterator<Item = u32> {
    let strings = s.generate.stop.iter().flatten();
    strings.filter_map(|text| one_token(text, tokenizer).filter(|&id| tokenizer.decode(&[id]).is_empty()))
}

/// Tokens that end a sample of a model in training.
pub fn stops(s: &Settings, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut stops = match &s.model.pretrain {
        Some(dir) => stop_tokens(dir, tokenizer)?,
        None => tokenizer.eos().into_iter().collect(),
    };
    if let Some(template) = data::format(&s.data, tokenizer)?.chat {
        stops.extend(end_of_turn(&template, tokenizer));
    }
    stops.extend(special_stops(s, tokenizer));
    Ok(stops)
}

/// What ends the texts of a file of prompts.
pub struct TextEnds {
    tokens: Vec<u32>,
    strings: Vec<String>,
}

impl TextEnds {
    /// `tokens`: those that end a text. The strings are those of the settings.
    pub fn new(s: &Settings, tokens: Vec<u32>) -> TextEnds {
        TextEnds { tokens, strings: s.generate.stop.clone().unwrap_or_default() }
    }
    /// Whether a text of these tokens continues after the last of them.
    pub fn is_open(&self, tokenizer: &Tokenizer, ids: &[u32]) -> bool {
        !ids.last().is_some_and(|id| self.tokens.contains(id)) && !ends_at(tokenizer, ids, &self.strings)
    }
    /// The text of the tokens, without what ended it.
    pub fn text(&self, tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let ids = match ids.split_last() {
            Some((last, ids)) if self.tokens.contains(last) => ids,
            _ => ids,
        };
        cut(&tokenizer.decode(ids), &self.strings).to_string()
    }
}

/// Whether the last tokens have made one of the strings.
fn ends_at(tokenizer: &Tokenizer, ids: &[u32], strings: &[String]) -> bool {
    let Some(longest) = strings.iter().map(String::len).max() else { return false };
    // A token has at least a byte, and the first ones may be parts of a character.
    let text = tokenizer.decode(&ids[ids.len().saturating_sub(longest + 8)..]);
    strings.iter().any(|string| text.contains(string.as_str()))
}

/// The text before the first of the strings.
pub fn cut<'a>(text: &'a str, strings: &[String]) -> &'a str {
    let end = strings.iter().filter_map(|string| text.find(string.as_str())).min();
    &text[..end.unwrap_or(text.len())]
}
