//! A disk that fills up: a small tmpfs for the checkpoint directory if this user may mount one, else a limit on the
//! size of files that one rank writes. Never decides when.
use super::training::Process;
use clap::ValueEnum;
use flatshard::base::{Error, Result};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Resource, Rlimit, prlimit};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

/// How a full disk is simulated.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DiskChoice {
    /// tmpfs if it can be mounted, else file-sizes
    #[default]
    Auto,
    /// Checkpoints go to a 64 MiB tmpfs, which a ballast file fills up
    Tmpfs,
    /// Checkpoints go to the output directory; one rank can only write small files (RLIMIT_FSIZE)
    FileSizes,
}

const TMPFS_MIB: u64 = 64;
/// Maximum file size under the limit: a page, smaller than any part of a checkpoint.
const SMALL: u64 = 4096;

/// Unmounts the disk of an earlier run that was interrupted.
pub fn release(dir: &Path) {
    let _ = unmount(dir, UnmountFlags::DETACH); // usually nothing is mounted
}

#[derive(Debug)]
pub enum ChaosDisk {
    Tmpfs(PathBuf),
    FileSizes(PathBuf),
}

impl ChaosDisk {
    /// Makes `dir`, and mounts the tmpfs if chosen.
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
            ChaosDisk::Tmpfs(_) => format!("a {TMPFS_MIB} MiB tmpfs, filled up"),
            ChaosDisk::FileSizes(_) => "a file-size limit on one rank".into(),
        }
    }
    /// The system's error message for a full disk.
    pub fn refusal(&self) -> &'static str {
        match self {
            ChaosDisk::Tmpfs(_) => "No space left on device",
            ChaosDisk::FileSizes(_) => "File too large",
        }
    }

    fn ballast(dir: &Path) -> PathBuf {
        dir.join("ballast")
    }
    /// Reduces free space to at most `room` bytes, now; what the run removes afterwards is free until the next call.
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
                    // Refused if the run took the space first: then it is full, too.
                    let _ = fallocate(&file, FallocateFlags::empty(), held, surplus);
                }
                Ok(())
            }
            ChaosDisk::FileSizes(_) => {
                let limit = Rlimit { current: Some(SMALL), maximum: None };
                let _ = prlimit(Some(victim.id()), Resource::Fsize, limit); // it may have just exited
                Ok(())
            }
        }
    }
    /// Removes the ballast. Nothing to do for the limit: a restarted rank has none.
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

    /// Depending on the user, one of the two is used; both must work.
    #[test]
    fn a_disk_works_with_or_without_the_right_to_mount() {
        let dir = tempfile::tempdir().unwrap();
        for choice in [DiskChoice::Auto, DiskChoice::FileSizes] {
            let disk = ChaosDisk::new(dir.path().join("disk"), choice).unwrap();
            fs::write(disk.dir().join("file"), "content").unwrap();
            disk.free().unwrap();
            assert!(choice == DiskChoice::Auto || matches!(disk, ChaosDisk::FileSizes(_)));
        }
    }
}
