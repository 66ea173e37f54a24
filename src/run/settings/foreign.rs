//! Keys of files that are called as flags are: ours, and those of other tools, which one table gives a meaning wherever
//! they stand. Never knows where in the file a key stands.
use crate::base::{Error, Result};
use crate::run::settings::args::{self, Parsed};
use crate::run::settings::sections::Settings;
use crate::run::settings::synonyms::{self, Synonym, same, similar};
use crate::run::settings::value::overlay;
use clap::Args;
use serde_json::Value;
use std::iter::once;

/// A command line of settings alone.
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
    /// False where a flag cannot have such a value. Null is no value.
    pub fn add(&mut self, flag: &str, value: &Value) -> bool {
        let means_nothing = rows(flag).iter().all(|row| row.kind != "flag");
        let words = match value {
            Value::Null => Some(Vec::new()),
            Value::Object(_) if means_nothing => Some(vec![format!("--{flag}={value}")]),
            Value::Array(items) if items.is_empty() => Some(vec![format!("--{flag}=none")]),
            value => words(flag, value),
        };
        words.map(|words| self.argv.extend(words)).is_some()
    }

    /// `own`, the block's settings in our words, with what these keys say; and what is said about them.
    pub fn read(&self, own: Value) -> Result<(Value, Vec<String>)> {
        if self.argv.is_empty() {
            return Ok((own, Vec::new()));
        }
        // Ours are on the same line, where two that differ are found, and one gives way to another.
        let mut argv = Vec::new();
        for arg in command().get_arguments() {
            let value = own.as_object().into_iter().flatten().find_map(|(_, body)| body.get(arg.get_id().as_str()));
            if let (Some(long), Some(value)) = (arg.get_long(), value.filter(|value| *value != "auto")) {
                argv.extend(words(long, value).unwrap_or_default());
            }
        }
        argv.extend(self.argv.iter().cloned());
        let Parsed::Run(line) = args::parse::<KeyLine>("file", "", argv)? else {
            return Err(Error::input("version is no key of a file"));
        };
        let mut tree = serde_json::to_value(&line.settings).map_err(|e| Error::input(format!("settings: {e}")))?;
        overlay(&mut tree, own);
        Ok((tree, line.settings.notes))
    }
}

/// `--flag` and the words of `value`: none where it has parts of its own, or is empty.
fn words(flag: &str, value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(items) if !items.is_empty() => {
            let words = items.iter().map(text).collect::<Option<Vec<_>>>()?;
            Some(once(format!("--{flag}")).chain(words).collect())
        }
        value => text(value).map(|word| vec![format!("--{flag}={word}")]),
    }
}

/// One word.
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

/// Section and key of the setting whose flag is called `name`.
pub fn own(schema: &Value, name: &str) -> Option<(String, String)> {
    let (command, flag) = (command(), name.replace('_', "-"));
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(&flag));
    let alias = || synonyms::table().iter().find(|row| row.kind == "flag" && row.is_own() && row.spelling == name);
    let key = arg.map(|arg| arg.get_id().to_string()).or_else(|| alias().map(|row| row.key.to_string()))?;
    let of = |(section, body): (&String, &Value)| {
        // Where two sections have a key of this name.
        let short = key.strip_prefix(&format!("{section}_")).unwrap_or(&key);
        [key.as_str(), short].into_iter().find(|key| body.get(key).is_some()).map(|key| (section.clone(), key.into()))
    };
    schema.as_object()?.iter().find_map(of)
}

/// Whether the table says what this value of `key` means, or why it cannot be.
pub fn names_value(key: &str, value: &Value) -> bool {
    let text = text(value).unwrap_or_default();
    rows(key).iter().any(|row| row.flag.values.iter().any(|named| same(named, &text)))
}

/// The flag of another tool that the key `key` is: with its section before it, or alone. `of`: the section of settings
/// that it must be about; none for any.
pub fn flag(section: &str, key: &str, of: Option<&str>) -> Option<String> {
    let prefix = section.strip_suffix("_config").unwrap_or(section);
    let about = |row: &&Synonym| row.kind != "flag" || of.is_none_or(|of| row.section == of);
    let dotted = Some(format!("{section}.{key}")).filter(|name| !section.is_empty() && !rows(name).is_empty());
    let alone = || [key.to_string(), format!("{prefix}_{key}")].into_iter().find(|name| rows(name).iter().any(about));
    dotted.or_else(alone)
}

/// Whether other tools have flags `section.KEY`.
pub fn has_section(section: &str) -> bool {
    let prefix = |name: &&str| name.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
    synonyms::table().iter().any(|row| row.flag.names.iter().any(prefix))
}

/// The key that is most like `key`, for a message.
pub fn hint(key: &str) -> String {
    let command = command();
    let longs: Vec<String> =
        command.get_arguments().filter_map(|arg| Some(arg.get_long()?.replace('-', "_"))).collect();
    let near = similar(key, longs.iter().map(String::as_str)).or_else(|| similar(key, synonyms::flag_names()));
    near.map_or_else(
        || "docs/files.md says what a file may hold".into(),
        |near| format!("the nearest known one is {near}"),
    )
}
