//! Which checkpoint a run resumes from: the newest, or, if that is damaged and was not named explicitly, the newest
//! intact one. Never starts fresh where there was a checkpoint, and never skips one silently.
use crate::base::{Error, Result};
use crate::ckpt::{self, TrainerState};
use crate::engine::EngineOptions;
use crate::nn::Decoder;
use crate::run::settings::checkpoint::CheckpointSettings;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// Key in `data` of the trainer state: what revisions of the hub were when the run began.
pub const HUB: &str = "hub";

/// The checkpoint to resume from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResumeFrom {
    pub dir: PathBuf,
    pub state: TrainerState,
    /// What is wrong with newer checkpoints.
    pub damaged: Vec<String>,
    /// Fallbacks if the tensors of this one are damaged, newest first.
    older: VecDeque<PathBuf>,
}

/// The checkpoint of the settings, if any; it must match the model and the optimizer. Files and headers are verified
/// here, tensors when they are read.
pub fn find(c: &CheckpointSettings, e: &EngineOptions, decoder: &Decoder) -> Result<Option<ResumeFrom>> {
    let Some(from) = requested(c)? else { return Ok(None) };
    match ckpt::candidates(c.ckpt_dir.as_deref(), &from)? {
        none if none.is_empty() => Ok(None),
        some => first_intact(some.into(), Vec::new(), e, decoder).map(Some),
    }
}

/// The directory of the checkpoint that [`find`] looks at first.
pub fn newest(c: &CheckpointSettings) -> Result<Option<PathBuf>> {
    let Some(from) = requested(c)? else { return Ok(None) };
    Ok(ckpt::candidates(c.ckpt_dir.as_deref(), &from)?.into_iter().next())
}

/// The value of `--resume`. Without it the run starts fresh, in a directory without checkpoints.
pub fn requested(c: &CheckpointSettings) -> Result<Option<ckpt::Resume>> {
    match (c.resume.as_deref(), &c.ckpt_dir) {
        (None, None) => Ok(None),
        // A fresh run would replace the checkpoints of equal steps and prune the others.
        (None, Some(dir)) => match ckpt::newest(dir)? {
            None => Ok(None),
            Some(there) => Err(Error::input(format!(
                "--ckpt-dir {}: holds {} of an earlier run, which is never overwritten; add --resume auto to continue \
                it, \
                 or give another directory",
                dir.display(),
                there.file_name().unwrap_or_default().to_string_lossy()
            ))),
        },
        (Some("auto"), _) => Ok(Some(ckpt::Resume::Auto)),
        (Some("best"), Some(dir)) => Ok(Some(ckpt::Resume::Dir(dir.join("best")))),
        (Some(dir), _) => Ok(Some(ckpt::Resume::Dir(dir.into()))),
    }
}

impl ResumeFrom {
    /// The next older one, because the tensors of this one are damaged (`what`).
    pub fn fall_back(mut self, what: String, e: &EngineOptions, decoder: &Decoder) -> Result<ResumeFrom> {
        self.damaged.push(what);
        first_intact(self.older, self.damaged, e, decoder)
    }
}

fn first_intact(
    mut older: VecDeque<PathBuf>,
    mut damaged: Vec<String>,
    e: &EngineOptions,
    decoder: &Decoder,
) -> Result<ResumeFrom> {
    while let Some(dir) = older.pop_front() {
        match inspect(&dir, e, decoder) {
            Ok(state) => return Ok(ResumeFrom { dir, state, damaged, older }),
            Err(Error::Damaged(what)) => damaged.push(what),
            Err(other) => return Err(other),
        }
    }
    Err(Error::input(format!("{}; resume from another checkpoint (--resume DIR)", damaged.join("; "))))
}

/// Checks that the checkpoint holds adapters or a model as this run does, and that it has the same optimizer, for a
/// clearer error than a missing tensor. Damage is reported elsewhere.
fn kind(dir: &Path, e: &EngineOptions) -> Result<()> {
    let refused = |what: String| Err(Error::input(format!("{}: {what}", dir.display())));
    let adapters = dir.join(ckpt::adapter::FILE).exists();
    match e.tuning.lora.is_some() {
        true if !adapters && dir.join("config.json").exists() => {
            return refused(
                "holds a whole model, but this run trains adapters: remove --lora-rank, or give another --ckpt-dir and \
                 the model as --pretrain"
                    .into(),
            );
        }
        false if adapters => {
            return refused(
                "holds adapters, but this run trains a whole model: give the --lora-rank and --pretrain of the run \
                that \
                 saved it"
                    .into(),
            );
        }
        _ => {}
    }
    let now = e.rule.name();
    match ckpt::state::read(dir).ok().and_then(|(then, _)| then.optimizer.get("kind")?.as_str().map(str::to_owned)) {
        Some(then) if then != now => refused(format!(
            "was saved with --optimizer {then}, but this run has {now}: give {then}, or start fresh from its weights \
            with \
             --pretrain {}",
            dir.display()
        )),
        _ => Ok(()),
    }
}

fn inspect(dir: &Path, e: &EngineOptions, decoder: &Decoder) -> Result<TrainerState> {
    kind(dir, e)?;
    let state = ckpt::inspect(dir, &e.spec, decoder.layouts(), &e.rule.state());
    match (&state, &e.tuning.lora) {
        (Err(Error::Damaged(_)), _) | (_, None) => {}
        // A clearer error than mismatched shapes.
        (_, Some(lora)) => ckpt::adapter::same(dir, lora)?,
    }
    state
}
