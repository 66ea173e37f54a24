//! What `generation_config.json` of a model suggests for sampling and the settings do not have. Never changes a
//! setting: texts are drawn as the flags say, whatever the model.
use crate::base::{open, quote};
use crate::run::settings::generate::GenerateSettings;
use serde_json::{Map, Value};
use std::path::Path;

/// Keys without a flag, and the values with which they change nothing.
const WITHOUT_FLAG: [(&str, f64); 8] = [
    ("repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("num_beams", 1.0),
    ("length_penalty", 1.0),
];

/// A note about the suggestions of the model in `dir` that are not followed, if there are any.
pub(super) fn unused(dir: &Path, settings: &GenerateSettings) -> Option<String> {
    const FILE: &str = "generation_config.json";
    let keys: Map<String, Value> = serde_json::from_slice(&open::read(&dir.join(FILE)).ok()?).ok()?;
    let number = |key: &str| keys.get(key).and_then(Value::as_f64);
    let samples = keys.get("do_sample") != Some(&Value::Bool(false));
    let flags: [(&str, Option<f64>); 4] = [
        ("temperature", settings.temperature),
        ("top_k", settings.top_k.map(|n| n as f64)),
        ("top_p", settings.top_p),
        ("min_p", settings.min_p),
    ];
    let differs = |&(key, own): &(&str, Option<f64>)| number(key).is_some_and(|x| samples && own != Some(x));
    let greedy = settings.temperature == Some(0.0);
    let with_flag = flags.into_iter().filter(differs).filter(|_| !greedy).map(|(key, _)| key);
    let with_flag: Vec<String> = with_flag.filter_map(|key| Some(flag(key, number(key)?))).collect();
    let other = WITHOUT_FLAG.into_iter().filter(|(key, off)| number(key).is_some_and(|x| x != *off));
    let mut other: Vec<String> = other.filter_map(|(key, _)| Some(format!("{key} {}", number(key)?))).collect();
    let lists = ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id"];
    let set = |key: &&str| keys.get(*key).is_some_and(|value| !value.is_null() && *value != serde_json::json!([]));
    other.extend(lists.into_iter().filter(set).map(String::from));
    let mut parts = Vec::new();
    if !with_flag.is_empty() {
        parts.push(format!("its sampling is {}", with_flag.join(" ")));
    }
    if !other.is_empty() {
        parts.push(format!("{} has no equivalent", other.join(", ")));
    }
    let of = quote(dir.join(FILE).display()).to_string();
    (!parts.is_empty()).then(|| format!("{of} is not used for sampling: {}", parts.join("; ")))
}

/// The flag with a value.
fn flag(key: &str, value: f64) -> String {
    format!("--{} {value}", key.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_followed_is_named_with_its_flag() {
        let dir = tempfile::tempdir().unwrap();
        let said = |text: &str, settings: &GenerateSettings| {
            std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
            unused(dir.path(), settings)
        };
        let defaults = GenerateSettings { temperature: Some(0.8), top_k: Some(0), ..GenerateSettings::default() };
        let text = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}"#;
        let note = said(text, &defaults).unwrap();
        assert!(
            note.ends_with("its sampling is --temperature 0.6 --top-k 20; repetition_penalty 1.05 has no equivalent")
        );
        let same = GenerateSettings { temperature: Some(0.6), top_k: Some(20), ..GenerateSettings::default() };
        assert_eq!(said(r#"{"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.0}"#, &same), None);
        let greedy = GenerateSettings { temperature: Some(0.0), ..defaults };
        assert_eq!(said(r#"{"temperature": 0.6}"#, &greedy), None);
        assert_eq!(said(r#"{"eos_token_id": [1, 2]}"#, &same), None);
    }
}
