//! Floor 8: from flags to a finished run.
//!
//! [`args`] (flags) and [`config`] (files) give [`settings`]; [`plan`] makes of them what is to be done, or says what is wrong;
//! [`launch`] starts the ranks, each of which does the loop.
pub mod launch;
pub mod r#loop;
pub mod generate;
pub mod plan;
pub mod settings;
pub mod trace;
pub mod watch;

pub use settings::StrategyName;

use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use launch::restart;

use plan::Plan;
use plan::check;
use settings::LogLevel;
use settings::args::{self, Parsed};
use settings::config;
use std::io::Write;
use std::process::ExitCode;
use watch::log::Log;

/// The whole of a training binary. `strategy`: what it is for, where the settings do not say.
pub fn main(program: &'static str, about: &'static str, strategy: StrategyName) -> ExitCode {
    let launched = match RankEnv::from_env() {
        Ok(launched) => launched,
        Err(e) => return failed(&e, None),
    };
    match start(program, about, strategy, launched.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&e, launched.as_ref()),
    }
}

fn start(program: &'static str, about: &'static str, strategy: StrategyName, launched: Option<&RankEnv>) -> Result<()> {
    if let Some(parent) = launched.and_then(|env| env.parent_pid) {
        launch::follow_parent(parent)?;
    }
    launch::pass_over_file_sizes()?;
    let cli = match args::parse::<args::Cli>(program, about, args::words()?)? {
        Parsed::Help(text) => {
            return print(&text);
        }
        Parsed::Run(cli) => cli,
    };
    if let Some(prompt) = &cli.files.generate {
        return generate::main(config::resolve(&cli, cli.files.stage.as_deref())?, strategy, launched, prompt);
    }
    match (config::stages(&cli)?, &cli.files.stage) {
        (stages, None) if !stages.is_empty() => {
            // Every stage's settings are read before the first one starts; its plan is made when its turn comes.
            let settings = stages.iter().map(|stage| config::resolve(&cli, Some(stage)));
            let settings: Vec<_> = settings.collect::<Result<_>>()?;
            settings.iter().try_for_each(check::outputs)?;
            for (i, (stage, settings)) in stages.iter().zip(settings).enumerate() {
                let plan = Plan::new(settings, strategy, launched)?;
                if cli.files.print_config {
                    return print(&plan.print()?); // the others start from what this one will leave
                }
                let last = i + 1 == stages.len();
                if last || !plan.is_done() {
                    one(&plan, launched, Some(stage))?;
                }
            }
            Ok(())
        }
        (_, stage) => {
            let plan = Plan::new(config::resolve(&cli, stage.as_deref())?, strategy, launched)?;
            if cli.files.print_config {
                return print(&plan.print()?);
            }
            one(&plan, launched, None)
        }
    }
}

/// On standard output. Nobody reading to the end (`| head`) is no failure.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("write", "standard output", e)),
        _ => Ok(()),
    }
}

/// One run. `stage`: which of several, for the ranks that this process starts.
fn one(plan: &Plan, launched: Option<&RankEnv>, stage: Option<&str>) -> Result<()> {
    // Started by us: the parent has made room and seen that the run fits.
    let prepares = launched.is_none_or(|env| env.parent_pid.is_none() && env.local_rank == 0);
    let first = launched.is_none_or(|env| env.rank == 0);
    let _lock = if prepares { plan.prepare(first)? } else { None };
    let log = Log::open(&plan.settings.watch, launched).map_err(Error::before_start)?;
    let result = match launched {
        Some(env) => r#loop::run(plan, env, &log),
        None => restart::run(plan, stage, &log),
    };
    if let Err(e) = &result {
        log.note(if let Error::Signal(_) = e { LogLevel::Info } else { LogLevel::Error }, e); // stderr has it from `failed`
    }
    result
}

fn failed(e: &Error, launched: Option<&RankEnv>) -> ExitCode {
    let what = args::with_flags(&e.to_string());
    let text = match (e, launched) {
        // Our own parent says it once for all ranks.
        (Error::Signal(_), Some(RankEnv { parent_pid: Some(_), .. })) => String::new(),
        (Error::Signal(_), _) => format!("{what}\n"),
        // A launcher of others prints what all ranks say.
        (_, Some(RankEnv { parent_pid: None, rank, .. })) if !what.starts_with("rank ") => {
            format!("{}rank {rank}: {what}\n", launch::FAILED)
        }
        _ => format!("{}{what}\n", launch::FAILED),
    };
    let _ = std::io::stderr().write_all(text.as_bytes()); // the status says it, too
    ExitCode::from(e.exit_status())
}
