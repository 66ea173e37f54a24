//! The card of a data set (README.md): which files its configurations name. Never looks for these files.
use serde_json::Value;

/// A configuration, as the card's `configs` have it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CardConfig {
    pub name: String,
    default: bool,
    /// The folder that patterns are below.
    pub folder: Option<String>,
    /// Split and patterns; empty: by the hub's conventions.
    pub files: Vec<(String, Vec<String>)>,
    /// How the files are to be read otherwise than by their headers, as `names: ["text"]`.
    pub reading: Vec<String>,
}

/// Keys of a configuration that change no row, and values that our readers have.
const INERT: [&str; 15] = [
    "config_name",
    "data_files",
    "data_dir",
    "default",
    "version",
    "description",
    "features",
    "batch_size",
    "chunksize",
    "block_size",
    "use_threads",
    "newlines_in_values",
    "keep_linebreaks",
    "drop_labels",
    "drop_metadata",
];
const READ: [(&str, &[&str]); 5] = [
    ("sep", &[",", "\t"]),
    ("delimiter", &[",", "\t"]),
    ("header", &["0", "infer"]),
    ("encoding", &["utf-8", "utf8", "UTF-8"]),
    ("sample_by", &["line"]),
];

pub(super) const CARD: &str = "README.md";
/// Longest header of a card.
const MOST: usize = 4 << 20;

/// The configurations of a card. An error: what is wrong with its header.
pub(super) fn configs(card: &str) -> Result<Vec<CardConfig>, String> {
    let Some(header) = header(card) else { return Ok(Vec::new()) };
    if header.len() > MOST {
        return Err(format!("its header has {} bytes; the limit is {MOST}", header.len()));
    }
    let header: Value = serde_saphyr::from_str(header).map_err(|e| e.to_string())?;
    let configs = header["configs"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(configs.iter().map(config).collect())
}

/// The YAML between two lines of dashes at the beginning.
fn header(card: &str) -> Option<&str> {
    let card = card.trim_start_matches('\u{feff}').trim_start(); // as huggingface_hub
    let rest = card.strip_prefix("---")?.trim_start_matches([' ', '\t', '\r']).strip_prefix('\n')?;
    let mut at = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == "---" {
            return Some(&rest[..at]);
        }
        at += line.len();
    }
    None
}

fn config(value: &Value) -> CardConfig {
    CardConfig {
        name: word(&value["config_name"]).unwrap_or_else(|| "default".into()),
        default: value["default"] == true,
        folder: word(&value["data_dir"]),
        files: files(&value["data_files"]),
        reading: value.as_object().map_or_else(Vec::new, reading),
    }
}

fn reading(config: &serde_json::Map<String, Value>) -> Vec<String> {
    let is_read = |key: &str, value: &Value| {
        let named =
            |(name, values): &(&str, &[&str])| *name == key && word(value).is_some_and(|v| values.contains(&&v[..]));
        INERT.contains(&key) || READ.iter().any(named)
    };
    config.iter().filter(|(key, value)| !is_read(key, value)).map(|(key, value)| format!("{key}: {value}")).collect()
}

/// A name, which YAML may take for a number.
fn word(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(on) => Some(on.to_string()),
        _ => None,
    }
}

fn patterns(value: &Value) -> Vec<String> {
    match value {
        Value::Array(all) => all.iter().filter_map(word).collect(),
        one => word(one).into_iter().collect(),
    }
}

/// A pattern, several, a map from splits to patterns, or a list of `{split, path}`.
fn files(value: &Value) -> Vec<(String, Vec<String>)> {
    let train = |patterns: Vec<String>| if patterns.is_empty() { vec![] } else { vec![("train".into(), patterns)] };
    match value {
        Value::Object(map) => map.iter().map(|(split, value)| (split.clone(), patterns(value))).collect(),
        Value::Array(all) if all.iter().any(Value::is_object) => {
            let split = |entry: &Value| word(&entry["split"]).unwrap_or_else(|| "train".into());
            all.iter().map(|entry| (split(entry), patterns(&entry["path"]))).collect()
        }
        other => train(patterns(other)),
    }
}

/// The configuration of this name.
pub(super) fn named<'a>(configs: &'a [CardConfig], name: &str) -> Option<&'a CardConfig> {
    configs.iter().find(|config| config.name == name)
}

/// The configuration that is meant where none is named: an error lists the choice.
pub(super) fn default(configs: &[CardConfig]) -> Result<Option<&CardConfig>, Vec<&str>> {
    match configs {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        several => {
            let marked = several.iter().find(|config| config.default);
            let named = || several.iter().find(|config| config.name == "default");
            marked.or_else(named).map(Some).ok_or(several.iter().map(|config| &config.name[..]).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_data_files() {
        let of = |yaml: &str| configs(&format!("---\nlicense: mit\nconfigs:\n{yaml}\n---\n# Text\n")).unwrap();
        let one = |yaml: &str| of(&format!("- config_name: a\n  {yaml}")).remove(0).files;
        let files = |all: &[(&str, &[&str])]| -> Vec<(String, Vec<String>)> {
            all.iter()
                .map(|(split, paths)| (split.to_string(), paths.iter().map(|p| p.to_string()).collect()))
                .collect()
        };
        assert_eq!(one("data_files: x.jsonl"), files(&[("train", &["x.jsonl"])]));
        // Blank lines may come first.
        let late = configs("\n \n---\nconfigs:\n- config_name: a\n  data_files: x.jsonl\n---\n").unwrap().remove(0);
        assert_eq!(late.files, files(&[("train", &["x.jsonl"])]));
        assert_eq!(one("data_files: [x.jsonl, 'y*']"), files(&[("train", &["x.jsonl", "y*"])]));
        let list = "data_files:\n  - split: train\n    path: [a, b]\n  - split: test\n    path: c";
        assert_eq!(one(list), files(&[("train", &["a", "b"]), ("test", &["c"])]));
        assert_eq!(one("data_files: {train: a, test: [b]}"), files(&[("train", &["a"]), ("test", &["b"])]));
        assert_eq!(one("data_dir: sub"), files(&[]));
        assert_eq!(of("- config_name: 2024\n  data_dir: x")[0].name, "2024");
        let read =
            |yaml: &str| of(&format!("- config_name: a\n  data_files: x.csv\n  {yaml}")).remove(0).reading.join(", ");
        assert_eq!(read("sep: \"\\t\"\n  header: 0\n  version: 1.0.0"), "");
        assert_eq!(
            read("header: null\n  names: [text]\n  skiprows: 1"),
            "header: null, names: [\"text\"], skiprows: 1"
        );
        assert_eq!(configs("# No header").unwrap(), []);
        assert_eq!(configs("---\nlicense: mit\n---\n").unwrap(), []);
        assert!(configs("---\n{a: [\n---\n").is_err());
    }

    #[test]
    fn a_choice_needs_a_default() {
        let config = |name: &str, default| CardConfig { name: name.into(), default, ..CardConfig::default() };
        let name =
            |configs: &[CardConfig]| default(configs).map(|c| c.map(|c| c.name.clone())).map_err(|e| e.join(" "));
        assert_eq!(name(&[]), Ok(None));
        assert_eq!(name(&[config("a", false)]), Ok(Some("a".into())));
        assert_eq!(name(&[config("a", false), config("default", false), config("c", true)]), Ok(Some("c".into())));
        assert_eq!(name(&[config("a", false), config("default", false)]), Ok(Some("default".into())));
        assert_eq!(name(&[config("a", false), config("b", false)]), Err("a b".into()));
    }
}
