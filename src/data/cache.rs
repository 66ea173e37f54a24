//! Token files: a corpus as numbers, written once and mapped from then on. Never interprets tokens, never deletes.
//!
//! `DIR/KEY.tokens` is a 4096-byte header, then words (u16 where every id fits, else u32, in this machine's byte order),
//! then for rows their ends (u64, in words). A row is its ids, then as many labels. The file is written under another
//! name, synced and renamed, so it is complete or absent; a lock beside it makes ranks and jobs that want the same file
//! build it once, and frees itself when the builder dies. It is safe to delete at any time when no run is reading it.
use crate::base::{Error, Result};
use crate::device::{IGNORE, mapped::MappedFile};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Part of every key: raise it when the format, or what is written for the same files, changes.
pub const VERSION: u64 = 2;
const MAGIC: u64 = u64::from_le_bytes(*b"flatshrd");
const HEADER: usize = 4096;
/// A body of up to this many bytes is hashed when it is opened (some 10 ms for 100 MiB); of a larger one, header and length
/// are checked.
const HASHED: u64 = 256 << 20;

/// The header: as words, the hash of the others last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
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

impl Header {
    fn to_words(self) -> [u64; 13] {
        let Header { key, width, words, rows, files, skipped, bytes, dropped, bad, content } = self;
        let mut all = [MAGIC, VERSION, key, width, words, rows, files, skipped, bytes, dropped, bad, content, 0];
        all[12] = xxh3_64(bytemuck::cast_slice(&all[..12]));
        all
    }
    /// `None` where the magic, the version or the hash is wrong.
    fn from_words(all: [u64; 13]) -> Option<Header> {
        let [_, _, key, width, words, rows, files, skipped, bytes, dropped, bad, content, _] = all;
        let header = Header { key, width, words, rows, files, skipped, bytes, dropped, bad, content };
        (header.to_words() == all).then_some(header)
    }
    fn body(&self) -> u64 {
        self.words * self.width + self.rows * 8
    }
}

/// Words of a [`TokenFile`].
#[derive(Clone, Copy, Debug)]
pub enum Words<'a> {
    U16(&'a [u16]),
    U32(&'a [u32]),
}

impl<'a> Words<'a> {
    /// The first `n`.
    pub fn first(self, n: usize) -> Words<'a> {
        self.slice(0..n)
    }
    /// Those of the first `n` that follow the very first.
    pub fn after_first(self, n: usize) -> Words<'a> {
        self.slice(1..n.max(1))
    }
    fn slice(self, range: std::ops::Range<usize>) -> Words<'a> {
        match self {
            Words::U16(w) => Words::U16(&w[range]),
            Words::U32(w) => Words::U32(&w[range]),
        }
    }
    pub fn len(&self) -> usize {
        match self {
            Words::U16(w) => w.len(),
            Words::U32(w) => w.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Both are as long as `self`.
    pub fn ids(&self, out: &mut [u32]) {
        match self {
            Words::U16(w) => out.iter_mut().zip(*w).for_each(|(o, &w)| *o = w as u32),
            Words::U32(w) => out.copy_from_slice(w),
        }
    }
    /// Targets: ids, or [`IGNORE`] for the largest word, which is no id. As long as `self`.
    pub fn targets(&self, out: &mut [i32]) {
        match self {
            Words::U16(w) => {
                out.iter_mut().zip(*w).for_each(|(o, &w)| *o = if w == u16::MAX { IGNORE } else { w as i32 })
            }
            Words::U32(w) => {
                out.iter_mut().zip(*w).for_each(|(o, &w)| *o = if w == u32::MAX { IGNORE } else { w as i32 })
            }
        }
    }
}

pub struct TokenFile {
    map: MappedFile,
    header: Header,
}

impl TokenFile {
    /// Words in all: tokens of a stream, ids and labels of rows.
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
    /// Words `start..start + len` of a stream.
    pub fn range(&self, start: u64, len: usize) -> Words<'_> {
        let width = self.header.width as usize;
        let start = HEADER + start as usize * width;
        let bytes = &self.map[start..start + len * width];
        match width {
            2 => Words::U16(bytemuck::cast_slice(bytes)),
            _ => Words::U32(bytemuck::cast_slice(bytes)),
        }
    }
    /// Tokens of row `r`.
    pub fn row_len(&self, r: u64) -> usize {
        let start = if r == 0 { 0 } else { self.end(r - 1) };
        (self.end(r) - start) as usize / 2
    }
    /// Ids and labels of row `r`, equally long.
    pub fn row(&self, r: u64) -> (Words<'_>, Words<'_>) {
        let (end, len) = (self.end(r), self.row_len(r));
        (self.range(end - 2 * len as u64, len), self.range(end - len as u64, len))
    }
    fn end(&self, r: u64) -> u64 {
        let at = HEADER + (self.header.words * self.header.width + r * 8) as usize;
        bytemuck::pod_read_unaligned(&self.map[at..at + 8])
    }

    /// `None` where there is no such file, or it is not whole.
    fn open(path: &Path, key: u64) -> Result<Option<TokenFile>> {
        let io = |e| Error::io("read", path, e);
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            Err(e) => return Err(io(e)),
        };
        let len = file.metadata().map_err(io)?.len();
        if len < HEADER as u64 {
            return Ok(None);
        }
        let mut words = [0u64; 13];
        file.read_exact(bytemuck::cast_slice_mut(&mut words)).map_err(io)?;
        let Some(header) = Header::from_words(words) else { return Ok(None) };
        if header.key != key || len != HEADER as u64 + header.body() {
            return Ok(None);
        }
        // Read, not mapped: pages of the mapping that are touched count as this process's memory.
        if header.body() <= HASHED && content(&mut file).map_err(io)? != header.content {
            return Ok(None);
        }
        Ok(Some(TokenFile { map: MappedFile::open(path)?, header }))
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

/// What a builder writes into. Constant memory: words go to the file, ends of rows to a file of their own until the end.
pub struct Writer {
    path: PathBuf,
    out: BufWriter<File>,
    ends: Option<BufWriter<File>>,
    hash: Xxh3,
    header: Header,
    encoded: Vec<u8>,
    pub files: u64,
    pub skipped: u64,
    pub bytes: u64,
    pub dropped: u64,
    pub bad: u64,
}

impl Writer {
    fn create(path: PathBuf, key: u64, bound: usize) -> Result<Writer> {
        // The largest word stands for IGNORE.
        let width = if bound <= u16::MAX as usize { 2 } else { 4 };
        let none =
            Header { key, width, words: 0, rows: 0, files: 0, skipped: 0, bytes: 0, dropped: 0, bad: 0, content: 0 };
        let mut out = BufWriter::with_capacity(1 << 20, create(&path)?);
        out.write_all(&[0; HEADER]).map_err(|e| Error::io("write", &path, e))?;
        Ok(Writer {
            path,
            out,
            ends: None,
            hash: Xxh3::new(),
            header: none,
            encoded: Vec::new(),
            files: 0,
            skipped: 0,
            bytes: 0,
            dropped: 0,
            bad: 0,
        })
    }
    /// Appends to the stream. Ids are below the bound that the cache was opened with.
    pub fn tokens(&mut self, ids: &[u32]) -> Result<()> {
        self.words(ids.iter().copied())
    }
    /// Appends a row; `labels` as long as `ids`.
    pub fn row(&mut self, ids: &[u32], labels: &[i32]) -> Result<()> {
        self.tokens(ids)?;
        self.words(labels.iter().map(|&label| if label == IGNORE { u32::MAX } else { label as u32 }))?;
        let path = self.path.with_extension("ends");
        let ends = match &mut self.ends {
            Some(ends) => ends,
            none => none.insert(BufWriter::new(create(&path)?)),
        };
        self.header.rows += 1;
        ends.write_all(&self.header.words.to_ne_bytes()).map_err(|e| Error::io("write", path, e))
    }
    fn words(&mut self, words: impl ExactSizeIterator<Item = u32>) -> Result<()> {
        self.header.words += words.len() as u64;
        self.encoded.clear();
        match self.header.width {
            2 => words.for_each(|w| self.encoded.extend((w as u16).to_ne_bytes())),
            _ => words.for_each(|w| self.encoded.extend(w.to_ne_bytes())),
        }
        self.hash.update(&self.encoded);
        self.out.write_all(&self.encoded).map_err(|e| Error::io("write", &self.path, e))
    }
    /// The ends, the header, to the disk, and under its name.
    fn finish(mut self, to: &Path) -> Result<()> {
        let mut finish = || {
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
                fs::remove_file(self.path.with_extension("ends"))?;
            }
            let Writer { files, skipped, bytes, dropped, bad, .. } = self;
            let header = Header { files, skipped, bytes, dropped, bad, content: self.hash.digest(), ..self.header };
            self.out.seek(SeekFrom::Start(0))?;
            self.out.write_all(bytemuck::cast_slice(&header.to_words()))?;
            self.out.flush()?;
            self.out.get_ref().sync_all()?;
            fs::rename(&self.path, to)
        };
        finish().map_err(|e| Error::io("write", to, e))
    }
}

fn create(path: &Path) -> Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(|e| Error::io("create", path, e))
}

/// The token file of `key` in `dir`, and whether it was built just now. Where it is missing or not whole, one caller of
/// all threads and processes runs `build`, while the others wait for it. `bound`: ids that are written are below it.
pub fn open(
    dir: &Path,
    key: u64,
    bound: usize,
    build: impl FnOnce(&mut Writer) -> Result<()>,
) -> Result<(TokenFile, bool)> {
    let path = dir.join(format!("{key:016x}.tokens"));
    if let Some(whole) = TokenFile::open(&path, key)? {
        return Ok((whole, false));
    }
    let unwritable = |e: &dyn std::fmt::Display| {
        let dir = dir.display();
        Error::input(format!(
            "the cache of tokens {dir} cannot be written ({e}): set FLATSHARD_CACHE_DIR to a directory that can be"
        ))
    };
    fs::create_dir_all(dir).map_err(|e| unwritable(&e))?;
    let lock_path = path.with_extension("lock");
    let lock = create(&lock_path).map_err(|e| unwritable(&e))?; // dropped, and so unlocked, on return
    flock(&lock, FlockOperation::LockExclusive).map_err(|e| Error::io("lock", &lock_path, e.into()))?;
    if let Some(whole) = TokenFile::open(&path, key)? {
        return Ok((whole, false));
    }
    // One name: what a builder that was killed left behind is overwritten, not piled up.
    let partial = path.with_extension("partial");
    let mut writer = Writer::create(partial.clone(), key, bound)?;
    if let Err(e) = build(&mut writer).and_then(|()| writer.finish(&path)) {
        for left in [partial.with_extension("ends"), partial] {
            let _ = fs::remove_file(left); // the build's error is the one to report
        }
        return Err(e);
    }
    match TokenFile::open(&path, key)? {
        Some(whole) => Ok((whole, true)),
        None => Err(Error::io("read back", &path, std::io::Error::other("what was just written is not what is read"))),
    }
}
