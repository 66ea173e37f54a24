//! Checks that a directory may be written, and allocates its files at full length before any tensor is written. Never
//! writes a tensor.
use super::companions::{self, template};
use super::disk::{self, Disk};
use super::hf;
use super::layout::{FilePlan, pretty};
use crate::base::{Error, Result, open};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Marks an export with the run that wrote it. Model loaders ignore it.
const MARK: &str = "flatshard.json";

/// Name and content of the mark of `run`.
pub(super) fn mark(run: &str) -> (String, Vec<u8>) {
    (MARK.into(), pretty(&json!({"run": run})).into_bytes())
}

/// How exports treat a place that is taken.
#[derive(Clone, Debug)]
pub(super) struct Exports {
    /// The run's id, which marks its exports.
    pub run: String,
    /// A model of another run is replaced.
    pub overwrite: bool,
    /// A model that may not go to its place goes next to it.
    pub beside: bool,
}

impl Exports {
    /// Where a model goes: to the directory `target`, or next to it, and why.
    pub fn directory(&self, target: &Path) -> Result<(PathBuf, Option<String>)> {
        self.place(target, |dir| check_export(dir, Some(&self.run), self.overwrite))
    }
    /// The same for any export. `check` refuses what may not be replaced.
    pub fn place(&self, target: &Path, check: impl FnOnce(&Path) -> Result<()>) -> Result<(PathBuf, Option<String>)> {
        let Err(why) = check(target) else { return Ok((target.into(), None)) };
        if !self.beside {
            return Err(why);
        }
        let name = |part: Option<&OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
        let name = match target.extension().filter(|end| end.eq_ignore_ascii_case("gguf")) {
            Some(end) => format!("{}-{}.{}", name(target.file_stem()), self.run, end.display()),
            None => format!("{}-{}", name(target.file_name()), self.run),
        };
        let beside = target.with_file_name(name);
        let note = format!("{why}. It was free when this run began, so the model is in {}", beside.display());
        Ok((beside, Some(note)))
    }
}

/// Checks that the export `dir` may be written: it is new, empty, or holds a model and nothing else. An existing model
/// is replaced if `run` wrote it, or with `overwrite`.
pub fn check_export(dir: &Path, run: Option<&str>, overwrite: bool) -> Result<()> {
    let refuse = |what: &str| {
        let what = format!("{}: {what}. Use a new or empty directory", dir.display());
        Err(Error::input(what))
    };
    let list = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound && dir.is_symlink() => {
            return refuse("is a link to what does not exist");
        }
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
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => name == template::FOLDER && only_templates(&entry.path()),
            kind => (known || weights) && kind.is_ok_and(|kind| kind.is_file()),
        }
    };
    if let Some(other) = list.iter().find(|entry| !part(entry)) {
        return refuse(&format!("contains {}, which is not a model file and is never overwritten", name(other)));
    }
    if list.is_empty() {
        return Ok(());
    }
    if !list.iter().any(|entry| name(entry) == hf::FILE) {
        return refuse("contains model files, but no config.json");
    }
    let text = fs::read(dir.join(MARK)).unwrap_or_default();
    let wrote = serde_json::from_slice::<Value>(&text).unwrap_or_default();
    match overwrite || run.is_some_and(|run| wrote["run"] == run) {
        true => Ok(()),
        false => refuse("contains a model that this run did not write, which is replaced only with `overwrite`"),
    }
}

/// Whether a directory holds named chat templates and nothing else.
fn only_templates(dir: &Path) -> bool {
    let one = |entry: std::io::Result<DirEntry>| {
        entry.is_ok_and(|e| {
            template::is_template(&e.file_name().to_string_lossy()) && e.file_type().is_ok_and(|kind| kind.is_file())
        })
    };
    fs::read_dir(dir).is_ok_and(|mut entries| entries.all(one))
}

/// Whether both paths lead to the same directory, through any links and mounts.
pub fn same_place(a: &Path, b: &Path) -> bool {
    let path = |path: &Path| fs::canonicalize(path).or_else(|_| std::path::absolute(path)).ok();
    let same = |a| fs::metadata(b).is_ok_and(|b| open::is_same(&a, &b));
    fs::metadata(a).is_ok_and(same) || path(a).is_some_and(|path_a| path(b) == Some(path_a))
}

/// Creates the directory with every tensor file at full length, so that a full disk is detected before anything is
/// written.
pub(super) fn create(disk: &Disk, dir: &Path, plan: &FilePlan) -> Result<()> {
    let parent = disk::parent(dir);
    disk.make_dirs(parent)?;
    if free(parent).is_some_and(|free| free < plan.bytes()) {
        return Err(no_room(dir, plan.bytes(), Errno::NOSPC.into()));
    }
    let make = || {
        disk.make_dir(dir)?;
        plan.files.iter().try_for_each(|f| reserve(disk, &dir.join(&f.name), &f.header, f.bytes, plan.bytes()))
    };
    make().inspect_err(|_| drop(fs::remove_dir_all(dir)))
}

/// Creates a file of `bytes` and writes its beginning. `all` is the size of the whole save, for the error on a full
/// disk.
pub(super) fn reserve(disk: &Disk, path: &Path, beginning: &[u8], bytes: u64, all: u64) -> Result<()> {
    let made = disk.create(path)?;
    match fallocate(&made.file, FallocateFlags::empty(), 0, bytes) {
        // The file system cannot reserve space: a full disk is detected while writing.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => made.file.set_len(bytes).map_err(|e| Error::io("write", path, e))?,
        Err(e) => return Err(no_room(path, all, e.into())),
        Ok(()) => {}
    }
    made.write_at(beginning, 0)?;
    made.sync() // other hosts sync only what they write
}

/// Refuses a file or directory, named by `flag`, that a run will write at its end if there is no room for it now.
pub fn check_room(flag: &str, path: &Path, needed: u64) -> Result<()> {
    let Some(free) = path.ancestors().skip(1).find_map(|above| free(if above == "" { Path::new(".") } else { above }))
    else {
        return Ok(());
    };
    match free < needed {
        true => Err(Error::input(format!(
            "{flag} {}: {needed} bytes will be written, and {free} are free there; free disk space, or name another place",
            path.display()
        ))),
        false => Ok(()),
    }
}

/// Bytes this user can still write on the disk of `dir`.
fn free(dir: &Path) -> Option<u64> {
    statvfs(dir).ok().map(|s| s.f_bavail.saturating_mul(s.f_frsize))
}

fn no_room(path: &Path, needed: u64, cause: std::io::Error) -> Error {
    let free = free(disk::parent(path)).map_or("an unknown number".into(), |free| free.to_string());
    let text = format!(
        "{cause}: a checkpoint of this model needs {needed} bytes, and {free} are free here. Free disk space, keep fewer \
         checkpoints (`keep`), or name another directory. Existing checkpoints are untouched"
    );
    Error::io("reserve", path, std::io::Error::new(cause.kind(), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_will_write_must_fit_now() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().join("new/of/it"), "relative".into()] {
            check_room("--save-hf", &path, 1).unwrap();
            let text = check_room("--save-hf", &path, u64::MAX).unwrap_err().to_string();
            assert!(text.starts_with("--save-hf ") && text.contains("are free there"), "{text}");
        }
    }
}
