//! `run`, and what it shares with `suite`: runs the jobs of a set one after another and reports how each ended. Never
//! reads metrics.
use crate::catalogue::{self, Program, RunEntry};
use crate::job::{self, Job, JobOutcome};
use crate::launch::{self, Common, lay_over};
use crate::launcher::LaunchArgs;
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// Write configuration and command of each run of the curated set; with --execute, run them
///
/// A finished run is not repeated; a failed one is recorded with its message, and the others continue.
#[derive(clap::Args)]
pub struct RunArgs {
    /// One directory per run: configuration, log, metrics, status
    #[arg(long, visible_alias = "experiment-dir", default_value = "runs/experiments", value_name = "DIR")]
    output_dir: PathBuf,
    /// Execute the runs, one after another; otherwise only write configurations and print commands
    #[arg(long)]
    execute: bool,
    /// Only these runs; a name may end in `*` [default: all; PyTorch's only with --peers]
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "NAME")]
    only: Vec<String>,
    /// All but these runs; a name may end in `*`
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "NAME")]
    skip: Vec<String>,
    /// List the runs of the set
    #[arg(long)]
    list: bool,
    /// Optimizer steps per run
    #[arg(long, default_value_t = 20, value_name = "N")]
    steps: u64,
    /// Rounds; each runs the whole set once, so that other load on the machine affects all runs alike
    #[arg(long, default_value_t = 1, value_name = "N")]
    repeat: u32,
    /// Configuration for all runs, merged over the built-in one: `model`, `data`, `optim`, `batch`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Also run PyTorch's DDP and FSDP2, and its FSDP with the settings that the set ablates
    #[arg(long)]
    peers: bool,
    /// Python interpreter for PyTorch; needs torch and transformers
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: String,
    #[command(flatten)]
    launch: LaunchArgs,
    /// After `--`: flags for every run of flatshard, as in `-- --embed-dim 512`
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

/// What all runs share: a model of 3.3 M parameters that shows the differences between strategies within a second or
/// two, on a task without files. Only training is timed: no evaluation, no sample.
pub fn common_config(steps: u64) -> Value {
    json!({
        "run": {"max_steps": steps, "log_every": 1, "eval": false, "sample": false},
        "model": {"arch": "llama", "embed_dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 320},
        "data": {"dataset": ["synthetic"], "max_len": 256},
        "optim": {"lr": 1e-3, "warmup_steps": 5, "lr_scheduler": "constant"},
        "batch": {"batch_size": 2, "grad_accum": 1},
    })
}

pub fn main(args: &RunArgs) -> Result<Verdict> {
    let entries: Vec<RunEntry> = catalogue::all().into_iter().chain(catalogue::peers()).collect();
    if args.list {
        let width = entries.iter().map(|e| e.name.len()).max().unwrap_or(0);
        let peer = |e: &RunEntry| catalogue::peers().iter().any(|peer| peer.name == e.name);
        for e in &entries {
            println!("{:width$}  {}{}", e.name, e.about, if peer(e) { " (--peers)" } else { "" });
        }
        return Ok(Verdict::Good);
    }
    args.launch.check()?;
    for (flag, n) in [("--steps", args.steps), ("--repeat", args.repeat as u64)] {
        if n == 0 {
            return Err(Error::input(format!("{flag} is 0; it must be at least 1")));
        }
    }
    let mut entries = catalogue::choose(entries, &args.only, &args.skip)?;
    let peers = catalogue::peers();
    let named = |e: &RunEntry| args.only.iter().any(|name| name == e.name);
    entries.retain(|e| args.peers || named(e) || !peers.iter().any(|peer| peer.name == e.name));
    if entries.is_empty() {
        return Err(Error::input("only PyTorch runs are selected: add --peers, or give their full names in --only"));
    }
    let is_torch = |e: &RunEntry| matches!(e.program, Program::Torch(_));
    if let Some(why) = entries.iter().any(is_torch).then(|| torch_is_missing(&args.python)).flatten() {
        let names: Vec<&str> = entries.iter().filter(|e| is_torch(e)).map(|e| e.name).collect();
        let skipped = format!("{} skipped: {why}. Set --python to another interpreter", names.join(", "));
        entries.retain(|e| !is_torch(e));
        match entries.is_empty() {
            true => return Err(Error::input(skipped)),
            false => eprintln!("note: {skipped}"),
        }
    }
    let mut config = common_config(args.steps);
    if let Some(path) = &args.config {
        lay_over(&mut config, &launch::read_config(path)?);
        lay_over(&mut config, &json!({"run": {"max_steps": args.steps}}));
    }
    if args.execute {
        args.launch.check_installed()?;
    }
    let bin = launch::binaries(args.launch.bin_dir.as_deref())?;
    let output = absolute(&args.output_dir)?;
    let flags = args.flags.clone();
    let python = Some(args.python.clone());
    let common = Common { launch: args.launch.clone(), bin, config, flags, output, python };
    let rounds = (1..=args.repeat).flat_map(|round| entries.iter().map(move |entry| (entry, round)));
    let jobs: Vec<Job> = rounds.map(|(entry, round)| common.job(entry, round)).collect::<Result<_>>()?;
    if !args.execute {
        return print(&jobs);
    }
    let failed = run(&jobs)?;
    println!("next: experiments analyze --output-dir {}", args.output_dir.display());
    Ok(if failed == 0 { Verdict::Good } else { Verdict::Bad })
}

/// The absolute path. An error names what cannot be written, before anything starts.
pub fn absolute(dir: &PathBuf) -> Result<PathBuf> {
    let dir = std::path::absolute(dir).map_err(|e| Error::input(format!("{}: {e}", dir.display())))?;
    match std::fs::create_dir_all(&dir) {
        Ok(()) => Ok(dir),
        Err(e) => Err(Error::input(format!("--output-dir {}: {e}", dir.display()))),
    }
}

fn print(jobs: &[Job]) -> Result<Verdict> {
    // Check all before writing the first: no earlier run may have other settings.
    let done: Vec<bool> = jobs.iter().map(|job| Ok(job.before()?.is_some())).collect::<Result<_>>()?;
    for (job, done) in jobs.iter().zip(done) {
        job.materialize()?;
        let variables: String = job.env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        println!("{variables}{}{}", launch::shell(&job.command), if done { "  # done" } else { "" });
    }
    eprintln!("{} configurations written; add --execute to run them", jobs.len());
    Ok(Verdict::Good)
}

/// Runs all jobs, one after another, with one line each. Returns how many failed.
pub fn run(jobs: &[Job]) -> Result<usize> {
    for job in jobs {
        job.before()?;
    }
    let width = jobs.iter().map(|job| job.name.len()).max().unwrap_or(0);
    let (mut failed, mut signals) = (0, job::stop_signals()?);
    for (n, job) in jobs.iter().enumerate() {
        print!("[{:>2}/{}] {:width$}  ", n + 1, jobs.len(), job.name);
        let _ = std::io::stdout().flush(); // a progress line
        match job.run(&mut signals)? {
            JobOutcome::Done(status) => println!("done in {:.1} s", status.seconds),
            JobOutcome::Before(_) => println!("already done"),
            JobOutcome::Failed(status) => {
                failed += 1;
                println!("failed: {}", status.message);
            }
        }
    }
    println!("{} done, {failed} failed", jobs.len() - failed);
    Ok(failed)
}

/// Why `program` cannot run the PyTorch side; None if it can.
fn torch_is_missing(program: &str) -> Option<String> {
    match Command::new(program).args(["-c", "import torch, transformers"]).output() {
        Err(e) => Some(format!("cannot start {program}: {e}")),
        Ok(tried) if tried.status.success() => None,
        Ok(tried) => {
            let words = String::from_utf8_lossy(&tried.stderr).into_owned();
            let last = words.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("import torch failed");
            Some(format!("{program}: {}", last.trim()))
        }
    }
}
