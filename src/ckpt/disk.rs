//! The file operations that make a save durable, in one place: write, fsync, rename, fsync of the directory. An
//! observer sees each of them after it has succeeded, so that tests can check their order. Never decides what is
//! written, or when.
use crate::base::{Error, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One successful operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskOp {
    /// A new directory was made.
    Make(PathBuf),
    /// A new file, or an existing one truncated.
    Create(PathBuf),
    /// An existing file was opened for writing.
    Open(PathBuf),
    Write(PathBuf),
    /// A file or directory was fsynced.
    Sync(PathBuf),
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
}

/// The file system, with an optional observer.
#[derive(Clone, Default)]
pub struct Disk(Option<Arc<dyn Fn(DiskOp) + Send + Sync>>);

impl Disk {
    pub fn watched(watcher: impl Fn(DiskOp) + Send + Sync + 'static) -> Disk {
        Disk(Some(Arc::new(watcher)))
    }
    fn done(&self, op: impl FnOnce() -> DiskOp) {
        if let Some(watcher) = &self.0 {
            watcher(op());
        }
    }

    pub(super) fn make_dir(&self, dir: &Path) -> Result<()> {
        fs::create_dir(dir).map_err(|e| Error::io("make", dir, e))?;
        self.done(|| DiskOp::Make(dir.into()));
        Ok(())
    }
    /// Makes `dir` and its missing parents, durably.
    pub(super) fn make_dirs(&self, dir: &Path) -> Result<()> {
        if dir.is_dir() {
            return Ok(());
        }
        let above = parent(dir);
        self.make_dirs(above)?;
        match self.make_dir(dir) {
            Err(_) if dir.is_dir() => {} // another process made it first
            made => made?,
        }
        self.sync_dir(above)
    }

    pub(super) fn create(&self, path: &Path) -> Result<Writing> {
        let file = File::create(path).map_err(|e| Error::io("write", path, e))?;
        self.done(|| DiskOp::Create(path.into()));
        Ok(Writing { disk: self.clone(), path: path.into(), file })
    }
    /// Opens an existing file for writing.
    pub(super) fn open(&self, path: &Path) -> io::Result<Writing> {
        let file = OpenOptions::new().write(true).open(path)?;
        self.done(|| DiskOp::Open(path.into()));
        Ok(Writing { disk: self.clone(), path: path.into(), file })
    }
    /// Writes a small file in one call.
    pub(super) fn write(&self, path: &Path, content: &[u8]) -> Result<()> {
        let file = self.create(path)?;
        file.write_at(content, 0)?;
        file.sync()
    }

    /// Makes the names in `dir` durable.
    pub(super) fn sync_dir(&self, dir: &Path) -> Result<()> {
        File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io("sync", dir, e))?;
        self.done(|| DiskOp::Sync(dir.into()));
        Ok(())
    }
    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)?;
        self.done(|| DiskOp::Rename { from: from.into(), to: to.into() });
        Ok(())
    }
    /// Swaps the two names atomically.
    pub(super) fn exchange(&self, from: &Path, to: &Path) -> io::Result<()> {
        renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)?;
        self.done(|| DiskOp::Rename { from: from.into(), to: to.into() });
        Ok(())
    }
}

/// A file being written. Nothing is durable before [`Writing::sync`].
pub(super) struct Writing {
    disk: Disk,
    path: PathBuf,
    /// For operations that do not change the content.
    pub file: File,
}

impl Writing {
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|e| Error::io("write", &self.path, e))?;
        self.disk.done(|| DiskOp::Write(self.path.clone()));
        Ok(())
    }
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("sync", &self.path, e))?;
        self.disk.done(|| DiskOp::Sync(self.path.clone()));
        Ok(())
    }
}

/// Size of the buffer between device and files, the largest transfer; it stays in a core's L2 cache.
pub(super) const CHUNK: usize = 1 << 20;

/// The parent directory; "." for a bare name.
pub(super) fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    // The kernel refuses to sync /dev/null, which shows that it was asked to.
    #[test]
    fn a_sync_asks_the_kernel() {
        let null = Path::new("/dev/null");
        let refused = |result: Result<()>| {
            assert!(matches!(result, Err(Error::Io { op: "sync", source, .. }) if source.raw_os_error() == Some(22)));
        };
        let file = Disk::default().open(null).unwrap();
        file.write_at(b"gone", 0).unwrap();
        refused(file.sync());
        refused(Disk::default().sync_dir(null));
    }

    #[test]
    fn each_new_directory_is_synced_into_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let disk = Disk::watched({
            let seen = seen.clone();
            move |op| seen.lock().unwrap().push(op)
        });
        let at = |name: &str| dir.path().join(name);
        disk.make_dirs(&at("a/b")).unwrap();
        disk.make_dirs(&at("a/b")).unwrap();
        let made =
            [DiskOp::Make(at("a")), DiskOp::Sync(dir.path().into()), DiskOp::Make(at("a/b")), DiskOp::Sync(at("a"))];
        assert_eq!(*seen.lock().unwrap(), made);
    }
}
