//! What is wrong with settings one by one: numbers out of range, places that cannot be written. Relations between settings
//! follow in `run/plan`. Never changes anything, but that [`opened`] makes what it opens.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::run::plan::limits;
use crate::run::plan::resume;
use crate::run::settings::*;
use crate::run::watch::metrics;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Ranges of single numbers; relations between settings follow where they are used.
pub fn numbers(s: &Settings) -> Result<()> {
    fn whole(name: &str, value: Option<u64>) -> Result<()> {
        match value {
            Some(0) => Err(Error::input(format!("{name} is 0: it must be at least 1"))),
            _ => Ok(()),
        }
    }
    fn real(name: &str, value: Option<f64>, fits: impl Fn(f64) -> bool, range: &str) -> Result<()> {
        match value.filter(|&x| !(x.is_finite() && fits(x))) {
            Some(x) => Err(Error::input(format!("{name} is {x}: it must be {range}"))),
            None => Ok(()),
        }
    }
    let n = |x: Option<usize>| x.map(|x| x as u64);
    limits::single(s)?;
    whole("nproc_per_node", n(s.run.nproc_per_node))?;
    whole("num_nodes", n(s.run.num_nodes))?;
    whole("max_steps", s.run.max_steps)?;
    whole("epochs", s.run.epochs)?;
    real("monitor_interval", s.faults.monitor_interval, |x| x > 0.0 && x <= 3600.0, "above 0, at most 3600 seconds")?;
    real("init_timeout", s.faults.init_timeout, |x| x > 0.0 && x <= 1e6, "above 0, at most a million seconds")?;
    whole("ranks_per_gpu", n(s.run.ranks_per_gpu))?;
    whole("log_every", s.run.log_every)?;
    whole("batch_size", n(s.batch.batch_size))?;
    whole("grad_accum", n(s.batch.grad_accum))?;
    whole("max_len", n(s.data.max_len))?;
    whole("num_heads", n(s.model.num_heads))?;
    whole("tp_size", n(s.parallel.tp_size))?;
    whole("ring_attn_size", n(s.parallel.ring_attn_size))?;
    whole("dp_replicate_size", n(s.parallel.dp_replicate_size))?;
    let o = &s.optim;
    real("lr", o.lr, |x| x >= 0.0, "0 or more")?;
    for beta in o.betas.iter().flatten() {
        real("betas", Some(*beta), |x| (0.0..1.0).contains(&x), "in [0, 1)")?;
    }
    if let Some(betas) = o.betas.as_ref().filter(|b| b.len() != 2) {
        return Err(Error::input(format!("betas has {} values: it must have 2", betas.len())));
    }
    real("eps", o.eps, |x| x > 0.0, "above 0")?;
    real("momentum", o.momentum, |x| (0.0..1.0).contains(&x), "in [0, 1)")?;
    real("weight_decay", o.weight_decay, |x| x >= 0.0, "0 or more")?;
    real("min_lr_ratio", o.min_lr_ratio, |x| (0.0..=1.0).contains(&x), "in [0, 1]")?;
    real("grad_clip", o.grad_clip, |x| x >= 0.0, "0 (no clipping) or more")?;
    real("dropout", s.model.dropout, |x| (0.0..1.0).contains(&x), "in [0, 1)")?;
    let g = &s.generate;
    whole("max_new_tokens", n(g.max_new_tokens))?;
    real("temperature", g.temperature, |x| x >= 0.0, "0 or more")?;
    real("top_p", g.top_p, |x| x > 0.0 && x <= 1.0, "above 0, at most 1")?;
    real("comm_timeout", s.run.comm_timeout, |x| x > 0.0 && x <= 1e6, "above 0, at most a million seconds")
}

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
    if c.save_every.is_some_and(|n| n > 0) && c.ckpt_dir.is_none() {
        return Err(Error::input("--save-every needs a place for the checkpoints: add --ckpt-dir DIR"));
    }
    for (flag, dir) in [("--ckpt-dir", &c.ckpt_dir), ("--save-hf", &c.save_hf)] {
        if let Some(dir) = dir {
            directory(flag, dir)?;
        }
    }
    export(s)?;
    s.run.metrics_path.as_deref().map_or(Ok(()), |path| file("--metrics-path", path))
}

/// An export replaces nothing but a model of its own run, or with --overwrite another; never one that this run reads.
fn export(s: &Settings) -> Result<()> {
    let c = &s.checkpoint;
    let Some(dir) = &c.save_hf else {
        return match c.overwrite {
            Some(true) => Err(Error::input("--overwrite has no effect here: add --save-hf DIR, or remove it")),
            _ => Ok(()),
        };
    };
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

/// What the first rank will write is opened, once, before any rank starts: finds a full device, or a name that is too long. A file
/// that was not there is removed again, since ranks may still be refused.
pub fn opened(s: &Settings) -> Result<()> {
    let bad = |flag: &str, path: &Path, e| Error::input(format!("{flag} {}: {e}", path.display()));
    // Who reads a pipe would take its first end for the last.
    let is_pipe = |path: &Path| path.metadata().is_ok_and(|m| m.file_type().is_fifo());
    if let Some(path) = s.run.metrics_path.as_ref().filter(|path| !is_pipe(path)) {
        let new = !path.exists();
        let opened = metrics::to_add(path).and_then(|_| if new { std::fs::remove_file(path) } else { Ok(()) });
        opened.map_err(|e| bad("--metrics-path", path, e))?;
    }
    if let Some(dir) = &s.watch.tensorboard {
        std::fs::create_dir_all(dir).map_err(|e| bad("--tensorboard", dir, e))?;
    }
    Ok(())
}

/// `path` is, or can become, a file.
pub fn file(flag: &str, path: &Path) -> Result<()> {
    match path.is_dir() {
        true => Err(Error::input(format!("{flag} {}: is a directory, not a file", path.display()))),
        false => writable(flag, path),
    }
}
/// `path` is, or can become, a directory.
pub fn directory(flag: &str, path: &Path) -> Result<()> {
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
