//! The binary `experiments`: runs strategies side by side and judges what they cost. It starts `run_fsdp` and `run_ddp`
//! and reads their metrics files; it never trains by itself.
#[macro_use]
mod say; // print! for a reader that may go away
mod verdict; // how a subcommand ends

// Runs and what they leave.
mod catalogue; // the runs of each set
mod text_log; // losses in logs
mod curve; // metrics files
mod job; // one run as a child process
mod launcher; // who starts the ranks
mod launch; // from an entry of a set to a job

// Charts and tables.
mod chart; // SVG and PNG
mod compare; // two curves
mod summary; // what the runs of a directory cost
mod table; // as text
mod page; // as HTML
mod memory; // memory timelines

// Subcommands.
mod analyze;
mod sets;
mod suite;
mod smoke;
mod chaos;
mod trace;

use clap::{Parser, Subcommand};
use experiments::plan;
use flatshard::base::Result;
use std::path::Path;
use std::process::ExitCode;
use verdict::Verdict;

/// Runs flatshard's strategies side by side, and judges what they cost.
///
/// Exit status: 0 done, or the judgment is good; 1 a run failed, or the judgment is bad; 2 bad input.
#[derive(Parser)]
#[command(name = "experiments", version, max_term_width = 120)]
struct HarnessCli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Run(Box<sets::RunArgs>),
    Analyze(analyze::AnalyzeArgs),
    Compare(compare::CompareArgs),
    Suite(Box<suite::SuiteArgs>),
    Smoke(smoke::SmokeArgs),
    Chaos(chaos::ChaosArgs),
    Trace(trace::TraceArgs),
    /// Bytes of a rank, communication and step time of each strategy on N GPUs, and which to run: plan --help
    #[command(disable_help_flag = true)]
    Plan {
        /// Its own flags, and those of run_fsdp
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<String>,
    },
}

fn main() -> ExitCode {
    let words = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    let cli = HarnessCli::parse_from(normalize(words));
    let result: Result<Verdict> = match cli.verb {
        Verb::Run(args) => sets::main(&args),
        Verb::Analyze(args) => analyze::main(&args),
        Verb::Compare(args) => compare::main(&args),
        Verb::Suite(args) => suite::main(&args),
        Verb::Smoke(args) => smoke::main(&args),
        Verb::Chaos(args) => chaos::main(&args),
        Verb::Trace(args) => trace::main(&args),
        Verb::Plan { flags } => plan::main(&flags).map(|fits| if fits { Verdict::Good } else { Verdict::Bad }),
    };
    match result {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Err(e) => {
            eprintln!("error: {}", flatshard::run::settings::args::with_flags(&e.to_string()));
            ExitCode::from(e.exit_status())
        }
    }
}

/// Flags with dashes, and `--plot FILE` as `--plot=FILE`. Values and what follows `--` stay as they are.
fn normalize(words: impl Iterator<Item = String>) -> Vec<String> {
    let (mut words, mut out) = (words.peekable(), Vec::<String>::new());
    // `--plot` may also stand alone, in front of a run: pictures are known by their ending, runs exist.
    let is_file = |word: &String| {
        let picture = [".png", ".svg"].iter().any(|ending| word.ends_with(ending));
        !word.starts_with('-') && (picture || !Path::new(word).exists())
    };
    while let Some(word) = words.next() {
        if word == "--" {
            out.push(word);
            out.extend(words);
            break;
        }
        let is_value = out.last().is_some_and(|flag| ["--launcher", "--launcher-args"].contains(&flag.as_str()));
        let mut word = if is_value { word } else { dashes(word) };
        if ["--plot", "--output"].contains(&word.as_str())
            && let Some(file) = words.next_if(is_file)
        {
            word += &format!("={file}");
        }
        out.push(word);
    }
    out
}

/// `--output_dir x` is `--output-dir x`, as in the training binaries.
fn dashes(arg: String) -> String {
    match arg.strip_prefix("--") {
        None => arg,
        Some(flag) => {
            let (name, value) = flag.split_at(flag.find('=').unwrap_or(flag.len()));
            format!("--{}{value}", name.replace('_', "-"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        HarnessCli::command().debug_assert();
    }

    #[test]
    fn values_and_flags_that_are_passed_on_stay() {
        let read = |line: &str| normalize(line.split(' ').map(String::from)).join(" ");
        assert_eq!(
            read("run --launcher_args --a_b c_d -- --adam_lr x"),
            "run --launcher-args --a_b c_d -- --adam_lr x"
        );
        assert_eq!(read("compare --plot x.svg a b"), "compare --plot=x.svg a b");
        assert_eq!(read("compare --plot no-such b"), "compare --plot=no-such b");
        assert_eq!(
            read("compare --plot / b --plot --threshold 1 --plot"),
            "compare --plot / b --plot --threshold 1 --plot"
        );
    }

    #[test]
    fn underscores_in_names_only() {
        assert_eq!(dashes("--output_dir=a_b".into()), "--output-dir=a_b");
        assert_eq!(dashes("a_b".into()), "a_b");
        assert_eq!(dashes("-n_1".into()), "-n_1");
    }
}
