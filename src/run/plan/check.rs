//! What is wrong with settings together, and with the places that they name. Values by themselves are checked where
//! they are declared. Never changes anything.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::comm::env::RankEnv;
use crate::run::plan::evaluations;
use crate::run::plan::profile::Profile;
use crate::run::plan::restarts::Restarts;
use crate::run::plan::resume;
use crate::run::settings::Settings;
use std::path::Path;

/// A merge reads a model and an adapter and writes a model.
pub fn merge(s: &Settings) -> Result<()> {
    let Some(dir) = &s.lora.merge else { return Ok(()) };
    if s.model.pretrain.is_none() || s.checkpoint.save_hf.is_none() {
        return Err(Error::input(
            "--lora-merge needs the model that the adapter was trained on, and a place for the merged one: add --pretrain \
             DIR and --save-hf DIR",
        ));
    }
    ckpt::adapter::read(dir).map(|_| ())
}

/// Where the run will write must be writable now, not after an hour. Nothing is made yet.
pub fn outputs(s: &Settings) -> Result<()> {
    let c = &s.checkpoint;
    evaluations::check(s)?;
    for (flag, dir) in [("--ckpt-dir", &c.ckpt_dir), ("--save-hf", &c.save_hf), ("--tensorboard", &s.watch.tensorboard)]
    {
        dir.as_deref().map_or(Ok(()), |dir| directory(flag, dir))?;
    }
    for (flag, path) in [("--metrics-path", &s.run.metrics_path), ("--log-file", &s.watch.log_file)] {
        path.as_deref().map_or(Ok(()), |path| file(flag, path))?;
    }
    export(s)
}

/// An export replaces nothing but a model of its own run, or with --overwrite another; never one that this run reads.
fn export(s: &Settings) -> Result<()> {
    let c = &s.checkpoint;
    let Some(dir) = &c.save_hf else { return Ok(()) };
    for (flag, input) in
        [("--pretrain", &s.model.pretrain), ("--lora-merge", &s.lora.merge), ("--ckpt-dir", &c.ckpt_dir)]
    {
        if let Some(input) = input.as_ref().filter(|input| ckpt::same_place(dir, input)) {
            return Err(Error::input(format!(
                "--save-hf {}: is the directory of {flag} {}, which is never overwritten; give another directory",
                dir.display(),
                input.display()
            )));
        }
    }
    let run = resume::asked(c)?.map_or(Ok(Vec::new()), |from| ckpt::candidates(c.ckpt_dir.as_deref(), &from))?;
    let run = run.iter().find_map(|dir| ckpt::state::read(dir).ok()).and_then(|(state, _)| state.run);
    ckpt::check_export(dir, run.as_deref(), c.overwrite == Some(true))
}

/// What follows a failure can follow, on these ranks.
pub fn restarts(s: &Settings, r: &Restarts, nproc: usize, launched: Option<&RankEnv>) -> Result<()> {
    let max = r.max;
    if max > 0 && launched.is_some() {
        return Err(Error::input(format!(
            "--max-restarts {max}: these ranks were started by another launcher, whose own --max-restarts (torchrun) or \
             --requeue (Slurm) does that; add --resume auto, so that its restarts go on from the last checkpoint"
        )));
    }
    if max > 0 && s.checkpoint.ckpt_dir.is_none() {
        return Err(Error::input(format!("--max-restarts {max} needs checkpoints to go on from: add --ckpt-dir DIR")));
    }
    if let Some(range) = r.elastic.as_ref().filter(|range| launched.is_none() && !range.contains(&nproc)) {
        return Err(Error::input(format!(
            "--elastic {}:{}: the run starts on {nproc} ranks, which is not between them; use --nproc-per-node",
            range.start(),
            range.end()
        )));
    }
    s.faults.save_traces_folder.as_deref().map_or(Ok(()), |folder| directory("--save-traces-folder", folder))
}

/// Traces and the timeline of memory have a place.
pub fn profile(s: &Settings, profile: Option<&Profile>) -> Result<()> {
    s.trace.memory_timeline.as_deref().map_or(Ok(()), |path| file("--memory-timeline", path))?;
    profile.map_or(Ok(()), |profile| directory("--trace-folder", &profile.folder))
}

/// `path` is, or can become, a file.
fn file(flag: &str, path: &Path) -> Result<()> {
    match path.is_dir() {
        true => Err(Error::input(format!("{flag} {}: is a directory, not a file", path.display()))),
        false => writable(flag, path),
    }
}
/// `path` is, or can become, a directory.
fn directory(flag: &str, path: &Path) -> Result<()> {
    match path.exists() && !path.is_dir() {
        true => Err(Error::input(format!("{flag} {}: is a file, not a directory", path.display()))),
        false => writable(flag, path),
    }
}

/// `path`, or the nearest directory above it that exists, can be written.
fn writable(flag: &str, path: &Path) -> Result<()> {
    let absolute = std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))?;
    let there = absolute.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    if there != absolute && !there.is_dir() {
        return Err(Error::input(format!("{flag} {}: {} is not a directory", path.display(), there.display())));
    }
    rustix::fs::access(there, rustix::fs::Access::WRITE_OK)
        .map_err(|e| Error::input(format!("{flag} {}: cannot write {}: {e}", path.display(), there.display())))
}
