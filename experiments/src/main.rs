//! The binary `experiments`: runs strategies side by side and judges what they cost. It starts `run_fsdp` and `run_ddp` and
//! reads their metrics files; it never trains by itself.
#[macro_use]
mod say;

mod analyze;
mod catalogue;
mod chaos;
mod chart;
mod compare;
mod curve;
mod job;
mod launch;
mod memory;
mod page;
mod sets;
mod smoke;
mod suite;
mod summary;
mod table;
mod trace;

use clap::{Parser, Subcommand};
use experiments::plan;
use flatshard::base::Result;
use std::process::ExitCode;

/// Runs flatshard's strategies side by side, and judges what they cost.
///
/// Exit status: 0 done, or the judgement is good; 1 a run failed, or the judgement is bad; 2 bad input.
#[derive(Parser)]
#[command(name = "experiments", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Run(Box<sets::Args>),
    Analyze(analyze::Args),
    Compare(compare::Args),
    Suite(Box<suite::Args>),
    Smoke(smoke::Args),
    Chaos(chaos::Args),
    Trace(trace::Args),
    /// Bytes of a rank, communication and step time of each strategy on N GPUs, and which to run: plan --help
    #[command(disable_help_flag = true)]
    Plan {
        /// Its own flags, and those of run_fsdp
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<String>,
    },
}

/// What a subcommand that ran to its end has to say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Good,
    Bad,
}

fn main() -> ExitCode {
    let cli = Cli::parse_from(std::env::args_os().map(|arg| dashes(arg.to_string_lossy().into_owned())));
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
        Cli::command().debug_assert();
    }

    #[test]
    fn underscores_in_names_only() {
        assert_eq!(dashes("--output_dir=a_b".into()), "--output-dir=a_b");
        assert_eq!(dashes("a_b".into()), "a_b");
        assert_eq!(dashes("-n_1".into()), "-n_1");
    }
}
