//! Flags as typed, each with the words up to the next flag. Never interprets a flag.
use crate::run::settings::synonyms::{self, FlagPattern, same};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::iter::once;

#[derive(Clone, Debug)]
pub struct TypedFlag {
    /// Without its first dashes; empty for words before the first flag.
    pub text: String,
    /// With dashes instead of underscores.
    pub name: String,
    pub words: Vec<String>,
    /// Whether the first word followed `=`.
    pub inline: bool,
    /// Typed as `--no-x`: `false` is its word.
    pub off: bool,
}

/// Splits a command line without the program's name.
pub fn split(argv: impl IntoIterator<Item = String>) -> Vec<TypedFlag> {
    let mut typed: Vec<TypedFlag> = Vec::new();
    for word in argv {
        // Hydra's NAME=VALUE.
        let is_setting = |(name, _): &(&str, &str)| {
            name.contains('.')
                && (!synonyms::of_flag(&name.replace('_', "-")).is_empty() || synonyms::is_in_section(name, "verl"))
        };
        let word = if word.split_once('=').filter(is_setting).is_some() { format!("--{word}") } else { word };
        let short = ["-h", "-V"].contains(&word.as_str());
        match (word.strip_prefix("--").filter(|flag| !flag.is_empty()), typed.last_mut()) {
            (Some(flag), _) => {
                let (text, value) = flag.split_once('=').map_or((flag, None), |(text, value)| (text, Some(value)));
                typed.push(TypedFlag {
                    text: text.into(),
                    name: text.replace('_', "-"),
                    words: value.map(String::from).into_iter().collect(),
                    inline: value.is_some(),
                    off: false,
                });
            }
            (None, Some(last)) if !short => last.words.push(word),
            (None, _) => {
                let (text, name) = Default::default();
                typed.push(TypedFlag { text, name, words: vec![word], inline: false, off: false });
            }
        }
    }
    typed
}

impl TypedFlag {
    /// The flag with `words`, for messages.
    pub fn show(&self, words: &[String]) -> String {
        let words = if self.off { &[] } else { words };
        once(format!("--{}", self.text)).chain(words.iter().cloned()).collect::<Vec<_>>().join(" ")
    }
    /// Whether it matches the pattern. A flag without words has the value `true`.
    pub fn is(&self, pattern: &FlagPattern) -> bool {
        let on = ["true".to_string()];
        let words = if self.words.is_empty() { &on } else { &self.words[..] };
        let value = |word: &String| pattern.values.iter().any(|value| means(word, value));
        pattern.names.iter().any(|name| name.replace('_', "-") == self.name)
            && (pattern.values.is_empty() || words.iter().any(value))
    }
    /// The same, where a pattern may ask for the words of another flag.
    pub fn is_with(&self, pattern: &FlagPattern, words: &[String]) -> bool {
        match pattern.values[..] {
            ["same"] => self.words == words && self.is(&FlagPattern { names: pattern.names.clone(), values: vec![] }),
            _ => self.is(pattern),
        }
    }
    /// The name without the `no-` of its last dotted part.
    pub fn without_no(&self) -> Option<String> {
        let last = self.name.rfind('.').map_or(0, |dot| dot + 1);
        Some(self.name[..last].to_string() + self.name[last..].strip_prefix("no-")?)
    }
}

/// `true` or `false` for the words that tools accept for them.
pub fn truth(word: &str) -> Option<&'static str> {
    match word.to_ascii_lowercase().as_str() {
        "true" | "yes" | "y" | "t" | "1" | "on" => Some("true"),
        "false" | "no" | "n" | "f" | "0" | "off" => Some("false"),
        _ => None,
    }
}

/// Whether `word` matches the `value` of a row.
pub fn means(word: &str, value: &str) -> bool {
    if let Some(keys) = value.strip_prefix('{').and_then(|keys| keys.strip_suffix('}')) {
        let object: Option<Map<String, Value>> = serde_json::from_str(word).ok();
        let keys: BTreeSet<&str> = keys.split_terminator(',').collect();
        return object.is_some_and(|object| object.keys().map(String::as_str).collect::<BTreeSet<_>>() == keys);
    }
    let number = |text: &str| text.parse::<f64>().ok();
    if let Some(limit) = value.strip_prefix('<').and_then(number) {
        return number(word).is_some_and(|x| x > 0.0 && x < limit);
    }
    same(word, value) || (["true", "false"].contains(&value) && truth(word) == Some(value))
}
