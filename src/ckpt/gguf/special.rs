//! Special tokens, whether they are added around a text, and the chat template, read from tokenizer.json,
//! tokenizer_config.json and config.json with the rules of llama.cpp's converter. Never reads ordinary tokens.
use super::header::{GgufKeys, KeyValue};
use super::vocabulary::TokenizerFiles;
use crate::nn::Arch;
use serde_json::{Map, Value, json};

/// A token's name in Hugging Face files, and its key in a GGUF file.
const TYPES: [(&str, &str); 8] = [
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("unk", "unknown_token_id"),
    ("sep", "seperator_token_id"), // spelled so
    ("pad", "padding_token_id"),
    ("mask", "mask_token_id"),
    ("eot", "eot_token_id"),
    ("eom", "eom_token_id"),
];

#[derive(Default)]
pub struct SpecialTokens {
    /// Type and id; type and whether it is added around a text. Both in the order in which the converter finds them.
    ids: Vec<(&'static str, u64)>,
    add: Vec<(&'static str, bool)>,
    /// Name and text; the default template has no name.
    templates: Vec<(String, String)>,
}

impl SpecialTokens {
    /// Ignores ids that are not below `below`.
    pub fn new(files: &TokenizerFiles, config: &Map<String, Value>, below: Option<usize>) -> SpecialTokens {
        let mut found = SpecialTokens::default();
        let mut types = 6; // eot and eom where a template asks for them
        if let Some(mut names) = files.config.as_object().cloned() {
            for (key, other) in [("bos_token", "cls_token"), ("eos_token", "sep_token")] {
                if is_missing(names.get(key)) && !is_missing(names.get(other)) {
                    names.insert(key.into(), given(&names, other));
                }
            }
            let post = &files.json["post_processor"];
            let parts = post["processors"].as_array().map_or(std::slice::from_ref(post), Vec::as_slice);
            parts.iter().for_each(|part| types = types.max(found.processor(part, &mut names)));
            found.templates = templates(files, &names);
            let added = files.json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
            for (name, _) in &TYPES[..types] {
                if let Some(add) = names.get(&format!("add_{name}_token")).and_then(Value::as_bool) {
                    found.set_add(name, add, false);
                }
                let token = names.get(&format!("{name}_token"));
                let token = token.and_then(|token| token.as_str().or_else(|| token["content"].as_str()));
                let id = added.iter().find(|entry| token.is_some() && entry["content"].as_str() == token);
                found.set_id(name, id.map_or(&Value::Null, |entry| &entry["id"]), below);
            }
        }
        for (name, _) in &TYPES[..types] {
            found.set_id(name, config.get(&format!("{name}_token_id")).unwrap_or(&Value::Null), below);
        }
        found
    }

    /// What the converter corrects in the files of a family.
    pub fn of_family(&mut self, arch: Arch, files: &TokenizerFiles, config: &Map<String, Value>, generation: &Value) {
        match arch {
            Arch::Glm4 | Arch::Glm4MoeLite => {
                let added = files.json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
                let eot = [("eot", "<|user|>"), ("unk", "<|endoftext|>")];
                let (before, after) = match arch {
                    Arch::Glm4 => (("eos", "<|endoftext|>"), ("bos", "<|endoftext|>")),
                    _ => (("bos", "[gMASK]"), ("eom", "<|observation|>")),
                };
                for (name, text) in std::iter::once(before).chain(eot).chain([after]) {
                    let id = added.iter().find(|entry| entry["content"] == text);
                    self.set_id(name, id.map_or(&Value::Null, |entry| &entry["id"]), None);
                }
            }
            Arch::HunyuanDense => {
                self.replace_id("eos", config.get("eod_token_id"));
                if let [first, _, ..] = generation["eos_token_id"].as_array().map_or(&[][..], Vec::as_slice) {
                    self.replace_id("eot", Some(first));
                }
            }
            _ => {}
        }
    }
    fn replace_id(&mut self, name: &'static str, id: Option<&Value>) {
        let Some(id) = id.and_then(Value::as_u64) else { return };
        match self.ids.iter_mut().find(|(n, _)| *n == name) {
            Some((_, old)) => *old = id,
            None => self.ids.push((name, id)),
        }
    }

    pub fn put(&self, keys: &mut GgufKeys) {
        for (name, id) in &self.ids {
            let key = TYPES.iter().find(|(n, _)| n == name).map_or(*name, |(_, key)| key);
            keys.put(&format!("tokenizer.ggml.{key}"), KeyValue::U32(*id as usize));
        }
        for (name, add) in self.add.iter().filter(|(name, _)| ["bos", "eos", "sep"].contains(name)) {
            keys.put(&format!("tokenizer.ggml.add_{name}_token"), KeyValue::Bool(*add));
        }
        let (default, named): (Vec<_>, Vec<_>) = self.templates.iter().partition(|(name, _)| name.is_empty());
        for (name, text) in &named {
            keys.put(&format!("tokenizer.chat_template.{name}"), KeyValue::Text(text));
        }
        let names: Vec<Vec<u8>> = named.iter().map(|(name, _)| name.clone().into_bytes()).collect();
        if !names.is_empty() {
            keys.put("tokenizer.chat_templates", KeyValue::Texts(&names));
        }
        default.iter().for_each(|(_, text)| keys.put("tokenizer.chat_template", KeyValue::Text(text)));
    }

    /// The first id of a type counts.
    fn set_id(&mut self, name: &'static str, id: &Value, below: Option<usize>) {
        let Some(id) = id.as_u64().filter(|id| below.is_none_or(|below| *id < below as u64)) else { return };
        if !self.ids.iter().any(|(n, _)| *n == name) {
            self.ids.push((name, id));
        }
    }
    fn set_add(&mut self, name: &'static str, add: bool, replace: bool) {
        match self.add.iter_mut().find(|(n, _)| *n == name) {
            Some((_, old)) if replace => *old = add,
            Some(_) => {}
            None => self.add.push((name, add)),
        }
    }

    /// Reads what a post-processor adds around a text. May add tokens to `names`, the keys of tokenizer_config.json.
    /// Returns how many of [`TYPES`] are looked up.
    fn processor(&mut self, part: &Value, names: &mut Map<String, Value>) -> usize {
        let mut types = 6;
        match part["type"].as_str() {
            Some("ByteLevel") => {
                self.set_add("bos", false, false);
                self.set_add("eos", false, false);
            }
            Some("TemplateProcessing") => {
                let token = |entry: Option<&Value>| {
                    entry.map(|entry| entry["SpecialToken"]["id"].clone()).filter(|id| !is_missing(Some(id)))
                };
                let list = |key: &str| part[key].as_array().cloned().unwrap_or_default();
                let (single, pair) = (list("single"), list("pair"));
                let several = single.len() > 1;
                let (first, last) =
                    (token(single.first().filter(|_| several)), token(single.last().filter(|_| several)));
                if let Some(first) = &first {
                    let known = |names: &_| [given(names, "bos_token"), given(names, "cls_token")].contains(first);
                    if !known(names) {
                        for key in ["bos_token", "cls_token"] {
                            if is_missing(names.get(key)) {
                                names.insert(key.into(), first.clone());
                            }
                        }
                    }
                    self.set_add("bos", known(names), true);
                }
                if let Some(last) = &last {
                    let eos = given(names, "eos_token");
                    if *last != eos {
                        types = 7;
                        names.insert("eot_token".into(), eos);
                        names.insert("eos_token".into(), last.clone());
                    }
                    self.set_add("eos", true, true);
                }
                self.separator(&pair, first.as_ref(), last.as_ref(), names);
            }
            _ => {}
        }
        types
    }

    /// Whether a token stands between two texts.
    fn separator(
        &mut self,
        pair: &[Value],
        first: Option<&Value>,
        last: Option<&Value>,
        names: &mut Map<String, Value>,
    ) {
        let token = |entry: &Value| entry["SpecialToken"]["id"].clone();
        let from = (first.is_some() && pair.first().map(token).as_ref() == first) as usize;
        let to = pair.len() - (last.is_some() && pair.last().map(token).as_ref() == last) as usize;
        let pair = pair.get(from..to).unwrap_or_default();
        let sequence = |entry: Option<&Value>, id: &str| entry.is_some_and(|entry| entry["Sequence"]["id"] == id);
        let between = pair.get(1..pair.len().saturating_sub(1)).unwrap_or_default();
        if between.is_empty() || !sequence(pair.first(), "A") || !sequence(pair.last(), "B") {
            return;
        }
        let ends = |entry: &Value| {
            let token = token(entry);
            !token.is_null() && ["sep_token", "eos_token"].iter().any(|name| names.get(*name) == Some(&token))
        };
        let second = between.get(1).filter(|_| between.len() == 2);
        let adds = ends(&between[0]) && last.is_none() || second.is_some_and(ends);
        self.set_add("sep", adds, true);
        if adds && is_missing(names.get("sep_token")) {
            names.insert("sep_token".into(), given(names, "eos_token"));
        }
    }
}

fn given(names: &Map<String, Value>, key: &str) -> Value {
    names.get(key).cloned().unwrap_or_default()
}
fn is_missing(value: Option<&Value>) -> bool {
    value.is_none_or(|value| value.is_null() || value == "")
}

/// `chat_template` of tokenizer_config.json, or a file of its own with those of named ones: a text, or a list.
fn templates(files: &TokenizerFiles, names: &Map<String, Value>) -> Vec<(String, String)> {
    let own = || files.template.get("chat_template").cloned();
    let entry = |name: &str, text: &str| json!({"name": name, "template": text});
    let named = || files.named.iter().map(|(name, text)| entry(name, text));
    let jinja = files.jinja.as_deref().map(|text| match files.named.is_empty() {
        true => json!(text),
        false => std::iter::once(entry("default", text)).chain(named()).collect(),
    });
    let file = jinja.or_else(own);
    match names.get("chat_template").cloned().or(file) {
        Some(Value::String(text)) if !text.is_empty() => vec![(String::new(), text)],
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|entry| {
                let name = entry["name"].as_str().filter(|name| !name.is_empty())?;
                let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
                let name = if name == "default" { String::new() } else { name };
                Some((name, entry["template"].as_str()?.to_string()))
            })
            .collect(),
        _ => Vec::new(),
    }
}
