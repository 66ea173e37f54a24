//! A tokenized corpus, written once and memory-mapped from then on. Never interprets tokens, and never decides where
//! the file goes.
//!
//! `DIR/KEY.tokens` is a 4096-byte header with the notes made while reading, then words (u16 if every id fits, else
//! u32, in native byte order), then for rows their end offsets (u64, in words). A row is its ids, then its labels.
use super::recipe::Drop;
use super::sweep;
use super::words::TokenWords;
use crate::base::{Error, Result};
use crate::device::{IGNORE, mapped::MappedFile};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Part of every key: increase it when the format, or what is written for the same files, changes.
pub const VERSION: u64 = 8;
const MAGIC: u64 = u64::from_le_bytes(*b"flatshrd");
const HEADER: usize = 4096;
const NOTES: usize = HEADER - size_of::<TokenFileHeader>();
/// Bodies up to this size are hashed when opened (about 10 ms for 100 MiB); for larger ones, only header and length are
/// checked.
const HASHED: u64 = 256 << 20;

/// Statistics collected while building, for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct TokenCounts {
    pub files: u64,
    /// Files of a directory that are not text.
    pub skipped: u64,
    /// Total size of the files read.
    pub bytes: u64,
    /// Rows dropped, by [`Drop::ALL`].
    pub dropped: [u64; Drop::ALL.len()],
    /// Malformed rows that were skipped.
    pub bad: u64,
    /// Rows cut to `max_len` tokens.
    pub cut: u64,
}

/// What was noted while reading, for the log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Notes {
    /// What rows hold and nothing reads, with the number of such rows.
    pub unread: BTreeMap<String, u64>,
    /// What is wrong with the first bad row that was skipped.
    pub first_bad: Option<String>,
}

impl Notes {
    /// JSON of at most `room` bytes: the names in the fewest rows are left out first.
    fn stored(mut self, room: usize) -> Vec<u8> {
        loop {
            let json = serde_json::to_vec(&self).unwrap_or_default();
            if json.len() <= room {
                return json;
            }
            match self.unread.iter().min_by_key(|(_, rows)| **rows).map(|(name, _)| name.clone()) {
                Some(rarest) => drop(self.unread.remove(&rarest)),
                None => self.first_bad = None,
            }
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TokenFileHeader {
    magic: u64,
    version: u64,
    key: u64,
    /// Bytes per word.
    width: u64,
    words: u64,
    /// 0 for a stream.
    rows: u64,
    counts: TokenCounts,
    /// Bytes of the notes that follow these fields, and their xxh3.
    notes: u64,
    notes_hash: u64,
    /// xxh3 of everything after the header.
    content: u64,
    /// xxh3 of all fields above.
    own: u64,
}

impl TokenFileHeader {
    fn sum(&self) -> u64 {
        let bytes = bytemuck::bytes_of(self);
        xxh3_64(&bytes[..bytes.len() - size_of::<u64>()])
    }
    fn is_whole(&self) -> bool {
        (self.magic, self.version, self.own) == (MAGIC, VERSION, self.sum())
    }
    fn body(&self) -> u64 {
        self.words * self.width + self.rows * 8
    }
}

pub struct TokenFile {
    map: MappedFile,
    header: TokenFileHeader,
    notes: Notes,
    /// Holds the shared lock while the file is mapped.
    _used: File,
}

impl TokenFile {
    /// Total words: tokens of a stream, or ids and labels of rows.
    pub fn words(&self) -> u64 {
        self.header.words
    }
    pub fn rows(&self) -> u64 {
        self.header.rows
    }
    pub fn counts(&self) -> TokenCounts {
        self.header.counts
    }
    pub fn notes(&self) -> &Notes {
        &self.notes
    }
    /// Equal for equal tokens, whatever their source.
    pub fn content(&self) -> u64 {
        self.header.content
    }
    /// Words `start..start + len` of a stream.
    pub fn range(&self, start: u64, len: usize) -> TokenWords<'_> {
        let width = self.header.width as usize;
        let start = HEADER + start as usize * width;
        let bytes = &self.map[start..start + len * width];
        match width {
            2 => TokenWords::U16(bytemuck::cast_slice(bytes)),
            _ => TokenWords::U32(bytemuck::cast_slice(bytes)),
        }
    }
    /// Length of row `r` in tokens.
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

    /// `None` if there is no such file, or it is incomplete.
    pub(super) fn open(path: &Path, key: u64) -> Option<TokenFile> {
        TokenFile::of(sweep::open_held(path)?, path, key).ok()?
    }
    /// `None` if the file is incomplete.
    pub(super) fn of(mut file: File, path: &Path, key: u64) -> Result<Option<TokenFile>> {
        let io = |e| Error::io("read", path, e);
        let len = file.metadata().map_err(io)?.len();
        if len < HEADER as u64 {
            return Ok(None);
        }
        let mut header = TokenFileHeader::default();
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        file.read_exact(bytemuck::bytes_of_mut(&mut header)).map_err(io)?;
        if !header.is_whole() || header.key != key || len != HEADER as u64 + header.body() {
            return Ok(None);
        }
        let mut notes = vec![0; (header.notes as usize).min(NOTES)];
        file.read_exact(&mut notes).map_err(io)?;
        let Some(notes) = serde_json::from_slice(&notes).ok().filter(|_| xxh3_64(&notes) == header.notes_hash) else {
            return Ok(None);
        };
        // Read instead of mapped: touched pages of a mapping count toward this process's memory.
        if header.body() <= HASHED && content(&mut file).map_err(io)? != header.content {
            return Ok(None);
        }
        let _ = file.set_modified(SystemTime::now()); // fails, harmlessly, for a file of another user
        Ok(Some(TokenFile { map: MappedFile::of(&file, path)?, header, notes, _used: file }))
    }
}

/// The hash of everything after the header.
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

/// Writes a token file in constant memory: words go straight to the file, row ends to a temporary file until the end.
pub struct TokenWriter {
    /// For messages, and to place temporary files next to it.
    path: PathBuf,
    out: BufWriter<File>,
    ends: Option<BufWriter<File>>,
    hash: Xxh3,
    header: TokenFileHeader,
    encoded: Vec<u8>,
    /// A write to this file failed, rather than reading the corpus.
    pub(super) broken: bool,
    pub counts: TokenCounts,
    pub notes: Notes,
}

impl TokenWriter {
    pub(super) fn new(file: File, path: PathBuf, key: u64, bound: usize) -> Result<TokenWriter> {
        // The largest word stands for IGNORE.
        let width = if bound <= u16::MAX as usize { 2 } else { 4 };
        let mut writer = TokenWriter {
            path,
            out: BufWriter::with_capacity(1 << 20, file),
            ends: None,
            hash: Xxh3::new(),
            header: TokenFileHeader { magic: MAGIC, version: VERSION, key, width, ..TokenFileHeader::default() },
            encoded: Vec::new(),
            broken: false,
            counts: TokenCounts::default(),
            notes: Notes::default(),
        };
        let made = writer.out.write_all(&[0; HEADER]);
        writer.written(made)?;
        Ok(writer)
    }
    fn written<T>(&mut self, result: io::Result<T>) -> Result<T> {
        self.broken |= result.is_err();
        result.map_err(|e| Error::io("write", &self.path, e))
    }
    /// Appends to the stream. Ids are below the bound the cache was opened with.
    pub fn tokens(&mut self, ids: &[u32]) -> Result<()> {
        self.words(ids.iter().copied())
    }
    /// Appends a row; `labels` is as long as `ids`.
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
    /// Writes the row ends and the header. With `to`, also syncs the file and renames it to that path.
    pub(super) fn finish(mut self, to: Option<&Path>) -> io::Result<File> {
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
        let notes = self.notes.stored(NOTES);
        let mut header = TokenFileHeader {
            counts: self.counts,
            notes: notes.len() as u64,
            notes_hash: xxh3_64(&notes),
            content: self.hash.digest(),
            ..self.header
        };
        header.own = header.sum();
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(bytemuck::bytes_of(&header))?;
        self.out.write_all(&notes)?;
        let file = self.out.into_inner()?;
        if let Some(to) = to {
            file.sync_all()?;
            fs::rename(&self.path, to)?;
        }
        Ok(file)
    }
}

/// An unnamed file in `dir` that disappears when closed; in memory if `dir` has no room for one.
pub(super) fn nameless(dir: &Path) -> io::Result<File> {
    let path = dir.join(format!("{:016x}.scratch", RandomState::new().hash_one(std::process::id())));
    match File::options().read(true).write(true).create_new(true).open(&path) {
        Ok(file) => {
            let _ = fs::remove_file(&path); // a sweep may have removed it first
            Ok(file)
        }
        Err(e) => memfd_create("tokens", MemfdFlags::CLOEXEC).map(File::from).map_err(|_| e),
    }
}
