//! A disk that fills up: a small tmpfs for the checkpoint directory where this user may mount one, else a limit on the
//! size of the files that one rank writes. Never decides when.
use super::training::Process;
use clap::ValueEnum;
use flatshard::base::{Error, Result};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Resource, Rlimit, prlimit};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

/// What stands for a full disk.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DiskChoice {
    /// tmpfs where it can be mounted, else file-sizes
    #[default]
    Auto,
    /// Checkpoints go to a tmpfs of 64 MiB; the rest of it is filled with another file
    Tmpfs,
    /// Checkpoints go to the output directory; one rank may write small files only (RLIMIT_FSIZE)
    FileSizes,
}

const TMPFS_MIB: u64 = 64;
/// Bytes of a file that a rank may still write: a page, less than any part of a checkpoint.
const SMALL: u64 = 4096;

/// Where an earlier run that could not end left its disk.
pub fn release(dir: &Path) {
    let _ = unmount(dir, UnmountFlags::DETACH); // there is none, as a rule
}

#[derive(Debug)]
pub enum ChaosDisk {
    Tmpfs(PathBuf),
    FileSizes(PathBuf),
}

impl ChaosDisk {
    /// `dir` is made, and mounted where that is how.
    pub fn new(dir: PathBuf, choice: DiskChoice) -> Result<ChaosDisk> {
        fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, e))?;
        if choice == DiskChoice::FileSizes {
            return Ok(ChaosDisk::FileSizes(dir));
        }
        let data = CString::new(format!("size={TMPFS_MIB}m")).unwrap_or_default();
        match (mount("tmpfs", &dir, "tmpfs", MountFlags::empty(), data.as_c_str()), choice) {
            (Ok(()), _) => Ok(ChaosDisk::Tmpfs(dir)),
            (Err(_), DiskChoice::Auto) => Ok(ChaosDisk::FileSizes(dir)),
            (Err(e), _) => Err(Error::input(format!(
                "--disk tmpfs: {} cannot be mounted ({e}): that needs root; use --disk file-sizes",
                dir.display()
            ))),
        }
    }

    pub fn dir(&self) -> &Path {
        let (ChaosDisk::Tmpfs(dir) | ChaosDisk::FileSizes(dir)) = self;
        dir
    }
    pub fn about(&self) -> String {
        match self {
            ChaosDisk::Tmpfs(_) => format!("a tmpfs of {TMPFS_MIB} MiB, filled up"),
            ChaosDisk::FileSizes(_) => "a limit on the sizes of the files that one rank writes".into(),
        }
    }
    /// The system's words when there is no room.
    pub fn refusal(&self) -> &'static str {
        match self {
            ChaosDisk::Tmpfs(_) => "No space left on device",
            ChaosDisk::FileSizes(_) => "File too large",
        }
    }

    fn ballast(dir: &Path) -> PathBuf {
        dir.join("ballast")
    }
    /// Leaves `room` bytes at most, now: what the run removes afterwards is free until the next call.
    pub fn fill(&self, room: u64, victim: &Process) -> Result<()> {
        match self {
            ChaosDisk::Tmpfs(dir) => {
                let path = ChaosDisk::ballast(dir);
                let failed = |e: std::io::Error| Error::io("fill", &path, e);
                let disk = statvfs(dir).map_err(|e| failed(e.into()))?;
                let surplus = (disk.f_bavail * disk.f_frsize).saturating_sub(room);
                let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
                let held = file.metadata().map_err(failed)?.len();
                if surplus > 0 {
                    // Refused where the run was quicker: then it is full, too.
                    let _ = fallocate(&file, FallocateFlags::empty(), held, surplus);
                }
                Ok(())
            }
            ChaosDisk::FileSizes(_) => {
                let limit = Rlimit { current: Some(SMALL), maximum: None };
                let _ = prlimit(Some(victim.id()), Resource::Fsize, limit); // it may have ended by itself
                Ok(())
            }
        }
    }
    /// A rank that is started again has no limit, so there is nothing to do for that.
    pub fn free(&self) -> Result<()> {
        match self {
            ChaosDisk::Tmpfs(dir) => {
                let path = ChaosDisk::ballast(dir);
                File::create(&path)
                    .map(drop)
                    .and_then(|()| fs::remove_file(&path))
                    .map_err(|e| Error::io("free", &path, e))
            }
            ChaosDisk::FileSizes(_) => Ok(()),
        }
    }
}

impl Drop for ChaosDisk {
    fn drop(&mut self) {
        if let ChaosDisk::Tmpfs(dir) = self {
            release(dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As whom it runs decides which of the two; both must be usable.
    #[test]
    fn a_disk_is_there_with_or_without_the_right_to_mount() {
        let dir = tempfile::tempdir().unwrap();
        for choice in [DiskChoice::Auto, DiskChoice::FileSizes] {
            let disk = ChaosDisk::new(dir.path().join("disk"), choice).unwrap();
            fs::write(disk.dir().join("file"), "content").unwrap();
            disk.free().unwrap();
            assert!(choice == DiskChoice::Auto || matches!(disk, ChaosDisk::FileSizes(_)));
        }
    }
}
