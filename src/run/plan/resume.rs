//! Which checkpoint a run goes on from: the newest, or, where that is damaged and nobody named it, the newest one that
//! is whole. Never starts afresh where there was a checkpoint, and never passes over one without a word.
use crate::base::{Error, Result};
use crate::ckpt::{self, TrainerState};
use crate::engine::EngineOptions;
use crate::nn::Decoder;
use crate::run::settings::checkpoint::CheckpointSettings;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// The checkpoint to go on from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResumeFrom {
    pub dir: PathBuf,
    /// Where that run stood.
    pub state: TrainerState,
    /// What is wrong with newer ones.
    pub damaged: Vec<String>,
    /// To go on from where the tensors of this one turn out to be damaged; the newest first.
    older: VecDeque<PathBuf>,
}

/// The checkpoint that the settings ask for, when it is one of this model and optimizer. Files and headers are verified
/// here, tensors when they are read.
pub fn find(c: &CheckpointSettings, e: &EngineOptions, decoder: &Decoder) -> Result<Option<ResumeFrom>> {
    let Some(from) = asked(c)? else { return Ok(None) };
    match ckpt::candidates(c.ckpt_dir.as_deref(), &from)? {
        none if none.is_empty() => Ok(None),
        some => first_whole(some.into(), Vec::new(), e, decoder).map(Some),
    }
}

/// What `--resume` says. Without it the run begins anew, in a directory without checkpoints.
pub fn asked(c: &CheckpointSettings) -> Result<Option<ckpt::Resume>> {
    match (c.resume.as_deref(), &c.ckpt_dir) {
        (None, None) => Ok(None),
        // A fresh run would replace the checkpoints of equal steps and prune the others.
        (None, Some(dir)) => match ckpt::newest(dir)? {
            None => Ok(None),
            Some(there) => Err(Error::input(format!(
                "--ckpt-dir {}: holds {} of an earlier run; add --resume auto to go on from it, or give another \
                 directory: nothing is overwritten",
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
    /// The next older one: the tensors of this one are damaged, as `what` says.
    pub fn fall_back(mut self, what: String, e: &EngineOptions, decoder: &Decoder) -> Result<ResumeFrom> {
        self.damaged.push(what);
        first_whole(self.older, self.damaged, e, decoder)
    }
}

fn first_whole(
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

/// Whether the checkpoint holds adapters or a model, and which optimizer it is of, before tensors are looked for by
/// name. One that is not whole is for others to judge.
fn kind(dir: &Path, e: &EngineOptions) -> Result<()> {
    let refused = |what: String| Err(Error::input(format!("{}: {what}", dir.display())));
    let adapters = dir.join(ckpt::adapter::FILE).exists();
    match e.tuning.lora.is_some() {
        true if !adapters && dir.join("config.json").exists() => {
            return refused(
                "holds a whole model, and this run trains adapters: leave out --lora-rank, or give another --ckpt-dir \
                            and the model as --pretrain"
                    .into(),
            );
        }
        false if adapters => {
            return refused(
                "holds adapters, and this run trains a whole model: give --lora-rank and --pretrain as the run that \
                            saved it"
                    .into(),
            );
        }
        _ => {}
    }
    let now = e.rule.name();
    match ckpt::state::read(dir).ok().and_then(|(then, _)| then.optimizer.get("kind")?.as_str().map(str::to_owned)) {
        Some(then) if then != now => refused(format!(
            "was saved with --optimizer {then}, and this run has {now}: give {then}, or start anew from its weights with \
             --pretrain {}",
            dir.display()
        )),
        _ => Ok(()),
    }
}

fn inspect(dir: &Path, e: &EngineOptions, decoder: &Decoder) -> Result<TrainerState> {
    kind(dir, e)?;
    let state = ckpt::inspect(dir, &e.spec, decoder.layouts(), e.rule.state());
    match (&state, &e.tuning.lora) {
        (Err(Error::Damaged(_)), _) | (_, None) => {}
        // Says more than that the tensors have other shapes.
        (_, Some(lora)) => ckpt::adapter::same(dir, lora)?,
    }
    state
}
