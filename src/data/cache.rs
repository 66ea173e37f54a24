//! Token files by key: found, or built once by one of all processes that want them. Never interprets tokens.
//!
//! The file is written as `KEY.partial`, synced and renamed, so it is complete or absent. Who builds it has that file
//! locked, so that ranks and jobs that want the same one build it once; the lock goes with its holder. Who reads a
//! token file has it locked for sharing, so `sweep` sees which ones are in use. Without a directory that can
//! be written, a token file has no name, and goes with its process.
use super::sweep;
use super::token_file::{TokenFile, TokenWriter, nameless};
use crate::base::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Between looks at what another one builds.
const LOOK: Duration = Duration::from_millis(20);

/// Where token files are, and how many bytes of them.
#[derive(Clone, Debug)]
pub struct Cache {
    /// None: nothing is kept.
    pub dir: Option<PathBuf>,
    /// Of what is not in use, the least recently used goes first.
    pub limit: u64,
    /// Where files without a name are made.
    pub scratch: PathBuf,
}

impl Cache {
    /// Without a limit.
    pub fn at(dir: impl Into<PathBuf>) -> Cache {
        let dir = dir.into();
        Cache { scratch: dir.clone(), dir: Some(dir), limit: u64::MAX }
    }
}

/// What [`open`] found or made.
pub struct Opened {
    pub file: TokenFile,
    /// Just now.
    pub built: bool,
    /// Why it could not be kept, where it was to be.
    pub unkept: Option<String>,
}

/// Why there is no token file.
enum Failure {
    /// The directory, or the disk.
    Unwritable(String),
    /// What was to be written.
    Source(Error),
}

/// The token file of `key`. Where it is missing or not whole, one caller of all threads and processes runs `build`,
/// while the others wait for it; where nothing can be kept, each caller does. `bound`: ids that are written are below
/// it.
pub fn open(
    cache: &Cache,
    key: u64,
    bound: usize,
    mut build: impl FnMut(&mut TokenWriter) -> Result<()>,
) -> Result<Opened> {
    let mut unkept = None;
    if let Some(dir) = &cache.dir {
        match kept(dir, key, bound, &mut build) {
            Ok((file, built)) => {
                sweep::sweep(dir, cache.limit);
                return Ok(Opened { file, built, unkept });
            }
            Err(Failure::Source(e)) => return Err(e),
            Err(Failure::Unwritable(why)) => unkept = Some(format!("{} ({why})", dir.display())),
        }
    }
    let scratch = &cache.scratch;
    let unwritable = |why: String| {
        Error::input(format!(
            "the tokens of the data set have no place: {} cannot be written ({why}). Name a directory with `cache_dir`, or \
             set TMPDIR",
            scratch.display()
        ))
    };
    let file = nameless(scratch).map_err(|e| unwritable(e.to_string()))?;
    match written(file, &scratch.join("tokens"), None, key, bound, &mut build) {
        Ok(file) => Ok(Opened { file, built: true, unkept }),
        Err(Failure::Source(e)) => Err(e),
        Err(Failure::Unwritable(why)) => Err(unwritable(why)),
    }
}

/// The one in `dir`, and whether it was built just now.
fn kept(
    dir: &Path,
    key: u64,
    bound: usize,
    build: &mut dyn FnMut(&mut TokenWriter) -> Result<()>,
) -> std::result::Result<(TokenFile, bool), Failure> {
    let path = dir.join(format!("{key:016x}.tokens"));
    let partial = path.with_extension("partial");
    let unwritable = |e: io::Error| Failure::Unwritable(e.to_string());
    loop {
        if let Some(whole) = TokenFile::open(&path, key) {
            return Ok((whole, false));
        }
        fs::create_dir_all(dir).map_err(unwritable)?;
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&partial);
        let file = file.map_err(unwritable)?;
        // Not waited for inside the lock: a builder that has finished keeps its file locked, as its reader.
        while let Err(e) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if e != Errno::WOULDBLOCK {
                return Err(unwritable(e.into()));
            }
            if !sweep::is_at(&file, &partial) {
                break;
            }
            std::thread::sleep(LOOK);
        }
        // Finished or given up meanwhile. A builder that was killed has left it as it was.
        if !sweep::is_at(&file, &partial) {
            continue;
        }
        if let Some(whole) = TokenFile::open(&path, key) {
            let _ = fs::remove_file(&partial); // made after another had finished
            return Ok((whole, false));
        }
        file.set_len(0).map_err(unwritable)?;
        let built = written(file, &partial, Some(&path), key, bound, build);
        if built.is_err() {
            let _ = fs::remove_file(&partial); // the build's error is the one to report
        }
        return built.map(|file| (file, true));
    }
}

/// `file`, which is at `path`, as `build` fills it.
fn written(
    file: File,
    path: &Path,
    to: Option<&Path>,
    key: u64,
    bound: usize,
    build: &mut dyn FnMut(&mut TokenWriter) -> Result<()>,
) -> std::result::Result<TokenFile, Failure> {
    let unwritable = |e: &dyn std::fmt::Display| Failure::Unwritable(e.to_string());
    let mut writer = TokenWriter::new(file, path.into(), key, bound).map_err(|e| unwritable(&e))?;
    if let Err(e) = build(&mut writer) {
        return Err(if writer.broken { unwritable(&e) } else { Failure::Source(e) });
    }
    let file = writer.finish(to).map_err(|e| unwritable(&e))?;
    let _ = flock(&file, FlockOperation::LockShared); // read from now on
    match TokenFile::of(file, to.unwrap_or(path), key) {
        Ok(Some(whole)) => Ok(whole),
        Ok(None) => Err(unwritable(&"what was just written is not what is read")),
        Err(e) => Err(unwritable(&e)),
    }
}
