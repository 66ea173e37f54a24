//! No requested setting is silently without effect: applies the table of settings that have no effect given the others
//! (`idle.tsv`) as errors or notes. Default values are always accepted, as in a file of all settings. Never changes a
//! setting, except that settings the engine does not have become null.
use crate::base::{Error, Result};
use crate::run::settings::args::Cli;
use crate::run::settings::defaults::defaults;
use crate::run::settings::spellings::argument;
use clap::CommandFactory;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::LazyLock;

/// A row of the table.
pub struct IdleRow {
    /// `section.key` or `section.*`.
    pub settings: Vec<&'static str>,
    terms: Vec<IdleTerm>,
    pub refuse: bool,
    /// Refuses an explicit default value too.
    any: bool,
    /// The settings have an effect, whatever later rows say.
    has_effect: bool,
    pub because: &'static str,
    /// What to use instead; may be empty.
    instead: &'static str,
}

/// Compares `name` (a setting if it has a dot, else a fact) with values.
struct IdleTerm {
    name: &'static str,
    test: Test,
}

enum Test {
    OneOf(Vec<&'static str>),
    NoneOf(Vec<&'static str>),
    On,
    Off,
    /// `<` or `<=` the setting itself.
    Below {
        or_equal: bool,
    },
}

/// Facts known without a plan.
const WITHOUT_PLAN: [&str; 2] = ["engine", "task"];

static TABLE: LazyLock<Vec<IdleRow>> = LazyLock::new(|| {
    let rows = include_str!("idle.tsv").lines().filter(|line| !line.starts_with('#'));
    let row = |line: &'static str| {
        let [settings, terms, then, because, instead] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("idle.tsv: a row without five columns: {line}")
        };
        IdleRow {
            settings: settings.split(", ").collect(),
            terms: terms.split(" and ").map(IdleTerm::read).collect(),
            refuse: then.starts_with("refuse"),
            any: then == "refuse any",
            has_effect: then == "nothing",
            because,
            instead,
        }
    };
    rows.map(row).collect()
});

impl IdleTerm {
    fn read(text: &'static str) -> IdleTerm {
        let list = |values: &'static str| values.split(',').collect();
        let (name, test) = if let Some((name, values)) = text.split_once("!=") {
            (name, Test::NoneOf(list(values)))
        } else if let Some(name) = text.strip_suffix("<=self") {
            (name, Test::Below { or_equal: true })
        } else if let Some(name) = text.strip_suffix("<self") {
            (name, Test::Below { or_equal: false })
        } else if let Some((name, values)) = text.split_once('=') {
            (name, Test::OneOf(list(values)))
        } else {
            text.strip_prefix('!').map_or((text, Test::On), |name| (name, Test::Off))
        };
        IdleTerm { name, test }
    }

    /// False if the fact is unknown.
    fn holds(&self, settings: &Value, facts: &Value, itself: &Value) -> bool {
        let value = match self.name.split_once('.') {
            Some((section, key)) => &settings[section][key],
            None if facts[self.name].is_null() => return false,
            None => &facts[self.name],
        };
        match &self.test {
            Test::OneOf(values) => values.contains(&text(value).as_str()),
            Test::NoneOf(values) => !values.contains(&text(value).as_str()),
            Test::On => !nothing(value),
            Test::Off => nothing(value),
            Test::Below { or_equal } => match (value.as_f64(), itself.as_f64()) {
                (Some(value), Some(itself)) => value < itself || *or_equal && value == itself,
                _ => false,
            },
        }
    }
}

impl IdleRow {
    fn names(&self, section: &str, key: &str) -> bool {
        self.settings
            .iter()
            .any(|setting| setting.split_once('.').is_some_and(|(s, k)| s == section && (k == key || k == "*")))
    }
    fn asks_engine(&self) -> bool {
        self.terms.iter().any(|term| term.name == "engine")
    }
    fn asks_plan(&self) -> bool {
        self.terms.iter().any(|term| !term.name.contains('.') && !WITHOUT_PLAN.contains(&term.name))
    }
    fn holds(&self, settings: &Value, facts: &Value, itself: &Value) -> bool {
        self.terms.iter().all(|term| term.holds(settings, facts, itself))
    }
}

fn nothing(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false)) || value.as_f64() == Some(0.0)
}
/// The value as on a command line.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(" "),
        Value::Number(n) if n.is_f64() => match n.as_f64() {
            Some(whole) if whole.fract() == 0.0 && whole.abs() < 1e15 => whole.to_string(),
            _ => n.to_string(),
        },
        other => other.to_string(),
    }
}

/// The flag of a setting, with its value.
fn flag(cli: &clap::Command, section: &str, key: &str, value: &Value) -> String {
    let long = argument(cli, section, key).and_then(clap::Arg::get_long);
    let long = long.map_or(key.replace('_', "-"), str::to_string);
    match value {
        Value::Bool(true) => format!("--{long}"),
        Value::Bool(false) => format!("--no-{long}"),
        value => format!("--{long} {}", text(value)),
    }
}

/// Notes about settings in `asked` that are not the default and have no effect, given all `settings`; an error if the
/// row refuses them. `of_plan`: only rows that need facts of a plan, or only the others.
fn judge(asked: &Value, settings: &Value, facts: &Value, of_plan: bool) -> Result<Vec<String>> {
    let (defaults, cli) = (defaults(), LazyLock::new(Cli::command));
    let mut found: Vec<(&str, Vec<String>)> = Vec::new();
    for (section, keys) in asked.as_object().into_iter().flatten() {
        for (key, value) in keys.as_object().into_iter().flatten() {
            if value.is_null() {
                continue;
            }
            let holds = |row: &&IdleRow| row.names(section, key) && row.holds(settings, facts, value);
            let Some(row) = TABLE.iter().find(holds).filter(|row| row.asks_plan() == of_plan) else { continue };
            if row.has_effect || *value == defaults[section][key] && !row.any {
                continue;
            }
            let flag = flag(&cli, section, key, value);
            if row.refuse {
                let instead = if row.instead.is_empty() { String::new() } else { format!(", or use {}", row.instead) };
                return Err(Error::input(format!("{flag} has no effect here: {}; remove it{instead}", row.because)));
            }
            match found.iter_mut().find(|(because, _)| *because == row.because) {
                Some((_, flags)) => flags.push(flag),
                None => found.push((row.because, vec![flag])),
            }
        }
    }
    let line = |(because, flags): (&str, Vec<String>)| {
        let have = if flags.len() == 1 { "has" } else { "have" };
        format!("{} {have} no effect here: {because}", flags.join(", "))
    };
    Ok(found.into_iter().map(line).collect())
}

/// Judges settings without a plan. `asked`: the user's settings; `task`: train, generate or merge; `engine`: manual,
/// reference, zero or ddp. Removes settings that the engine does not have from `merged`.
pub fn settings(asked: &Value, merged: &mut Value, task: &str, engine: &str) -> Result<Vec<String>> {
    let facts = json!({"task": task, "engine": engine});
    let notes = judge(asked, merged, &facts, false)?;
    if engine != "ddp" {
        let foreign = |row: &&IdleRow| row.asks_engine() && row.holds(merged, &facts, &Value::Null);
        let rows = TABLE.iter().filter(foreign);
        let keys: HashSet<_> =
            rows.flat_map(|row| &row.settings).filter_map(|setting| setting.split_once('.')).collect();
        keys.into_iter().filter(|(_, key)| *key != "*").for_each(|(section, key)| merged[section][key] = Value::Null);
    }
    Ok(notes)
}

/// Judges settings with the facts of a plan: its machine and its data.
pub fn plan(settings: &impl serde::Serialize, facts: &Value) -> Result<Vec<String>> {
    let settings = serde_json::to_value(settings).map_err(|e| Error::input(format!("settings: {e}")))?;
    judge(&settings, &settings, facts, true)
}

/// The rows of the table.
pub fn rows() -> impl Iterator<Item = &'static IdleRow> {
    TABLE.iter()
}

#[cfg(test)]
mod tests {
    use super::super::sections::Settings;
    use super::*;

    /// Each name of the table is a setting or a fact.
    #[test]
    fn rows_name_settings_and_facts() {
        let schema = serde_json::to_value(Settings::default()).unwrap();
        let known = |section: &str, key: &str| {
            key == "*" && schema.get(section).is_some() || schema[section].get(key).is_some()
        };
        for row in rows() {
            for setting in &row.settings {
                let (section, key) = setting.split_once('.').unwrap();
                assert!(known(section, key), "{setting} is no setting");
            }
            for term in &row.terms {
                match term.name.split_once('.') {
                    Some((section, key)) => assert!(known(section, key), "{} is no setting", term.name),
                    None => assert!(term.name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{}", term.name),
                }
            }
        }
    }
}
