//! The command line: [`Settings`] as flags, and the spellings that users know. Never validates across settings.
use crate::base::{Error, Result};
use crate::run::settings::defaults::{default_text, defaults};
use crate::run::settings::help::{self, HelpFlags, HelpPage, is_plain};
use crate::run::settings::sections::Settings;
use crate::run::settings::spellings::{self, is_switch};
use crate::run::settings::synonyms;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::any::TypeId;
use std::path::PathBuf;
use std::str::FromStr;

/// The whole command line.
#[derive(Parser, Debug)]
#[command(version, allow_negative_numbers = true, args_override_self = true, disable_help_subcommand = true)]
pub struct Cli {
    #[command(flatten)]
    pub help: HelpFlags,
    #[command(flatten)]
    pub files: Files,
    #[command(flatten)]
    pub settings: Settings,
}

impl AsMut<Settings> for Cli {
    fn as_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }
}

/// What to read and what to do: on the command line only.
#[derive(clap::Args, Debug, Default)]
#[command(next_help_heading = "Files")]
pub struct Files {
    /// Settings file, YAML or JSON; flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Use this named model of the file's model_configs
    #[arg(long, value_name = "NAME")]
    pub model_config: Option<String>,
    /// Use this named block of the file's distributed_examples, or the keys of a JSON file, as transformers' Trainer
    /// does
    #[arg(long, value_name = "NAME|FILE.json")]
    pub fsdp_config: Option<String>,
    /// Run only this stage of the file's training_stages
    #[arg(long, value_name = "NAME")]
    pub stage: Option<String>,
    /// Continue this prompt, or all of a file or data set, with the model of --pretrain, --resume or --ckpt-dir, then
    /// exit. Chat and input templates apply; without a tokenizer, pass token ids ("3 17 5")
    #[arg(long, value_name = "PROMPT")]
    pub generate: Option<String>,
    /// Talk to the model of --pretrain, --resume or --ckpt-dir: each line of standard input is a message, /help lists
    /// the commands, Ctrl-C stops an answer
    #[arg(long, conflicts_with = "generate")]
    pub chat: bool,
    /// Print the resolved settings and the plan (mesh, parameters, bytes per rank), then exit
    #[arg(long)]
    pub print_config: bool,
    /// Print the first N samples as they would be trained on, before packing: one JSON object per line with tokens,
    /// labels, text and the text with loss; then exit
    #[arg(long, value_name = "N", conflicts_with_all = ["generate", "chat", "print_config"])]
    pub print_samples: Option<u64>,
    /// Show the first N samples as text, in color where there is a loss (in [[ ]] without colors), then exit
    #[arg(long, value_name = "N", conflicts_with_all = ["generate", "chat", "print_config", "print_samples"])]
    pub preview: Option<u64>,
    /// Tolerated: old torchrun versions pass it; the environment decides
    #[arg(long, hide = true)]
    pub local_rank: Option<usize>,
}

impl Files {
    /// Whether the model writes text, and nothing is trained.
    pub fn writes_text(&self) -> bool {
        self.generate.is_some() || self.chat
    }
}

impl Cli {
    /// Whether a model is trained: no text is written, and none is written in another form.
    pub fn trains(&self) -> bool {
        !self.files.writes_text() && !self.settings.only_converts()
    }
}

/// What a command line asks for. `C`: [`Cli`], or a command line that holds it and has flags of its own.
pub enum Parsed<C = Cli> {
    Run(Box<C>),
    /// `--help`, `--version` and the like: this text, exit 0.
    Help(String),
}

/// The words behind the program's name. Paths too are text here: they go into files of settings and into messages.
pub fn words() -> Result<Vec<String>> {
    let text = |word: std::ffi::OsString| {
        word.into_string()
            .map_err(|word| Error::input(format!("the argument {} is not UTF-8; rename it", word.to_string_lossy())))
    };
    std::env::args_os().skip(1).map(text).collect()
}

/// `argv` without the program's name. Errors are [`Error::Input`].
pub fn parse<C: CommandFactory + FromArgMatches + AsMut<Settings>>(
    page: &HelpPage,
    argv: impl IntoIterator<Item = String>,
) -> Result<Parsed<C>> {
    parse_with(&command::<C>(page), page, argv, &[])
}

/// [`parse`] with the [`command`] of `page`, which a caller with many command lines builds once. `around`: flags that
/// decide what flags of other tools mean, and are read elsewhere.
pub fn parse_with<C: FromArgMatches + AsMut<Settings>>(
    command: &clap::Command,
    page: &HelpPage,
    argv: impl IntoIterator<Item = String>,
    around: &[String],
) -> Result<Parsed<C>> {
    let line = spellings::read(argv, around, command)?;
    let argv = std::iter::once(page.program.to_string()).chain(line.argv);
    let matches = match command.clone().try_get_matches_from(argv) {
        Ok(matches) => matches,
        Err(e) if e.kind() == ErrorKind::DisplayHelp => return Ok(Parsed::Help(help::short(command, page))),
        Err(e) if e.kind() == ErrorKind::DisplayVersion => return Ok(Parsed::Help(e.to_string())),
        Err(e) => {
            let text = help::fault(&e);
            let typed = line.read_as.iter().find(|(_, ours)| text.contains(&format!("{ours} ")));
            let typed = typed.map(|(theirs, ours)| format!("; --{theirs} is read as {ours}"));
            return Err(Error::input(format!("{text}{}", typed.unwrap_or_default())));
        }
    };
    if let Some(text) = help::asked(&matches, command, page) {
        return Ok(Parsed::Help(text));
    }
    let mut cli = C::from_arg_matches(&matches).map_err(|e| Error::input(e.to_string()))?;
    cli.as_mut().notes = line.notes.into_iter().map(|(_, note)| note).collect();
    Ok(Parsed::Run(Box::new(cli)))
}

/// The text of an error, with flags for the fields that the library names in backticks: `` `max_len` `` is --max-len,
/// `` `device: cpu` `` is --device cpu, and `` `async_save: false` `` is --no-async-save. What is no flag stays.
pub fn with_flags(text: &str) -> String {
    let command = Cli::command();
    let flag = |quoted: &str| {
        let (field, value) = quoted.split_once(": ").map_or((quoted, ""), |(field, value)| (field, value));
        let long =
            command.get_arguments().filter_map(clap::Arg::get_long).find(|long| long.replace('-', "_") == field)?;
        Some(match value {
            "" => format!("--{long}"),
            "false" => format!("--no-{long}"),
            value => format!("--{long} {value}"),
        })
    };
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, (quoted, after))) =
        rest.split_once('`').and_then(|(before, rest)| Some((before, rest.split_once('`')?)))
    {
        out.push_str(before);
        // A key of a row may have the name of a setting.
        match flag(quoted).filter(|_| !after.starts_with("; its keys are")) {
            Some(flag) => out.push_str(&flag),
            None => out.extend(["`", quoted, "`"]),
        }
        rest = after;
    }
    out + rest
}

/// clap calls -1 an "invalid digit found in string", and takes NaN for a number, which no setting is.
fn numeric(arg: clap::Arg) -> clap::Arg {
    fn whole<T: FromStr>(text: &str) -> std::result::Result<T, String> {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let why = if digits { "the number is too large" } else { "a whole number, 0 or more, is expected" };
        text.parse().map_err(|_| why.into())
    }
    fn real<T: FromStr + Copy + Into<f64>>(text: &str) -> std::result::Result<T, String> {
        let number = text.parse().ok().filter(|&x: &T| x.into().is_finite());
        number.ok_or_else(|| "a number is expected".into())
    }
    match arg.get_value_parser().type_id() {
        id if id == TypeId::of::<f64>() => arg.value_parser(real::<f64>),
        id if id == TypeId::of::<f32>() => arg.value_parser(real::<f32>),
        id if id == TypeId::of::<u64>() => arg.value_parser(whole::<u64>),
        id if id == TypeId::of::<usize>() => arg.value_parser(whole::<usize>),
        id if id == TypeId::of::<u32>() => arg.value_parser(whole::<u32>),
        _ => arg,
    }
}

/// clap's table with on/off flags as `--x[=true|false]` and defaults from the one place that holds them.
pub fn command<C: CommandFactory>(page: &HelpPage) -> clap::Command {
    let defaults = defaults();
    C::command().name(page.program).about(page.about).mut_args(|arg| {
        let aliases: Vec<&str> = synonyms::aliases(arg.get_id().as_str()).collect();
        let arg = numeric(arg.visible_aliases(aliases));
        let arg = match arg.get_possible_values().is_empty() {
            _ if is_plain(&arg) => {
                arg.num_args(0..=1).require_equals(true).default_missing_value("true").hide_possible_values(true)
            }
            _ if is_switch(&arg) => arg.num_args(0..=1).default_missing_value("true").value_name("MODE"),
            false if arg.get_action().takes_values() && arg.get_id() != "completions" => arg.value_name("NAME"),
            _ => arg,
        };
        let help = arg.get_help().map(|h| h.to_string()).unwrap_or_default();
        match default_text(defaults, arg.get_id().as_str()) {
            Some(default) => arg.help(format!("{help} [default: {default}]").trim_start().to_string()),
            None => arg,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::with_flags;

    #[test]
    fn fields_in_backticks_become_flags() {
        let text = "`max_len` of 3: use `device: cpu`, `async_save: false` or `input_ids`; a lone ` stays";
        let flags = "--max-len of 3: use --device cpu, --no-async-save or `input_ids`; a lone ` stays";
        assert_eq!(with_flags(text), flags);
    }
}
