//! docs/flags.md is made from the declarations of the settings, and this test compares the two. Never parses a command
//! line.
use clap::{Arg, Args, Command, CommandFactory};
use flatshard::run::settings::Settings;
use flatshard::run::settings::args::{Cli, Files};
use flatshard::run::settings::defaults::{default_text, defaults};
use flatshard::run::settings::help::HelpFlags;
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::Path;

const HEAD: &str = "# Flags

```sh run
run_fsdp --help-all
```

All flags of `run_fsdp` and `run_ddp`; below each, its key in a [settings file](files.md). Flags accept dashes and underscores. `--[no-]x` is
a switch: `--x` or `--no-x`, and `x: true` or `x: false` in a file. A word in capitals stands for a value and names its unit. Flags of other
tools are in [coming from other tools](coming-from.md).

This page is made from `src/run/settings` and `src/run/settings/defaults.yaml`; `tests/cli/flags.rs` checks that it is current.
";

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// `section.key` in a file.
fn key(settings: &Value, id: &str) -> Option<String> {
    let sections = settings.as_object().unwrap();
    let keys = || sections.iter().flat_map(|(name, body)| body.as_object().unwrap().keys().map(move |key| (name, key)));
    let exact = keys().find(|(_, key)| *key == id);
    let found = exact.or_else(|| keys().find(|(section, key)| id == format!("{section}_{key}")));
    found.map(|(section, key)| format!("{section}.{key}"))
}

fn row(arg: &Arg, settings: &Value, defaults: &Value) -> String {
    let (id, long) = (arg.get_id().as_str(), arg.get_long().unwrap());
    let names: Vec<String> = arg.get_possible_values().iter().map(|value| value.get_name().to_string()).collect();
    let valued = arg.get_action().takes_values();
    let switch = valued && names.iter().any(|name| name == "true");
    let placeholder = arg.get_value_names().into_iter().flatten().map(|name| name.to_string()).collect::<Vec<_>>();
    let more = arg.get_num_args().is_some_and(|number| number.max_values() > 2);
    let modes: Vec<&str> = names.iter().map(String::as_str).filter(|name| !["true", "false"].contains(name)).collect();
    let value = match () {
        () if switch && modes.is_empty() || !valued => String::new(),
        () if names.is_empty() => format!(" {}{}", placeholder.join(" "), if more { "..." } else { "" }),
        () => " NAME".into(),
    };
    let help = arg.get_help().map(|help| help.to_string()).unwrap_or_default();
    let (text, own) = match help.rsplit_once(" [default: ") {
        Some((text, own)) => (text.to_string(), own.trim_end_matches(']').to_string()),
        None => (help, String::new()),
    };
    let of = |name: &&str| format!("`{name}`");
    let values = match modes.is_empty() {
        true => String::new(),
        false => format!(". NAME: {}", modes.iter().map(of).collect::<Vec<_>>().join(", ")),
    };
    let default = default_text(defaults, id).unwrap_or(own);
    let flag = format!("--{}{long}{value}", if switch { "[no-]" } else { "" });
    let no_keys = HelpFlags::augment_args(Files::augment_args(Command::new("no keys")));
    let key = match no_keys.get_arguments().any(|arg| arg.get_id().as_str() == id) {
        true => String::new(),
        false => format!("<br>`{}`", key(settings, id).unwrap_or_else(|| panic!("--{long} is no key"))),
    };
    format!("| `{}`{key} | {}{values} | {} |\n", cell(&flag), cell(&text), cell(&default))
}

fn page() -> String {
    let (settings, defaults) = (serde_json::to_value(Settings::default()).unwrap(), defaults());
    let (mut page, mut section) = (HEAD.to_string(), String::new());
    let command = Cli::command();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_long().is_some()) {
        let Some(heading) = arg.get_help_heading() else { continue };
        if section != heading {
            section = heading.to_string();
            let table = "| flag and key | what it does | default |\n| --- | --- | --- |";
            write!(page, "\n## {section}\n\n{table}\n").unwrap();
        }
        page += &row(arg, &settings, defaults);
    }
    page
}

#[test]
fn the_page_of_flags_is_what_the_settings_declare() {
    let (made, page) = (Path::new(env!("CARGO_TARGET_TMPDIR")).join("flags.md"), page());
    fs::write(&made, &page).unwrap();
    let shown = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/flags.md")).unwrap_or_default();
    assert!(page == shown, "docs/flags.md is out of date: copy {}", made.display());
}
