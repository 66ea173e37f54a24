//! Tokens by id with their kinds, for both kinds of tokenizers, and the files that they come from. Never writes keys.
use super::super::companions::{Companions, template};
use crate::base::{Error, Result, quote};
use serde_json::Value;

/// llama.cpp's kinds of tokens.
pub const NORMAL: i32 = 1;
pub const CONTROL: i32 = 3;
pub const USER_DEFINED: i32 = 4;
pub const UNUSED: i32 = 5;
pub const BYTE: i32 = 6;

/// A tokenizer's files, parsed; null if a file is missing.
pub struct TokenizerFiles {
    pub json: Value,
    /// `tokenizer_config.json`
    pub config: Value,
    /// `special_tokens_map.json` and `added_tokens.json`
    pub map: Value,
    pub added: Value,
    pub jinja: Option<String>,
    /// Name and text of the chat templates that have a folder.
    pub named: Vec<(String, String)>,
    /// `chat_template.json`
    pub template: Value,
}

impl TokenizerFiles {
    pub fn new(companions: &Companions) -> Result<TokenizerFiles> {
        let json = |name: &str| -> Result<Value> {
            let parse =
                |text: &[u8]| serde_json::from_slice(text).map_err(|e| refused(&format!("{name}: {}", quote(e))));
            companions.file(name).map_or(Ok(Value::Null), parse)
        };
        Ok(TokenizerFiles {
            json: json("tokenizer.json")?,
            config: json("tokenizer_config.json")?,
            map: json("special_tokens_map.json")?,
            added: json("added_tokens.json")?,
            jinja: companions.file("chat_template.jinja").map(|text| String::from_utf8_lossy(text).into_owned()),
            named: template::named(&companions.files),
            template: json("chat_template.json")?,
        })
    }
}

/// Tokens by id, with the kind of each.
pub struct Vocabulary {
    pub tokens: Vec<Vec<u8>>,
    pub kinds: Vec<i32>,
}

impl Vocabulary {
    /// Placeholders: a model may have more ids than its tokenizer.
    pub fn unused(size: usize) -> Vocabulary {
        let tokens = (0..size).map(|id| format!("[PAD{id}]").into_bytes()).collect();
        Vocabulary { tokens, kinds: vec![UNUSED; size] }
    }
    pub fn set(&mut self, id: usize, token: &str, kind: i32) {
        if id < self.tokens.len() {
            (self.tokens[id], self.kinds[id]) = (token.as_bytes().to_vec(), kind);
        }
    }
    /// An added token, which is recognized before a text is split.
    pub fn add(&mut self, id: usize, token: &str, special: bool) {
        match special || looks_special(token) {
            true => self.set(id, token, CONTROL),
            false => self.set(id, &token.replace('\u{2581}', " "), USER_DEFINED),
        }
    }
}

/// Special tokens that some models do not mark as special.
fn looks_special(token: &str) -> bool {
    let within = |from, to| token.starts_with(from) && token.ends_with(to);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&token)
        || within("<|", "|>")
        || within("<\u{ff5c}", "\u{ff5c}>")
        || within("<unused", ">")
}

pub fn refused(what: &str) -> Error {
    Error::input(format!("`save_gguf`: the tokenizer cannot go into a GGUF file: {what}"))
}
