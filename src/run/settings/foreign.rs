//! File keys named like flags: ours, and those of other tools, which `synonyms.tsv` defines for any position. Never
//! knows where in the file a key is.
use crate::base::{Error, Result};
use crate::run::settings::args::{self, Parsed};
use crate::run::settings::help::HelpPage;
use crate::run::settings::sections::Settings;
use crate::run::settings::spellings::{argument, means};
use crate::run::settings::synonyms::{self, Synonym, similar};
use crate::run::settings::value::overlay;
use clap::Args;
use serde_json::Value;
use std::iter::once;

/// A command line with settings only.
#[derive(clap::Parser, Debug)]
#[command(allow_negative_numbers = true, args_override_self = true, disable_help_flag = true)]
struct KeyLine {
    #[command(flatten)]
    settings: Settings,
}

impl AsMut<Settings> for KeyLine {
    fn as_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }
}

/// Keys of other tools in one block, as their flags.
#[derive(Default)]
pub struct ForeignKeys {
    argv: Vec<String>,
}

impl ForeignKeys {
    /// False if a flag cannot have such a value. Null is no value.
    pub fn add(&mut self, flag: &str, value: &Value) -> bool {
        let of_object = |row: &&Synonym| row.flag.values.iter().any(|value| value.starts_with('{'));
        let takes_objects = rows(flag).iter().all(|row| row.kind != "flag" || of_object(row));
        let words = match value {
            Value::Null => Some(Vec::new()),
            Value::Object(_) if takes_objects => Some(vec![format!("--{flag}={value}")]),
            Value::Array(items) if items.is_empty() => Some(vec![format!("--{flag}=none")]),
            value => words(flag, value),
        };
        words.map(|words| self.argv.extend(words)).is_some()
    }

    /// `own`, the block's settings under our names, extended by these keys; and the notes about them. `around`: flags
    /// of the command line that decide what a key means.
    pub fn read(&self, mut own: Value, around: &[String]) -> Result<(Value, Vec<String>)> {
        if self.argv.is_empty() {
            return Ok((own, Vec::new()));
        }
        // Ours are on the same line, where two that differ are found, and one gives way to another.
        let (command, mut argv, mut typed) = (command(), Vec::new(), Vec::new());
        for (section, key, value) in entries(&own).filter(|(.., value)| *value != "auto") {
            let long = argument(&command, section, key).and_then(clap::Arg::get_long);
            if let Some(words) = long.and_then(|long| words(long, value)) {
                argv.extend(words);
                typed.push((section.to_string(), key.to_string()));
            }
        }
        argv.extend(self.argv.iter().cloned());
        let page = HelpPage::training("file", "");
        let Parsed::Run(line) = args::parse_with::<KeyLine>(&args::command::<KeyLine>(&page), &page, argv, around)?
        else {
            return Err(Error::input("version is no key of a file"));
        };
        let mut tree = serde_json::to_value(&line.settings).map_err(|e| Error::input(format!("settings: {e}")))?;
        // The line decides, where one of these keys leaves ours without effect.
        typed.into_iter().for_each(|(section, key)| own[section][key] = Value::Null);
        overlay(&mut tree, own);
        Ok((tree, line.settings.notes))
    }
}

/// `--flag` and the words of `value`; `None` if the value is nested or empty.
fn words(flag: &str, value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(items) if !items.is_empty() => {
            let words = items.iter().map(text).collect::<Option<Vec<_>>>()?;
            Some(once(format!("--{flag}")).chain(words).collect())
        }
        value => text(value).map(|word| vec![format!("--{flag}={word}")]),
    }
}

/// The value as one word.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Null | Value::Array(_) | Value::Object(_) => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

fn command() -> clap::Command {
    Settings::augment_args(clap::Command::new("file"))
}

fn rows(flag: &str) -> Vec<&'static Synonym> {
    synonyms::of_flag(&flag.replace('_', "-"))
}

/// Section and key of the setting with the flag `name`.
pub fn own(schema: &Value, name: &str) -> Option<(String, String)> {
    let (command, flag) = (command(), name.replace('_', "-"));
    let alias = || synonyms::table().iter().find(|row| row.kind == "flag" && row.is_own() && row.spelling == name);
    let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some(&flag)) else {
        return alias().map(|row| (row.section.into(), row.key.into()));
    };
    let (section, key, _) = entries(schema).find(|(section, key, _)| argument(&command, section, key) == Some(arg))?;
    Some((section.into(), key.into()))
}

/// Section, key and value of each setting.
fn entries(settings: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    settings.as_object().into_iter().flatten().flat_map(|(section, body)| {
        body.as_object().into_iter().flatten().map(move |(key, value)| (section.as_str(), key.as_str(), value))
    })
}

/// Whether the table has a row for this value of `key`, or for each of a list.
pub fn names_value(key: &str, value: &Value) -> bool {
    let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let named = |one: &Value| {
        let text = text(one).unwrap_or_default();
        rows(key).iter().any(|row| row.flag.values.iter().any(|named| means(&text, named)))
    };
    !all.is_empty() && all.iter().all(named)
}

/// The other tool's flag for the key `key`, with its section or alone. `of`: the required section of settings, if any.
pub fn flag(section: &str, key: &str, of: Option<&str>) -> Option<String> {
    let prefix = section.strip_suffix("_config").unwrap_or(section);
    let about = |row: &&Synonym| row.kind != "flag" || of.is_none_or(|of| row.section == of);
    let dotted = Some(format!("{section}.{key}")).filter(|name| !section.is_empty() && !rows(name).is_empty());
    let alone = || [key.to_string(), format!("{prefix}_{key}")].into_iter().find(|name| rows(name).iter().any(about));
    dotted.or_else(alone)
}

/// Whether another tool's flag `section.key` is something else than our own setting `own`, whose flag has that key.
pub fn overrides(section: &str, key: &str, own: &(String, String)) -> bool {
    let differs = |row: &&Synonym| row.kind != "flag" || (row.section, row.key) != (&own.0, &own.1);
    rows(&format!("{section}.{key}")).iter().any(differs)
}

/// Whether other tools have flags `section.KEY`.
pub fn has_section(section: &str) -> bool {
    let prefix = |name: &&str| name.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
    synonyms::table().iter().any(|row| row.flag.names.iter().any(prefix))
}

/// The key nearest to `key`, for a message.
pub fn hint(key: &str) -> String {
    let command = command();
    let longs: Vec<String> =
        command.get_arguments().filter_map(|arg| Some(arg.get_long()?.replace('-', "_"))).collect();
    let near = similar(key, longs.iter().map(String::as_str)).or_else(|| similar(key, synonyms::flag_names()));
    near.map_or_else(
        || "docs/files.md lists the keys of a file".into(),
        |near| format!("the nearest known one is {near}"),
    )
}
