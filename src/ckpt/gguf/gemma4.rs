//! The vocabulary of Gemma 4: llama.cpp runs its merges of whole texts as tokenizer.json has them. Never tokenizes.
use super::vocabulary::{BYTE, CONTROL, NORMAL, TokenizerFiles, USER_DEFINED, Vocabulary, refused};
use crate::base::Result;
use serde_json::Value;
use std::collections::HashSet;

/// Tokens that llama.cpp always shows, so that its parser of chats can read them.
const SHOWN: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// All tokens by id, of which a model has exactly as many.
pub fn vocabulary(files: &TokenizerFiles, size: usize) -> Result<Vocabulary> {
    let model = &files.json["model"];
    if model["type"] != "BPE" || model["byte_fallback"] != true {
        return Err(refused("Gemma 4's is BPE that falls back on bytes"));
    }
    let special = special(&files.config);
    let (mut vocabulary, mut given) = (Vocabulary::unused(size), HashSet::new());
    let mut set = |token: &str, id: &Value, other: i32| {
        let kind = match token {
            _ if SHOWN.contains(&token) => USER_DEFINED,
            _ if other == NORMAL && is_byte(token) => BYTE,
            _ if special.contains(token) => CONTROL,
            _ => other,
        };
        if let Some(id) = id.as_u64() {
            given.insert(id);
            vocabulary.set(id as usize, token, kind);
        }
    };
    for (token, id) in model["vocab"].as_object().into_iter().flatten() {
        set(token, id, NORMAL);
    }
    let base = model["vocab"].as_object();
    for token in files.json["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        if base.is_none_or(|base| !base.contains_key(text)) {
            set(text, &token["id"], USER_DEFINED);
        }
    }
    if given.len() != size || given.iter().any(|id| *id >= size as u64) {
        return Err(refused(&format!("it has {} tokens, and the model {size}", given.len())));
    }
    Ok(vocabulary)
}

/// Tokens that tokenizer_config.json gives a role.
fn special(config: &Value) -> HashSet<String> {
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_string);
    let roles = config.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_token"));
    let lists = ["extra_special_tokens", "additional_special_tokens"].map(|key| match &config[key] {
        Value::Array(list) => list.iter().filter_map(text).collect(),
        Value::Object(map) => map.values().filter_map(text).collect(),
        _ => Vec::new(),
    });
    roles.filter_map(|(_, value)| text(value)).chain(lists.into_iter().flatten()).collect()
}

/// `<0x0A>`
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.chars().all(|c| c.is_ascii_hexdigit()))
}
