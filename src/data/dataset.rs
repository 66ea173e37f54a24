//! A source of numbered rows of at most `max_len` tokens. Never knows batches, ranks or the order in which rows are
//! asked for.
use super::cache::{self, Cache, Opened};
use super::corpus::{Corpus, CorpusKind};
use super::format::Format;
use super::reader;
use super::recipe::Recipe;
use super::synthetic::Synthetic;
use super::token_file::{self, TokenCounts, TokenFile};
use super::tokenizer::Tokenizer;
use crate::base::{Error, Result};
use crate::device::IGNORE;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Files and directories, or the one word `synthetic`. Empty: the default corpus.
    pub paths: Vec<PathBuf>,
    pub tokenizer: Tokenizer,
    /// Of files of rows.
    pub format: Format,
    /// Of the model: ids are below it.
    pub vocab: usize,
    /// Tokens of a row.
    pub max_len: usize,
    /// At most this many rows, the first ones.
    pub max_samples: Option<u64>,
    /// Chooses the synthetic task.
    pub seed: u64,
    pub cache: Cache,
    /// Where cargo keeps its registry, for the default corpus.
    pub cargo_home: Option<PathBuf>,
}

/// What was found, for people and for the metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// "Rust sources of 85 crates"
    pub what: String,
    pub files: u64,
    /// Files of a directory that were left out because they are no text.
    pub skipped: u64,
    /// Size of the files.
    pub bytes: u64,
    pub tokens: u64,
    pub rows: u64,
    /// Rows are samples that were given one by one, of up to `max_len` tokens, not cut out of a stream.
    pub samples: bool,
    pub max_len: usize,
    /// Rows of more than `max_len` tokens: their ends are not trained on.
    pub cut: u64,
    /// Rows whose prompt leaves no room for a response, or that have none: left out.
    pub dropped: u64,
    /// Rows that were no rows: left out.
    pub bad: u64,
    /// What is wrong with the first of them, where the token file was made just now.
    pub first_bad: Option<String>,
    /// The token file was made just now, not found.
    pub built: bool,
    /// The cache that could not be written, and why: each process has made the tokens for itself.
    pub unkept: Option<String>,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Report { what, files, skipped, bytes, tokens, rows, max_len, cut, dropped, bad, first_bad, .. } = self;
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        write!(f, "{what}: ")?;
        if *files > 0 {
            write!(f, "{files} file{}, {:.1} MiB, ", plural(*files), *bytes as f64 / (1 << 20) as f64)?;
        }
        match self.samples {
            true => write!(f, "{tokens} tokens in {rows} sample{} of up to {max_len}", plural(*rows))?,
            false => write!(f, "{tokens} tokens in {rows} row{} of {max_len}", plural(*rows))?,
        }
        if *skipped > 0 {
            write!(f, "; {skipped} skipped, no text")?;
        }
        if *cut > 0 {
            let (are, were) = if *cut == 1 { ("is", "was") } else { ("are", "were") };
            write!(f, "; {cut} row{} {are} longer and {were} cut", plural(*cut))?;
        }
        if *dropped > 0 {
            write!(
                f,
                "; {dropped} row{} dropped: the prompt leaves no room for a response, or there is none",
                plural(*dropped)
            )?;
        }
        if *bad > 0 {
            write!(f, "; {bad} bad row{} skipped", plural(*bad))?;
        }
        if let Some(first) = first_bad {
            write!(f, " (the first: {first})")?;
        }
        Ok(())
    }
}

enum RowSource {
    /// Row r is tokens `r * max_len..=(r + 1) * max_len`: neighbours share one token, an input here and a target there.
    Stream(TokenFile),
    Rows(TokenFile),
    Synthetic(Synthetic),
}

pub struct Dataset {
    source: RowSource,
    max_len: usize,
    report: Report,
    fingerprint: u64,
}

impl Dataset {
    /// Finds the files, and builds their token file unless the cache has it. Ranks may all call this at once.
    ///
    /// Errors are [`Error::Input`] where the data is at fault: a path that is not there, no text, a malformed row, an
    /// id that the model does not have.
    pub fn open(options: &DataOptions) -> Result<Dataset> {
        let DataOptions { paths, tokenizer, format, vocab, max_len, max_samples, seed, cache, cargo_home } = options;
        format.check()?;
        if format.learns_responses() {
            tokenizer.end_of_text()?;
        }
        if format.reads_text() {
            tokenizer.check_vocab(*vocab)?;
        }
        let tokenizer = &tokenizer.for_model(*vocab);
        if *max_len == 0 {
            return Err(Error::input("max_len is 0: a sequence has at least 1 token"));
        }
        if let Some(0) = max_samples {
            return Err(Error::input("max_samples is 0: nothing would be left to train on"));
        }
        let limit = max_samples.unwrap_or(u64::MAX);
        if paths.iter().any(|p| p == Path::new("synthetic")) {
            if paths.len() > 1 {
                return Err(Error::input("`dataset: synthetic` does not mix with files: pass it alone"));
            }
            refuse_row_settings(&format.row_settings(), "synthetic", "is a stream of tokens")?;
            return Dataset::synthetic(Synthetic::new(*vocab, *seed)?, *max_len, limit);
        }
        let corpus = match paths.is_empty() {
            true => Corpus::default(cargo_home.as_deref())?,
            false => Corpus::find(paths)?,
        };
        if !corpus.kind.is_rows() {
            let what = if corpus.kind == CorpusKind::Text { "is text" } else { "is an array of tokens" };
            refuse_row_settings(&format.row_settings(), &corpus.what, what)?;
        }
        if corpus.kind == CorpusKind::Text {
            tokenizer.usable()?;
        }
        // Tokens that we make ourselves fit any vocabulary that is large enough: one file serves them all.
        let bound = if corpus.kind == CorpusKind::Text { tokenizer.vocab() } else { *vocab };
        let recipe = Recipe { format: format.clone(), tokenizer: tokenizer.clone(), bound, max_len: *max_len };
        let mut first_bad = None;
        let Opened { file, built, unkept } = cache::open(cache, key(&corpus, &recipe), bound, |out| {
            first_bad = reader::read(&corpus, &recipe, out)?;
            Ok(())
        })?;
        let is_rows = corpus.kind.is_rows();
        let rows = if is_rows { file.rows() } else { file.words().saturating_sub(1) / *max_len as u64 };
        if rows == 0 {
            return Err(nothing(&corpus, &file, *max_len, first_bad));
        }
        let rows = rows.min(limit);
        let TokenCounts { files, skipped, bytes, dropped, bad } = file.counts();
        let report = Report {
            what: corpus.what,
            files,
            skipped,
            bytes,
            tokens: if is_rows { (0..rows).map(|r| file.row_len(r) as u64).sum() } else { file.words() },
            rows,
            samples: is_rows,
            max_len: *max_len,
            cut: if is_rows { (0..rows).filter(|&r| file.row_len(r) > *max_len).count() as u64 } else { 0 },
            dropped,
            bad,
            first_bad,
            built,
            unkept,
        };
        let fingerprint = file.content();
        let source = if is_rows { RowSource::Rows(file) } else { RowSource::Stream(file) };
        Ok(Dataset { source, max_len: *max_len, report, fingerprint })
    }

    fn synthetic(task: Synthetic, max_len: usize, limit: u64) -> Result<Dataset> {
        let rows = limit.min(Synthetic::ROWS);
        let report = Report {
            what: format!("synthetic Markov chain (no model gets below a loss of {:.4})", Synthetic::FLOOR),
            files: 0,
            skipped: 0,
            bytes: 0,
            tokens: rows * max_len as u64,
            rows,
            samples: false,
            max_len,
            cut: 0,
            dropped: 0,
            bad: 0,
            first_bad: None,
            built: false,
            unkept: None,
        };
        let fingerprint = task.fingerprint();
        Ok(Dataset { source: RowSource::Synthetic(task), max_len, report, fingerprint })
    }

    pub fn rows(&self) -> u64 {
        self.report.rows
    }
    pub fn max_len(&self) -> usize {
        self.max_len
    }
    pub fn report(&self) -> &Report {
        &self.report
    }
    /// Equal for equal tokens, on any machine: tells a resumed run that its data is not what it was.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
    /// The same, as checkpoints keep it.
    pub fn fingerprint_text(&self) -> String {
        format!("{:016x}", self.fingerprint)
    }
    /// The loss that no model can beat, in nats a token, where it is known.
    pub fn loss_floor(&self) -> Option<f64> {
        matches!(self.source, RowSource::Synthetic(_)).then_some(Synthetic::FLOOR)
    }
    /// An input error where one of `settings`, which have an effect on rows alone, is given and there are none.
    pub fn check_row_settings(&self, settings: &[(&str, bool)]) -> Result<()> {
        match self.source {
            RowSource::Rows(_) => Ok(()),
            _ => refuse_row_settings(settings, &self.report.what, "has no rows"),
        }
    }
    /// Rows were given by the user one by one, not cut out of a stream.
    pub fn has_rows_of_its_own(&self) -> bool {
        matches!(self.source, RowSource::Rows(_))
    }

    /// Tokens of `row`, at most `max_len`. `row` is below [`Dataset::rows`].
    pub fn row_len(&self, row: u64) -> usize {
        match &self.source {
            RowSource::Rows(file) => file.row_len(row).min(self.max_len),
            RowSource::Stream(_) | RowSource::Synthetic(_) => self.max_len,
        }
    }
    /// Writes `row` into `tokens` and `targets`, each [`Dataset::row_len`] long. `targets[t]` is what position t
    /// predicts.
    pub fn fill(&self, row: u64, tokens: &mut [u32], targets: &mut [i32]) {
        let max = self.max_len;
        match &self.source {
            RowSource::Stream(file) => {
                let start = row * max as u64;
                file.range(start, max).ids(tokens);
                file.range(start + 1, max).targets(targets);
            }
            RowSource::Synthetic(task) => {
                let after = task.fill(row, tokens);
                shift(tokens, after, targets);
            }
            RowSource::Rows(file) => {
                let len = tokens.len();
                let (ids, labels) = file.row(row);
                ids.first(len).ids(tokens);
                let labels = labels.after_first(len);
                labels.targets(&mut targets[..labels.len()]);
                targets[labels.len()..].fill(IGNORE);
            }
        }
    }
}

/// `targets[t] = tokens[t + 1]`, and `after` for the last.
fn shift(tokens: &[u32], after: u32, targets: &mut [i32]) {
    let next = tokens[1..].iter().copied().chain([after]);
    targets.iter_mut().zip(next).for_each(|(target, next)| *target = next as i32);
}

/// What a token file is made of: the same key, the same file.
fn key(corpus: &Corpus, recipe: &Recipe) -> u64 {
    let mut hash = Xxh3::new();
    let Recipe { format, tokenizer, bound, max_len } = recipe;
    let made_by = (token_file::VERSION, corpus.kind, tokenizer.fingerprint(), bound);
    hash.update(format!("{made_by:?}\n").as_bytes());
    if corpus.kind.is_rows() {
        hash.update(format!("{format:?} {max_len}\n").as_bytes());
    }
    for file in &corpus.files {
        hash.update(file.path.as_os_str().as_encoded_bytes());
        hash.update(format!("\0{} {} {}\n", file.size, file.modified, file.named).as_bytes());
    }
    hash.digest()
}

/// An input error where a setting is given that has an effect on rows alone, of data without rows.
fn refuse_row_settings(settings: &[(&str, bool)], what: &str, is: &str) -> Result<()> {
    match settings.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((setting, _)) => Err(Error::input(format!(
            "`{setting}` has no effect here: `dataset` {what} {is}. Rows are .jsonl, .parquet, and .json that is an array \
             of objects; remove `{setting}` or name such files"
        ))),
    }
}

fn nothing(corpus: &Corpus, file: &TokenFile, max_len: usize, first_bad: Option<String>) -> Error {
    let what = &corpus.what;
    let TokenCounts { files, skipped, dropped, bad, .. } = file.counts();
    Error::input(match (corpus.kind, files) {
        (kind, _) if kind.is_rows() => match (dropped, bad) {
            (0, 0) => format!("`dataset` {what}: no rows, the file is empty"),
            (dropped, 0) => format!(
                "`dataset` {what}: none of its {dropped} rows leaves room for a response within max_len {max_len}: raise \
                 `max_len`"
            ),
            (dropped, bad) => format!(
                "`dataset` {what}: no rows are left; {bad} bad ones were skipped{} and {dropped} dropped",
                first_bad.map_or(String::new(), |first| format!(" (the first: {first})"))
            ),
        },
        (_, 0) => format!(
            "`dataset` {what}: no readable text in {skipped} files (binary or empty). Text, .jsonl, .json, .parquet and \
             .npy can be read"
        ),
        _ => format!(
            "`dataset` {what}: {} tokens are not enough for one row of max_len {max_len}, which takes {}. Pass more text or \
             a smaller `max_len`",
            file.words(),
            max_len + 1
        ),
    })
}
