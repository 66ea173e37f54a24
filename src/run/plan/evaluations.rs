//! The best checkpoint (`--save-on-best`, `--load-best`) and early stopping (`--patience`). They compare each
//! evaluation with the earlier ones, by its loss or, of GRPO, by its mean reward, across restarts. Never evaluates.
use super::resume::ResumeFrom;
use crate::base::{Error, Result};
use crate::ckpt::{Evaluations, same_place};
use crate::run::settings::Settings;
use crate::run::settings::value::StepInterval;

/// The flags of this run that compare evaluations.
fn flags(s: &Settings) -> Vec<String> {
    let best = (s.checkpoint.save_on_best == Some(true)).then(|| "--save-on-best".to_string());
    best.into_iter().chain(s.run.patience.map(|n| format!("--patience {n}"))).collect()
}

/// The settings have evaluations to compare, and a directory for the best checkpoint.
pub fn check(s: &Settings) -> Result<()> {
    let (saves, loads) = (s.checkpoint.save_on_best == Some(true), s.checkpoint.load_best == Some(true));
    let mut flags = flags(s);
    flags.extend(loads.then(|| "--load-best".to_string()));
    let Some((first, last)) = flags.first().zip(flags.last()) else { return Ok(()) };
    let lacks = [
        (loads && !saves, last, "needs the checkpoint with the lowest evaluation loss: add --save-on-best"),
        (saves && s.checkpoint.ckpt_dir.is_none(), first, "needs a checkpoint directory: add --ckpt-dir DIR"),
        (s.run.eval != Some(true), first, "compares evaluation losses, but --no-eval is set: remove one of them"),
        (
            (loads || s.run.patience.is_some()) && s.run.eval_every.is_none_or(|every| every == StepInterval::Steps(0)),
            last,
            "compares evaluations during the run: add --eval-every STEPS",
        ),
    ];
    match lacks.iter().find(|(lacks, ..)| *lacks) {
        None => Ok(()),
        Some((_, flag, why)) => Err(Error::input(format!("{flag} {why}"))),
    }
}

/// There are rows to evaluate.
pub fn check_rows(s: &Settings, rows: u64) -> Result<()> {
    match flags(s).first().filter(|_| rows == 0 && !s.objective.is_grpo()) {
        None => Ok(()),
        Some(flag) => Err(Error::input(format!(
            "{flag} compares evaluation losses, but this data set has no held-out rows: add --eval-dataset \
             PATH, or train on at least 80 rows (with --shuffle if rows are samples)"
        ))),
    }
}

pub fn are_counted(s: &Settings) -> bool {
    !flags(s).is_empty()
}

/// The evaluations of `rows` that the run continues with.
pub fn begin(s: &Settings, rows: String, resumed: Option<&ResumeFrom>) -> Option<Evaluations> {
    let before = resumed.and_then(|resumed| resumed.state.evaluations.clone());
    let counts = resumed.is_none_or(|resumed| forgotten(s, &rows, resumed).is_none());
    match are_counted(s) {
        true => before.filter(|_| counts).or_else(|| Some(Evaluations::over(rows, s.objective.is_grpo()))),
        false => before,
    }
}

/// Why evaluations before `resumed` do not count, if there were any and they do not.
pub fn forgotten(s: &Settings, rows: &str, resumed: &ResumeFrom) -> Option<String> {
    let before = resumed.state.evaluations.as_ref().filter(|_| are_counted(s))?;
    if before.rows != rows {
        return Some("earlier evaluations do not count: they used other rows".into());
    }
    let dir = s.checkpoint.ckpt_dir.as_ref().filter(|_| s.checkpoint.save_on_best == Some(true))?;
    let from = std::path::absolute(&resumed.dir).ok();
    let here = from.as_ref().and_then(|from| from.parent()).is_some_and(|from| same_place(from, dir));
    (before.best_step > 0 && !(before.best_saved && here)).then(|| {
        let (dir, step) = (dir.display(), before.best_step);
        format!("earlier evaluations do not count: {dir} has no checkpoint of the best one, at step {step}")
    })
}

/// The last `--patience` evaluations had no lower loss.
pub fn is_patience_over(s: &Settings, evaluations: Option<&Evaluations>) -> bool {
    s.run.patience.zip(evaluations).is_some_and(|(patience, evaluations)| evaluations.since_best >= patience)
}
