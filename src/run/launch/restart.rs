//! A job that outlives its failures: the ranks that this process started are started again, from the last complete
//! checkpoint, on as many of them or on fewer. Never restarts after bad input or a signal, and never touches a checkpoint.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::comm::env::{RankEnv, Restart};
use crate::comm::flight;
use crate::comm::mesh::MeshSizes;
use crate::run::launch;
use crate::run::launch::Launch;
use crate::run::plan::Plan;
use crate::run::plan::check;
use crate::run::plan::derive::set;
use crate::run::settings::Faults;
use crate::run::settings::Settings;
use crate::run::watch::Log;
use crate::run::watch::metrics;
use serde_json::json;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// When a run ends early and what follows a failure.
#[derive(Clone, Debug)]
pub struct Restarts {
    pub max: u32,
    /// Ranks of the job, where that may change.
    pub elastic: Option<RangeInclusive<usize>>,
    pub monitor_interval: Duration,
    /// Until the first step is done.
    pub init_timeout: Duration,
    /// Where ranks of a failed run write their last collectives.
    pub traces: Option<PathBuf>,
    pub time_limit: Option<Duration>,
    /// That end the run after the step at hand.
    pub signals: Vec<i32>,
}

impl Restarts {
    pub fn new(s: &Settings, nproc: usize, launched: Option<&RankEnv>) -> Result<Restarts> {
        let f = &s.faults;
        let max = set(&f.max_restarts, "faults.max_restarts")?;
        let foreign = launched.is_some_and(|env| env.parent_pid.is_none());
        if max > 0 && foreign {
            return Err(Error::input(format!(
                "--max-restarts {max}: these ranks were started by another launcher, whose own --max-restarts (torchrun) or \
                 --requeue (Slurm) does that; add --resume auto, so that its restarts go on from the last checkpoint"
            )));
        }
        if max > 0 && s.checkpoint.ckpt_dir.is_none() {
            return Err(Error::input(format!(
                "--max-restarts {max} needs checkpoints to go on from: add --ckpt-dir DIR"
            )));
        }
        let elastic = f.elastic.as_deref().map(range).transpose()?;
        if let Some(range) = elastic.as_ref().filter(|range| launched.is_none() && !range.contains(&nproc)) {
            return Err(Error::input(format!(
                "--elastic {}:{}: the run starts on {nproc} ranks, which is not between them; use --nproc-per-node",
                range.start(),
                range.end()
            )));
        }
        if elastic.is_some() && max == 0 {
            return Err(Error::input("--elastic says what follows a failure: add --max-restarts N"));
        }
        if let Some(folder) = &f.save_traces_folder {
            check::directory("--save-traces-folder", folder)?;
        }
        Ok(Restarts {
            max,
            elastic,
            monitor_interval: Duration::from_secs_f64(set(&f.monitor_interval, "faults.monitor_interval")?),
            init_timeout: Duration::from_secs_f64(set(&f.init_timeout, "faults.init_timeout")?),
            traces: traces(s),
            time_limit: f.time_limit.as_deref().map(duration).transpose()?,
            signals: signals(f)?,
        })
    }
}

pub fn signals(f: &Faults) -> Result<Vec<i32>> {
    set(&f.signals, "faults.signals")?.iter().map(|name| launch::signal(name)).collect()
}

/// The place that was given, or one beside the checkpoints.
fn traces(s: &Settings) -> Option<PathBuf> {
    let near = || s.checkpoint.ckpt_dir.as_ref().map(|dir| dir.join("comm_traces"));
    s.faults.save_traces_folder.clone().or_else(near)
}

/// "MIN:MAX", or one number for both.
fn range(text: &str) -> Result<RangeInclusive<usize>> {
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.trim().parse(), max.trim().parse()) {
        (Ok(min), Ok(max)) if 1 <= min && min <= max => Ok(min..=max),
        _ => Err(Error::input(format!("--elastic {text}: it must be MIN:MAX ranks, such as 2:8"))),
    }
}

/// Seconds, M:S or H:M:S.
fn duration(text: &str) -> Result<Duration> {
    let parts: Option<Vec<f64>> = text.split(':').map(|part| part.trim().parse().ok()).collect();
    let parts = parts.filter(|p| p.len() <= 3 && p.iter().all(|x| *x >= 0.0));
    let seconds = parts.map(|p| p.iter().fold(0.0, |sum, part| 60.0 * sum + part)).filter(|&s| s > 0.0 && s < 1e9);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        Error::input(format!("--time-limit {text}: it must be seconds or H:M:S, above 0, such as 3600 or 23:50:00"))
    })
}

/// In a rank of a restart: goes on from the last checkpoint, with as many sequences in a step as the first start had, in the
/// micro-batches that [`crate::run::plan::batch::solve`] finds.
pub fn adapt(s: &mut Settings, env: &RankEnv, restart: Restart) {
    s.run.nproc_per_node = Some(env.local_world);
    s.checkpoint.resume = Some("auto".into());
    (s.batch.train_batch_size, s.batch.grad_accum) = (Some(restart.global_batch), None);
}

/// The largest number of ranks below `now` that the model's mesh and the step's batch can be split over.
fn fewer(plan: &Plan, now: usize, min: usize, global_batch: usize) -> Result<Option<usize>> {
    let s = &plan.settings;
    let MeshSizes { dp_replicate, sp, tp, .. } = plan.mesh;
    let fixed = if plan.is_sharded() { dp_replicate * sp * tp } else { sp * tp };
    let batch = set(&s.batch.batch_size, "batch.batch_size")?;
    let fits = |n: &usize| n.is_multiple_of(fixed) && global_batch.is_multiple_of(batch * (n / (sp * tp)));
    Ok((min..now).rev().find(fits))
}

/// Runs all ranks to their end, again after a failure while there are restarts left.
pub fn run(plan: &Plan, stage: Option<&str>, log: &Log) -> Result<()> {
    let Restarts { max, elastic, monitor_interval, time_limit, signals, traces, .. } = &plan.restarts;
    let metrics = plan.settings.run.metrics_path.as_deref();
    let global_batch = plan.loader(0)?.global_batch() as usize;
    let newest =
        || -> Result<Option<PathBuf>> { plan.settings.checkpoint.ckpt_dir.as_deref().map_or(Ok(None), ckpt::newest) };
    let deadline = time_limit.map(|limit| Instant::now() + limit);
    let (mut nproc, mut attempt, mut before) = (plan.nproc, 0, newest()?);
    loop {
        let restart = (attempt > 0).then_some(Restart { attempt, global_batch });
        let launch = Launch {
            nproc,
            ranks_per_gpu: plan.ranks_per_gpu,
            stage,
            restart,
            poll: *monitor_interval,
            signals,
            deadline,
        };
        let started = SystemTime::now();
        let Err(e) = launch::run(&launch) else { return Ok(()) };
        let e = explained(e, traces.as_deref(), nproc, started);
        let ended = matches!(e, Error::Input(_) | Error::Signal(_)) || attempt == *max;
        if ended {
            metrics::record_failure(metrics, &e);
            return Err(e);
        }
        if let Some(dir) = &plan.settings.checkpoint.ckpt_dir {
            ckpt::clear(dir)?; // all ranks are dead: what they were saving is in the way of what comes
        }
        let after = newest()?;
        if let Some(range) = elastic.as_ref().filter(|_| attempt > 0 && after == before) {
            nproc = fewer(plan, nproc, *range.start(), global_batch)?.unwrap_or(nproc);
        }
        (attempt, before) = (attempt + 1, after);
        let from = before.as_deref().and_then(|dir| dir.file_name()).map(|name| name.to_string_lossy().into_owned());
        let told = from.as_deref().unwrap_or("the beginning");
        log.warn(format_args!("{e}\nrestart {attempt} of {max} on {nproc} ranks, from {told}"));
        metrics::append(
            metrics,
            "restart",
            json!({"attempt": attempt, "world_size": nproc, "from": from, "message": e.to_string()}),
        );
    }
}

/// With what the ranks' flight recorders say together, where they have left any since `started`.
fn explained(e: Error, traces: Option<&Path>, world: usize, started: SystemTime) -> Error {
    match (e, traces) {
        (Error::Run(text), Some(dir)) => match flight::verdict(dir, world, started) {
            Some(verdict) => Error::Run(format!("{text}. Collectives ({}): {verdict}", dir.display())),
            None => Error::Run(text),
        },
        (e, _) => e,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::plan::batch;

    #[test]
    fn limits_and_ranges_are_read_or_refused() {
        let seconds = |text: &str| duration(text).map(|d| d.as_secs_f64()).map_err(|e| e.to_string());
        assert_eq!(seconds("90"), Ok(90.0));
        assert_eq!(seconds("1:30"), Ok(90.0));
        assert_eq!(seconds("23:50:00"), Ok(85_800.0));
        for bad in ["", "0", "-5", "1:2:3:4", "soon", "1e300"] {
            assert!(seconds(bad).unwrap_err().contains(&format!("--time-limit {bad}: it must be")), "{bad}");
        }
        assert_eq!(range("2:8").unwrap(), 2..=8);
        assert_eq!(range("3").unwrap(), 3..=3);
        for bad in ["8:2", "0:4", "a:b", "2:"] {
            assert_eq!(range(bad).unwrap_err().exit_status(), 2, "{bad}");
        }
    }

    /// As many sequences as before, whether the size of a micro-batch was given or followed from that of the step.
    #[test]
    fn a_restart_on_fewer_ranks_keeps_the_batch() {
        let vars = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
        let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        let env = RankEnv::read(&get).unwrap().unwrap();
        for (given, expected) in [(Some(2), (2, 3)), (None, (6, 1))] {
            let mut s = Settings::default();
            (s.batch.batch_size, s.batch.grad_accum) = (given, Some(2));
            adapt(&mut s, &env, Restart { attempt: 1, global_batch: 12 });
            batch::solve(&mut s, &MeshSizes::sharded(2)).unwrap();
            assert_eq!((s.batch.batch_size, s.batch.grad_accum), (Some(expected.0), Some(expected.1)));
            assert_eq!((s.run.nproc_per_node, s.checkpoint.resume.as_deref()), (Some(2), Some("auto")));
        }
    }
}
