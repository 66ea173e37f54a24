//! What `--help`, `--help-all`, `--completions` and `--man` print, all from clap's table of flags, and clap's errors in
//! one line. Never parses.
use crate::base::columns::wrap;
use crate::run::settings::spellings::is_switch;
use crate::run::settings::synonyms::one_of;
use crate::run::watch::style;
use clap::builder::styling::{Style, Styles};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};
use clap_complete::Shell;
use std::io::{IsTerminal, stdout};

/// What the help of a program has besides its flags.
pub struct HelpPage {
    pub program: &'static str,
    /// What it does, in two lines.
    pub about: &'static str,
    /// The flags that `--help` describes, in its order.
    pub main: &'static [&'static str],
    /// Arguments, and what they are for.
    pub examples: &'static [(&'static str, &'static str)],
    /// What may come first on the command line, and what each is for.
    pub verbs: &'static [(&'static str, &'static str)],
}

impl HelpPage {
    /// The page of a training binary.
    pub const fn training(program: &'static str, about: &'static str) -> HelpPage {
        const MAIN: &[&str] = &[
            "dataset",
            "pretrain",
            "config",
            "nproc-per-node",
            "max-steps",
            "batch-size",
            "max-len",
            "lr",
            "precision",
            "ckpt-dir",
            "resume",
            "save-hf",
            "generate",
            "metrics-path",
        ];
        const EXAMPLES: &[(&str, &str)] = &[
            ("", "a small LLaMA on 2 CPU ranks, 3 minutes"),
            ("--ckpt-dir run1 --resume auto --save-hf model", "save checkpoints, resume, export"),
            ("--ckpt-dir run1 --generate \"fn main() {\"", "continue a prompt"),
            ("--pretrain model --lora-rank 8 --save-hf tuned", "fine-tune the exported model with LoRA"),
            ("--nproc-per-node 8 --tp-size 2 --print-config", "the plan: bytes per rank"),
        ];
        HelpPage { program, about, main: MAIN, examples: EXAMPLES, verbs: &[] }
    }

    /// The page of the binary whose command lines begin with one of these verbs.
    pub const fn verbs(
        program: &'static str,
        about: &'static str,
        verbs: &'static [(&'static str, &'static str)],
    ) -> HelpPage {
        const EXAMPLES: &[(&str, &str)] = &[
            ("sft model chats.jsonl --lora-rank 8 --save-hf tuned", "train adapters on conversations"),
            ("chat tuned", "talk to the result"),
            ("export tuned --save-gguf tuned.gguf", "one file for llama.cpp and Ollama"),
            ("samples model chats.jsonl", "what would be trained on"),
        ];
        HelpPage { examples: EXAMPLES, verbs, ..HelpPage::training(program, about) }
    }

    fn usage(&self) -> String {
        let verb = if self.verbs.is_empty() { "" } else { "VERB MODEL [DATA...] " };
        format!("{} {verb}[FLAGS]", self.program)
    }

    fn example_lines(&self) -> Vec<String> {
        let commands: Vec<String> =
            self.examples.iter().map(|(args, _)| format!("{} {args}", self.program).trim_end().into()).collect();
        let width = commands.iter().map(String::len).max().unwrap_or(0);
        commands.iter().zip(self.examples).map(|(command, (_, what))| format!("{command:width$}  # {what}")).collect()
    }

    fn example_section(&self) -> String {
        let lines: String = self.example_lines().iter().map(|line| format!("\n  {line}")).collect();
        format!("{}{lines}", heading("Examples:"))
    }
}

/// Flags that print something and exit.
#[derive(clap::Args, Debug, Default)]
#[command(next_help_heading = "Help")]
pub struct HelpFlags {
    /// Print all flags by section, with units and defaults
    #[arg(long)]
    pub help_all: bool,
    /// Print a completion script for this shell
    #[arg(long, value_name = "SHELL")]
    pub completions: Option<Shell>,
    /// Print the man page (roff)
    #[arg(long)]
    pub man: bool,
}

/// The text that `matches` ask for, if they do.
pub fn asked(matches: &ArgMatches, command: &Command, page: &HelpPage) -> Option<String> {
    let is_on = |flag| matches!(matches.try_get_one::<bool>(flag), Ok(Some(true)));
    match matches.try_get_one::<Shell>("completions") {
        Ok(Some(&shell)) => Some(completions(with_verbs(completable(command.clone()), page), page.program, shell)),
        _ if is_on("help_all") => Some(all(command, page)),
        _ if is_on("man") => Some(man(command, page)),
        _ => None,
    }
}

/// The main flags and examples. On a terminal this fits one screen; elsewhere the names and defaults of all other flags
/// stand between the two, so that a search finds each.
pub fn short(command: &Command, page: &HelpPage) -> String {
    let is_main = |arg: &Arg| page.main.iter().position(|main| arg.get_long() == Some(main));
    let mut after = match stdout().is_terminal() {
        true => String::new(),
        false => format!("{}\n\n", further(command, &|arg| is_main(arg).is_some())),
    };
    after += &page.example_section();
    after += "\n\n--help-all describes all flags, by section. Each is also a key of a --config file.";
    let main = |arg: Arg| match is_main(&arg) {
        Some(at) => arg.help_heading("Main flags").display_order(at),
        None => arg.hide(true),
    };
    let command = command.clone().mut_args(main).disable_help_flag(true).disable_version_flag(true);
    let columns = if stdout().is_terminal() { command.max_term_width(COLUMNS) } else { command.term_width(COLUMNS) };
    rendered(columns.override_usage(page.usage()).after_help(after))
}

const COLUMNS: usize = 100;

/// Every flag in its section. A flag is one line where the reader is a program, such as grep.
fn all(command: &Command, page: &HelpPage) -> String {
    let command = command.clone().override_usage(page.usage()).after_help(page.example_section());
    rendered(if stdout().is_terminal() { command.max_term_width(COLUMNS) } else { command.term_width(0) })
}

/// Names and short defaults of all flags but those that `is_main` finds, in their sections.
fn further(command: &Command, is_main: &dyn Fn(&Arg) -> bool) -> String {
    let mut sections: Vec<(&str, Vec<String>)> = Vec::new();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && !is_main(arg)) {
        let (Some(section), Some(long)) = (arg.get_help_heading(), arg.get_long()) else { continue };
        let no = if is_switch(arg) { "[no-]" } else { "" };
        let help = arg.get_help().map(|help| help.to_string()).unwrap_or_default();
        let default = help.rsplit_once("[default: ").and_then(|(_, rest)| rest.split_once(']')).map(|(text, _)| text);
        let default =
            default.filter(|text| *text != "none" && text.len() < 14).map_or(String::new(), |d| format!(" {d}"));
        let flag = format!("--{no}{long}{default}");
        match sections.last_mut().filter(|last| last.0 == section) {
            Some(last) => last.1.push(flag),
            None => sections.push((section, vec![flag])),
        }
    }
    let lines = sections.iter().map(|(section, flags)| {
        wrap(
            &format!("  {:<12}", section.replace("Weights & Biases", "W&B")),
            flags.iter().map(String::as_str),
            "  ",
            COLUMNS,
        )
    });
    format!("{}\n{}", heading("Further flags, with their defaults:"), lines.collect::<Vec<_>>().join("\n"))
}

fn heading(text: &str) -> String {
    if style::is_on(&stdout()) { style::paint(Style::new().bold(), text) } else { text.into() }
}

fn rendered(command: Command) -> String {
    let bold = Style::new().bold();
    let text = shown(command).styles(Styles::plain().header(bold).usage(bold)).render_help();
    if style::is_on(&stdout()) { text.ansi().to_string() } else { text.to_string() }
}

/// On/off flags as people write them: `--[no-]x`, and `--[no-]x [MODE]` where there are further modes.
fn shown(command: Command) -> Command {
    command.mut_args(|arg| {
        let Some(long) = arg.get_long().filter(|_| is_switch(&arg)).map(|long| format!("[no-]{long}")) else {
            return arg;
        };
        if is_plain(&arg) { plain(arg).long(long) } else { arg.long(long).value_name("MODE") }
    })
}

/// One that has no mode but on and off.
pub fn is_plain(arg: &Arg) -> bool {
    is_switch(arg) && arg.get_possible_values().len() == 2
}

/// Without its value.
fn plain(arg: Arg) -> Arg {
    arg.action(ArgAction::SetTrue).num_args(0).require_equals(false).hide_possible_values(false)
}

/// `command` for completions: `--no-x` is a flag of its own, and files and directories are known as such.
pub fn completable(command: Command) -> Command {
    let switches: Vec<Arg> = command.get_arguments().filter(|arg| is_switch(arg)).cloned().collect();
    let off = switches.iter().filter_map(|arg| {
        let (long, help) = (arg.get_long()?, format!("Turn off --{}", arg.get_long()?));
        Some(Arg::new(format!("no-{long}")).long(format!("no-{long}")).action(ArgAction::SetTrue).help(help))
    });
    let hint = |arg: &Arg| match arg.get_value_names()?.first()?.as_str() {
        name if name.starts_with("FILE") => Some(ValueHint::FilePath),
        name if name.ends_with("DIR") => Some(ValueHint::DirPath),
        name if name.starts_with("PATH") => Some(ValueHint::AnyPath),
        _ => Some(ValueHint::Other),
    };
    let command = command.mut_args(|arg| match hint(&arg) {
        _ if is_plain(&arg) => plain(arg),
        Some(hint) if arg.get_possible_values().is_empty() => arg.value_hint(hint),
        _ => arg,
    });
    command.args(off.collect::<Vec<_>>())
}

/// Each verb as a command with the same flags.
fn with_verbs(command: Command, page: &HelpPage) -> Command {
    let verbs = page.verbs.iter().map(|(name, about)| command.clone().name(*name).about(*about));
    let verbs: Vec<Command> = verbs.collect();
    command.subcommands(verbs)
}

/// The script of `shell` that completes the command line of `program`.
pub fn completions(mut command: Command, program: &str, shell: Shell) -> String {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut command, program, &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

fn man(command: &Command, page: &HelpPage) -> String {
    let (first, _) = page.about.split_once('\n').unwrap_or((page.about, ""));
    let command = shown(command.clone()).about(first).long_about(page.about).override_usage(page.usage());
    let verbs: String = page.verbs.iter().map(|(name, about)| format!(".TP\n\\fB{name}\\fR\n{about}\n")).collect();
    let verbs = if verbs.is_empty() { verbs } else { format!(".SH VERBS\n{}", verbs.replace('-', "\\-")) };
    format!(
        "{}{verbs}.SH EXAMPLES\n.nf\n{}\n.fi\n",
        man_page(command),
        page.example_lines().join("\n").replace('-', "\\-")
    )
}

/// In roff.
pub fn man_page(command: Command) -> String {
    let mut out = Vec::new();
    // A vector takes everything that is written.
    let _ = clap_mangen::Man::new(command).render(&mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// clap's error in one line.
pub fn fault(e: &clap::Error) -> String {
    let text = |kind| match e.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let flag = text(ContextKind::InvalidArg).split([' ', '[']).next().unwrap_or_default();
    if let (ErrorKind::InvalidValue, Some(ContextValue::Strings(names))) = (e.kind(), e.get(ContextKind::ValidValue))
        && !names.is_empty()
    {
        return match text(ContextKind::InvalidValue) {
            "" => format!("{flag} has no value: it takes one of {}", names.join(", ")),
            value => format!("{flag} {value}: it must be {}", one_of(value, names.iter().map(String::as_str))),
        };
    }
    let text = e.to_string().replace(" [<MODE>]", "");
    let text = text.trim_start_matches("error: ");
    let ends = ["\n\nUsage", "\n\nFor more information"].iter().filter_map(|end| text.find(end)).min();
    text[..ends.unwrap_or(text.len())].trim_end().replace("\n\n", "; ").replace("\n", "")
}
