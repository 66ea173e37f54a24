//! Tokens that the files next to a tokenizer.json add to it, as transformers 5 does: `added_tokens_decoder` of
//! tokenizer_config.json, or without it added_tokens.json. Never reads a file.
use crate::base::quote;
use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer as Pipeline};

/// The special tokens that tokenizer_config.json names, else special_tokens_map.json: under keys that end in `_token`,
/// and in `extra_special_tokens`.
pub(super) fn named(config: &Map<String, Value>, map: &Map<String, Value>) -> Vec<(String, String)> {
    // A string, or {"content": string, ..}.
    let spelling = |value: &Value| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        (!text.is_empty()).then(|| text.to_string())
    };
    let mut named: Vec<(String, String)> = Vec::new();
    for file in [config, map] {
        let extra = file.get("extra_special_tokens").and_then(Value::as_object);
        let keys = file.iter().filter(|(key, _)| key.ends_with("_token"));
        for (key, value) in keys.chain(extra.into_iter().flatten()) {
            if let Some(text) = spelling(value).filter(|_| named.iter().all(|(known, _)| known != key)) {
                named.push((key.clone(), text));
            }
        }
    }
    named
}

/// The tokens with their ids, in the order of these, from tokenizer_config.json (`config`), special_tokens_map.json and
/// added_tokens.json (`added`). Those of the last that `known` has are left out.
pub fn later_tokens(
    config: &Map<String, Value>,
    map: &Map<String, Value>,
    added: &Map<String, Value>,
    known: impl Fn(&str) -> bool,
) -> Result<Vec<(u32, AddedToken)>, String> {
    let named = named(config, map);
    let listed = config.get("additional_special_tokens").or(config.get("extra_special_tokens"));
    let spelled = |value: &Value, text: &str| value == text || value["content"] == text;
    let special = |text: &str| {
        let listed = listed.and_then(Value::as_array).is_some_and(|list| list.iter().any(|value| spelled(value, text)));
        listed || named.iter().any(|(_, name)| name == text)
    };
    let mut tokens = Vec::new();
    match config.get("added_tokens_decoder").filter(|decoder| !decoder.is_null()) {
        Some(decoder) => {
            for (id, token) in decoder.as_object().ok_or("added_tokens_decoder is not an object")? {
                let wrong = || format!("added_tokens_decoder: {} is not a token with an id", quote(id));
                let (at, text) = id.parse().ok().zip(token["content"].as_str()).ok_or_else(wrong)?;
                let flag = |key: &str, default: bool| token[key].as_bool().unwrap_or(default);
                let is_special = flag("special", false);
                let token = AddedToken::from(text, is_special || special(text))
                    .single_word(flag("single_word", false))
                    .lstrip(flag("lstrip", false))
                    .rstrip(flag("rstrip", false))
                    .normalized(flag("normalized", !is_special));
                tokens.push((at, token));
            }
        }
        None => {
            for (text, id) in added.iter().filter(|(text, _)| !known(text)) {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.ok_or_else(|| format!("added_tokens.json: {} has no id", quote(text)))?;
                tokens.push((id, AddedToken::from(text.as_str(), special(text))));
            }
        }
    }
    tokens.sort_by_key(|(id, _)| *id);
    Ok(tokens)
}

/// Adds the tokens of the files next to a tokenizer.json. Those that are new must get the ids that they have there.
pub(super) fn add(
    pipeline: &mut Pipeline,
    config: &Map<String, Value>,
    map: &Map<String, Value>,
    added: &Map<String, Value>,
) -> Result<(), String> {
    let tokens = later_tokens(config, map, added, |text| pipeline.token_to_id(text).is_some())?;
    let new: Vec<(u32, String)> = tokens
        .iter()
        .filter(|(_, token)| pipeline.token_to_id(&token.content).is_none())
        .map(|(id, token)| (*id, token.content.clone()))
        .collect();
    pipeline.add_tokens(tokens.into_iter().map(|(_, token)| token)).map_err(|e| e.to_string())?;
    let got = |text: &str| pipeline.token_to_id(text);
    match new.iter().find(|(id, text)| got(text) != Some(*id)) {
        None => Ok(()),
        Some((id, text)) => Err(format!(
            "\"{}\" has id {id} there, but the next free id is {}: correct that id, or add the token to the tokenizer.json",
            quote(text),
            got(text).map_or("none".into(), |id| id.to_string())
        )),
    }
}
