//! `experiments plan`: from flags to tables. Selects the candidates and the machine, computes the costs, and recommends
//! one. Never times anything itself.
use super::candidates::{self, Candidate};
use super::cards;
use super::cost::{Cluster, Cost, PlanRow, RESERVED, host};
use super::machine::{FP8_GPUS, MachineModel, Rated};
use super::simulate::{self, BatchShape};
use super::{calibrate, report, trace};
use clap::Parser;
use flatshard::base::{Category, DType, Error, Result};
use flatshard::data::Tokenizer;
use flatshard::device::gpu::{GpuDevice, cuda};
use flatshard::run::HelpPage;
use flatshard::run::plan::outline::Outline;
use flatshard::run::plan::tokens;
use flatshard::run::resolve;
use flatshard::run::settings::DeviceName;
use flatshard::run::settings::Settings;
use flatshard::run::settings::StrategyName;
use flatshard::run::settings::args;
use flatshard::run::settings::args::Parsed;
use flatshard::run::settings::config;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const PAGE: HelpPage = HelpPage {
    program: "experiments plan",
    about: "Estimate memory per rank, communication and step time of each strategy, and recommend one.\nAccepts run_fsdp's flags as well as its own; what they fix is not varied.",
    main: &[
        "gpus",
        "gpu",
        "gpus-per-node",
        "calibrate",
        "check",
        "only",
        "json",
        "trace",
        "pretrain",
        "config",
        "batch-size",
        "max-len",
        "precision",
    ],
    examples: &[
        ("--gpus 8 --embed-dim 2048 --num-layers 16 --num-heads 16", "1B on 8 H100s"),
        ("--gpus 16 --gpu a100 --max-len 4096 --only FULL_SHARD", "one strategy"),
        ("--gpus 2 --gpu cpu --calibrate --check", "this CPU, measured"),
    ],
    verbs: &[],
};

/// Maximum ranks of a job, a limit of the norm's exact sum.
const MOST_RANKS: usize = 1 << 20;

#[derive(Parser, Debug)]
#[command(allow_negative_numbers = true, args_override_self = true, disable_help_subcommand = true)]
struct PlanCli {
    #[command(flatten)]
    plan: PlanArgs,
    #[command(flatten)]
    run: args::Cli,
}

impl AsMut<Settings> for PlanCli {
    fn as_mut(&mut self) -> &mut Settings {
        &mut self.run.settings
    }
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Plan")]
struct PlanArgs {
    /// Number of GPUs of the job; with --gpu cpu, number of ranks
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// GPU model: a100, h100, h200, b200, 4090, 5090, a10g, l4, l40s, rtx6000-ada, rtx6000-blackwell or mi300x; or cpu
    /// for this machine, with --calibrate [default: h100]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// GPUs per NVLink domain [default: 8]
    #[arg(long, value_name = "N")]
    gpus_per_node: Option<usize>,
    /// Measure this CPU with a few steps of two blocks of the model
    #[arg(long)]
    calibrate: bool,
    /// With --calibrate: also run each strategy, and print the prediction error
    #[arg(long)]
    check: bool,
    /// Plan only strategies whose name contains this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print one JSON document instead of the table
    #[arg(long)]
    json: bool,
    /// Write a Chrome trace of the recommended strategy's simulated step
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// The flags, for completions.
pub fn flags() -> clap::Command {
    args::command::<PlanCli>(&PAGE)
}

/// `argv` follows `plan`. Returns whether any strategy fits.
pub fn main(argv: &[String]) -> Result<bool> {
    let cli = match parse(argv, &[])? {
        Some(cli) => cli,
        None => return Ok(true), // --help
    };
    let (cluster, rows) = plan(&cli, argv)?;
    let best = best(&rows);
    if let (Some(path), Some(row)) = (&cli.plan.trace, best)
        && let Ok(cost) = &row.outcome
        && cost.step.is_some()
    {
        let Cost { engine, mesh, work, .. } = cost;
        let traced = simulate::step(engine, *mesh, work, &cluster.machine, cluster.per_node, true)?;
        trace::write(path, &traced.events)?;
    }
    let command = best.map(|row| command(argv, row, &cluster));
    match cli.plan.json {
        true => println!("{}", report::json(&cluster, &rows, best, command.as_deref())),
        false => print!("{}", report::text(&cluster, &rows, best, command.as_deref())),
    }
    Ok(best.is_some())
}

/// The fastest that fits or, among those within 1 % of it, the one with the least memory.
fn best(rows: &[PlanRow]) -> Option<&PlanRow> {
    let fitting = || rows.iter().filter_map(|row| Some((row, row.outcome.as_ref().ok().filter(|c| c.fits)?)));
    let top = fitting().map(|(_, cost)| cost.tokens_per_sec).fold(0.0, f64::max);
    let near = fitting().filter(|(_, cost)| cost.tokens_per_sec >= 0.99 * top);
    near.min_by_key(|(_, cost)| cost.total()).map(|(row, _)| row)
}

fn parse(argv: &[String], more: &[String]) -> Result<Option<PlanCli>> {
    let line = argv.iter().chain(more).cloned();
    match args::parse::<PlanCli>(&PAGE, line)? {
        Parsed::Run(cli) => Ok(Some(*cli)),
        Parsed::Help(text) => {
            print!("{text}");
            Ok(None)
        }
    }
}

/// What all candidates share: the command line, and the models and the tokenizer that it names, found and read once.
struct SharedSettings<'a> {
    argv: &'a [String],
    found: Settings,
    tokenizer: Tokenizer,
}

impl<'a> SharedSettings<'a> {
    fn new(cli: &PlanCli, argv: &'a [String]) -> Result<SharedSettings<'a>> {
        let mut found = config::resolve(&cli.run, cli.run.files.stage.as_deref(), StrategyName::Fsdp)?;
        resolve::config(&mut found)?;
        let tokenizer = tokens::tokenizer(&mut found);
        Ok(SharedSettings { argv, found, tokenizer })
    }
}

fn outline(
    common: &SharedSettings,
    candidate: &Candidate,
    device: DeviceName,
    gpus: usize,
    per_node: usize,
) -> Result<Outline> {
    let cli = parse(common.argv, &candidate.flags)?.ok_or_else(|| Error::input("--help is not expected here"))?;
    let mut settings = config::resolve(&cli.run, cli.run.files.stage.as_deref(), StrategyName::Fsdp)?;
    let Settings { model, objective, data, hub, .. } = &common.found;
    settings.model.pretrain.clone_from(&model.pretrain);
    settings.objective.ref_pretrain.clone_from(&objective.ref_pretrain);
    settings.objective.teacher.clone_from(&objective.teacher);
    settings.data.tokenizer.clone_from(&data.tokenizer);
    settings.hub.clone_from(hub);
    Outline::new(settings, common.tokenizer.clone(), device, gpus, per_node)
}

/// Costs every candidate, and returns the machine they were planned for.
fn plan(cli: &PlanCli, argv: &[String]) -> Result<(Cluster, Vec<PlanRow>)> {
    let PlanArgs { gpus, gpus_per_node, .. } = cli.plan;
    let gpus = gpus.ok_or_else(|| {
        Error::input(
            "--gpus is missing: give the number of GPUs to plan for, such as --gpus \
                                                8",
        )
    })?;
    let per_node = gpus_per_node.unwrap_or(8);
    if gpus == 0 || gpus > MOST_RANKS {
        return Err(Error::input(format!("--gpus {gpus}: it must be 1 to {MOST_RANKS}")));
    }
    if per_node == 0 {
        return Err(Error::input("--gpus-per-node 0: it must be at least 1"));
    }
    if gpus > per_node && !gpus.is_multiple_of(per_node) {
        return Err(Error::input(format!(
            "--gpus {gpus} is not a multiple of --gpus-per-node {per_node}: {gpus} = {} x {per_node} + {}",
            gpus / per_node,
            gpus % per_node,
        )));
    }
    let name = cli.plan.gpu.as_deref().unwrap_or("h100").to_lowercase();
    let device = if name == "cpu" { DeviceName::Cpu } else { DeviceName::Cuda };
    let mut candidates = candidates::candidates(&cli.run, gpus, per_node, device == DeviceName::Cpu);
    if let Some(only) = &cli.plan.only {
        let names: Vec<_> = candidates.iter().map(|c| c.name.clone()).collect();
        candidates.retain(|c| c.name.contains(only.as_str()));
        if candidates.is_empty() {
            return Err(Error::input(format!(
                "--only {only}: no such strategy; known strategies: {}",
                names.join(", ")
            )));
        }
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let common = SharedSettings::new(cli, argv)?;
    let outlines = on_cores(cores, &candidates, |c| outline(&common, c, device, gpus, per_node));
    // An error that every candidate has is one of the model or the flags.
    if outlines.iter().all(Result::is_err) {
        let first = outlines.into_iter().find_map(Result::err);
        return Err(first.unwrap_or_else(|| Error::input("no strategy to plan")));
    }
    if device == DeviceName::Cuda
        && !FP8_GPUS.contains(&&*name)
        && outlines.iter().flatten().any(|outline| outline.engine.tuning.fp8.is_some())
    {
        let gpus = FP8_GPUS.join(" and ");
        return Err(Error::input(format!(
            "--precision fp8 with --gpu {name}: scales for blocks of 128 are multiplied on {gpus} only; use --precision bf16"
        )));
    }
    let cluster = Cluster { machine: find(cli, &name, &common, &candidates, gpus)?, gpus, per_node };
    let planned = candidates.into_iter().zip(outlines).map(|(candidate, outline)| match outline {
        Ok(outline) => Ok((candidate, Ok(outline))),
        Err(Error::Input(why)) => Ok((candidate, Err(why))),
        Err(e) => Err(e),
    });
    let planned = planned.collect::<Result<Vec<_>>>()?;
    // Runs that are measured have the cores to themselves.
    let rows = on_cores(if cli.plan.check { 1 } else { cores }, &planned, |(candidate, outline)| {
        let outcome = match outline {
            Ok(outline) => Ok(cost(outline, &cluster, cli.plan.check)?),
            Err(why) => Err(why.clone()),
        };
        let sizes = outline.as_ref().map_or(Vec::new(), |outline| sizes(&cli.run.settings, outline));
        Ok(PlanRow { candidate: candidate.clone(), outcome, sizes })
    });
    let rows = rows.into_iter().collect::<Result<Vec<_>>>()?;
    Ok((cluster, rows))
}

/// What `of` makes of each item, in their order, on several cores.
fn on_cores<T: Sync, R: Send>(cores: usize, items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = Vec::new();
        while let Some((i, item)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?))) {
            made.push((i, of(item)));
        }
        made
    };
    let mut all = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores.min(items.len())).map(|_| scope.spawn(work)).collect();
        let made = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        made.flatten().collect::<Vec<_>>()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, made)| made).collect()
}

/// The machine of this name.
fn find(
    cli: &PlanCli,
    name: &str,
    common: &SharedSettings,
    candidates: &[Candidate],
    gpus: usize,
) -> Result<Arc<dyn MachineModel>> {
    let PlanArgs { calibrate, check, .. } = cli.plan;
    if name != "cpu" {
        let known = cards::named(name).ok_or_else(|| {
            let names: Vec<_> = cards::all().map(|gpu| gpu.name).collect();
            Error::input(format!("--gpu {name}: unknown GPU; known: {}, and cpu", names.join(", ")))
        })?;
        if calibrate || check {
            return Err(Error::input(format!(
                "--calibrate measures this machine's CPU: use it with --gpu cpu, not {name}"
            )));
        }
        return Ok(Arc::new(Rated { gpu: *known, tf32: cli.run.settings.precision.tf32 == Some(true) }));
    }
    if !calibrate {
        return Err(Error::input(
            "--gpu cpu: there are no published rates for CPUs; add --calibrate to measure this \
                                 one",
        ));
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if gpus > cores {
        return Err(Error::input(format!(
            "--gpus {gpus} with --gpu cpu: each rank needs a core, and this machine has \
                                         {cores}"
        )));
    }
    // Between them, a sharded and a replicated run have all operations and collectives of the others.
    let kinds = ["FULL_SHARD", "ddp"].map(|name| candidates.iter().find(|c| c.name == name));
    let given = candidates.first().filter(|_| kinds.iter().all(Option::is_none));
    let mut timings = Vec::new();
    for candidate in kinds.into_iter().flatten().chain(given) {
        let outline = outline(common, candidate, DeviceName::Cpu, gpus, gpus)?;
        timings.push(calibrate::timings(&outline.engine, outline.mesh, &work(&outline))?);
    }
    Ok(Arc::new(calibrate::machine(timings, gpus)))
}

/// Flags of sizes that are not given as flags, and would follow from the rows in a run of a data set or a pretrained
/// model.
fn sizes(given: &Settings, outline: &Outline) -> Vec<String> {
    let Settings { model, data, batch, .. } = &outline.settings;
    if model.pretrain.is_none() && data.dataset.is_none() {
        return Vec::new();
    }
    let batch = batch.train_batch_size.is_some();
    let all = [
        ("--max-len", given.data.max_len.is_some()),
        ("--batch-size", given.batch.batch_size.is_some() || batch),
        ("--grad-accum", given.batch.grad_accum.is_some() || batch),
    ];
    let derived = all.into_iter().zip(outline.work).filter(|((_, given), _)| !given);
    derived.flat_map(|((flag, _), size)| [flag.to_string(), size.to_string()]).collect()
}

fn work(outline: &Outline) -> BatchShape {
    let [max_len, batch_size, grad_accum] = outline.work;
    BatchShape { max_len, batch_size, grad_accum }
}

fn cost(outline: &Outline, cluster: &Cluster, check: bool) -> Result<Cost> {
    let work = work(outline);
    let Cluster { machine, gpus, per_node } = cluster;
    let Outline { settings, engine, mesh, params, carried, planned, .. } = outline.clone();
    let mut bytes = planned;
    let mut reserved = 0;
    if let Some(multiprocessors) = machine.multiprocessors() {
        let own = GpuDevice::planned(multiprocessors as u32) + cuda::WORKSPACE;
        bytes.iter_mut().filter(|b| b.0 == Category::Scratch).for_each(|b| b.1 += own);
        reserved = RESERVED;
    }
    let offloaded = host(&bytes);
    let total = bytes.iter().map(|b| b.1).sum::<usize>() - offloaded;
    let step = match offloaded {
        0 => Some(simulate::step(&engine, mesh, &work, machine, *per_node, false)?),
        _ => None,
    };
    let tokens = work.tokens() * mesh.dp_replicate * mesh.dp_shard;
    let tokens_per_sec = step.as_ref().map_or(0.0, |step| tokens as f64 / step.seconds());
    let flops = engine.spec.flops_per_token(work.max_len) as f64;
    let dtype: DType = engine.strategy.dtype();
    Ok(Cost {
        fits: machine.memory().is_none_or(|bytes| total + reserved <= bytes)
            && settings.fsdp.budget()?.is_none_or(|budget| total as u64 <= budget),
        mfu: machine.peak(dtype).filter(|_| step.is_some()).map(|peak| tokens_per_sec * flops / (peak * *gpus as f64)),
        measured: (check && step.is_some()).then(|| calibrate::measure(&engine, mesh, &work)).transpose()?,
        mesh,
        engine,
        params,
        carried,
        work,
        bytes,
        step,
        tokens_per_sec,
    })
}

/// The command line that runs it. `sizes`: what a run would derive from its rows, which a plan does not read.
fn command(argv: &[String], PlanRow { candidate, sizes, .. }: &PlanRow, cluster: &Cluster) -> String {
    let Cluster { gpus, per_node, .. } = cluster;
    let launch = match gpus.checked_div(*per_node) {
        Some(nodes) if nodes > 1 => {
            format!(
                "torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST1:29500 \
                 --no-python run_fsdp"
            )
        }
        _ => format!("run_fsdp --nproc-per-node {gpus}"),
    };
    let quoted = |word: &String| match word.contains(|c: char| c.is_whitespace() || "\"'$*?(){}[]<>|&;".contains(c)) {
        true => format!("'{}'", word.replace('\'', "'\\''")),
        false => word.clone(),
    };
    let words = own_flags_left_out(argv).into_iter().chain(candidate.flags.clone()).chain(sizes.clone());
    words.fold(launch, |line, word| format!("{line} {}", quoted(&word)))
}

/// The command line without the planner's own flags.
fn own_flags_left_out(argv: &[String]) -> Vec<String> {
    const VALUED: [&str; 5] = ["--gpus", "--gpu", "--gpus-per-node", "--only", "--trace"];
    const SWITCHES: [&str; 3] = ["--calibrate", "--check", "--json"];
    let mut left = Vec::new();
    let mut words = argv.iter();
    while let Some(word) = words.next() {
        let (name, value) = word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
        let name = name.replace('_', "-");
        match (VALUED.contains(&name.as_str()), SWITCHES.contains(&name.as_str())) {
            (true, _) if value.is_none() => drop(words.next()),
            (true, _) | (_, true) => {}
            _ => left.push(word.clone()),
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_planners_flags_are_not_passed_to_the_run() {
        let argv = ["--gpus", "8", "--embed-dim", "64", "--gpu=h100", "--json", "--trace", "x.json", "--lr", "1e-3"];
        let argv: Vec<String> = argv.map(str::to_string).to_vec();
        assert_eq!(own_flags_left_out(&argv), ["--embed-dim", "64", "--lr", "1e-3"]);
    }
}
