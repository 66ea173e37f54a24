//! `experiments plan` from its flags to its tables: which candidates, on which machine, at what cost, and which of them
//! to run. Never times anything itself.
use super::candidates::{self, Candidate};
use super::cost::{Cluster, Cost, PlanRow, RESERVED, host};
use super::machine::{GPUS, MachineModel, Rated};
use super::simulate::{self, BatchShape};
use super::{calibrate, report, trace};
use clap::Parser;
use flatshard::base::{Category, DType, Error, Result};
use flatshard::device::gpu::{GpuDevice, cuda};
use flatshard::run::plan::outline::Outline;
use flatshard::run::settings::DeviceName;
use flatshard::run::settings::Settings;
use flatshard::run::settings::StrategyName;
use flatshard::run::settings::args;
use flatshard::run::settings::args::Parsed;
use flatshard::run::settings::config;
use std::path::PathBuf;
use std::sync::Arc;

const ABOUT: &str = "Plans a run: bytes of a rank, communication and step time of each strategy, and which to use.\nTakes run_fsdp's flags beside its own; strategies that they settle are not varied.";

/// Ranks that a job may have: the norm's exact sum takes no more.
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
    /// GPUs of the job, or with --gpu cpu its ranks
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// a100, h100, h200 or b200; cpu: this machine, with --calibrate [default: h100]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// GPUs behind one NVLink switch [default: 8]
    #[arg(long, value_name = "N")]
    gpus_per_node: Option<usize>,
    /// Measure this CPU with some steps of two blocks of the model
    #[arg(long)]
    calibrate: bool,
    /// With --calibrate: also run each strategy, and say how far the prediction was off
    #[arg(long)]
    check: bool,
    /// Plan only strategies whose name holds this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// One JSON document instead of the table
    #[arg(long)]
    json: bool,
    /// Chrome trace of the recommended strategy's simulated step
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// `argv` behind `plan`. Whether something fits.
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
    let command = best.map(|row| command(argv, &row.candidate, &cluster));
    match cli.plan.json {
        true => println!("{}", report::json(&cluster, &rows, best, command.as_deref())),
        false => print!("{}", report::text(&cluster, &rows, best, command.as_deref())),
    }
    Ok(best.is_some())
}

/// Of what fits, the fastest; of those within a hundredth of it, the smallest.
fn best(rows: &[PlanRow]) -> Option<&PlanRow> {
    let fitting = || rows.iter().filter_map(|row| Some((row, row.outcome.as_ref().ok().filter(|c| c.fits)?)));
    let top = fitting().map(|(_, cost)| cost.tokens_per_sec).fold(0.0, f64::max);
    let near = fitting().filter(|(_, cost)| cost.tokens_per_sec >= 0.99 * top);
    near.min_by_key(|(_, cost)| cost.total()).map(|(row, _)| row)
}

fn parse(argv: &[String], more: &[String]) -> Result<Option<PlanCli>> {
    let line = argv.iter().chain(more).cloned();
    match args::parse::<PlanCli>("experiments plan", ABOUT, line)? {
        Parsed::Run(cli) => Ok(Some(*cli)),
        Parsed::Help(text) => {
            print!("{text}");
            Ok(None)
        }
    }
}

fn outline(
    argv: &[String],
    candidate: &Candidate,
    device: DeviceName,
    gpus: usize,
    per_node: usize,
) -> Result<Outline> {
    let cli = parse(argv, &candidate.flags)?.ok_or_else(|| Error::input("--help among the flags"))?;
    let settings = config::resolve(&cli.run, cli.run.files.stage.as_deref(), StrategyName::Fsdp)?;
    Outline::new(settings, device, gpus, per_node)
}

/// Every candidate, and the machine that they were planned for.
fn plan(cli: &PlanCli, argv: &[String]) -> Result<(Cluster, Vec<PlanRow>)> {
    let PlanArgs { gpus, gpus_per_node, .. } = cli.plan;
    let gpus = gpus.ok_or_else(|| Error::input("--gpus is missing: say for how many GPUs to plan, as in --gpus 8"))?;
    let per_node = gpus_per_node.unwrap_or(8);
    if gpus == 0 || gpus > MOST_RANKS {
        return Err(Error::input(format!("--gpus {gpus}: it must be 1 to {MOST_RANKS}")));
    }
    if per_node == 0 || (gpus > per_node && !gpus.is_multiple_of(per_node)) {
        return Err(Error::input(format!(
            "--gpus {gpus} are no whole nodes of --gpus-per-node {per_node}: {gpus} = {} x {per_node} + {}",
            gpus.checked_div(per_node).unwrap_or(0),
            gpus.checked_rem(per_node).unwrap_or(gpus),
        )));
    }
    let name = cli.plan.gpu.as_deref().unwrap_or("h100").to_lowercase();
    let device = if name == "cpu" { DeviceName::Cpu } else { DeviceName::Cuda };
    let mut candidates = candidates::candidates(&cli.run, gpus, per_node, device == DeviceName::Cpu);
    if let Some(only) = &cli.plan.only {
        let names: Vec<_> = candidates.iter().map(|c| c.name.clone()).collect();
        candidates.retain(|c| c.name.contains(only.as_str()));
        if candidates.is_empty() {
            return Err(Error::input(format!("--only {only}: no such strategy; there are {}", names.join(", "))));
        }
    }
    let outlines: Vec<_> = candidates.iter().map(|c| outline(argv, c, device, gpus, per_node)).collect();
    // A fault of the model or of the flags is every candidate's.
    if outlines.iter().all(Result::is_err) {
        let first = outlines.into_iter().find_map(Result::err);
        return Err(first.unwrap_or_else(|| Error::input("no strategy to plan")));
    }
    let cluster = Cluster { machine: find(cli, &name, argv, &candidates, gpus)?, gpus, per_node };
    let rows = candidates.iter().zip(outlines).map(|(candidate, outline)| {
        let outcome = match outline {
            Ok(outline) => Ok(cost(outline, &cluster, cli.plan.check)?),
            Err(Error::Input(why)) => Err(why),
            Err(e) => return Err(e),
        };
        Ok(PlanRow { candidate: candidate.clone(), outcome })
    });
    let rows = rows.collect::<Result<Vec<_>>>()?;
    Ok((cluster, rows))
}

/// The machine of that name.
fn find(
    cli: &PlanCli,
    name: &str,
    argv: &[String],
    candidates: &[Candidate],
    gpus: usize,
) -> Result<Arc<dyn MachineModel>> {
    let PlanArgs { calibrate, check, .. } = cli.plan;
    if name != "cpu" {
        let known = GPUS.iter().find(|gpu| gpu.name == name).ok_or_else(|| {
            let names: Vec<_> = GPUS.iter().map(|gpu| gpu.name).collect();
            Error::input(format!("--gpu {name}: no rates are known of it; there are {}, and cpu", names.join(", ")))
        })?;
        if calibrate || check {
            return Err(Error::input(format!(
                "--calibrate measures this machine's CPU: it needs --gpu cpu, not {name}"
            )));
        }
        return Ok(Arc::new(Rated { gpu: *known, tf32: cli.run.settings.precision.tf32 == Some(true) }));
    }
    if !calibrate {
        return Err(Error::input("--gpu cpu: no rates of CPUs are on record; add --calibrate to measure this one"));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if gpus > cores {
        return Err(Error::input(format!("--gpus {gpus} of --gpu cpu: a rank needs a core, and there are {cores}")));
    }
    // Sharded and replicated: between them they have the others' operations and collectives.
    let kinds = ["FULL_SHARD", "ddp"].map(|name| candidates.iter().find(|c| c.name == name));
    let given = candidates.first().filter(|_| kinds.iter().all(Option::is_none));
    let mut timings = Vec::new();
    for candidate in kinds.into_iter().flatten().chain(given) {
        let outline = outline(argv, candidate, DeviceName::Cpu, gpus, gpus)?;
        timings.push(calibrate::timings(&outline.engine, outline.mesh, &work(&outline))?);
    }
    Ok(Arc::new(calibrate::machine(timings, gpus)))
}

fn work(outline: &Outline) -> BatchShape {
    let [max_len, batch_size, grad_accum] = outline.work;
    BatchShape { max_len, batch_size, grad_accum }
}

fn cost(outline: Outline, cluster: &Cluster, check: bool) -> Result<Cost> {
    let work = work(&outline);
    let Cluster { machine, gpus, per_node } = cluster;
    let Outline { engine, mesh, params, planned: mut bytes, .. } = outline;
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
        fits: machine.memory().is_none_or(|bytes| total + reserved <= bytes),
        mfu: machine.peak(dtype).filter(|_| step.is_some()).map(|peak| tokens_per_sec * flops / (peak * *gpus as f64)),
        measured: (check && step.is_some()).then(|| calibrate::measure(&engine, mesh, &work)).transpose()?,
        mesh,
        engine,
        params,
        work,
        bytes,
        step,
        tokens_per_sec,
    })
}

/// The line that runs it.
fn command(argv: &[String], candidate: &Candidate, cluster: &Cluster) -> String {
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
    let words = own_flags_left_out(argv).into_iter().chain(candidate.flags.clone());
    words.fold(launch, |line, word| format!("{line} {}", quoted(&word)))
}

/// What of the command line is `run_fsdp`'s.
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
    fn flags_of_the_plan_are_not_the_runs() {
        let argv = ["--gpus", "8", "--embed-dim", "64", "--gpu=h100", "--json", "--trace", "x.json", "--lr", "1e-3"];
        let argv: Vec<String> = argv.map(str::to_string).to_vec();
        assert_eq!(own_flags_left_out(&argv), ["--embed-dim", "64", "--lr", "1e-3"]);
    }
}
