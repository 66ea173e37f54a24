//! huggingface_hub's cache: repositories as blobs by hash, snapshots of links by commit, and refs from names to
//! commits. Never downloads, and never removes what another program may use.
use super::fault::HubFault;
use super::name::{HubKind, is_commit, unsafe_name};
use super::progress::say;
use crate::base::{open, quote};
use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(50);
/// Before a wait is mentioned.
const SILENT: Duration = Duration::from_secs(10);
/// The format of the listings in `trees`.
const FORMAT: u64 = 1;

/// A file of a repository, as far as the listing knows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RepoFile {
    pub path: String,
    pub size: Option<u64>,
    /// Git's hash of the file, or of its pointer.
    pub blob: Option<String>,
    /// The checksum of a file in large storage.
    pub sha256: Option<String>,
}

/// The folder of a repository in the cache.
#[derive(Clone, Debug)]
pub(super) struct RepoCache {
    pub dir: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub fn new(cache: &Path, kind: HubKind, repo: &str) -> RepoCache {
        let name = format!("{}--{}", kind.plural(), repo.replace('/', "--"));
        RepoCache { dir: cache.join(&name), locks: cache.join(".locks").join(name) }
    }
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }
    /// A file of a snapshot; `path` is a safe name.
    pub fn file(&self, commit: &str, path: &str) -> PathBuf {
        self.snapshot(commit).join(path)
    }
    /// The commit that `revision` was when it was last asked for.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.into());
        }
        let text = open::read(&self.dir.join("refs").join(revision)).ok()?;
        String::from_utf8(text).ok().map(|text| text.trim().to_string()).filter(|commit| is_commit(commit))
    }
    /// Notes what `revision` is. A cache that cannot be written does without.
    pub fn remember(&self, revision: &str, commit: &str) {
        if revision != commit && self.commit(revision).as_deref() != Some(commit) {
            let _ = replace(&self.dir.join("refs").join(revision), commit.as_bytes());
        }
    }
    /// Whether another program has noted that there is no such file.
    pub fn is_known_missing(&self, commit: &str, path: &str) -> bool {
        self.dir.join(".no_exist").join(commit).join(path).exists()
    }

    /// The files of a commit, from the listing that huggingface_hub keeps too.
    pub fn listed(&self, commit: &str) -> Option<Vec<RepoFile>> {
        let text = open::read(&self.dir.join("trees").join(format!("{commit}.json"))).ok()?;
        let tree: Value = serde_json::from_slice(&text).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_string);
        let file = |(path, info): (&String, &Value)| RepoFile {
            path: path.clone(),
            size: info["lfs_size"].as_u64().or(info["size"].as_u64()),
            blob: text(&info["blob_id"]),
            sha256: text(&info["lfs_sha256"]),
        };
        (tree["format_version"] == FORMAT).then(|| tree["files"].as_object().into_iter().flatten().map(file).collect())
    }
    /// Keeps the listing, if it is whole. A cache that cannot be written does without.
    pub fn keep_listing(&self, commit: &str, files: &[RepoFile]) {
        let mut all = Map::new();
        for file in files {
            let (Some(size), Some(blob)) = (file.size, &file.blob) else { return };
            let mut info = json!({"size": size, "blob_id": blob});
            if let Some(sha256) = &file.sha256 {
                (info["lfs_sha256"], info["lfs_size"]) = (json!(sha256), json!(size));
            }
            all.insert(file.path.clone(), info);
        }
        let path = self.dir.join("trees").join(format!("{commit}.json"));
        if !path.exists() {
            let _ = replace(&path, json!({"format_version": FORMAT, "files": all}).to_string().as_bytes());
        }
    }
    /// The files of a snapshot, which may be a part of what the repository has.
    pub fn present(&self, commit: &str) -> Vec<RepoFile> {
        fn walk(dir: &Path, below: &str, found: &mut Vec<RepoFile>) {
            for path in open::listed(dir).unwrap_or_default() {
                let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
                let name = format!("{below}{name}");
                match fs::metadata(&path) {
                    Ok(meta) if meta.is_dir() && !path.is_symlink() => walk(&path, &format!("{name}/"), found),
                    Ok(meta) => found.push(RepoFile { path: name, size: Some(meta.len()), ..RepoFile::default() }),
                    Err(_) => {}
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.snapshot(commit), "", &mut found);
        found
    }

    /// Holds the lock that huggingface_hub takes for this blob. None: the file system has no locks.
    pub fn lock(&self, etag: &str, what: &str, quiet: bool) -> Result<Option<File>, HubFault> {
        let path = self.locks.join(format!("{etag}.lock"));
        fs::create_dir_all(&self.locks).map_err(|e| HubFault::disk("make", &self.locks, e))?;
        let (since, mut said) = (Instant::now(), false);
        loop {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o664).open(&path);
            let file = file.map_err(|e| HubFault::disk("write", &path, e))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Its holder may have removed it in the meantime.
                Ok(()) if is_at(&file, &path) => return Ok(Some(file)),
                Ok(()) => continue,
                Err(Errno::WOULDBLOCK) => sleep(POLL),
                Err(_) => return Ok(None),
            }
            if !said && since.elapsed() > SILENT {
                said = true;
                say(
                    quiet,
                    format_args!("wait for another process that downloads {} ({})", quote(what), path.display()),
                );
            }
        }
    }

    /// Gives a blob its name in a snapshot: a relative link, or a copy where links are impossible.
    pub fn link(&self, commit: &str, path: &str, etag: &str) -> Result<(), HubFault> {
        let at = self.file(commit, path);
        let up = "../".repeat(1 + path.split('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        if fs::read_link(&at).is_ok_and(|there| there == target) || at.exists() {
            return Ok(());
        }
        let failed = |e| HubFault::disk("write", &at, e);
        at.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
        let _ = fs::remove_file(&at); // a link to a blob that is gone
        match symlink(&target, &at) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(e) if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) => {
                fs::copy(self.blob(etag), &at).map(drop).map_err(failed)
            }
            other => other.map_err(failed),
        }
    }

    /// Bytes that can still be written, and where.
    pub fn room(&self) -> Option<(u64, &Path)> {
        let there = self.dir.ancestors().find(|dir| dir.is_dir())?;
        let stat = statvfs(there).ok()?;
        Some((stat.f_bavail.saturating_mul(stat.f_frsize), there))
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().and_then(|a| fs::metadata(path).map(|b| same(a, b))).unwrap_or(false)
}

/// Writes a small file that readers see whole or not at all.
fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let partial = path.with_file_name(name);
    fs::write(&partial, content)?;
    fs::rename(&partial, path)
}

/// Whether a server's hash can be the name of a blob.
pub(super) fn is_etag(etag: &str) -> bool {
    let known = etag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    known && etag.len() <= 200 && !etag.starts_with('.') && unsafe_name(etag).is_none()
}
