//! Spellings of other tools, from the one table `synonyms.tsv`; and the known name that is most like an unknown one.
//! Never decides what a setting means.
use std::sync::LazyLock;

/// A row of the table: `spelling` stands for the setting `section.key`, or for a `value` of it.
#[derive(Debug)]
pub struct Synonym {
    /// section, key, flag or value.
    kind: &'static str,
    pub spelling: &'static str,
    section: &'static str,
    /// Empty for a section.
    pub key: &'static str,
    value: &'static str,
}

static TABLE: LazyLock<Vec<Synonym>> = LazyLock::new(|| {
    let rows = include_str!("synonyms.tsv").lines().filter(|line| !line.starts_with('#'));
    let cells = rows.map(|row| row.split('\t').collect::<Vec<_>>());
    let row = |cells: Vec<&'static str>| {
        let (section, key) = cells[2].split_once('.').unwrap_or((cells[2], ""));
        Synonym { kind: cells[0], spelling: cells[1], section, key, value: cells[3] }
    };
    cells.map(row).collect()
});

fn all(kind: &str) -> impl Iterator<Item = &'static Synonym> {
    TABLE.iter().filter(move |row| row.kind == kind)
}

/// Flags that `--help` shows beside our own.
pub fn flags() -> impl Iterator<Item = &'static Synonym> {
    all("flag")
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

/// The value that `text` is of the setting `key`.
pub fn value<'a>(key: &str, text: &'a str) -> &'a str {
    all("value").find(|row| row.key == key && row.spelling == text).map_or(text, |row| row.value)
}

/// The known name most like `name`.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> &'a str {
    let like = |k: &str| strsim::normalized_damerau_levenshtein(name, k);
    known.into_iter().max_by(|a, b| like(a).total_cmp(&like(b))).unwrap_or("--help")
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
            let Synonym { kind, spelling, section, key, value } = *row;
            let reads = |value: &str| serde_json::from_value::<Settings>(json!({section: {key: value}})).is_ok();
            let taken = match kind {
                "section" => schema.get(spelling).is_some(),
                "key" => schema.pointer(&format!("/{}", spelling.replace('.', "/"))).is_some(),
                "flag" => schema.as_object().unwrap().values().any(|s| s.get(spelling).is_some()),
                "value" => reads(spelling) || !reads(value),
                _ => true,
            };
            assert!(
                schema[section].is_object() && (kind == "section" || schema[section].get(key).is_some()),
                "{row:?}"
            );
            assert!(!taken, "{row:?} hides a name of our own");
        }
    }
}
