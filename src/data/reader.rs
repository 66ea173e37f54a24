//! From the files of a corpus to the words of a cache, in one pass and in constant memory. Never decides where the cache is.
use super::cache::Writer;
use super::corpus::{Corpus, Kind, Source};
use super::tokenizer::Tokenizer;
use super::{jsonl, npy};
use crate::base::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Where a token was read, for messages that name it.
pub(super) enum Place<'a> {
    /// Counted from 1.
    Line(&'a Path, u64),
    /// Counted from 0.
    Index(&'a Path, u64),
}

impl Place<'_> {
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::input(match self {
            Place::Line(path, n) => format!("{}: line {n} {what}", path.display()),
            Place::Index(path, i) => format!("{}: element {i} {what}", path.display()),
        })
    }
    /// `value` as a token id, which is in `0..bound`.
    pub fn id(&self, value: Option<i64>, bound: usize) -> Result<u32> {
        match value {
            Some(id) if id >= 0 && (id as u64) < bound as u64 => Ok(id as u32),
            Some(id) => Err(self.error(format!(
                "has token id {id}, but vocab_size is {bound}: tokenizer mismatch. Set vocab_size to that of the tokenizer \
                 that made these ids"
            ))),
            None => Err(self.error("is no token id: it is above 2^63")),
        }
    }
}

/// How much of a file is looked at to call it text, and how much is read at once.
const CHUNK: usize = 1 << 18;

/// Writes every file of `corpus`. Ids are below `bound`.
pub(super) fn read(corpus: &Corpus, tokenizer: &Tokenizer, bound: usize, out: &mut Writer) -> Result<()> {
    let (mut chunk, mut ids) = (vec![0u8; CHUNK], Vec::with_capacity(CHUNK));
    for file in &corpus.files {
        match corpus.kind {
            Kind::Text => {
                if !text(&file.path, tokenizer, &mut chunk, &mut ids, out)? {
                    if file.named {
                        return Err(unreadable(file));
                    }
                    out.skipped += 1;
                    continue;
                }
            }
            Kind::Rows => jsonl::read(&file.path, tokenizer, bound, |ids, labels| out.row(ids, labels))?,
            Kind::Tokens => npy::read(&file.path, bound, |ids| out.tokens(ids))?,
        }
        out.files += 1;
        out.bytes += file.size;
    }
    Ok(())
}

fn unreadable(file: &Source) -> Error {
    let path = file.path.display();
    Error::input(match file.size {
        0 => format!("{path}: the file is empty"),
        _ => format!(
            "{path}: not a text file (a NUL byte or invalid UTF-8 near its start). Text, .jsonl and .npy can be read"
        ),
    })
}

/// One file and an end-of-text token. False, with nothing written, where the file is not text; an empty file is no text.
fn text(path: &Path, tokenizer: &Tokenizer, chunk: &mut [u8], ids: &mut Vec<u32>, out: &mut Writer) -> Result<bool> {
    let mut file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let mut first = true;
    loop {
        let n = fill(&mut file, chunk).map_err(|e| Error::io("read", path, e))?;
        if first && (n == 0 || !is_text(&chunk[..n], n == chunk.len())) {
            return Ok(false);
        }
        first = false;
        ids.clear();
        tokenizer.encode(&chunk[..n], ids);
        if n < chunk.len() {
            ids.push(tokenizer.end_of_text());
            out.tokens(ids)?;
            return Ok(true);
        }
        out.tokens(ids)?;
    }
}

/// As many bytes as there are, up to `chunk.len()`.
fn fill(file: &mut File, chunk: &mut [u8]) -> std::io::Result<usize> {
    let mut n = 0;
    while n < chunk.len() {
        match file.read(&mut chunk[n..])? {
            0 => break,
            more => n += more,
        }
    }
    Ok(n)
}

/// No NUL, and UTF-8 up to a character that the end of the piece may have cut.
fn is_text(bytes: &[u8], cut: bool) -> bool {
    !bytes.contains(&0)
        && match std::str::from_utf8(bytes) {
            Ok(_) => true,
            Err(e) => cut && e.error_len().is_none(),
        }
}
