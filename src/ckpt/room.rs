//! Room for a save: whether a directory may be written, and its files at their full length before a byte of a tensor is.
//! Never writes a tensor.
use super::disk::{self, Disk};
use super::layout::Plan;
use super::{companions, hf};
use crate::base::{Error, Result};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Whether `--save-hf dir` may be written: new, empty, or holding nothing but an earlier export.
pub fn check_export(dir: &Path) -> Result<()> {
    let refuse = |what: String| {
        Error::input(format!(
            "--save-hf {}: {what}; give a new or empty directory: nothing is overwritten",
            dir.display()
        ))
    };
    let list = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        list => list.map_err(|e| refuse(format!("cannot be listed ({e})")))?,
    };
    let names = list.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<std::io::Result<_>>().map_err(|e| refuse(e.to_string()))?;
    let ours = |name: &String| {
        name == hf::FILE
            || companions::is_companion(name)
            || ["model", "adapter_model"].iter().any(|stem| name.starts_with(stem))
                && (name.ends_with(".safetensors") || name.ends_with(".index.json"))
    };
    match names.iter().find(|name| !ours(name)) {
        Some(other) => Err(refuse(format!("holds {other}, which is not part of an earlier export"))),
        None if names.is_empty() || names.iter().any(|n| n == hf::FILE) => Ok(()),
        None => Err(refuse("is not an earlier export: it has no config.json".into())),
    }
}

/// The directory with every tensor file at its full length: a full disk is found here, before anything is written.
pub(super) fn create(disk: &Disk, dir: &Path, plan: &Plan) -> Result<()> {
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

fn no_room(path: &Path, plan: &Plan, cause: std::io::Error) -> Error {
    let free = free(disk::parent(path)).map_or("an unknown number".into(), |free| free.to_string());
    let text = format!(
        "{cause}: a checkpoint of this model needs {} bytes and {free} are free here; free some, keep fewer (--keep), or \
         save elsewhere (--ckpt-dir). Complete checkpoints are untouched",
        plan.bytes()
    );
    Error::io("reserve", path, std::io::Error::new(cause.kind(), text))
}
