//! From the files of a corpus to the words of a cache, in one pass and in constant memory. Never decides where the cache is.
use super::cache::Writer;
use super::corpus::{Corpus, Kind, Source};
use super::npy;
use super::recipe::{Recipe, token_id};
use super::rows::Rows;
use super::tokenizer::Tokenizer;
use crate::base::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Where a token was read, for messages that name it.
pub(super) enum Place<'a> {
    /// Counted from 1.
    Line(&'a Path, u64),
    /// Counted from 0, of Parquet.
    Row(&'a Path, u64),
    /// Counted from 0.
    Index(&'a Path, u64),
}

impl Place<'_> {
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::input(match self {
            Place::Line(path, n) => format!("{}: line {n} {what}", path.display()),
            Place::Row(path, n) => format!("{}: row {n} (from 0) {what}", path.display()),
            Place::Index(path, i) => format!("{}: element {i} {what}", path.display()),
        })
    }
    /// `value` as a token id, which is in `0..bound`.
    pub fn id(&self, value: Option<i64>, bound: usize) -> Result<u32> {
        match value {
            Some(id) => token_id(id, bound).map_err(|fault| self.error(fault)),
            None => Err(self.error("is no token id: it is above 2^63")),
        }
    }
}

/// How much of a file is looked at to call it text, and how much is read at once.
const CHUNK: usize = 1 << 18;
/// How much of a text without a good place to cut it is held.
const HELD: usize = 1 << 23;

/// Writes every file of `corpus`. What is wrong with the first row that was skipped, if one was.
pub(super) fn read(corpus: &Corpus, recipe: &Recipe, out: &mut Writer) -> Result<Option<String>> {
    let tokenizer = &recipe.tokenizer;
    let (mut chunk, mut ids) = (vec![0u8; CHUNK], Vec::with_capacity(CHUNK));
    let mut first_bad = None;
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
            Kind::Rows | Kind::Parquet => {
                let mut rows = Rows::new(recipe, out);
                match corpus.kind {
                    Kind::Rows => rows.jsonl(&file.path)?,
                    _ => rows.parquet(&file.path)?,
                }
                first_bad = first_bad.or(rows.first_bad);
            }
            Kind::Tokens => npy::read(&file.path, recipe.bound, |ids| out.tokens(ids))?,
        }
        out.files += 1;
        out.bytes += file.size;
    }
    Ok(first_bad)
}

fn unreadable(file: &Source) -> Error {
    let path = file.path.display();
    Error::input(match file.size {
        0 => format!("{path}: the file is empty"),
        _ => format!(
            "{path}: not a text file (a NUL byte or invalid UTF-8 near its start). Text, .jsonl, .parquet and .npy can be read"
        ),
    })
}

/// One file as a document: see [`Tokenizer::around`], then an end-of-text token. False, with nothing written, where the file
/// is not text; an empty file is no text.
///
/// A piece of a long file is tokenized behind the end of the one before it, so that a cut changes no token: it falls behind
/// a line where the next begins with a letter or digit, and words know nothing of the line before.
fn text(path: &Path, tokenizer: &Tokenizer, chunk: &mut [u8], ids: &mut Vec<u32>, out: &mut Writer) -> Result<bool> {
    let mut file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let end = tokenizer.end_of_text()?;
    let (before, behind) = tokenizer.around();
    let (mut held, mut lead, mut first) = (Vec::new(), 0, true);
    loop {
        let n = fill(&mut file, chunk).map_err(|e| Error::io("read", path, e))?;
        let last = n < chunk.len();
        if first && (n == 0 || !is_text(&chunk[..n], !last)) {
            return Ok(false);
        }
        ids.clear();
        if first {
            ids.extend_from_slice(before);
            first = false;
        }
        if let Tokenizer::Bytes = tokenizer {
            ids.extend(chunk[..n].iter().map(|&b| b as u32)); // any bytes, and bytes know no neighbours
        } else {
            held.extend_from_slice(&chunk[..n]);
            let cut = if last { held.len() } else { cut(&held[lead..]).map_or(lead, |at| lead + at) };
            if cut > lead {
                let piece = String::from_utf8_lossy(&held[..cut]);
                // What is not UTF-8 grows: the lead is measured in the text that is tokenized.
                let from = String::from_utf8_lossy(&held[..lead]).len();
                tokenizer.encode_after(&piece, from, ids)?;
                let keep = line_before(&held[..cut]);
                held.drain(..keep);
                lead = cut - keep;
            }
        }
        if last {
            ids.extend_from_slice(behind);
            if ids.last() != Some(&end) {
                ids.push(end);
            }
            out.tokens(ids)?;
            return Ok(true);
        }
        out.tokens(ids)?;
    }
}

/// Behind the last line whose successor begins with a letter or digit. In a text without such lines: nowhere, until so
/// much is held that it is cut anyhow.
fn cut(bytes: &[u8]) -> Option<usize> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b >= 0xc2; // from there on: the first byte of a longer character
    let good = |at: &usize| bytes[*at - 1] == b'\n' && !bytes[*at - 2].is_ascii_whitespace() && word(bytes[*at]);
    let anyhow =
        || (bytes.len() >= HELD).then(|| bytes.iter().rposition(|b| b.is_ascii()).map_or(bytes.len(), |at| at + 1));
    (2..bytes.len()).rev().find(good).or_else(anyhow)
}

/// Where the last line of `bytes` begins, which end behind a line.
fn line_before(bytes: &[u8]) -> usize {
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    body.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1)
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
