//! Spellings of other tools, from the one table `synonyms.tsv`; and the known name that is most like an unknown one.
//! Never decides what a setting means.
use std::sync::LazyLock;

/// A row of the table: `spelling` stands for the setting `section.key`, for a `value` of it, or for nothing of ours.
#[derive(Debug)]
pub struct Synonym {
    /// section, key, value, flag, idle or refused.
    pub kind: &'static str,
    pub spelling: &'static str,
    /// Empty where there is none.
    pub section: &'static str,
    /// Empty for a section; of a flag that is one value of a pair, with `.0` or `.1`.
    pub key: &'static str,
    pub value: &'static str,
    pub tool: &'static str,
    pub why: &'static str,
    /// The flag that is read.
    pub flag: FlagPattern,
    /// Another flag of the command line beside which it is read so.
    pub with: Option<FlagPattern>,
}

/// Names of a flag, and the values of it that a row is about: none for all.
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
    /// Gives way to any other flag that sets the same.
    pub fn is_weak(&self) -> bool {
        self.value.ends_with('?')
    }
    /// Ours, only longer or shorter.
    pub fn is_own(&self) -> bool {
        self.tool.starts_with("flatshard")
    }
    /// Words to repeat in a message: none where they do not matter, which may be a secret.
    pub fn shown<'a>(&self, words: &'a [String]) -> &'a [String] {
        let matters = self.value.is_empty() || self.value.contains('{') || !self.flag.values.is_empty();
        if matters { words } else { &[] }
    }
    /// The words of our flag for those of the other: the same, or what the row's value makes of each.
    pub fn convert(&self, words: &[String]) -> Vec<String> {
        match self.value.trim_end_matches('?') {
            "" => words.to_vec(),
            "{,}" => words.iter().flat_map(|word| word.split(',').map(String::from)).collect(),
            pattern if pattern.contains("{}") => words.iter().map(|word| pattern.replace("{}", word)).collect(),
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

/// Further names of our own flag for the setting `key`, which `--help` shows with it.
pub fn aliases(key: &str) -> impl Iterator<Item = &'static str> {
    all("flag").filter(move |row| row.is_own() && row.key == key).map(|row| row.spelling)
}

/// The rows of another tool's flag, whose `name` has dashes.
pub fn of_flag(name: &str) -> Vec<&'static Synonym> {
    let named = |row: &&Synonym| row.flag.names.iter().any(|other| other.replace('_', "-") == name);
    flags().filter(|row| !row.is_own()).filter(named).collect()
}

/// The flags of other tools that are read as ours.
pub fn flag_names() -> impl Iterator<Item = &'static str> {
    all("flag").flat_map(|row| row.flag.names.iter().copied())
}

/// The section of settings that a file calls `name`.
pub fn section(name: &str) -> &str {
    all("section").find(|row| row.spelling == name).map_or(name, |row| row.section)
}

/// What the key `key` of a file's section stands for: section and key.
pub fn key(section: &str, key: &str) -> Option<(&'static str, &'static str)> {
    let found = all("key").find(|row| row.spelling.split_once('.') == Some((section, key)));
    found.map(|row| (row.section, row.key))
}

/// The keys that a file's section may have for others.
pub fn keys_of(section: &str) -> impl Iterator<Item = &str> {
    let split = all("key").filter_map(|row| row.spelling.split_once('.'));
    split.filter(move |(of, _)| *of == section).map(|(_, key)| key)
}

/// The row that says what value `text` is of the setting `key`.
pub fn value_row(key: &str, text: &str) -> Option<&'static Synonym> {
    all("value").find(|row| row.key == key && row.spelling == text)
}

/// The value that `text` is of the setting `key`.
pub fn value<'a>(key: &str, text: &'a str) -> &'a str {
    value_row(key, text).map_or(text, |row| row.value)
}

/// One value in two spellings: capitals do not count, nor how a number is written.
pub fn same(a: &str, b: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    a.eq_ignore_ascii_case(b) || number(a).is_some_and(|a| number(b) == Some(a))
}

fn likeness(a: &str, b: &str) -> f64 {
    strsim::normalized_damerau_levenshtein(&a.replace('_', "-"), &b.replace('_', "-"))
}

/// The known name most like `name`.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> &'a str {
    known.into_iter().max_by(|a, b| likeness(name, a).total_cmp(&likeness(name, b))).unwrap_or("--help")
}

/// The known name that `name` is likely to mean: spelt almost so, or with a word that says something in common.
pub fn similar<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const COMMON: [&str; 11] =
        ["size", "steps", "path", "type", "name", "file", "data", "model", "every", "with", "parallel"];
    let words = |text: &'a str| text.split(['-', '_', '.']).filter(|word| word.len() > 3 && !COMMON.contains(word));
    let shares = |other: &'a str| words(other).any(|word| name.split(['-', '_', '.']).any(|mine| mine == word));
    let likely = known.into_iter().filter(|other| likeness(name, other) >= 0.7 || shares(other));
    Some(nearest(name, likely)).filter(|near| *near != "--help")
}

#[cfg(test)]
mod tests {
    use super::super::sections::Settings;
    use super::*;
    use serde_json::json;

    /// Each row is of a setting there is, and says something that no setting says.
    #[test]
    fn synonyms_are_of_settings() {
        let schema = serde_json::to_value(Settings::default()).unwrap();
        for row in TABLE.iter() {
            let Synonym { kind, spelling, section, key, value, .. } = *row;
            let key = key.split('.').next().unwrap_or_default(); // a half of a pair
            let reads = |value: &str| serde_json::from_value::<Settings>(json!({section: {key: value}})).is_ok();
            let taken = match kind {
                "section" => schema.get(spelling).is_some(),
                "key" => schema.pointer(&format!("/{}", spelling.replace('.', "/"))).is_some(),
                "flag" => schema.as_object().unwrap().values().any(|s| s.get(spelling).is_some()),
                "value" => reads(spelling) || !reads(value),
                "idle" | "refused" => false, // one that is ours, too, is so beside another tool's flag only
                _ => true,
            };
            let is_setting = schema[section].is_object() && (kind == "section" || schema[section].get(key).is_some());
            let names_none = section.is_empty() && ["idle", "refused"].contains(&kind);
            assert!(is_setting || names_none, "{row:?}");
            assert!(!taken, "{row:?} hides a name of our own");
        }
    }
}
