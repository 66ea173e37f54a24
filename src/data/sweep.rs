//! Keeps the token-file directory within its size limit and removes what killed builders left. Never removes a file
//! that a process has locked (is reading or writing), nor one whose name is not ours.
use crate::base::open;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// Begins the names of the files that the cache keeps for runs that sample: then 16 hexadecimal digits.
pub const PROMPTS: &str = "prompts-";

/// Best effort: a file that cannot be removed stays, and if another process is sweeping, this one does nothing.
pub(super) fn sweep(dir: &Path, limit: u64) {
    let Ok(own) = File::open(dir) else { return };
    if flock(&own, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        return;
    }
    let mut kept = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let extension = path.extension().and_then(|e| e.to_str());
        // What a run that samples reads in place of its prompts.
        let stem = stem.strip_prefix(PROMPTS).unwrap_or(stem);
        if stem.len() != 16 || !stem.bytes().all(|b| b.is_ascii_hexdigit()) {
            continue;
        }
        match extension {
            Some("tokens" | "jsonl") => {
                if let Ok(meta) = entry.metadata() {
                    kept.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), meta.len(), path));
                }
            }
            // Earlier versions locked a file next to the token file and left it there.
            Some("partial" | "scratch" | "lock" | "ends") => drop(remove_unused(&path)),
            _ => {}
        }
    }
    kept.sort();
    let mut total: u64 = kept.iter().map(|(_, len, _)| len).sum();
    for (_, len, path) in &kept {
        if total <= limit {
            break;
        }
        if remove_unused(path) {
            total -= len;
        }
    }
}

/// Removes the file unless a process has it locked. Returns whether it was removed.
fn remove_unused(path: &Path) -> bool {
    let Ok(file) = File::options().read(true).write(true).open(path) else { return false };
    let free = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(&file, path);
    free && fs::remove_file(path).is_ok()
}

/// Creates the file at `path`, which nobody sweeps as long as it is open.
pub fn create_held(path: &Path) -> io::Result<File> {
    loop {
        let file = File::create(path)?;
        flock(&file, FlockOperation::LockShared)?;
        // It may have been swept before it was locked.
        if is_at(&file, path) {
            return Ok(file);
        }
    }
}

/// Opens the file at `path`, if there is one, which nobody sweeps as long as it is open.
pub fn open_held(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    // Without file locks nothing tells which files are in use.
    let _ = flock(&file, FlockOperation::LockShared);
    is_at(&file, path).then_some(file)
}

/// Whether the file at `path` is still `file`.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    file.metadata().is_ok_and(|held| fs::metadata(path).is_ok_and(|named| open::is_same(&held, &named)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Two runs that sample may start in one cache directory.
    #[test]
    fn a_file_that_is_created_while_others_sweep_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    sweep(dir.path(), 0);
                }
            });
            let lost = (0..2000u64).filter(|i| {
                let path = dir.path().join(format!("{PROMPTS}{i:016x}.partial"));
                let held = create_held(&path).unwrap();
                let there = fs::rename(&path, path.with_extension("jsonl")).is_ok();
                drop(held);
                !there
            });
            let lost = lost.count();
            done.store(true, Ordering::Relaxed);
            assert_eq!(lost, 0);
        });
    }
}
