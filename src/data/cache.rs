//! Token files: a corpus as numbers, written once and mapped from then on. Never interprets tokens.
//!
//! `DIR/KEY.tokens` is a 4096-byte header, then words (u16 where every id fits, else u32, in this machine's byte
//! order), then for rows their ends (u64, in words). A row is its ids, then as many labels. The file is written as
//! `KEY.partial`, synced and renamed, so it is complete or absent. Who builds it has that file locked, so that ranks
//! and jobs that want the same one build it once; the lock goes with its holder. Who reads a token file has it locked
//! for sharing, so `sweep` sees which ones are in use. Without a directory that can be written, a token file
//! has no name, and goes with its process.
use super::sweep;
use super::words::TokenWords;
use crate::base::{Error, Result};
use crate::device::{IGNORE, mapped::MappedFile};
use rustix::fs::{FlockOperation, MemfdFlags, flock, memfd_create};
use rustix::io::Errno;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Part of every key: raise it when the format, or what is written for the same files, changes.
pub const VERSION: u64 = 3;
const MAGIC: u64 = u64::from_le_bytes(*b"flatshrd");
const HEADER: usize = 4096;
/// A body of up to this many bytes is hashed when it is opened (some 10 ms for 100 MiB); of a larger one, header and
/// length are checked.
const HASHED: u64 = 256 << 20;
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

/// The header: as words, the hash of the others last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TokenFileHeader {
    key: u64,
    /// Bytes of a word.
    width: u64,
    words: u64,
    /// 0 in a stream.
    rows: u64,
    files: u64,
    skipped: u64,
    bytes: u64,
    dropped: u64,
    bad: u64,
    /// xxh3 of all that follows the header.
    content: u64,
}

impl TokenFileHeader {
    fn to_words(self) -> [u64; 13] {
        let TokenFileHeader { key, width, words, rows, files, skipped, bytes, dropped, bad, content } = self;
        let mut all = [MAGIC, VERSION, key, width, words, rows, files, skipped, bytes, dropped, bad, content, 0];
        all[12] = xxh3_64(bytemuck::cast_slice(&all[..12]));
        all
    }
    /// `None` where the magic, the version or the hash is wrong.
    fn from_words(all: [u64; 13]) -> Option<TokenFileHeader> {
        let [_, _, key, width, words, rows, files, skipped, bytes, dropped, bad, content, _] = all;
        let header = TokenFileHeader { key, width, words, rows, files, skipped, bytes, dropped, bad, content };
        (header.to_words() == all).then_some(header)
    }
    fn body(&self) -> u64 {
        self.words * self.width + self.rows * 8
    }
}

pub struct TokenFile {
    map: MappedFile,
    header: TokenFileHeader,
    /// Locked for sharing, for as long as it is read.
    _used: File,
}

impl TokenFile {
    /// TokenWords in all: tokens of a stream, ids and labels of rows.
    pub fn words(&self) -> u64 {
        self.header.words
    }
    pub fn rows(&self) -> u64 {
        self.header.rows
    }
    pub fn files(&self) -> u64 {
        self.header.files
    }
    /// Files of a directory that were no text.
    pub fn skipped(&self) -> u64 {
        self.header.skipped
    }
    /// Size of the files that were read.
    pub fn bytes(&self) -> u64 {
        self.header.bytes
    }
    /// Rows without room for a response, or without one.
    pub fn dropped(&self) -> u64 {
        self.header.dropped
    }
    /// Rows that were no rows, and were left out.
    pub fn bad(&self) -> u64 {
        self.header.bad
    }
    /// Equal for equal tokens, wherever they came from.
    pub fn content(&self) -> u64 {
        self.header.content
    }
    /// TokenWords `start..start + len` of a stream.
    pub fn range(&self, start: u64, len: usize) -> TokenWords<'_> {
        let width = self.header.width as usize;
        let start = HEADER + start as usize * width;
        let bytes = &self.map[start..start + len * width];
        match width {
            2 => TokenWords::U16(bytemuck::cast_slice(bytes)),
            _ => TokenWords::U32(bytemuck::cast_slice(bytes)),
        }
    }
    /// Tokens of row `r`.
    pub fn row_len(&self, r: u64) -> usize {
        let start = if r == 0 { 0 } else { self.end(r - 1) };
        (self.end(r) - start) as usize / 2
    }
    /// Ids and labels of row `r`, equally long.
    pub fn row(&self, r: u64) -> (TokenWords<'_>, TokenWords<'_>) {
        let (end, len) = (self.end(r), self.row_len(r));
        (self.range(end - 2 * len as u64, len), self.range(end - len as u64, len))
    }
    fn end(&self, r: u64) -> u64 {
        let at = HEADER + (self.header.words * self.header.width + r * 8) as usize;
        bytemuck::pod_read_unaligned(&self.map[at..at + 8])
    }

    /// `None` where there is no such file, or it is not whole.
    fn open(path: &Path, key: u64) -> Option<TokenFile> {
        let file = File::open(path).ok()?;
        // A file system without locks has no say in what is in use. One that was removed meanwhile is not there.
        let _ = flock(&file, FlockOperation::LockShared);
        let file = sweep::is_at(&file, path).then_some(file)?;
        TokenFile::of(file, path, key).ok()?
    }
    /// `None` where it is not whole.
    fn of(mut file: File, path: &Path, key: u64) -> Result<Option<TokenFile>> {
        let io = |e| Error::io("read", path, e);
        let len = file.metadata().map_err(io)?.len();
        if len < HEADER as u64 {
            return Ok(None);
        }
        let mut words = [0u64; 13];
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        file.read_exact(bytemuck::cast_slice_mut(&mut words)).map_err(io)?;
        let Some(header) = TokenFileHeader::from_words(words) else { return Ok(None) };
        if header.key != key || len != HEADER as u64 + header.body() {
            return Ok(None);
        }
        // Read, not mapped: pages of the mapping that are touched count as this process's memory.
        if header.body() <= HASHED && content(&mut file).map_err(io)? != header.content {
            return Ok(None);
        }
        let _ = file.set_modified(SystemTime::now()); // of somebody else's file it may not be said when it was used
        Ok(Some(TokenFile { map: MappedFile::of(&file, path)?, header, _used: file }))
    }
}

/// The hash of all that follows the header.
fn content(file: &mut File) -> std::io::Result<u64> {
    file.seek(SeekFrom::Start(HEADER as u64))?;
    let (mut hash, mut chunk) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hash.digest()),
            n => hash.update(&chunk[..n]),
        }
    }
}

/// What a builder writes into. Constant memory: words go to the file, ends of rows to a file of their own until the
/// end.
pub struct TokenWriter {
    /// For messages; files next to it can be made.
    path: PathBuf,
    out: BufWriter<File>,
    ends: Option<BufWriter<File>>,
    hash: Xxh3,
    header: TokenFileHeader,
    encoded: Vec<u8>,
    /// What went wrong was a write of this file, not what was to be written.
    broken: bool,
    pub files: u64,
    pub skipped: u64,
    pub bytes: u64,
    pub dropped: u64,
    pub bad: u64,
}

impl TokenWriter {
    fn new(file: File, path: PathBuf, key: u64, bound: usize) -> Result<TokenWriter> {
        // The largest word stands for IGNORE.
        let width = if bound <= u16::MAX as usize { 2 } else { 4 };
        let none = TokenFileHeader {
            key,
            width,
            words: 0,
            rows: 0,
            files: 0,
            skipped: 0,
            bytes: 0,
            dropped: 0,
            bad: 0,
            content: 0,
        };
        let mut writer = TokenWriter {
            path,
            out: BufWriter::with_capacity(1 << 20, file),
            ends: None,
            hash: Xxh3::new(),
            header: none,
            encoded: Vec::new(),
            broken: false,
            files: 0,
            skipped: 0,
            bytes: 0,
            dropped: 0,
            bad: 0,
        };
        let made = writer.out.write_all(&[0; HEADER]);
        writer.written(made)?;
        Ok(writer)
    }
    fn written<T>(&mut self, result: io::Result<T>) -> Result<T> {
        self.broken |= result.is_err();
        result.map_err(|e| Error::io("write", &self.path, e))
    }
    /// Appends to the stream. Ids are below the bound that the cache was opened with.
    pub fn tokens(&mut self, ids: &[u32]) -> Result<()> {
        self.words(ids.iter().copied())
    }
    /// Appends a row; `labels` as long as `ids`.
    pub fn row(&mut self, ids: &[u32], labels: &[i32]) -> Result<()> {
        self.tokens(ids)?;
        self.words(labels.iter().map(|&label| if label == IGNORE { u32::MAX } else { label as u32 }))?;
        self.header.rows += 1;
        let end = self.header.words.to_ne_bytes();
        let result = match &mut self.ends {
            Some(ends) => ends.write_all(&end),
            none => nameless(self.path.parent().unwrap_or(Path::new(".")))
                .and_then(|file| none.insert(BufWriter::new(file)).write_all(&end)),
        };
        self.written(result)
    }
    fn words(&mut self, words: impl ExactSizeIterator<Item = u32>) -> Result<()> {
        self.header.words += words.len() as u64;
        self.encoded.clear();
        match self.header.width {
            2 => words.for_each(|w| self.encoded.extend((w as u16).to_ne_bytes())),
            _ => words.for_each(|w| self.encoded.extend(w.to_ne_bytes())),
        }
        self.hash.update(&self.encoded);
        let result = self.out.write_all(&self.encoded);
        self.written(result)
    }
    /// The ends and the header; with a name to go by, to the disk and under that name.
    fn finish(mut self, to: Option<&Path>) -> io::Result<File> {
        if let Some(ends) = self.ends.take() {
            let mut ends = ends.into_inner()?;
            ends.rewind()?;
            let mut chunk = vec![0; 1 << 16];
            loop {
                let n = ends.read(&mut chunk)?;
                if n == 0 {
                    break;
                }
                self.hash.update(&chunk[..n]);
                self.out.write_all(&chunk[..n])?;
            }
        }
        let TokenWriter { files, skipped, bytes, dropped, bad, .. } = self;
        let header =
            TokenFileHeader { files, skipped, bytes, dropped, bad, content: self.hash.digest(), ..self.header };
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(bytemuck::cast_slice(&header.to_words()))?;
        let file = self.out.into_inner()?;
        if let Some(to) = to {
            file.sync_all()?;
            fs::rename(&self.path, to)?;
        }
        Ok(file)
    }
}

/// A file in `dir` that nobody else finds, and that goes when it is closed; in memory where `dir` has no room for one.
fn nameless(dir: &Path) -> io::Result<File> {
    let path = dir.join(format!("{:016x}.scratch", RandomState::new().hash_one(std::process::id())));
    match File::options().read(true).write(true).create_new(true).open(&path) {
        Ok(file) => {
            let _ = fs::remove_file(&path); // a sweep may have been first
            Ok(file)
        }
        Err(e) => memfd_create("tokens", MemfdFlags::CLOEXEC).map(File::from).map_err(|_| e),
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
