//! Token files by key: found, or built once among all processes that want them. Never interprets tokens.
//!
//! A file is written as `KEY.partial`, synced and renamed, so it is either complete or absent. The builder holds an
//! exclusive lock on it, so ranks and jobs that want the same file build it once; the lock dies with its holder.
//! Readers hold a shared lock, which tells `sweep` which files are in use. If no directory can be written, the token
//! file is unnamed and disappears with its process.
use super::sweep;
use super::token_file::{TokenFile, TokenWriter, nameless};
use crate::base::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Poll interval while another process builds the file.
const POLL: Duration = Duration::from_millis(20);

/// Where token files live, and how much space they may take.
#[derive(Clone, Debug)]
pub struct Cache {
    /// None: nothing is kept.
    pub dir: Option<PathBuf>,
    /// In bytes. Beyond it, the least recently used files that are not in use are removed.
    pub limit: u64,
    /// Directory for unnamed files.
    pub scratch: PathBuf,
}

impl Cache {
    /// No size limit.
    pub fn at(dir: impl Into<PathBuf>) -> Cache {
        let dir = dir.into();
        Cache { scratch: dir.clone(), dir: Some(dir), limit: u64::MAX }
    }
}

/// The result of [`open`].
pub struct Opened {
    pub file: TokenFile,
    /// Built by this call.
    pub built: bool,
    /// Why it could not be kept in the cache directory.
    pub unkept: Option<String>,
}

/// Why there is no token file.
enum Failure {
    /// The directory or the disk failed.
    Unwritable(String),
    /// The corpus could not be read.
    Source(Error),
}

/// Numbers kept under `key`; None if there are none.
pub fn numbers(cache: &Cache, key: u64) -> Option<Vec<f64>> {
    let file = TokenFile::open(&cache.dir.as_ref()?.join(format!("{key:016x}.tokens")), key)?;
    let mut words = vec![0u32; file.words() as usize];
    file.range(0, words.len()).ids(&mut words);
    Some(words.as_chunks().0.iter().map(|&[low, high]| f64::from_bits(low as u64 | (high as u64) << 32)).collect())
}

/// Keeps `numbers` under `key`, if there is a directory that can be written.
pub fn keep_numbers(cache: &Cache, key: u64, numbers: &[f64]) {
    let Some(dir) = &cache.dir else { return };
    let words = |x: &f64| [x.to_bits() as u32, (x.to_bits() >> 32) as u32];
    let mut write = |out: &mut TokenWriter| {
        numbers.chunks(1 << 16).try_for_each(|chunk| out.tokens(&chunk.iter().flat_map(words).collect::<Vec<_>>()))
    };
    if kept(dir, key, usize::MAX, &mut write).is_ok() {
        sweep::sweep(dir, cache.limit);
    }
}

/// The token file for `key`. If it is missing or incomplete, one caller among all threads and processes runs `build`
/// while the others wait; if nothing can be kept, every caller does. Ids written are below `bound`.
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
            "cannot cache the tokenized data set: {} is not writable ({why}). Set `cache_dir` or TMPDIR to a writable \
             directory",
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

/// The file in `dir`, and whether this call built it.
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
        // Polled, not waited for with a blocking lock: a finished builder keeps its file locked as its reader.
        while let Err(e) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if e != Errno::WOULDBLOCK {
                return Err(unwritable(e.into()));
            }
            if !sweep::is_at(&file, &partial) {
                break;
            }
            std::thread::sleep(POLL);
        }
        // Another builder finished or gave up. One that was killed leaves the file in place.
        if !sweep::is_at(&file, &partial) {
            continue;
        }
        if let Some(whole) = TokenFile::open(&path, key) {
            let _ = fs::remove_file(&partial); // created after another builder had finished
            return Ok((whole, false));
        }
        file.set_len(0).map_err(unwritable)?;
        let built = written(file, &partial, Some(&path), key, bound, build);
        if built.is_err() {
            let _ = fs::remove_file(&partial); // report the build's error, not this one
        }
        return built.map(|file| (file, true));
    }
}

/// Fills `file`, which is at `path`, by `build`.
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
    let _ = flock(&file, FlockOperation::LockShared); // it is a reader from now on
    match TokenFile::of(file, to.unwrap_or(path), key) {
        Ok(Some(whole)) => Ok(whole),
        Ok(None) => Err(unwritable(&"the file reads back differently from what was written")),
        Err(e) => Err(unwritable(&e)),
    }
}
