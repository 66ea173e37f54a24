//! `run`, and what `suite` shares with it: runs the jobs of a set one after the other and reports how each ended. Never
//! reads metrics.
use crate::catalogue::{self, Program, RunEntry};
use crate::job::{self, Job, JobOutcome};
use crate::launch::{self, Common, LaunchArgs, lay_over};
use crate::verdict::Verdict;
use flatshard::base::{Error, Result};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// Write a configuration and a command for each run of the curated set; with --execute, run them
///
/// A run that is done is not run again; one that fails is recorded with its message, and the others go on.
#[derive(clap::Args)]
pub struct RunArgs {
    /// A directory for each run: configuration, log, metrics, status
    #[arg(long, default_value = "runs/experiments", value_name = "DIR")]
    output_dir: PathBuf,
    /// Run them, in turn; without it, configurations are written and commands printed
    #[arg(long)]
    execute: bool,
    /// Only these runs; a name may end in `*`
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "NAME")]
    only: Vec<String>,
    /// All but these runs; a name may end in `*`
    #[arg(long, value_delimiter = ',', num_args = 1.., value_name = "NAME")]
    skip: Vec<String>,
    /// Print the names of the set and what they are
    #[arg(long)]
    list: bool,
    /// Optimizer steps of each run
    #[arg(long, default_value_t = 20, value_name = "N")]
    steps: u64,
    /// Rounds: each runs the whole set once, so that a busy neighbor hurts all alike
    #[arg(long, default_value_t = 1, value_name = "N")]
    repeat: u32,
    /// Configuration that all runs share, laid over the built-in one: `model`, `data`, `optim`, `batch`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// PyTorch DDP, FSDP1 and FSDP2 too, where Python has torch and transformers
    #[arg(long)]
    peers: bool,
    /// The Python of --peers
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: String,
    #[command(flatten)]
    launch: LaunchArgs,
    /// After `--`: flags that every run of flatshard gets, as `-- --embed-dim 512`
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

/// What all runs share: a model of 3.3 M parameters that shows the differences between strategies within a second or
/// two, on a task without files. Nothing but training is timed: no evaluation, no sample.
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
        entries.iter().for_each(|e| println!("{:width$}  {}", e.name, e.about));
        return Ok(Verdict::Good);
    }
    args.launch.check()?;
    for (flag, n) in [("--steps", args.steps), ("--repeat", args.repeat as u64)] {
        if n == 0 {
            return Err(Error::input(format!("{flag} is 0: it must be at least 1")));
        }
    }
    let mut entries = catalogue::choose(entries, &args.only, &args.skip)?;
    let python = if args.peers { torch(&args.python) } else { None };
    if args.peers && python.is_none() {
        eprintln!("note: {} has no torch and transformers, so the runs of PyTorch are left out", args.python);
    }
    entries.retain(|e| python.is_some() || !matches!(e.program, Program::Torch(_)));
    if entries.is_empty() {
        return Err(Error::input(
            "only runs of PyTorch are left: they need --peers, and a --python with torch and transformers",
        ));
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
    let common = Common { launch: args.launch.clone(), bin, config, flags, output, logs: None, python };
    let rounds = (1..=args.repeat).flat_map(|round| entries.iter().map(move |entry| (entry, round)));
    let jobs: Vec<Job> = rounds.map(|(entry, round)| common.job(entry, round)).collect::<Result<_>>()?;
    if !args.execute {
        return print(&jobs);
    }
    let failed = run(&jobs)?;
    println!("next: experiments analyze --output-dir {}", args.output_dir.display());
    Ok(if failed == 0 { Verdict::Good } else { Verdict::Bad })
}

/// An error names what cannot be written, before anything starts.
pub fn absolute(dir: &PathBuf) -> Result<PathBuf> {
    let dir = std::path::absolute(dir).map_err(|e| Error::input(format!("{}: {e}", dir.display())))?;
    match std::fs::create_dir_all(&dir) {
        Ok(()) => Ok(dir),
        Err(e) => Err(Error::input(format!("--output-dir {}: {e}", dir.display()))),
    }
}

fn print(jobs: &[Job]) -> Result<Verdict> {
    // All are looked at before the first is written: none is done with other settings.
    let done: Vec<bool> = jobs.iter().map(|job| Ok(job.before()?.is_some())).collect::<Result<_>>()?;
    for (job, done) in jobs.iter().zip(done) {
        job.materialize()?;
        let variables: String = job.env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        println!("{variables}{}{}", launch::shell(&job.command), if done { "  # done" } else { "" });
    }
    eprintln!("{} configurations written; --execute runs them", jobs.len());
    Ok(Verdict::Good)
}

/// Runs all, one after the other, with a line for each. Returns how many failed.
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
            JobOutcome::Before(_) => println!("was done before"),
            JobOutcome::Failed(status) => {
                failed += 1;
                println!("failed: {}", status.message);
            }
        }
    }
    println!("{} done, {failed} failed", jobs.len() - failed);
    Ok(failed)
}

/// `program`, where it is a Python that can run the peers.
fn torch(program: &str) -> Option<String> {
    let modules = Command::new(program).args(["-c", "import torch, transformers"]).output().ok()?;
    modules.status.success().then(|| program.to_string())
}
