//! Room for a save: whether a directory may be written, and its files at their full length before a byte of a tensor
//! is. Never writes a tensor.
use super::disk::{self, Disk};
use super::layout::{FilePlan, pretty};
use super::{companions, hf};
use crate::base::{Error, Result, open};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::fs::{self, DirEntry};
use std::io::ErrorKind;
use std::path::Path;

/// In an export: which run wrote it. Readers of models pass over it.
const MARK: &str = "flatshard.json";

/// Name and content of the mark of `run`.
pub(super) fn mark(run: &str) -> (String, Vec<u8>) {
    (MARK.into(), pretty(&json!({"run": run})).into_bytes())
}

/// Whether the export `dir` may be written: it is new, empty, or holds a model and nothing else. A model is replaced
/// where `run` wrote it, or where `overwrite` says so.
pub fn check_export(dir: &Path, run: Option<&str>, overwrite: bool) -> Result<()> {
    let refuse = |what: &str| {
        let what = format!("`save_hf` {}: {what}; give a new or empty directory", dir.display());
        Err(Error::input(what))
    };
    let list = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        list => list.and_then(|list| list.collect::<std::io::Result<Vec<_>>>()),
    };
    let list = match list {
        Ok(list) => list,
        Err(e) => return refuse(&format!("cannot be listed ({e})")),
    };
    let name = |entry: &DirEntry| entry.file_name().to_string_lossy().into_owned();
    let part = |entry: &&DirEntry| {
        let name = name(entry);
        let known = name == hf::FILE || name == MARK || companions::is_companion(&name);
        let weights = ["model", "adapter_model"].iter().any(|stem| name.starts_with(stem))
            && (name.ends_with(".safetensors") || name.ends_with(".index.json"));
        (known || weights) && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    if let Some(other) = list.iter().find(|entry| !part(entry)) {
        return refuse(&format!("holds {}, which is not a file of a model and is never overwritten", name(other)));
    }
    if list.is_empty() {
        return Ok(());
    }
    if !list.iter().any(|entry| name(entry) == hf::FILE) {
        return refuse("holds files of a model, but no config.json");
    }
    let text = fs::read(dir.join(MARK)).unwrap_or_default();
    let wrote = serde_json::from_slice::<Value>(&text).unwrap_or_default();
    match overwrite || run.is_some_and(|run| wrote["run"] == run) {
        true => Ok(()),
        false => refuse("holds a model that this run did not write, which only `overwrite` replaces"),
    }
}

/// Whether both paths lead to one directory, by whatever links and mounts.
pub fn same_place(a: &Path, b: &Path) -> bool {
    let path = |path: &Path| fs::canonicalize(path).or_else(|_| std::path::absolute(path)).ok();
    let same = |a| fs::metadata(b).is_ok_and(|b| open::is_same(&a, &b));
    fs::metadata(a).is_ok_and(same) || path(a).is_some_and(|path_a| path(b) == Some(path_a))
}

/// The directory with every tensor file at its full length: a full disk is found here, before anything is written.
pub(super) fn create(disk: &Disk, dir: &Path, plan: &FilePlan) -> Result<()> {
    let parent = disk::parent(dir);
    disk.make_dirs(parent)?;
    if free(parent).is_some_and(|free| free < plan.bytes()) {
        return Err(no_room(parent, plan, Errno::NOSPC.into()));
    }
    let make = || {
        disk.make_dir(dir)?;
        for plan_file in &plan.files {
            let path = dir.join(&plan_file.name);
            let made = disk.create(&path)?;
            match fallocate(&made.file, FallocateFlags::empty(), 0, plan_file.bytes) {
                // A file system that cannot promise space: a full disk is found while writing.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                    made.file.set_len(plan_file.bytes).map_err(|e| Error::io("write", &path, e))?;
                }
                Err(e) => return Err(no_room(&path, plan, e.into())),
                Ok(()) => {}
            }
            made.write_at(&plan_file.header, 0)?;
            made.sync()?; // other hosts write the rest, and sync only what is theirs
        }
        Ok(())
    };
    make().inspect_err(|_| drop(fs::remove_dir_all(dir)))
}

/// Bytes that this user may still write on the disk of `dir`.
fn free(dir: &Path) -> Option<u64> {
    statvfs(dir).ok().map(|s| s.f_bavail.saturating_mul(s.f_frsize))
}

fn no_room(path: &Path, plan: &FilePlan, cause: std::io::Error) -> Error {
    let free = free(disk::parent(path)).map_or("an unknown number".into(), |free| free.to_string());
    let text = format!(
        "{cause}: a checkpoint of this model needs {} bytes and {free} are free here; free some, keep fewer (`keep`), or \
         save elsewhere (`ckpt_dir`). Complete checkpoints are untouched",
        plan.bytes()
    );
    Error::io("reserve", path, std::io::Error::new(cause.kind(), text))
}
