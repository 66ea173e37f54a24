//! The binary `experiments`: runs strategies side by side and compares their cost, by starting `run_fsdp` and `run_ddp`
//! and reading their metrics files. Never trains in its own process.
#[macro_use]
mod say; // print! that tolerates a closed pipe
mod verdict; // how a subcommand ends

// Runs and their results.
mod catalogue; // the runs of each set
mod text_log; // losses in logs
mod tail; // files that grow
mod curve; // metrics files
mod job; // one run as a child process
mod launcher; // what starts the ranks
mod launch; // from an entry of a set to a job

// Charts and tables.
mod chart; // SVG and PNG
mod learned; // accuracy of preference runs
mod compare; // two curves
mod summary; // the cost of each run of a directory
mod task; // what a run is for
mod table; // as text
mod memory; // memory timelines
mod trace; // of a step
mod page; // as HTML
mod serve; // the page over HTTP

// Subcommands.
#[allow(dead_code)] // experiments/tests/planner.rs reads more of it
mod plan; // the planner
mod analyze;
mod sets;
mod suite;
mod smoke;
mod chaos;
mod watch;
mod results;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use flatshard::base::Result;
use flatshard::run::settings::{args, help};
use flatshard::run::watch::style;
use std::path::Path;
use std::process::ExitCode;
use verdict::Verdict;

/// Run flatshard's strategies side by side, and compare their cost.
///
/// Exit status: 0 success; 1 a run failed or a comparison did not pass; 2 bad input.
#[derive(Parser)]
#[command(name = "experiments", version, max_term_width = 100, arg_required_else_help = true)]
#[command(override_usage = "experiments <COMMAND>", after_help = EXAMPLES)]
struct HarnessCli {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// Print a completion script for this shell
    #[arg(long, value_name = "SHELL", exclusive = true)]
    completions: Option<Shell>,
    /// Print the man page (roff)
    #[arg(long, exclusive = true)]
    man: bool,
}

const EXAMPLES: &str = "Examples:
  experiments smoke                                    # does everything work here? about a minute
  experiments run --execute --only ddp_fp32 fsdp_manual --steps 10
  experiments analyze                                  # table and HTML page of these runs
  experiments plan --gpus 8 --embed-dim 2048 --num-layers 16 --num-heads 16";

#[derive(Subcommand)]
enum Verb {
    #[command(after_help = "Examples:
  experiments run --list
  experiments run --execute --only ddp_fp32 fsdp_manual --steps 10
  experiments run --execute --repeat 3 --output-dir runs/large -- --embed-dim 512")]
    Run(Box<sets::RunArgs>),
    #[command(after_help = "Examples:
  experiments analyze
  experiments analyze --output-dir runs/large --baseline fsdp_manual")]
    Analyze(analyze::AnalyzeArgs),
    #[command(after_help = "Examples:
  experiments watch run.jsonl")]
    Watch(watch::WatchArgs),
    #[command(after_help = "Examples:
  experiments compare runs/experiments/ddp_fp32 runs/experiments/fsdp_manual --plot loss.svg
  experiments compare torchtitan.log metrics.jsonl --threshold 0.02")]
    Compare(compare::CompareArgs),
    #[command(after_help = "Examples:
  experiments suite --max-samples 64
  SKIP_RING=1 experiments suite --model qwen --dataset chats.jsonl -- --precision bf16")]
    Suite(Box<suite::SuiteArgs>),
    #[command(after_help = "Examples:
  experiments smoke
  experiments smoke --output-dir runs/smoke")]
    Smoke(smoke::SmokeArgs),
    #[command(after_help = "Examples:
  experiments chaos --kills 5 --others 2
  experiments chaos --seed 7 --nproc-per-node 4 --json faults.json -- --async-save")]
    Chaos(chaos::ChaosArgs),
    #[command(after_help = "Examples:
  run_fsdp --max-steps 12 --profile-steps 10:12 --metrics-path run/m.jsonl
  experiments trace run/traces/steps-10-12-rank-0.json --plot step.svg")]
    Trace(trace::TraceArgs),
    #[command(after_help = "Examples:
  experiments chart experiments/results/2026-11-21-peers-cpu.json --out peers
  experiments chart runs/dpo/metrics.jsonl runs/rm/metrics.jsonl --out preference
  experiments chart adamw.jsonl muon.jsonl --out loss")]
    Chart(results::ChartArgs),
    /// Estimate memory, communication and step time of each strategy on N GPUs, and recommend one: plan --help
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
    let command = HarnessCli::command;
    let Some(verb) = cli.verb else {
        print!(
            "{}",
            match cli.completions {
                Some(shell) => {
                    let flags = |_| help::completable(plan::flags()).name("plan");
                    help::completions(command().mut_subcommand("plan", flags), "experiments", shell)
                }
                None => help::man_page(command()),
            }
        );
        return ExitCode::SUCCESS;
    };
    let result: Result<Verdict> = match verb {
        Verb::Run(args) => sets::main(&args),
        Verb::Analyze(args) => analyze::main(&args),
        Verb::Watch(args) => watch::main(&args),
        Verb::Compare(args) => compare::main(&args),
        Verb::Suite(args) => suite::main(&args),
        Verb::Smoke(args) => smoke::main(&args),
        Verb::Chaos(args) => chaos::main(&args),
        Verb::Trace(args) => trace::main(&args),
        Verb::Chart(args) => results::main(&args),
        Verb::Plan { flags } => plan::main(&flags).map(|fits| if fits { Verdict::Good } else { Verdict::Bad }),
    };
    match result {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Ok(Verdict::Stopped(signal)) => ExitCode::from((128 + signal) as u8),
        Err(e) => {
            eprintln!("{} {}", style::error("error:"), args::with_flags(&e.to_string()));
            ExitCode::from(e.exit_status())
        }
    }
}

/// Replaces underscores in flags by dashes, and `--plot FILE` by `--plot=FILE`. Values, and everything after `--`,
/// stay.
fn normalize(words: impl Iterator<Item = String>) -> Vec<String> {
    let (mut words, mut out) = (words.peekable(), Vec::<String>::new());
    // `--plot` may also precede a run without a value: pictures are recognized by their extension, and runs exist.
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

/// `--output_dir x` becomes `--output-dir x`, as in the training binaries.
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

    #[test]
    fn the_command_line_is_consistent() {
        HarnessCli::command().debug_assert();
    }

    #[test]
    fn values_and_passed_on_flags_stay() {
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
