//! Floor 8: from flags to a finished run.
//!
//! Flags and files become [`settings`], and settings become a [`plan`] or an error; [`launch`] starts the ranks, and
//! each rank runs the [`mod@loop`]. Never computes a step itself.

/// Every flag and file key, declared once with its check.
pub mod settings;
/// read -> check -> derive -> fit.
pub mod plan;
/// Logs, metrics, TensorBoard, W&B.
pub mod watch;
/// Traces of steps, memory over time.
pub mod trace;
/// Names of the hub become paths.
pub mod resolve;
/// Processes, restarts, signals, devices.
pub mod launch;
/// One rank's run: data, agreement, steps, checkpoints, reports.
pub mod r#loop;
/// On-policy training.
pub mod rollouts;
/// `--generate`, `--chat`.
pub mod generate;
/// `--lora-merge`, `--export`.
pub mod convert;
/// `--print-samples`, `--preview`.
pub mod samples;
/// `flatshard VERB`.
pub mod verbs;

pub use settings::StrategyName;
pub use settings::help::HelpPage;

use crate::base::{Error, Result};
use crate::comm::claim::Claim;
use crate::comm::env::{RankEnv, SlurmShell};
use convert::Conversion;
use launch::{RankJob, restart};
use plan::{Plan, check, fit, ranks};
use samples::SampleLook;
use settings::args::{self, Parsed};
use settings::config;
use settings::hub::PROMPTS;
use settings::stages;
use std::io::Write;
use std::process::ExitCode;
use watch::log::RunLog;
use watch::report;
use watch::style;
use watch::wandb::Follower;

/// The main function of a training binary. `strategy` is its default.
pub fn main(page: &HelpPage, strategy: StrategyName) -> ExitCode {
    with_words(page, strategy, &|words| verbs::none(page.program, words))
}

/// The main function of `flatshard`, whose command line begins with a verb.
pub fn verbs_main(page: &HelpPage, strategy: StrategyName) -> ExitCode {
    with_words(page, strategy, &verbs::read)
}

/// Turns the words of the command line into those of a training binary, or into a text to print.
type WordReader<'a> = &'a dyn Fn(Vec<String>) -> Result<Parsed<Vec<String>>>;

fn with_words(page: &HelpPage, strategy: StrategyName, read: WordReader) -> ExitCode {
    let launched = match RankEnv::from_env() {
        Ok(launched) => launched,
        Err(e) => return failed(&e, None),
    };
    match start(page, strategy, launched.as_ref(), read) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&e, launched.as_ref()),
    }
}

fn start(page: &HelpPage, strategy: StrategyName, launched: Option<&RankEnv>, read: WordReader) -> Result<()> {
    launch::pass_over_file_sizes()?;
    if let Some(env) = launched
        && let Some(parent) = env.parent_pid
    {
        launch::follow_parent(parent)?;
        return match RankJob::receive()? {
            RankJob::Train(settled) => one(&Plan::inherit(*settled).map_err(Error::before_start)?, Some(env)),
            RankJob::Convert(settings) => convert::main(*settings, Some(env)),
            RankJob::Generate { settings, prompt, is_file } => generate::asked(*settings, Some(env), &prompt, is_file),
        };
    }
    let words = match read(args::words()?)? {
        Parsed::Run(words) => *words,
        Parsed::Help(text) => return print(&text),
    };
    let cli = match args::parse::<args::Cli>(page, words)? {
        Parsed::Help(text) => return print(&text),
        Parsed::Run(cli) => cli,
    };
    let mut runs = config::runs(&cli, strategy)?;
    let _claim = launched.map(Claim::of).transpose()?;
    let placed = launched.zip(runs.first()).map(|(env, settings)| ranks::place(env, settings)).transpose()?;
    let launched = placed.as_ref();
    resolve::names(&mut runs, &cli.settings.model, &cli.files, launched)?;
    if let Some(prompt) = &cli.files.generate {
        let Some(settings) = runs.pop() else { return Ok(()) };
        let rows = settings.hub.files(PROMPTS).map(|path| path.display().to_string());
        return generate::main(settings, launched, rows.as_ref().unwrap_or(prompt));
    }
    if cli.files.chat {
        return runs.pop().map_or(Ok(()), |settings| generate::chat::main(settings, launched));
    }
    let look = |count: Option<u64>, look: SampleLook| count.map(|count| (count, look));
    if let Some((count, look)) =
        look(cli.files.print_samples, SampleLook::Json).or(look(cli.files.preview, SampleLook::Color))
    {
        return runs.into_iter().try_for_each(|settings| samples::main(settings, launched, count, look));
    }
    if let Some(settings) = runs.pop_if(|settings| settings.only_converts()) {
        return match cli.files.print_config {
            true => print(&Conversion::new(settings, launched).map_err(Error::before_start)?.print()?),
            false => convert::main(settings, launched),
        };
    }
    if runs.len() > 1 {
        runs.iter().try_for_each(check::outputs)?;
        for later in stages::alone(&runs) {
            Plan::new(later, launched)?;
        }
    }
    let (last, mut logged) = (runs.len() - 1, Vec::new());
    let shell = if launched.is_none() { SlurmShell::from_env() } else { None };
    for (i, settings) in runs.into_iter().enumerate() {
        let planned = match cli.files.print_config && launched.is_none() {
            true => ranks::planned(&settings).map_err(Error::before_start)?,
            false => None,
        };
        let mut plan = Plan::new(settings, launched.or(planned.as_ref()))?;
        plan.settings.notes.extend(shell.and_then(|shell| plan.ranks.in_a_shell(shell)));
        plan.settings.notes.retain(|note| !logged.contains(note)); // by an earlier stage
        if cli.files.print_config {
            plan.settings.notes.extend(report::carried(&plan)?);
            RunLog::open(&plan.settings.watch, launched).map_err(Error::before_start)?.notes(&plan.settings.notes);
            return print(&plan.print()?); // a later stage needs this one's checkpoint to be planned
        }
        if i == last || !plan.is_done() {
            one(&plan, launched)?;
            logged.append(&mut plan.settings.notes);
        }
    }
    Ok(())
}

/// Prints on standard output. A reader that stops early (`| head`) is not a failure.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("write", "standard output", e)),
        _ => Ok(()),
    }
}

/// One run, or this process's rank of it.
fn one(plan: &Plan, launched: Option<&RankEnv>) -> Result<()> {
    let (prepares, first) = (launch::prepares(launched), launch::is_first(launched));
    let _lock = if prepares { fit::prepare(plan, first)? } else { None };
    let log = RunLog::open(&plan.settings.watch, launched).map_err(Error::before_start)?;
    if prepares && first {
        log.notes(&plan.settings.notes);
    }
    let follower = if prepares && first { Follower::start(plan, &log)? } else { None };
    let result = match launched {
        Some(env) => r#loop::run(plan, env, &log),
        None => restart::run(plan, &log),
    };
    if let Some(follower) = follower {
        follower.end(&result, &log);
    }
    result.inspect_err(|e| log.ended(e))
}

fn failed(e: &Error, launched: Option<&RankEnv>) -> ExitCode {
    let what = args::with_flags(&e.to_string());
    let head = style::error(launch::FAILED);
    let text = match (e, launched) {
        // Our own launcher prints it once for all ranks.
        (Error::Signal(_), Some(RankEnv { parent_pid: Some(_), .. })) | (Error::Reported, _) => String::new(),
        (Error::Signal(_), _) => format!("{what}\n"),
        // An external launcher prints the output of all ranks.
        (_, Some(RankEnv { parent_pid: None, rank, .. })) if !what.starts_with("rank ") => {
            format!("{head}rank {rank}: {what}\n")
        }
        _ => format!("{head}{what}\n"),
    };
    let _ = std::io::stderr().write_all(text.as_bytes()); // the exit status reports it too
    ExitCode::from(e.exit_status())
}
