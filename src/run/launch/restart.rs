//! `--max-restarts` and `--elastic`: after a failure, starts the ranks again from the last complete checkpoint, on the
//! same number of ranks or fewer. Never restarts after bad input or a signal, and never modifies a checkpoint.
use super::job::RankJob;
use super::processes::{self, Launch};
use crate::base::{Error, Result};
use crate::ckpt;
use crate::comm::flight;
use crate::comm::mesh::MeshSizes;
use crate::run::plan::Plan;
use crate::run::plan::restarts::Restarts;
use crate::run::settings::value::set;
use crate::run::watch::RunLog;
use crate::run::watch::metrics;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

/// The largest number of ranks below `now` that the mesh and the global batch can be divided among.
fn fewer(plan: &Plan, now: usize, min: usize, global_batch: usize) -> Result<Option<usize>> {
    let s = &plan.settings;
    let MeshSizes { dp_replicate, sp, tp, ep, .. } = plan.ranks.mesh;
    let fixed = if plan.is_sharded() { dp_replicate * ep * sp * tp } else { sp * tp };
    let batch = set(&s.batch.batch_size, "batch.batch_size")?;
    let fits = |n: &usize| n.is_multiple_of(fixed) && global_batch.is_multiple_of(batch * (n / (sp * tp)));
    Ok((min..now).rev().find(fits))
}

/// Runs all ranks to the end, restarting after failures while restarts are left.
pub fn run(plan: &Plan, log: &RunLog) -> Result<()> {
    let Restarts { max, elastic, monitor_interval, time_limit, signals, traces, .. } = &plan.restarts;
    let metrics = plan.settings.run.metrics_path.as_deref();
    let global_batch = plan.loader(0)?.global_batch() as usize;
    let newest =
        || -> Result<Option<PathBuf>> { plan.settings.checkpoint.ckpt_dir.as_deref().map_or(Ok(None), ckpt::newest) };
    let deadline = time_limit.map(|limit| Instant::now() + limit);
    let (mut nproc, mut attempt, mut before) = (plan.ranks.nproc, 0, newest()?);
    let mut job = RankJob::Train(Box::new(plan.settled()));
    loop {
        let launch = Launch {
            nproc,
            ranks_per_gpu: plan.ranks.ranks_per_gpu,
            job: &job,
            poll: *monitor_interval,
            signals,
            deadline,
        };
        let started = SystemTime::now();
        let Err(e) = processes::run(&launch) else { return Ok(()) };
        let e = explained(e, traces.as_deref(), nproc, started);
        let ended = matches!(e, Error::Input(_) | Error::Signal(_)) || attempt == *max;
        if ended {
            metrics::record_failure(metrics, &e);
            return Err(e);
        }
        if let Some(dir) = &plan.settings.checkpoint.ckpt_dir {
            ckpt::clear(dir)?; // all ranks have exited: remove what they were saving
        }
        let after = newest()?;
        if let Some(range) = elastic.as_ref().filter(|_| attempt > 0 && after == before) {
            nproc = fewer(plan, nproc, *range.start(), global_batch)?.unwrap_or(nproc);
        }
        (attempt, before) = (attempt + 1, after);
        let from = before.as_deref().and_then(|dir| dir.file_name()).map(|name| name.to_string_lossy().into_owned());
        let source = from.as_deref().unwrap_or("the beginning");
        log.warn(format_args!("{e}\nrestart {attempt} of {max} on {nproc} ranks, from {source}"));
        metrics::append(
            metrics,
            "restart",
            json!({"attempt": attempt, "world_size": nproc, "from": from, "message": e.to_string()}),
        );
        let again = plan.again(nproc, attempt).inspect_err(|e| metrics::record_failure(metrics, e))?;
        job = RankJob::Train(Box::new(again.settled()));
    }
}

/// Adds the verdict of the flight recorders, if ranks have written any since `started`.
fn explained(e: Error, traces: Option<&Path>, world: usize, started: SystemTime) -> Error {
    match (e, traces) {
        (Error::Run(text), Some(dir)) => match flight::verdict(dir, world, started) {
            Some(verdict) => Error::Run(format!("{text}. Collectives ({}): {verdict}", dir.display())),
            None => Error::Run(text),
        },
        (e, _) => e,
    }
}
