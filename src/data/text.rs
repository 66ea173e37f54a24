//! Reads text files in pieces on one thread and tokenizes them on several, in order. Never holds more than one batch of
//! pieces.

use super::content::{self, failed, fill, is_text};
use super::corpus::{CorpusFile, READ};
use super::kind::FileForm;
use super::token_file::TokenWriter;
use super::tokenizer::Tokenizer;
use crate::base::{Error, Result};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes read at a time, and bytes inspected to decide whether a file is text.
const CHUNK: usize = 1 << 18;
/// Maximum bytes held of a text without a good place to split.
const HELD: usize = 1 << 23;
/// Chunks per thread and batch: enough that waiting for the slowest thread hardly counts.
const EACH: usize = 4;
/// Maximum pieces per batch; files may be small.
const PIECES: usize = 256;

/// Reads text files, one after another, into a token file.
///
/// A file is a document: see [`Tokenizer::affixes`], then an end-of-text token. A piece of a long file is tokenized
/// together with the last line of the piece before it, so that splitting changes no token: a split falls after a line
/// break where the next line begins with a letter or digit, and no pre-tokenizer word reaches further back.
pub(super) struct Texts<'a> {
    tokenizer: &'a Tokenizer,
    out: &'a mut TokenWriter,
    end: u32,
    pub threads: usize,
    chunk: Vec<u8>,
    /// The first `given` are this batch's; the rest are kept for reuse.
    pieces: Vec<TextPiece>,
    given: usize,
    /// Bytes of text in this batch.
    bytes: usize,
}

/// A piece of a file.
#[derive(Default)]
struct TextPiece {
    path: PathBuf,
    text: String,
    /// Where this piece's own tokens begin.
    from: usize,
    /// It begins a document; it ends one.
    first: bool,
    last: bool,
    ids: Vec<u32>,
    failed: Option<Error>,
}

impl TextPiece {
    fn encode(&mut self, tokenizer: &Tokenizer, end: u32) {
        let (_, behind) = tokenizer.affixes();
        self.ids.clear();
        if self.first {
            self.ids.extend_from_slice(tokenizer.before(&self.text));
        }
        if self.text.len() > self.from {
            let encoded = tokenizer.encode_after(&self.text, self.from, &mut self.ids);
            self.failed = encoded.map_err(|e| Error::in_file(&self.path, e)).err();
        }
        if self.last {
            self.ids.extend_from_slice(behind);
            if self.ids.last() != Some(&end) {
                self.ids.push(end);
            }
        }
    }
}

impl<'a> Texts<'a> {
    pub fn new(tokenizer: &'a Tokenizer, out: &'a mut TokenWriter) -> Result<Texts<'a>> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        let (end, chunk) = (tokenizer.end_of_text()?, vec![0u8; CHUNK]);
        Ok(Texts { tokenizer, out, end, threads, chunk, pieces: Vec::new(), given: 0, bytes: 0 })
    }

    /// Reads all files. In a directory, files that are not text are skipped and counted.
    pub fn read(mut self, files: &[CorpusFile]) -> Result<()> {
        for file in files {
            if self.file(file)? {
                self.out.counts.files += 1;
                self.out.counts.bytes += file.size;
            } else if file.named {
                return Err(unreadable(file));
            } else {
                self.out.counts.skipped += 1;
            }
        }
        self.flush()
    }

    /// Reads one file. Returns false, with nothing written, if it is not text or is empty.
    fn file(&mut self, file: &CorpusFile) -> Result<bool> {
        if file.form != FileForm::Text {
            return Ok(false);
        }
        let path = &file.path;
        let mut file: Box<dyn Read> = match file.embedded {
            Some(text) => Box::new(text),
            None => content::open(path)?.file,
        };
        let (mut held, mut lead, mut first) = (Vec::new(), 0, true);
        loop {
            let n = fill(&mut file, &mut self.chunk).map_err(|e| failed(path, e))?;
            let read = &self.chunk[..n];
            let last = n < CHUNK;
            if first && (n == 0 || !is_text(read, !last)) {
                return Ok(false);
            }
            if let Tokenizer::Bytes = self.tokenizer {
                // Byte tokens are independent of their neighbors: widening them is as fast as handing them to a thread.
                let ids = read.iter().map(|&b| b as u32).chain(last.then_some(self.end));
                self.out.tokens(&ids.collect::<Vec<_>>())?;
            } else {
                held.extend_from_slice(read);
                let cut = if last { held.len() } else { cut(&held[lead..]).map_or(lead, |at| lead + at) };
                // Replacing invalid UTF-8 lengthens the text: measure the lead in what is tokenized.
                let from = String::from_utf8_lossy(&held[..lead]).len();
                if cut > lead || first || last {
                    self.give(path, &held[..cut], (from, first, last))?;
                }
                if cut > lead {
                    let keep = line_before(&held[..cut]);
                    held.drain(..keep);
                    lead = cut - keep;
                }
            }
            first = false;
            if last {
                return Ok(true);
            }
        }
    }

    /// Adds a piece; tokenizes the batch when it is full.
    fn give(&mut self, path: &Path, text: &[u8], place: (usize, bool, bool)) -> Result<()> {
        if self.given == self.pieces.len() {
            self.pieces.push(TextPiece::default());
        }
        let piece = &mut self.pieces[self.given];
        piece.text.clear();
        piece.text.push_str(&String::from_utf8_lossy(text));
        piece.path.clear();
        piece.path.push(path);
        (piece.from, piece.first, piece.last) = place;
        self.given += 1;
        self.bytes += text.len();
        let full = self.bytes >= EACH * self.threads * CHUNK || self.given >= PIECES * self.threads;
        if full { self.flush() } else { Ok(()) }
    }

    /// Tokenizes the batch: each thread takes the next free piece; results are written in order.
    fn flush(&mut self) -> Result<()> {
        let pieces = &mut self.pieces[..self.given];
        let (tokenizer, end, threads) = (self.tokenizer, self.end, self.threads.min(pieces.len()));
        let left = Mutex::new(pieces.iter_mut());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || std::iter::from_fn(next).for_each(|piece| piece.encode(tokenizer, end));
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        for piece in pieces {
            piece.failed.take().map_or(Ok(()), Err)?;
            self.out.tokens(&piece.ids)?;
        }
        (self.given, self.bytes) = (0, 0);
        Ok(())
    }
}

fn unreadable(file: &CorpusFile) -> Error {
    let path = file.path.display();
    Error::input(match file.size {
        0 => format!("{path}: the file is empty"),
        _ => format!(
            "{path}: not a text file (NUL byte or invalid UTF-8 near its start). Name {READ} files, or convert it to \
             UTF-8"
        ),
    })
}

/// The position after the last line break that a letter or digit follows. None if there is no such line break, until so
/// much text is held that it is split anyway.
fn cut(bytes: &[u8]) -> Option<usize> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b >= 0xc2; // 0xc2 and above: the first byte of a longer character
    let good = |at: &usize| bytes[*at - 1] == b'\n' && !bytes[*at - 2].is_ascii_whitespace() && word(bytes[*at]);
    let anyhow =
        || (bytes.len() >= HELD).then(|| bytes.iter().rposition(|b| b.is_ascii()).map_or(bytes.len(), |at| at + 1));
    (2..bytes.len()).rev().find(good).or_else(anyhow)
}

/// Start of the last line of `bytes`, which end with a line break.
fn line_before(bytes: &[u8]) -> usize {
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    body.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::cache::{self, Cache};
    use crate::data::token_file::TokenFile;

    /// Any number of threads writes the same words; the file's hash shows it.
    #[test]
    fn threads_change_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let line =
            "it won't be the 1,000,000th time, na\u{ef}ve \u{6f22}\u{5b57}\n\n    print(f'{i} of {argc}')\nThe fox\n";
        let texts = [
            line.repeat(12_000),
            "x".into(),
            line.repeat(3),
            "lazy dog ".repeat(60_000),
            "\0".into(),
            line.repeat(4000),
        ];
        let put = |(i, text): (usize, &String)| {
            let path = dir.path().join(format!("{i}.txt"));
            std::fs::write(&path, text).unwrap();
            CorpusFile {
                path,
                size: text.len() as u64,
                version: [0; 5],
                named: false,
                embedded: None,
                slice: None,
                form: FileForm::Text,
            }
        };
        let files: Vec<CorpusFile> = texts.iter().enumerate().map(put).collect();
        for name in ["byte_level", "sentencepiece"] {
            let golden = format!("{}/tests/data/golden/{name}/tokenizer.json", env!("CARGO_MANIFEST_DIR"));
            let tokenizer = Tokenizer::load(Path::new(&golden)).unwrap();
            let built = |threads: usize| -> TokenFile {
                let to = dir.path().join(format!("{name}-{threads}"));
                let build = |out: &mut TokenWriter| Texts { threads, ..Texts::new(&tokenizer, out)? }.read(&files);
                cache::open(&Cache::at(to), 1, tokenizer.vocab(), build).unwrap().file
            };
            let alone = built(1);
            assert_eq!((alone.counts().files, alone.counts().skipped), (5, 1));
            for threads in [2, 3, 8] {
                let several = built(threads);
                assert_eq!((several.words(), several.content()), (alone.words(), alone.content()), "{name}, {threads}");
            }
        }
    }
}
