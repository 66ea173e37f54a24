//! `chaos`: a training run to which everything happens that happens on clusters, again and again, and the proof that it is bit
//! for bit the run to which nothing happened. [`draw`] says what will go wrong, [`inflict`] does it, [`proof`] judges,
//! [`report`] tells. Never changes how the run trains.
mod draw;
mod follow;
mod inflict;
mod proof;
mod report;
mod training;

use crate::Verdict;
use crate::curve::METRICS;
use crate::{launch, sets};
use flatshard::base::{Error, Result};
use inflict::Chaos;
use proof::Proof;
use rustix::process::Signal;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use training::Training;

/// Kill a training run at random again and again, and prove that its losses and weights are those of one left in peace
#[derive(clap::Args)]
pub struct Args {
    /// SIGKILLs: of a rank, of the process that started the ranks, of all of them
    #[arg(long, default_value_t = 20, value_name = "N")]
    kills: usize,
    /// What is drawn: faults, victims, moments
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
    /// Ranks of the run
    #[arg(long, default_value_t = 2, value_name = "N")]
    nproc_per_node: usize,
    /// Restarts by the run's own launcher; when it has none left, or was killed, it is started again with --resume auto
    #[arg(long, default_value_t = 25, value_name = "N")]
    max_restarts: u32,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 3, value_name = "N")]
    save_every: u64,
    /// Every fault with its times, and the proof, as JSON [default: chaos.json in the output directory]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the runs there [default: a scratch directory, removed when all is well]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Where run_fsdp and run_ddp are [default: beside this binary, built by cargo where they are not]
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<PathBuf>,
    /// After `--`: flags that the training run gets, as `-- --async-save`
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

/// Some milliseconds a step, with dropout, so that random masks have to come back too. The learning rate does not depend on
/// the number of steps, which nobody knows beforehand.
const TINY: &str = "--dataset synthetic --arch gpt --dropout 0.1 --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 \
                    --batch-size 4 --lr 0.003 --warmup-steps 10 --lr-scheduler constant --no-eval --no-sample \
                    --log-every 1000000";
const KEEP: usize = 3;
/// More than it comes to before it is asked to stop.
const ENDLESS: u64 = 1_000_000_000;

pub fn main(args: &Args) -> Result<Verdict> {
    for (flag, n) in [
        ("--kills", args.kills as u64),
        ("--nproc-per-node", args.nproc_per_node as u64),
        ("--save-every", args.save_every),
    ] {
        if n == 0 {
            return Err(Error::input(format!("{flag} is 0: it must be at least 1")));
        }
    }
    let scratch = std::env::temp_dir().join(format!("flatshard-chaos-{}", std::process::id()));
    let output = sets::absolute(args.output_dir.as_ref().unwrap_or(&scratch))?;
    let bin = launch::binaries(args.bin_dir.as_deref())?;
    let good = run(args, &bin, &output)?;
    match (good, args.output_dir.is_none()) {
        (true, true) => std::fs::remove_dir_all(&scratch).map_err(|e| Error::io("remove", &scratch, e))?,
        _ => println!("the runs are in {}", output.display()),
    }
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

fn run(args: &Args, bin: &Path, output: &Path) -> Result<bool> {
    let started = Instant::now();
    let dir = |name: &str| output.join(name);
    let (disturbed, quiet) = (dir("disturbed"), dir("quiet"));
    for dir in [&disturbed, &quiet] {
        if dir.exists() {
            std::fs::remove_dir_all(dir).map_err(|e| Error::io("remove", dir, e))?;
        }
        std::fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
    }
    let command = |dir: &Path, steps: u64, more: &[String]| -> Vec<String> {
        let text = |path: PathBuf| path.display().to_string();
        let mut words = vec![text(bin.join("run_fsdp"))];
        words.extend(TINY.split_whitespace().map(String::from));
        words.extend(["--nproc-per-node".into(), args.nproc_per_node.to_string()]);
        words.extend(["--metrics-path".into(), text(dir.join(METRICS)), "--ckpt-dir".into(), text(dir.join("ckpt"))]);
        words.extend(["--keep".into(), KEEP.to_string(), "--max-steps".into(), steps.to_string()]);
        words.extend(args.flags.iter().chain(more).cloned());
        words
    };
    let more = ["--save-every", &args.save_every.to_string(), "--max-restarts", &args.max_restarts.to_string()];
    let more = [&more[..], &["--resume", "auto"]].concat().into_iter().map(String::from).collect::<Vec<_>>();

    let plan = draw::draw(args.kills, args.nproc_per_node, args.seed);
    let training =
        Training::new(command(&disturbed, ENDLESS, &more), disturbed.join(METRICS), disturbed.join("log.txt"));
    let mut chaos = Chaos::new(training, disturbed.join("ckpt"));
    chaos.training.start()?;
    let mut records = Vec::new();
    for fault in &plan {
        records.push(chaos.inflict(fault)?);
    }
    let steps = chaos.stop()? + 2;
    println!("{}", report::table(&records));

    end(&command(&disturbed, steps, &more), &disturbed)?;
    end(&command(&quiet, steps, &[]), &quiet)?;
    let mut proof = proof::curves(&follow::events(&disturbed.join(METRICS))?, &follow::events(&quiet.join(METRICS))?);
    let last = |dir: &Path| dir.join("ckpt").join(format!("step-{steps:08}"));
    proof::checkpoints(&last(&disturbed), &last(&quiet), &mut proof)?;
    proof::leftovers(&disturbed.join("ckpt"), KEEP, args.nproc_per_node, &mut proof)?;
    tell(&proof, &chaos.unplanned);
    let about = json!({
        "kills": args.kills,
        "seed": args.seed,
        "ranks": args.nproc_per_node,
        "save_every": args.save_every,
        "max_restarts": args.max_restarts,
        "seconds": started.elapsed().as_secs(),
        "command": launch::shell(&chaos.training.command[1..]),
    });
    let json = args.json.clone().unwrap_or(dir("chaos.json"));
    report::write(&json, about, &records, &chaos.unplanned, &proof)?;
    println!("{} faults in {:.0} s; each is in {}", records.len(), started.elapsed().as_secs_f64(), json.display());
    Ok(proof.wrong.is_empty())
}

fn tell(proof: &Proof, unplanned: &[String]) {
    for failure in unplanned {
        println!("note: it failed on its own {failure}");
    }
    match proof.wrong.is_empty() {
        true => println!(
            "bitwise: {} steps ({} lines, with those that were done again) and all {} files of the last checkpoint are those \
             of a run that was left in peace; nothing is left behind",
            proof.steps, proof.lines, proof.files
        ),
        false => proof.wrong.iter().for_each(|wrong| println!("WRONG {wrong}")),
    }
}

/// Runs it to its end, in peace.
fn end(command: &[String], dir: &Path) -> Result<()> {
    let log = dir.join("last.txt");
    let file = std::fs::File::create(&log).map_err(|e| Error::io("create", &log, e))?;
    let status =
        Command::new(&command[0]).args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).status();
    let status = status.map_err(|e| Error::io("start", &command[0], e))?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::Run(format!("a run that nobody disturbed ended with {status}: see {}", log.display()))),
    }
}

impl Chaos {
    /// Asks the run to end; returns the number of steps done.
    fn stop(&mut self) -> Result<u64> {
        self.training.send_launcher(Signal::TERM);
        let asked = Instant::now();
        loop {
            let ended = self.training.ended()?;
            self.catch_up()?;
            match ended {
                Some(status) if status.code() == Some(143) => return Ok(self.furthest),
                Some(status) => return Err(Error::Run(format!("after SIGTERM the run ended with {status}"))),
                None if asked.elapsed() > inflict::HANGS => {
                    return Err(Error::Run("SIGTERM does not end the run".into()));
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}
