//! `chaos`: subjects a training run to the faults that happen on clusters, repeatedly, and proves that it ends bit for
//! bit like an undisturbed run. [`draw`] plans the faults, [`inflict`] causes them, [`proof`] judges, [`report`]
//! prints. Never changes how the run trains.
mod draw; // the plan of faults
mod follow; // reads what a run writes
mod damage; // damages checkpoints
mod disk; // a disk that fills up
mod training; // the run's processes
mod course; // observes the run
mod inflict; // causes the faults
mod proof; // compares with an undisturbed run
mod report; // table and JSON

use crate::curve::METRICS;
use crate::verdict::Verdict;
use crate::{job, launch, sets};
use course::Course;
use disk::ChaosDisk;
use draw::FaultKind;
use flatshard::base::{Error, Result};

use proof::ChaosProof;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use training::Training;

/// Kill a training run repeatedly, and prove that its losses and weights equal those of an undisturbed run
#[derive(clap::Args)]
pub struct ChaosArgs {
    /// Number of SIGKILLs: of a rank, of the process that started the ranks, or of all of them
    #[arg(long, default_value_t = 20, value_name = "N")]
    kills: usize,
    /// Number of other faults, cycling through: a rank stopped for longer than --comm-timeout, or for less; a stalled
    /// rank; a full disk; a flipped bit in a checkpoint; half a checkpoint [default: a tenth of the kills, at least one
    /// of each]
    #[arg(long, value_name = "N")]
    others: Option<usize>,
    /// Seed of the plan: faults, victims, moments
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
    /// Ranks of the run
    #[arg(long, default_value_t = 2, value_name = "N")]
    nproc_per_node: usize,
    /// How long a rank waits for its peers
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS")]
    comm_timeout: f64,
    /// How to simulate a full disk
    #[arg(long, value_enum, default_value_t)]
    disk: disk::DiskChoice,
    /// Let the run continue with fewer ranks (run_fsdp --elastic): its curve is then compared with a tolerance, not bit
    /// for bit
    #[arg(long, value_name = "MIN:MAX")]
    elastic: Option<String>,
    /// Restarts by the run's own launcher. When it runs out or is killed, it is started again with --resume auto
    #[arg(long, default_value_t = 25, value_name = "N")]
    max_restarts: u32,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 3, value_name = "N")]
    save_every: u64,
    /// Write every fault with its times, and the proof, as JSON [default: chaos.json in the output directory]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the runs there [default: a scratch directory, removed on success]
    #[arg(long, visible_alias = "experiment-dir", value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Directory of run_fsdp and run_ddp [default: that of this binary, built by cargo if missing]
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<PathBuf>,
    /// After `--`: flags for the training run, as in `-- --async-save`
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

/// A few milliseconds per step, with dropout, so that random masks must be restored too. The learning rate must not
/// depend on the number of steps, which is not known beforehand.
const TINY: &str = "--dataset synthetic --arch gpt --dropout 0.1 --embed-dim 64 --num-layers 2 --num-heads 2 --max-len 32 \
                    --batch-size 4 --lr 0.003 --warmup-steps 10 --lr-scheduler constant --no-eval --no-sample \
                    --log-every 1000000";
const DISK: &str = "disk";
const KEEP: usize = 3;
/// More steps than the run ever reaches.
const ENDLESS: u64 = 1_000_000_000;

pub fn main(args: &ChaosArgs) -> Result<Verdict> {
    for (flag, n) in [
        ("--kills", args.kills as u64),
        ("--nproc-per-node", args.nproc_per_node as u64),
        ("--save-every", args.save_every),
    ] {
        if n == 0 {
            return Err(Error::input(format!("{flag} is 0; it must be at least 1")));
        }
    }
    if !(2.0..=600.0).contains(&args.comm_timeout) {
        return Err(Error::input(format!("--comm-timeout is {}; it must be from 2 to 600 seconds", args.comm_timeout)));
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

fn run(args: &ChaosArgs, bin: &Path, output: &Path) -> Result<bool> {
    let started = Instant::now();
    let dir = |name: &str| output.join(name);
    let (disturbed, quiet) = (dir("disturbed"), dir("quiet"));
    disk::release(&disturbed.join(DISK));
    for dir in [&disturbed, &quiet] {
        if dir.exists() {
            std::fs::remove_dir_all(dir).map_err(|e| Error::io("remove", dir, e))?;
        }
        std::fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
    }
    let signals = job::stop_signals()?;
    let disk = ChaosDisk::new(disturbed.join(DISK), args.disk)?;
    let ckpt = disk.dir().join("ckpt");
    let about_disk = disk.about();
    let command = |dir: &Path, ckpt: &Path, steps: u64, more: &[String]| -> Vec<String> {
        let text = |path: &Path| path.display().to_string();
        let mut words = vec![text(&bin.join("run_fsdp"))];
        words.extend(TINY.split_whitespace().map(String::from));
        words.extend(["--nproc-per-node".into(), args.nproc_per_node.to_string()]);
        words.extend(["--metrics-path".into(), text(&dir.join(METRICS)), "--ckpt-dir".into(), text(ckpt)]);
        words.extend(["--keep".into(), KEEP.to_string(), "--max-steps".into(), steps.to_string()]);
        words.extend(args.flags.iter().chain(more).cloned());
        words
    };
    let [every, max, timeout] =
        [args.save_every.to_string(), args.max_restarts.to_string(), args.comm_timeout.to_string()];
    let more = ["--save-every", &every, "--max-restarts", &max, "--comm-timeout", &timeout, "--resume", "auto"];
    let elastic = args.elastic.iter().flat_map(|range| ["--elastic", range]);
    let more: Vec<String> = more.into_iter().chain(elastic).map(String::from).collect();

    let others = args.others.unwrap_or((args.kills / 10).max(FaultKind::OTHERS.len()));
    let plan = draw::draw(args.kills, others, args.nproc_per_node, args.seed);
    let endless = command(&disturbed, &ckpt, ENDLESS, &more);
    let training = Training::new(endless, disturbed.join(METRICS), disturbed.join("log.txt"));
    let mut course = Course::new(training, disk, ckpt.clone(), signals);
    course.training.start()?;
    let mut records = Vec::new();
    for fault in &plan {
        records.push(course.inflict(fault)?);
    }
    let steps = course.stop()? + 2;
    println!("{}", report::table(&records));

    end(&command(&disturbed, &ckpt, steps, &more), &disturbed)?;
    end(&command(&quiet, &quiet.join("ckpt"), steps, &[]), &quiet)?;
    let mut proof = proof::curves(&follow::events(&disturbed.join(METRICS))?, &follow::events(&quiet.join(METRICS))?);
    let last = format!("step-{steps:08}");
    if proof.fewer_ranks_from.is_none() {
        proof::checkpoints(&ckpt.join(&last), &quiet.join("ckpt").join(&last), &mut proof)?;
    }
    proof::leftovers(&ckpt, KEEP, args.nproc_per_node, &mut proof)?;
    let alive = training::using(&ckpt);
    if !alive.is_empty() {
        proof.wrong.push(format!("processes {alive:?} still use {}", ckpt.display()));
    }
    print_proof(&proof, &course.unplanned);
    println!("full disk: {about_disk}");
    let about = json!({
        "kills": args.kills,
        "others": others,
        "seed": args.seed,
        "ranks": args.nproc_per_node,
        "cores": std::thread::available_parallelism().map_or(1, |n| n.get()),
        "disk": about_disk,
        "comm_timeout_s": args.comm_timeout,
        "save_every": args.save_every,
        "max_restarts": args.max_restarts,
        "seconds": started.elapsed().as_secs(),
        "flags": args.flags,
    });
    let json = args.json.clone().unwrap_or(dir("chaos.json"));
    report::write(&json, about, &records, &course.unplanned, &proof)?;
    println!("{} faults in {:.0} s, listed in {}", records.len(), started.elapsed().as_secs_f64(), json.display());
    Ok(proof.wrong.is_empty())
}

fn print_proof(proof: &ChaosProof, unplanned: &[String]) {
    for failure in unplanned {
        println!("note: unplanned failure {failure}");
    }
    match (proof.wrong.is_empty(), proof.fewer_ranks_from) {
        (true, Some(step)) => println!(
            "near: {} steps ({} lines) are within {:.0} % of an undisturbed run, and bitwise equal until the number of \
             ranks fell at step {step}; no leftover files",
            proof.steps,
            proof.lines,
            100.0 * proof::NEAR
        ),
        (true, None) => println!(
            "bitwise: {} steps ({} lines, including repeated steps) and all {} files of the last checkpoint equal \
             those of an undisturbed run; no leftover files",
            proof.steps, proof.lines, proof.files
        ),
        (false, _) => proof.wrong.iter().for_each(|wrong| println!("FAILED {wrong}")),
    }
}

/// Runs the command to its end, undisturbed.
fn end(command: &[String], dir: &Path) -> Result<()> {
    let log = dir.join("last.txt");
    let file = std::fs::File::create(&log).map_err(|e| Error::io("create", &log, e))?;
    let status =
        Command::new(&command[0]).args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).status();
    let status = status.map_err(|e| Error::io("start", &command[0], e))?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::Run(format!("the undisturbed run ended with {status}: see {}", log.display()))),
    }
}
