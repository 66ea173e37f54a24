//! The tokenizer's files of a Hugging Face directory from the keys of a GGUF file: tokenizer.json, and
//! tokenizer_config.json with the special tokens and the chat templates. Never tokenizes.
//!
//! A GGUF file has tokens with merges (byte-level BPE) or with scores (SentencePiece). How a text is split before that
//! is only named; [`SplitRule`] spells the names out, as the published tokenizer.json of each has it.
use super::super::file::{GgufFile, GgufValue};
use super::super::sentencepiece::{self, ADDED, Piece};
use super::super::splits::SplitRule;
use super::super::vocabulary::{BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED};
use crate::base::{Error, Result, quote};
use crate::ckpt::layout::pretty;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// A kind of tokens that only files of others have.
const UNKNOWN: i32 = 2;

/// Name and content of the tokenizer's files.
pub fn files(file: &GgufFile) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let keys = TokenizerKeys(file);
    let model = keys.text("tokenizer.ggml.model")?.unwrap_or("none");
    if model == "none" || model == "no_vocab" {
        return Ok(Vec::new());
    }
    let tokens = keys.tokens()?;
    let id = |name: &str| keys.special(name, tokens.len());
    let ids = [id("bos")?, id("eos")?, id("unknown")?, id("padding")?];
    let add = |name: &str, default: bool| keys.flag(&format!("tokenizer.ggml.add_{name}_token"), default);
    let text = |id: Option<usize>| id.map(|id| tokens[id].text.clone());
    let mut config = Map::new();
    let names = ["bos_token", "eos_token", "unk_token", "pad_token"];
    let spelled = names.into_iter().zip(ids).filter_map(|(name, id)| Some((name.to_string(), json!(text(id)?))));
    config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    config.insert("clean_up_tokenization_spaces".into(), json!(false));
    config.extend(spelled);
    for name in ["bos", "eos"] {
        if keys.get(&format!("tokenizer.ggml.add_{name}_token")).is_some() {
            config.insert(format!("add_{name}_token"), json!(add(name, false)?));
        }
    }
    let json = match (keys.text("tokenizer.huggingface.json")?, model) {
        (Some(json), _) => {
            let parsed = serde_json::from_str(json);
            parsed.map_err(|e| Error::input(format!("tokenizer.huggingface.json: {}", quote(e))))?
        }
        (None, "gpt2" | "llama") => {
            let (mut json, begins) = match model {
                "gpt2" => byte_pairs(&keys, &tokens)?,
                _ => (pieces(&keys, &tokens, ids[2])?, true),
            };
            let begin = ids[0].filter(|_| matches!(add("bos", begins), Ok(true)));
            let end = ids[1].filter(|_| matches!(add("eos", false), Ok(true)));
            json["post_processor"] = last_step(added_around(&tokens, begin, end), model == "gpt2");
            json
        }
        (None, other) => {
            return Err(Error::input(format!(
                "tokenizer.ggml.model is {}; supported: gpt2 and llama. Use the model's Hugging Face directory",
                quote(other)
            )));
        }
    };
    if let Some(templates) = templates(&keys)? {
        config.insert("chat_template".into(), templates);
    }
    let mut files = vec![("tokenizer.json", pretty(&json).into_bytes())];
    if model == "llama" {
        config.insert("added_tokens_decoder".into(), Value::Object(added_later(&tokens)));
        let prefix = keys.flag(PREFIX, true)?;
        if keys.get(PREFIX).is_some() {
            config.insert("add_prefix_space".into(), json!(prefix));
        }
        files.push(("tokenizer.model", model_file(&tokens, prefix)));
    }
    files.push(("tokenizer_config.json", pretty(&Value::Object(config)).into_bytes()));
    Ok(files)
}

/// The last step: what is added around a text, after the byte-level step of published files, which changes nothing.
fn last_step(around: Value, byte_level: bool) -> Value {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
    match (byte_level, around) {
        (true, Value::Null) => bytes,
        (true, around) => json!({"type": "Sequence", "processors": [bytes, around]}),
        (false, around) => around,
    }
}

/// What is added around a text; null if nothing is.
fn added_around(tokens: &[VocabToken], begin: Option<usize>, end: Option<usize>) -> Value {
    if begin.is_none() && end.is_none() {
        return Value::Null;
    }
    let special = |id: usize, part: u32| json!({"SpecialToken": {"id": tokens[id].text, "type_id": part}});
    let one = |name: &str, part: u32| {
        let text = json!({"Sequence": {"id": name, "type_id": part}});
        let begin = begin.map(|id| special(id, part));
        begin.into_iter().chain([text]).chain(end.map(|id| special(id, part))).collect::<Vec<_>>()
    };
    let known = |id: usize| {
        let text = &tokens[id].text;
        (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]}))
    };
    let known: Map<String, Value> = begin.into_iter().chain(end).map(known).collect();
    let pair = [one("A", 0), one("B", 1)].concat();
    json!({"type": "TemplateProcessing", "single": one("A", 0), "pair": pair, "special_tokens": known})
}

/// Ids that end a text: of the text, of a turn, of a message.
pub fn ends(file: &GgufFile) -> Result<(Option<usize>, Vec<usize>)> {
    let keys = TokenizerKeys(file);
    let size = keys.list("tokenizer.ggml.tokens")?.len();
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(keys.special(name, size)?.filter(|id| !ends.contains(id)));
    }
    Ok((keys.special("bos", size)?, ends))
}

struct VocabToken {
    text: String,
    kind: i32,
    score: f32,
}

/// Byte-level BPE, and whether a text begins with a token by default.
fn byte_pairs(keys: &TokenizerKeys, tokens: &[VocabToken]) -> Result<(Value, bool)> {
    let name = keys.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let Some(rule) = SplitRule::named(name) else {
        return Err(Error::input(format!(
            "tokenizer.ggml.pre is {}; supported: {}. Use the model's Hugging Face directory",
            quote(name),
            SplitRule::names().collect::<Vec<_>>().join(", ")
        )));
    };
    let pair = |merge: &String| {
        // The first part may be a space of its own.
        let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        at.map(|at| json!([merge[..at], merge[at + 1..]]))
    };
    let merges: Option<Vec<Value>> = keys.list("tokenizer.ggml.merges")?.iter().map(pair).collect();
    let merges = merges.ok_or_else(|| Error::input("tokenizer.ggml.merges has an entry that is not a pair"))?;
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": rule.ignores_merges,
        "vocab": vocabulary(tokens), "merges": merges,
    });
    let normalizer = if rule.composed { json!({"type": "NFC"}) } else { Value::Null };
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let added = added(tokens);
    Ok((whole(added, normalizer, rule.json(), decoder, model), rule.begins))
}

/// SentencePiece's BPE, which falls back on bytes. The order of merges follows from the scores of what they make, as
/// in transformers' `generate_merges`.
fn pieces(keys: &TokenizerKeys, tokens: &[VocabToken], unknown: Option<usize>) -> Result<Value> {
    let spelled: Vec<VocabToken> =
        tokens.iter().map(|t| VocabToken { text: mark(&t.text), kind: t.kind, score: t.score }).collect();
    let unknown = unknown.or_else(|| tokens.iter().position(|t| t.kind == UNKNOWN));
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": unknown.map(|id| &spelled[id].text),
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
        "byte_fallback": tokens.iter().any(|t| t.kind == BYTE), "ignore_merges": false,
        "vocab": vocabulary(&spelled), "merges": merges(&spelled),
    });
    let prefix = keys.flag(PREFIX, true)?;
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let mut back = vec![
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let normalizer = if prefix {
        back.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace]})
    } else {
        replace
    };
    let decoder = json!({"type": "Sequence", "decoders": back});
    Ok(whole(added(&spelled), normalizer, Value::Null, decoder, model))
}

/// `tokenizer.model`, without the placeholders at the end.
fn model_file(tokens: &[VocabToken], prefix: bool) -> Vec<u8> {
    let real = tokens.iter().enumerate().rposition(|(id, token)| !is_placeholder(id, token)).map_or(0, |last| last + 1);
    let pieces =
        tokens[..real].iter().map(|token| Piece { text: mark(&token.text), score: token.score, kind: token.kind });
    sentencepiece::file(&pieces.collect::<Vec<_>>(), prefix)
}

/// `added_tokens_decoder`: tokens that are not pieces of `tokenizer.model`, or that users defined.
fn added_later(tokens: &[VocabToken]) -> Map<String, Value> {
    let later = |token: &VocabToken| token.kind == USER_DEFINED || token.kind == CONTROL && token.score == ADDED;
    let all = tokens.iter().enumerate().filter(|(_, token)| later(token));
    let spelled = |token: &VocabToken| VocabToken { text: mark(&token.text), ..*token };
    all.map(|(id, token)| (id.to_string(), entry(&spelled(token)))).collect()
}

/// Spaces as SentencePiece spells them.
fn mark(text: &str) -> String {
    text.replace(' ', "\u{2581}")
}

/// Ids that no tokenizer gives.
fn is_placeholder(id: usize, token: &VocabToken) -> bool {
    token.kind == UNUSED && token.text == format!("[PAD{id}]")
}

/// Every way to make a token of two, those of better scores first.
fn merges(tokens: &[VocabToken]) -> Vec<Value> {
    let merged = |t: &VocabToken| matches!(t.kind, NORMAL | USER_DEFINED | UNUSED);
    let ids: HashMap<&str, usize> =
        tokens.iter().enumerate().filter(|(_, t)| merged(t)).map(|(id, t)| (&t.text[..], id)).collect();
    let mut order: Vec<usize> = (0..tokens.len()).filter(|id| merged(&tokens[*id])).collect();
    // Pieces that users defined are matched before all others, the longest first.
    let chars = |id: usize| tokens[id].text.chars().count();
    let rank = |id: &usize| if tokens[*id].kind == USER_DEFINED { f32::INFINITY } else { tokens[*id].score };
    let length = |id: &usize| if rank(id).is_finite() { 0 } else { chars(*id) };
    order.sort_by(|a, b| rank(b).total_cmp(&rank(a)).then_with(|| length(b).cmp(&length(a))));
    let mut all = Vec::new();
    for group in order.chunk_by(|a, b| rank(a) == rank(b) && rank(a).is_finite()) {
        let mut found = Vec::new();
        for &id in group {
            let text = &tokens[id].text;
            let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
            let mut pairs: Vec<(usize, usize)> =
                parts.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?))).collect();
            pairs.sort_unstable();
            found.extend(pairs);
        }
        // A stable sort: among pairs of equal lengths, the order of the pieces and then of the ids counts.
        found.sort_by_key(|(left, right)| std::cmp::Reverse((chars(*left), chars(*right))));
        all.extend(found.iter().map(|(left, right)| json!([tokens[*left].text, tokens[*right].text])));
    }
    all
}

/// Tokens with their ids, without placeholders. The first of equal ones counts.
fn vocabulary(tokens: &[VocabToken]) -> Map<String, Value> {
    let mut vocabulary = Map::new();
    for (id, token) in tokens.iter().enumerate() {
        if !is_placeholder(id, token) {
            vocabulary.entry(&token.text).or_insert(json!(id));
        }
    }
    vocabulary
}

/// Tokens that are recognized before a text is split.
fn added(tokens: &[VocabToken]) -> Vec<Value> {
    let all = tokens.iter().enumerate();
    let added = all.filter(|(_, token)| matches!(token.kind, CONTROL | USER_DEFINED | UNKNOWN));
    let numbered = |(id, token): (usize, &VocabToken)| {
        let mut map = Map::new();
        map.insert("id".into(), json!(id));
        if let Value::Object(more) = entry(token) {
            map.extend(more);
        }
        Value::Object(map)
    };
    added.map(numbered).collect()
}

fn entry(token: &VocabToken) -> Value {
    json!({
        "content": token.text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": token.kind != USER_DEFINED,
    })
}

fn whole(added: Vec<Value>, normalizer: Value, splits: Value, decoder: Value, model: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": splits, "post_processor": null, "decoder": decoder, "model": model,
    })
}

/// `chat_template` of tokenizer_config.json: a text, or a list of named ones.
fn templates(keys: &TokenizerKeys) -> Result<Option<Value>> {
    const KEY: &str = "tokenizer.chat_template";
    let default = keys.text(KEY)?;
    let mut named = Vec::new();
    for name in keys.list("tokenizer.chat_templates")? {
        let text = keys.text(&format!("{KEY}.{name}"))?;
        named.extend(text.map(|text| json!({"name": name, "template": text})));
    }
    Ok(match (default, named.is_empty()) {
        (default, true) => default.map(|text| json!(text)),
        (default, false) => {
            let default = default.map(|text| json!({"name": "default", "template": text}));
            Some(default.into_iter().chain(named).collect())
        }
    })
}

struct TokenizerKeys<'a>(&'a GgufFile);

impl<'a> TokenizerKeys<'a> {
    fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.0.keys.get(key)
    }
    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Text(text)) => Ok(Some(text)),
            Some(_) => Err(Error::input(format!("{} is not a text", quote(key)))),
        }
    }
    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(GgufValue::Bool(flag)) => Ok(*flag),
            Some(_) => Err(Error::input(format!("{key} is not true or false"))),
        }
    }
    fn list(&self, key: &str) -> Result<&'a [String]> {
        match self.get(key) {
            None => Ok(&[]),
            Some(GgufValue::Texts(list)) => Ok(list),
            Some(_) => Err(Error::input(format!("{key} is not a list of texts"))),
        }
    }
    /// The id of a special token, which must be one of `size`.
    fn special(&self, name: &str, size: usize) -> Result<Option<usize>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match self.get(&key) {
            None => Ok(None),
            Some(GgufValue::Int(id)) if (0..size as i128).contains(id) => Ok(Some(*id as usize)),
            Some(GgufValue::Int(id)) => Err(Error::input(format!("{key} is {id}, but there are {size} tokens"))),
            Some(_) => Err(Error::input(format!("{key} is not a token id"))),
        }
    }
    fn tokens(&self) -> Result<Vec<VocabToken>> {
        let texts = self.list("tokenizer.ggml.tokens")?;
        let kinds = match self.get("tokenizer.ggml.token_type") {
            Some(GgufValue::Ints(kinds)) if kinds.len() == texts.len() => &kinds[..],
            None => &[],
            Some(_) => {
                return Err(Error::input(format!("tokenizer.ggml.token_type is not a list of {} kinds", texts.len())));
            }
        };
        let scores = match self.get("tokenizer.ggml.scores") {
            Some(GgufValue::Floats(scores)) if scores.len() == texts.len() => &scores[..],
            None => &[],
            Some(_) => {
                return Err(Error::input(format!("tokenizer.ggml.scores is not a list of {} numbers", texts.len())));
            }
        };
        let kind = |id: usize| kinds.get(id).map_or(NORMAL, |kind| *kind as i32);
        let score = |id: usize| scores.get(id).copied().unwrap_or(-(id as f32));
        Ok(texts
            .iter()
            .enumerate()
            .map(|(id, text)| VocabToken { text: text.clone(), kind: kind(id), score: score(id) })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So that long runs become the tokens of Gemma 3's own tokenizer, whose merges are in this order.
    #[test]
    fn the_longest_pieces_that_users_defined_are_merged_first() {
        let token = |(text, kind): (&str, i32)| VocabToken { text: text.into(), kind, score: 0.0 };
        let pieces = [
            ("\n", NORMAL),
            ("\n\n", USER_DEFINED),
            ("\n\n\n", USER_DEFINED),
            ("ab", NORMAL),
            ("a", NORMAL),
            ("b", NORMAL),
        ];
        let expected = [["\n\n", "\n"], ["\n", "\n\n"], ["\n", "\n"], ["a", "b"]].map(|pair| json!(pair));
        assert_eq!(merges(&pieces.map(token)), expected);
    }
}
