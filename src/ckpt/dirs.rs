//! Checkpoint directories: finds the newest, replaces one atomically, removes old ones. Never reads what is inside, and
//! never removes a directory that does not have our name.
use super::disk::{Disk, parent};
use crate::base::{Error, Result, open};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The files that name the newest checkpoint and the one with the lowest evaluation loss.
pub const LATEST: &str = "latest";
pub const BEST: &str = "best";
const STEP: &str = "step-";
/// Prefix of unfinished saves, and of checkpoints being removed.
const UNFINISHED: &str = ".tmp-";

/// The `resume` setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Resume {
    /// The newest complete checkpoint in the checkpoint directory; a fresh start if there is none.
    Auto,
    /// This checkpoint, the one named by this file (`best`, `latest`), or the newest in this checkpoint directory.
    Dir(PathBuf),
}

pub fn name(step: u64) -> String {
    format!("{STEP}{step:08}")
}

/// The step of a directory named `step-` and eight or more digits; no other is ever resumed from or removed.
pub fn step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP)?;
    let plain = digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}

/// Complete checkpoints in `dir`, newest first. Empty if `dir` does not exist.
fn complete(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found: Vec<_> = entries(dir)?
        .into_iter()
        .filter_map(|(name, path)| Some((step(&name)?, path)))
        .filter(|(_, path)| path.is_dir() && !path.is_symlink())
        .collect();
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let failed = |e| Error::io("list", dir, e);
    match fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(failed(e)),
        Ok(list) => list
            .map(|entry| {
                let entry = entry.map_err(failed)?;
                Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
            })
            .collect(),
    }
}

/// The checkpoint that `latest` names, else the one with the highest step. `latest` is the last one saved, which does
/// not have the highest step if the run resumed from an earlier one.
pub fn newest(dir: &Path) -> Result<Option<PathBuf>> {
    let complete = complete(dir)?;
    let named = named(dir, LATEST).and_then(|named| complete.iter().find(|(step, _)| *step == named).cloned());
    Ok(named.or(complete.into_iter().next()).map(|(_, path)| path))
}

/// The last step after `step` of a checkpoint in `dir`.
pub fn later(dir: &Path, step: u64) -> Result<Option<u64>> {
    Ok(complete(dir)?.first().map(|(last, _)| *last).filter(|last| *last > step))
}

/// The step of the checkpoint that the file `pointer` of `dir` names.
fn named(dir: &Path, pointer: &str) -> Option<u64> {
    let text = open::read(&dir.join(pointer)).ok().and_then(|text| String::from_utf8(text).ok())?;
    step(text.trim())
}

/// The checkpoint to resume from; `None` is a fresh start.
pub fn resolve(ckpt_dir: Option<&Path>, resume: &Resume) -> Result<Option<PathBuf>> {
    match (resume, ckpt_dir) {
        (Resume::Auto, Some(dir)) => match newest(dir)? {
            None => trainers(dir)?.map_or(Ok(None), |theirs| Err(super::state::theirs(&theirs))),
            newest => Ok(newest),
        },
        (Resume::Auto, None) => Err(Error::input("`resume: auto` needs `ckpt_dir`, which is not set")),
        (Resume::Dir(dir), _) if dir.join(super::state::FILE).exists() => Ok(Some(dir.clone())),
        (Resume::Dir(dir), _) if dir.is_file() => pointed(dir).map(Some),
        (Resume::Dir(dir), _) if dir.file_name().is_some_and(|name| name == BEST) && !dir.exists() => {
            Err(Error::input(format!("`resume` {}: no such file; it is written with `save_on_best`", dir.display())))
        }
        (Resume::Dir(dir), _) => newest(dir)?.map(Some).ok_or_else(|| {
            Error::input(format!(
                "`resume` {}: neither a checkpoint (it has no {}) nor a directory of checkpoints. Use a step-* \
                 directory or `auto`",
                dir.display(),
                super::state::FILE
            ))
        }),
    }
}

/// The newest checkpoint of transformers' Trainer in `dir`, which saves to `checkpoint-STEP`.
fn trainers(dir: &Path) -> Result<Option<PathBuf>> {
    let all = entries(dir)?.into_iter().filter_map(|(name, path)| {
        let step = name.strip_prefix("checkpoint-")?.parse::<u64>().ok()?;
        path.join(super::state::FILE).is_file().then_some((step, path))
    });
    Ok(all.max().map(|(_, path)| path))
}

/// The directory of the model that `path` names: the newest checkpoint of a directory of checkpoints, the one that a
/// file `best` or `latest` names, else `path` itself.
pub fn of_model(path: &Path) -> Result<PathBuf> {
    let pointer = path.file_name().is_some_and(|name| name == BEST || name == LATEST);
    match path.is_file() {
        true if pointer => pointed(path),
        false if path.is_dir() && !path.join(super::hf::FILE).exists() => Ok(newest(path)?.unwrap_or(path.into())),
        _ => Ok(path.into()),
    }
}

/// The checkpoint that the file `best` or `latest` names.
fn pointed(file: &Path) -> Result<PathBuf> {
    let bad =
        |what: String| Error::input(format!("`resume` {}: {what}. Use a step-* directory or `auto`", file.display()));
    let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if ![BEST, LATEST].contains(&name.as_str()) {
        return Err(bad("is a file, not a checkpoint".into()));
    }
    let dir = parent(file);
    let step = named(dir, &name).ok_or_else(|| bad("names no checkpoint".into()))?;
    let path = dir.join(self::name(step));
    if path.is_dir() { Ok(path) } else { Err(bad(format!("names {}, which does not exist", self::name(step)))) }
}

/// Like [`resolve`], followed by older checkpoints to fall back to if it is damaged, unless the user named one.
/// Checkpoints of later steps belong to an abandoned continuation.
pub fn candidates(ckpt_dir: Option<&Path>, resume: &Resume) -> Result<Vec<PathBuf>> {
    let Some(newest) = resolve(ckpt_dir, resume)? else { return Ok(Vec::new()) };
    let mut found = match (resume, ckpt_dir) {
        (Resume::Auto, Some(dir)) => complete(dir)?,
        _ => Vec::new(),
    };
    let at = newest.file_name().and_then(|name| step(&name.to_string_lossy())).unwrap_or(0);
    found.retain(|(step, _)| *step < at);
    Ok(std::iter::once(newest).chain(found.into_iter().map(|(_, path)| path)).collect())
}

/// Reserves a checkpoint directory for one run, until it is dropped or its process ends in any way.
#[derive(Debug)]
pub struct Lock {
    _dir: File,
}

/// Makes `dir`, locks out other runs and removes what interrupted saves left in it. Called by one process per host
/// before any rank saves.
pub fn prepare(dir: &Path) -> Result<Lock> {
    let bad = |what: String| Error::input(format!("`ckpt_dir` {}: {what}", dir.display()));
    Disk::default().make_dirs(dir).map_err(|e| bad(format!("cannot create it: {e}")))?;
    let file = File::open(dir).map_err(|e| bad(e.to_string()))?;
    // The lock is on the directory itself, so no lock file can be left over. File systems without locks (some NFS) do
    // not tell two runs apart.
    if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        let what = "another run is using it. Wait until that run ends, or use another directory";
        return Err(bad(what.into()));
    }
    clear(dir)?;
    Ok(Lock { _dir: file })
}

/// Removes what interrupted saves left in `dir`, when nobody is saving.
pub fn clear(dir: &Path) -> Result<()> {
    sweep(dir, |name| name.starts_with(STEP) || [LATEST, BEST].contains(&name) || name.starts_with("probe-"))
}

/// Removes what interrupted saves left in `dir`. `ours` decides by the name after the prefix.
fn sweep(dir: &Path, ours: impl Fn(&str) -> bool) -> Result<()> {
    let mut dead = entries(dir)?.into_iter().filter(|(name, _)| name.strip_prefix(UNFINISHED).is_some_and(&ours));
    dead.try_for_each(|(_, path)| remove(&path))
}

/// Removes what interrupted saves of `target` left next to it, and nothing else; not what another run is writing.
pub(super) fn sweep_unfinished(target: &Path) -> Result<()> {
    let name = format!("{}-", target.file_name().unwrap_or_default().to_string_lossy());
    let nonce = |n: &str| n.len() == 16 && n.bytes().all(|b| b.is_ascii_hexdigit());
    let held = |dead: &str| hold(&parent(target).join(format!("{UNFINISHED}{dead}"))).is_err();
    sweep(parent(target), |dead| dead.strip_prefix(&name).is_some_and(nonce) && !held(dead))
}

/// Keeps an unfinished save from being removed, until the result is dropped or the process ends. An error, if another
/// holds it.
pub(super) fn hold(unfinished: &Path) -> Result<File> {
    let failed = |e| Error::io("lock", unfinished, e);
    let file = File::open(unfinished).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(e @ Errno::WOULDBLOCK) => Err(failed(e.into())),
        _ => Ok(file), // some file systems have no locks
    }
}

/// Unique across saves and hosts.
pub(super) fn nonce() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos() as u64) ^ (std::process::id() as u64) << 32
}

/// A unique name for an unfinished save of `name`.
pub fn unfinished(name: &str, nonce: u64) -> String {
    format!("{UNFINISHED}{name}-{nonce:016x}")
}

pub(super) fn remove(path: &Path) -> Result<()> {
    let result = if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    result.map_err(|e| Error::io("remove", path, e))
}

/// Renames the complete directory `from` to `to`, atomically and durably; removes what had that name.
pub(super) fn publish(disk: &Disk, from: &Path, to: &Path) -> Result<()> {
    let failed = |e: std::io::Error| Error::io("rename", to, e);
    // rename itself replaces an empty directory; a full one is exchanged with the new one.
    match disk.rename(from, to) {
        Ok(()) => {}
        Err(_) if to.is_dir() => {
            if disk.exchange(from, to).is_err() {
                // File systems without exchange (NFS): for a moment, nothing has the name.
                let aside = from.with_extension("old");
                disk.rename(to, &aside).map_err(failed)?;
                disk.rename(from, to).map_err(failed)?;
                disk.rename(&aside, from).map_err(failed)?;
            }
            remove(from)?;
        }
        Err(e) => return Err(failed(e)),
    }
    disk.sync_dir(parent(to))
}

/// The directory of the checkpoint of `step`.
pub fn of_step(dir: &Path, step: u64) -> PathBuf {
    dir.join(name(step))
}

/// Makes `pointer` (`latest` or `best`) name the checkpoint of `step`.
pub(super) fn point(disk: &Disk, dir: &Path, pointer: &str, step: u64) -> Result<()> {
    let unfinished = dir.join(format!("{UNFINISHED}{pointer}"));
    disk.write(&unfinished, format!("{}\n", name(step)).as_bytes())?;
    disk.rename(&unfinished, &dir.join(pointer)).map_err(|e| Error::io("rename", dir.join(pointer), e))?;
    disk.sync_dir(dir)
}

/// Makes `best` name the checkpoint of `step`, if that is complete and not already named.
pub(super) fn point_best(disk: &Disk, dir: &Path, step: u64) -> Result<()> {
    match named(dir, BEST) != Some(step) && of_step(dir, step).is_dir() {
        true => point(disk, dir, BEST, step),
        false => Ok(()),
    }
}

/// The same at the start of a run: an earlier process may have died between saving its best checkpoint and naming it.
pub fn mark_best(dir: &Path, step: u64) -> Result<()> {
    point_best(&Disk::default(), dir, step)
}

/// Removes all but the newest `keep` checkpoints up to `newest`, and never the best one. Checkpoints of later steps
/// belong to an abandoned continuation: they stay until this run replaces them.
pub(super) fn prune(dir: &Path, newest: u64, keep: usize) -> Result<()> {
    let best = named(dir, BEST);
    let old = complete(dir)?.into_iter().filter(|(step, _)| *step <= newest).skip(keep.max(1));
    for (_, path) in old.filter(|(step, _)| Some(*step) != best) {
        // Renamed first: a half-removed checkpoint must not look complete.
        let doomed = dir.join(format!("{UNFINISHED}{}-pruned", path.file_name().unwrap_or_default().to_string_lossy()));
        fs::rename(&path, &doomed).map_err(|e| Error::io("rename", &path, e))?;
        remove(&doomed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = entries(dir).unwrap().into_iter().map(|(n, _)| n).collect();
        names.sort();
        names
    }
    fn make(dir: &Path, names: &[&str]) {
        names.iter().for_each(|n| fs::create_dir_all(dir.join(n).join("inside")).unwrap());
    }

    #[test]
    fn prune_keeps_the_newest_and_whatever_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        let foreign = ["step-100", "step-0000010x", "step-00000001.bak", "notes", "step--0000001"];
        make(dir.path(), &foreign);
        make(dir.path(), &["step-00000010", "step-00000020", "step-00000030", "step-00000099"]);
        std::os::unix::fs::symlink(dir.path().join("notes"), dir.path().join("step-00000005")).unwrap();
        prune(dir.path(), 30, 2).unwrap();
        let mut expected = vec!["step-00000005", "step-00000020", "step-00000030", "step-00000099"];
        expected.extend(foreign);
        expected.sort();
        assert_eq!(listed(dir.path()), expected);
        prune(dir.path(), 30, 0).unwrap();
        assert!(dir.path().join("step-00000030/inside").exists(), "the newest is never pruned");
    }

    #[test]
    fn the_best_checkpoint_stays_until_another_is_better() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", "step-00000020", "step-00000030"]);
        let disk = Disk::default();
        point_best(&disk, dir.path(), 40).unwrap();
        assert!(!dir.path().join(BEST).exists(), "it must name an existing checkpoint");
        point_best(&disk, dir.path(), 10).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(BEST)).unwrap(), "step-00000010\n");
        prune(dir.path(), 30, 1).unwrap();
        assert_eq!(listed(dir.path()), ["best", "step-00000010", "step-00000030"]);
        let best = Resume::Dir(dir.path().join(BEST));
        assert_eq!(resolve(None, &best).unwrap(), Some(dir.path().join("step-00000010")));
        point_best(&disk, dir.path(), 30).unwrap();
        prune(dir.path(), 30, 1).unwrap();
        assert_eq!(listed(dir.path()), ["best", "step-00000030"]);
        fs::remove_dir_all(dir.path().join("step-00000030")).unwrap();
        for (content, says) in
            [("step-00000030", "names step-00000030, which does not exist"), ("x", "names no checkpoint")]
        {
            fs::write(dir.path().join(BEST), content).unwrap();
            assert!(resolve(None, &best).unwrap_err().to_string().contains(says));
        }
        fs::remove_file(dir.path().join(BEST)).unwrap();
        assert!(resolve(None, &best).unwrap_err().to_string().contains("written with `save_on_best`"));
    }

    #[test]
    fn newest_follows_latest_then_the_highest_step() {
        let dir = tempfile::tempdir().unwrap();
        let newest = || newest(dir.path()).unwrap().map(|p| p.file_name().unwrap().to_string_lossy().into_owned());
        assert_eq!(newest(), None);
        make(dir.path(), &["step-00000010", "step-00000020", ".tmp-step-00000030-00"]);
        assert_eq!(newest().as_deref(), Some("step-00000020"));
        point(&Disk::default(), dir.path(), LATEST, 10).unwrap();
        assert_eq!(newest().as_deref(), Some("step-00000010"));
        for stale in ["step-00000099", "../../etc", ""] {
            fs::write(dir.path().join(LATEST), stale).unwrap();
            assert_eq!(newest().as_deref(), Some("step-00000020"), "latest holds {stale:?}");
        }
    }

    #[test]
    fn older_checkpoints_follow_only_if_none_was_named() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", "step-00000020", "step-00000030", "step-00000040"]);
        point(&Disk::default(), dir.path(), LATEST, 30).unwrap();
        let steps = |resume: Resume| -> Vec<u64> {
            let found = candidates(Some(dir.path()), &resume).unwrap();
            found.iter().map(|path| step(&path.file_name().unwrap().to_string_lossy()).unwrap()).collect()
        };
        assert_eq!(steps(Resume::Auto), [30, 20, 10]);
        assert_eq!(steps(Resume::Dir(dir.path().to_path_buf())), [30]);
    }

    #[test]
    fn prepare_removes_only_interrupted_saves() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", ".tmp-step-00000020-0123", ".tmp-mine"]);
        [".tmp-latest", ".tmp-best"].iter().for_each(|name| fs::write(dir.path().join(name), "step-0").unwrap());
        prepare(dir.path()).unwrap();
        assert_eq!(listed(dir.path()), [".tmp-mine", "step-00000010"]);
    }

    #[test]
    fn sweep_removes_only_interrupted_saves_of_that_name() {
        let dir = tempfile::tempdir().unwrap();
        let others = [".tmp-model-v2-00000000000000ff", ".tmp-model-old", "model-00000000000000ff"];
        make(dir.path(), &others);
        make(dir.path(), &[&unfinished("model", 255), &unfinished("model", 254)]);
        let held = hold(&dir.path().join(unfinished("model", 254))).unwrap();
        sweep_unfinished(&dir.path().join("model")).unwrap();
        let mut expected = others.to_vec();
        expected.push(".tmp-model-00000000000000fe");
        expected.sort();
        assert_eq!(listed(dir.path()), expected);
        drop(held);
        sweep_unfinished(&dir.path().join("model")).unwrap();
        let mut expected = others.to_vec();
        expected.sort();
        assert_eq!(listed(dir.path()), expected);
    }

    #[test]
    fn publish_replaces_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join(".tmp-step-00000010-1"), dir.path().join("step-00000010"));
        for content in ["first", "second"] {
            fs::create_dir(&new).unwrap();
            fs::write(new.join("file"), content).unwrap();
            publish(&Disk::default(), &new, &old).unwrap();
            assert_eq!(fs::read_to_string(old.join("file")).unwrap(), content);
            assert_eq!(listed(dir.path()), ["step-00000010"]);
        }
    }
}
