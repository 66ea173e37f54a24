//! Spellings of other tools, from the one table `synonyms.tsv`; and the known name that is most like an unknown one.
//! Never decides what a setting means.
use std::sync::LazyLock;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SynonymKind {
    Section,
    Key,
    Flag,
    Value,
}

/// A row of the table: `spelling` stands for the setting `section.key`, or for a `value` of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Synonym {
    pub kind: SynonymKind,
    pub spelling: &'static str,
    pub section: &'static str,
    /// Empty for a section.
    pub key: &'static str,
    pub value: &'static str,
}

static TABLE: LazyLock<Vec<Synonym>> = LazyLock::new(|| {
    let lines = include_str!("synonyms.tsv").lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| row(line).expect("synonyms.tsv is compiled in; a test reads it")).collect()
});

fn row(line: &'static str) -> Option<Synonym> {
    let mut cells = line.split('\t');
    let kind = match cells.next()? {
        "section" => SynonymKind::Section,
        "key" => SynonymKind::Key,
        "flag" => SynonymKind::Flag,
        "value" => SynonymKind::Value,
        _ => return None,
    };
    let (spelling, setting, value) = (cells.next()?, cells.next()?, cells.next()?);
    let (section, key) = setting.split_once('.').unwrap_or((setting, ""));
    Some(Synonym { kind, spelling, section, key, value })
}

pub fn all(kind: SynonymKind) -> impl Iterator<Item = &'static Synonym> {
    TABLE.iter().filter(move |row| row.kind == kind)
}

/// The section of settings that a file calls `name`.
pub fn section(name: &str) -> &str {
    all(SynonymKind::Section).find(|row| row.spelling == name).map_or(name, |row| row.section)
}

/// What the key `key` of a file's section stands for: section and key.
pub fn key(section: &str, key: &str) -> Option<(&'static str, &'static str)> {
    let found = all(SynonymKind::Key).find(|row| row.spelling.split_once('.') == Some((section, key)));
    found.map(|row| (row.section, row.key))
}

/// The keys that a file's section may have for others.
pub fn keys_of<'a>(section: &'a str) -> impl Iterator<Item = &'a str> {
    let split = all(SynonymKind::Key).filter_map(|row| row.spelling.split_once('.'));
    split.filter(move |(of, _)| *of == section).map(|(_, key)| key)
}

/// The value that `text` is of the setting `key`.
pub fn value<'a>(key: &str, text: &'a str) -> &'a str {
    all(SynonymKind::Value).find(|row| row.key == key && row.spelling == text).map_or(text, |row| row.value)
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
            assert!(schema[section].is_object(), "{row:?}");
            assert!(kind == SynonymKind::Section || schema[section].get(key).is_some(), "{row:?}");
            let taken = match kind {
                SynonymKind::Section => schema.get(spelling).is_some(),
                SynonymKind::Key => schema.pointer(&format!("/{}", spelling.replace('.', "/"))).is_some(),
                SynonymKind::Flag => schema.as_object().unwrap().values().any(|s| s.get(spelling).is_some()),
                SynonymKind::Value => {
                    let reads =
                        |value: &str| serde_json::from_value::<Settings>(json!({section: {key: value}})).is_ok();
                    assert!(reads(value), "{row:?}");
                    reads(spelling)
                }
            };
            assert!(!taken, "{row:?} hides a name of our own");
        }
    }
}
