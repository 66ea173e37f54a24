//! The binary `experiments`: runs strategies side by side and judges what they cost. It starts `run_fsdp` and `run_ddp`
//! and reads their metrics files; it never trains by itself.
#[macro_use]
mod say; // print! for a reader that may go away
mod verdict; // how a subcommand ends

// Runs and what they leave.
mod catalogue; // the runs of each set
mod curve; // metrics files
mod job; // one run as a child process
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
    let cli = HarnessCli::parse_from(std::env::args_os().map(|arg| dashes(arg.to_string_lossy().into_owned())));
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
        HarnessCli::command().debug_assert();
    }

    #[test]
    fn underscores_in_names_only() {
        assert_eq!(dashes("--output_dir=a_b".into()), "--output-dir=a_b");
        assert_eq!(dashes("a_b".into()), "a_b");
        assert_eq!(dashes("-n_1".into()), "-n_1");
    }
}
