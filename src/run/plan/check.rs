//! Checks of settings together, and of the paths that they name. Single values are checked where they are declared.
//! Never changes anything.
use crate::base::{Error, Result};
use crate::ckpt;
use crate::ckpt::gguf::{GgufType, Q8_0_BLOCK};
use crate::comm::env::RankEnv;
use crate::data::Tokenizer;
use crate::engine::EngineOptions;
use crate::nn::{Decoder, Slice};
use crate::run::plan::profile::Profile;
use crate::run::plan::restarts::Restarts;
use crate::run::plan::resume::{self, ResumeFrom};
use crate::run::plan::save::{self, SaveOptions};
use crate::run::plan::sized::SizedEngine;
use crate::run::plan::{evaluations, objective};
use crate::run::settings::Settings;
use crate::run::settings::hub::DataName;
use crate::run::trace::memory::TIMELINE;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Output paths must be writable now rather than fail after an hour. Creates nothing.
pub fn outputs(s: &Settings) -> Result<()> {
    let c = &s.checkpoint;
    evaluations::check(s)?;
    let dirs = [
        ("--ckpt-dir", &c.ckpt_dir),
        ("--save-hf", &c.save_hf),
        ("--save-adapter", &c.save_adapter),
        ("--tensorboard", &s.watch.tensorboard),
    ];
    for (flag, dir) in dirs {
        dir.as_deref().map_or(Ok(()), |dir| directory(flag, dir))?;
    }
    let files =
        [("--metrics-path", &s.run.metrics_path), ("--log-file", &s.watch.log_file), ("--save-gguf", &c.save_gguf)];
    for (flag, path) in files {
        path.as_deref().map_or(Ok(()), |path| file(flag, path))?;
    }
    let mut named = files.into_iter().chain([("--memory-timeline", &s.trace.memory_timeline)]);
    while let Some((flag, Some(path))) = named.find(|(_, path)| path.is_some()) {
        // Devices may be: /dev/null takes all.
        let same = |other: &Path| (path.is_file() || !path.exists()) && ckpt::same_place(other, path);
        if let Some((other, _)) = named.clone().find(|(_, other)| other.as_deref().is_some_and(same)) {
            return Err(Error::input(format!("{flag} and {other} are one file, {}: give two", path.display())));
        }
    }
    for (flag, path, begins) in [
        ("--metrics-path", &s.run.metrics_path, "{\"event\":"),
        ("--memory-timeline", &s.trace.memory_timeline, TIMELINE),
    ] {
        path.as_deref().map_or(Ok(()), |path| replaceable(flag, path, begins))?;
    }
    s.watch.log_file.as_deref().map_or(Ok(()), |path| is_no_input(s, "--log-file", path))?;
    if let Some(path) = &c.save_gguf {
        if s.objective.scores() {
            return Err(Error::input("--objective rm: GGUF files hold language models; remove --save-gguf"));
        }
        ckpt::gguf::check_file(path, c.overwrite == Some(true))?;
    }
    export(s, "--save-hf", &c.save_hf, &None)?;
    export(s, "--save-adapter", &c.save_adapter, &c.save_hf)
}

/// A file that is there already is replaced only by one of its kind, which `begins` so: it could be the run's own data.
fn replaceable(flag: &str, path: &Path, begins: &str) -> Result<()> {
    if !path.is_file() {
        return Ok(()); // opening a pipe would wait for its other end
    }
    let Ok(file) = File::open(path) else { return Ok(()) };
    let mut beginning = Vec::new();
    file.take(begins.len() as u64)
        .read_to_end(&mut beginning)
        .map_err(|e| Error::input(format!("{flag} {}: {e}", path.display())))?;
    match begins.as_bytes().starts_with(&beginning) {
        true => Ok(()),
        false => Err(Error::input(format!(
            "{flag} {}: is another file than {flag} writes, and is never overwritten; give another path",
            path.display()
        ))),
    }
}

/// A file that grows is none that the run reads.
fn is_no_input(s: &Settings, flag: &str, path: &Path) -> Result<()> {
    let named = [&s.data.dataset, &s.data.eval_dataset, &s.objective.rollouts];
    let files = named.into_iter().flatten().flatten().map(|text| PathBuf::from(DataName::of(text).name));
    let models = [&s.model.pretrain, &s.objective.ref_pretrain, &s.objective.teacher, &s.lora.merge, &s.lora.adapter];
    let within = |dir: &&PathBuf| path.exists() && path.parent().is_some_and(|parent| ckpt::same_place(parent, dir));
    let read = files.into_iter().find(|file| file.exists() && ckpt::same_place(path, file));
    match read.or(models.into_iter().flatten().find(within).cloned()) {
        None => Ok(()),
        Some(input) => Err(Error::input(format!(
            "{flag} {}: the run reads {}, which is never written to; give another path",
            path.display(),
            input.display()
        ))),
    }
}

/// The weights that the run reads besides the checkpoint of `resume` are those of its models. `models` identifies them.
pub fn weights(
    s: &Settings,
    sized: &SizedEngine,
    resume: Option<&ResumeFrom>,
    models: &Map<String, Value>,
) -> Result<()> {
    resume.map_or(Ok(()), |resume| objective::same_base(s, resume, models))?;
    // Checkpoints of adapters hold only adapters: the base model is always read from its own directory.
    let reads_base = resume.is_none() || sized.options.tuning.lora.is_some();
    if let Some(dir) = s.model.pretrain.as_ref().filter(|_| reads_base) {
        ckpt::inspect_model(dir, &sized.options.spec, sized.decoder.layouts())?;
    }
    if let Some(dir) = s.lora.adapter.as_ref().filter(|_| resume.is_none()) {
        let tower = s.model.pretrain.as_deref().map_or(Ok(false), ckpt::hf::has_tower)?;
        ckpt::inspect_trained_adapter(dir, sized.decoder.layouts(), tower)?;
    }
    objective::inspect(s, &sized.options)
}

/// The model and its tokenizer can be exported to GGUF on these ranks. `source` is what the run starts from. Returns
/// what there is to know of the file.
pub fn gguf(
    s: &Settings,
    source: Option<&Path>,
    tokenizer: &Tokenizer,
    engine: &EngineOptions,
    tp: usize,
) -> Result<Option<String>> {
    let Some(file) = &s.checkpoint.save_gguf else { return Ok(None) };
    let bad = |what: &str| Err(Error::input(format!("--save-gguf {}: {what}", file.display())));
    let (spec, kind) = (&engine.spec, SaveOptions::new(&s.checkpoint)?.gguf);
    let (own, shared) = spec.experts.as_ref().map_or((spec.ff, 0), |experts| (experts.ff, experts.shared_ff));
    let cuts = engine.cuts;
    let inputs = [(cuts.attention, spec.heads * spec.head_dim), (cuts.mlp, own), (cuts.mlp, shared)];
    let whole = |n: usize| n.is_multiple_of(Q8_0_BLOCK);
    let cut = |n: usize| whole(n) && !(0..tp).all(|index| whole(Slice { index, of: tp }.share(n).start));
    if let Some((_, n)) = inputs.iter().find(|(cuts, n)| kind == GgufType::Q8_0 && *cuts && cut(*n)) {
        return bad(&format!(
            "--tp-size {tp} cuts {n} columns within blocks of {Q8_0_BLOCK}, which q8_0 scales together; use --gguf-type f16 or \
             bf16, or another --tp-size"
        ));
    }
    let (decoder, companions) = (Decoder::new(spec.clone())?, save::companions(s, spec, source, tokenizer)?);
    ckpt::gguf::beginning(file, spec, decoder.layouts(), kind, &companions)?;
    Ok(ckpt::gguf::left_out(spec).map(|what| format!("--save-gguf {}: {what}", file.display())))
}

/// Refuses weights to be written at the end that have no room now. Of how many parameters, and how many are trained.
pub fn room(s: &Settings, params: usize, trainable: usize) -> Result<()> {
    let (c, save) = (&s.checkpoint, SaveOptions::new(&s.checkpoint)?);
    let all = [
        ("--save-hf", &c.save_hf, params * save.dtype.bitsize() / 8),
        ("--save-adapter", &c.save_adapter, trainable * 4),
        ("--save-gguf", &c.save_gguf, params * if save.gguf == GgufType::Q8_0 { 1 } else { 2 }),
        // Masters, without moments: the least that a checkpoint has.
        ("--ckpt-dir", &c.ckpt_dir, 4 * if s.lora.rank.is_some() { trainable } else { params }),
    ];
    all.into_iter().try_for_each(|(flag, path, bytes)| {
        path.as_ref().map_or(Ok(()), |path| ckpt::check_room(flag, path, bytes as u64))
    })
}

/// An export to the directory of `flag` replaces only one of the same run, or with --overwrite any other; never one
/// that this run reads, or `other`.
fn export(s: &Settings, flag: &str, dir: &Option<PathBuf>, other: &Option<PathBuf>) -> Result<()> {
    let c = &s.checkpoint;
    let Some(dir) = dir else { return Ok(()) };
    let taken = [
        ("--pretrain", &s.model.pretrain),
        ("--lora-merge", &s.lora.merge),
        ("--lora-adapter", &s.lora.adapter),
        ("--ref-pretrain", &s.objective.ref_pretrain),
        ("--teacher", &s.objective.teacher),
        ("--ckpt-dir", &c.ckpt_dir),
        ("--save-hf", other),
    ];
    for (of, input) in taken {
        if let Some(input) = input.as_ref().filter(|input| ckpt::same_place(dir, input)) {
            return Err(Error::input(format!(
                "{flag} {}: is the directory of {of} {}, which is never overwritten; give another directory",
                dir.display(),
                input.display()
            )));
        }
    }
    // A conversion continues no run.
    let continued = if s.only_converts() { None } else { resume::requested(c)? };
    let run = continued.map_or(Ok(Vec::new()), |from| ckpt::candidates(c.ckpt_dir.as_deref(), &from))?;
    let run = run.iter().find_map(|dir| ckpt::state::read(dir).ok()).and_then(|(state, _)| state.run);
    let checked = ckpt::check_export(dir, run.as_deref(), c.overwrite == Some(true));
    checked.map_err(|e| Error::input(format!("{flag} {e}")))
}

/// Restarts are possible with these ranks.
pub fn restarts(s: &Settings, r: &Restarts, nproc: usize, launched: Option<&RankEnv>) -> Result<()> {
    let max = r.max;
    if max > 0 && launched.is_some() {
        return Err(Error::input(format!(
            "--max-restarts {max}: these ranks were started by an external launcher; use its own --max-restarts \
            (torchrun) \
             or --requeue (Slurm), with --resume auto to continue from the last checkpoint"
        )));
    }
    if max > 0 && s.checkpoint.ckpt_dir.is_none() {
        return Err(Error::input(format!("--max-restarts {max} needs checkpoints to resume from: add --ckpt-dir DIR")));
    }
    if let Some(range) = r.elastic.as_ref().filter(|range| launched.is_none() && !range.contains(&nproc)) {
        return Err(Error::input(format!(
            "--elastic {}:{}: {nproc} starting ranks is outside MIN:MAX; set --nproc-per-node",
            range.start(),
            range.end()
        )));
    }
    s.faults.save_traces_folder.as_deref().map_or(Ok(()), |folder| directory("--save-traces-folder", folder))
}

/// Traces and the memory timeline can be written.
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
