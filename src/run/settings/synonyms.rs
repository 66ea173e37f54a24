//! Names of other tools, from the table `synonyms.tsv`, and the known name nearest to an unknown one. Never interprets
//! a setting.
use serde_json::Value;
use std::sync::LazyLock;

/// A row of the table: `spelling` is read as the setting `section.key`, as a `value` of it, or has no equivalent.
#[derive(Debug)]
pub struct Synonym {
    /// section, key, value, flag, idle or refused.
    pub kind: &'static str,
    pub spelling: &'static str,
    /// Empty if there is none.
    pub section: &'static str,
    /// Empty for a section. A flag that is one value of a pair has `.0` or `.1`.
    pub key: &'static str,
    pub value: &'static str,
    pub tool: &'static str,
    pub why: &'static str,
    pub flag: FlagPattern,
    /// Another flag that must also be on the command line.
    pub with: Option<FlagPattern>,
}

/// The value of a row whose flag counts samples, where ours counts prompts.
const PER_PROMPT: &str = "{/G}";

/// The value of a row whose flag is a rate, where ours is a fraction of the learning rate.
const PER_RATE: &str = "{min_lr/LR}";

/// Names of a flag, and the values that a row applies to; empty: all values.
#[derive(Debug)]
pub struct FlagPattern {
    pub names: Vec<&'static str>,
    pub values: Vec<&'static str>,
}

impl FlagPattern {
    fn new(text: &'static str) -> FlagPattern {
        let (names, values) = text.split_once('=').unwrap_or((text, ""));
        FlagPattern { names: names.split_whitespace().collect(), values: values.trim().split_terminator('|').collect() }
    }
}

impl Synonym {
    fn new(row: &'static str) -> Synonym {
        let mut cells = row.split('\t');
        let mut cell = || cells.next().unwrap_or_default();
        let (kind, spelling, setting) = (cell(), cell(), cell());
        let (section, key) = setting.split_once('.').unwrap_or((setting, ""));
        let (flag, with) = spelling.split_once('&').map_or((spelling, None), |(flag, with)| (flag, Some(with)));
        let (flag, with) = (FlagPattern::new(flag), with.map(FlagPattern::new));
        Synonym { kind, spelling, section, key, value: cell(), tool: cell(), why: cell(), flag, with }
    }
    /// Yields to any other flag that sets the same setting.
    pub fn is_weak(&self) -> bool {
        self.value.ends_with('?')
    }
    /// Counts samples, where our setting counts prompts.
    pub fn counts_samples(&self) -> bool {
        self.value == PER_PROMPT
    }
    /// A rate, where our setting is a fraction of the learning rate.
    pub fn is_rate(&self) -> bool {
        self.value == PER_RATE
    }
    /// An alias of our own.
    pub fn is_own(&self) -> bool {
        self.tool.starts_with("flatshard")
    }
    /// Words to show in a message; none if they do not matter, since they may be a secret.
    pub fn shown<'a>(&self, words: &'a [String]) -> &'a [String] {
        let matters = self.value.is_empty() || self.value.contains('{') || !self.flag.values.is_empty();
        if matters { words } else { &[] }
    }
    /// The words of our flag for those of the other: the same, or converted by the row's value.
    pub fn convert(&self, words: &[String]) -> Vec<String> {
        match self.value.trim_end_matches('?') {
            "" => words.to_vec(),
            "{,}" => words.iter().flat_map(|word| word.split(',').map(String::from)).collect(),
            "{0}" => words.first().cloned().into_iter().collect(),
            "{1}" => words.get(1).cloned().into_iter().collect(),
            PER_PROMPT => words.to_vec(), // divided once the whole command line is known
            pattern if pattern.contains("{}") => words.iter().map(|word| pattern.replace("{}", word)).collect(),
            pattern if pattern.starts_with('{') => {
                let key = pattern.trim_matches(['{', '}']).trim_end_matches("/LR");
                let object = words.first().and_then(|word| serde_json::from_str::<Value>(word).ok());
                let value = object.map(|object| object[key].clone()).unwrap_or_default();
                vec![value.as_str().map_or_else(|| value.to_string(), String::from)]
            }
            value => vec![value.to_string()],
        }
    }
}

static TABLE: LazyLock<Vec<Synonym>> = LazyLock::new(|| {
    include_str!("synonyms.tsv").lines().filter(|row| !row.starts_with('#')).map(Synonym::new).collect()
});

/// The whole table, in its order.
pub fn table() -> &'static [Synonym] {
    &TABLE
}

fn all(kind: &str) -> impl Iterator<Item = &'static Synonym> {
    TABLE.iter().filter(move |row| row.kind == kind)
}

fn flags() -> impl Iterator<Item = &'static Synonym> {
    TABLE.iter().filter(|row| ["flag", "idle", "refused"].contains(&row.kind))
}

/// Aliases of our own flag for the setting `key`, shown in `--help`.
pub fn aliases(key: &str) -> impl Iterator<Item = &'static str> {
    all("flag").filter(move |row| row.is_own() && row.key == key).map(|row| row.spelling)
}

/// The rows of another tool's flag, whose `name` has dashes.
pub fn of_flag(name: &str) -> Vec<&'static Synonym> {
    let named = |row: &&Synonym| row.flag.names.iter().any(|other| other.replace('_', "-") == name);
    flags().filter(|row| !row.is_own()).filter(named).collect()
}

/// Whether `tool` has other flags in the section of the dotted `name`.
pub fn is_in_section(name: &str, tool: &str) -> bool {
    let Some((section, _)) = name.split_once('.') else { return false };
    let is_in = |other: &str| other.split_once('.').is_some_and(|(of, _)| of == section);
    flags().filter(|row| row.tool == tool).flat_map(|row| &row.flag.names).any(|other| is_in(other))
}

/// The flags of other tools that are read as ours.
pub fn flag_names() -> impl Iterator<Item = &'static str> {
    all("flag").flat_map(|row| row.flag.names.iter().copied())
}

/// The section of settings for the section `name` of a file.
pub fn section(name: &str) -> &str {
    all("section").find(|row| row.spelling == name).map_or(name, |row| row.section)
}

/// Section and key of the setting for the key `key` of a file's section.
pub fn key(section: &str, key: &str) -> Option<(&'static str, &'static str)> {
    let found = all("key").find(|row| row.spelling.split_once('.') == Some((section, key)));
    found.map(|row| (row.section, row.key))
}

/// Alternative keys of a file's section.
pub fn keys_of(section: &str) -> impl Iterator<Item = &str> {
    let split = all("key").filter_map(|row| row.spelling.split_once('.'));
    split.filter(move |(of, _)| *of == section).map(|(_, key)| key)
}

/// The row for the value `text` of the setting `key`.
pub fn value_row(key: &str, text: &str) -> Option<&'static Synonym> {
    all("value").find(|row| row.key == key && row.spelling == text)
}

/// `text` as a value of the setting `key`.
pub fn value<'a>(key: &str, text: &'a str) -> &'a str {
    value_row(key, text).map_or(text, |row| row.value)
}

/// Equal values: ignores case and the notation of numbers.
pub fn same(a: &str, b: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    a.eq_ignore_ascii_case(b) || number(a).is_some_and(|a| number(b) == Some(a))
}

/// From 0 to 1, of their first characters: the time is proportional to the product of the lengths.
fn likeness(a: &str, b: &str) -> f64 {
    const COMPARED: usize = 100;
    let [a, b] = [a, b].map(|text| text.chars().take(COMPARED).collect::<String>().replace('_', "-"));
    strsim::normalized_damerau_levenshtein(&a, &b)
}

/// The known name nearest to `name`.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> &'a str {
    known.into_iter().max_by(|a, b| likeness(name, a).total_cmp(&likeness(name, b))).unwrap_or("--help")
}

/// The known name that `name` probably misspells: its words begin alike and are similar, in any order, or all of it is
/// similar. A name with one other word means something else.
pub fn similar<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const FILLERS: [&str; 9] = ["num", "number", "of", "the", "path", "dir", "file", "use", "enable"];
    fn words(text: &str) -> Vec<&str> {
        text.split(['-', '_', '.']).filter(|word| !word.is_empty() && !FILLERS.contains(word)).collect()
    }
    let mine = words(name);
    let means = |other: &str| {
        let theirs = words(other);
        let begins = |word: &str| word.chars().next();
        let has = |word: &str| theirs.iter().any(|o| likeness(word, o) >= 0.7 && begins(word) == begins(o));
        let all = theirs.len() == mine.len() && mine.iter().all(|word| has(word));
        all || likeness(&mine.concat(), &theirs.concat()) >= 0.85
    };
    Some(nearest(name, known.into_iter().filter(|other| means(other)))).filter(|near| *near != "--help")
}

/// What is expected where one of `names` is, and which of them `text` is likely to mean.
pub fn one_of<'a>(text: &str, names: impl Iterator<Item = &'a str> + Clone) -> String {
    let likely = names.clone().filter(|name| likeness(&text.to_lowercase(), &name.to_lowercase()) >= 0.7);
    let likely = Some(nearest(text, likely)).filter(|near| *near != "--help");
    let hint = likely.map_or(String::new(), |near| format!(". Did you mean {near}?"));
    format!("one of {}{hint}", names.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::sections::Settings;
    use super::*;
    use serde_json::json;

    /// Each row names an existing setting and does not shadow one of our names.
    #[test]
    fn synonyms_name_settings() {
        let schema = serde_json::to_value(Settings::default()).unwrap();
        for row in TABLE.iter() {
            let Synonym { kind, spelling, section, key, value, .. } = *row;
            let key = key.split('.').next().unwrap_or_default(); // one value of a pair
            let reads = |value: &str| serde_json::from_value::<Settings>(json!({section: {key: value}})).is_ok();
            let taken = match kind {
                "section" => schema.get(spelling).is_some(),
                "key" => schema.pointer(&format!("/{}", spelling.replace('.', "/"))).is_some(),
                "flag" => schema.as_object().unwrap().values().any(|s| s.get(spelling).is_some()),
                "value" => reads(spelling) || !reads(value),
                "idle" | "refused" => false, // if the name is also ours, it needs another tool's flag next to it
                _ => true,
            };
            let is_setting = schema[section].is_object() && (kind == "section" || schema[section].get(key).is_some());
            let names_none = section.is_empty() && ["idle", "refused"].contains(&kind);
            assert!(is_setting || names_none, "{row:?}");
            assert!(!taken, "{row:?} shadows one of our own names");
        }
    }
}
