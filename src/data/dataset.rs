//! Numbered rows of at most `max_len` tokens. Never knows batches, ranks or the order in which rows are consumed.
use super::batch::Recorded;
use super::blend::Blend;
use super::cache::{self, Cache, Opened};
use super::corpus::{Corpus, CorpusKind, READ};
use super::format::{Format, Preferences, SampleKind};
use super::mismatched::Mismatched;
use super::reader::{self, RowFiles};
use super::recipe::{Drop, Recipe};
use super::report::{GroupCounts, Report};
use super::shapes::{GROUP_KEYS, PROMPT_KEYS};
use super::source::RowSource;
use super::synthetic::Synthetic;
use super::token_file::{self, Notes, TokenCounts, TokenFile, TokenWriter};
use super::tokenizer::Tokenizer;
use crate::base::{Error, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

#[derive(Clone, Debug)]
pub struct DataOptions {
    /// Files and directories, or the single word `synthetic`. Empty: the default corpus.
    pub paths: Vec<PathBuf>,
    pub tokenizer: Tokenizer,
    /// For files of rows.
    pub format: Format,
    /// The model's vocabulary size; ids are below it.
    pub vocab: usize,
    /// Tokens per sequence. A row is one; a pair is two.
    pub max_len: usize,
    /// Use only the first rows, at most this many.
    pub max_samples: Option<u64>,
    /// Selects the synthetic task.
    pub seed: u64,
    pub cache: Cache,
    /// Location of cargo's registry, for the default corpus.
    pub cargo_home: Option<PathBuf>,
}

/// Rows of one data set, or of several mixed by weight.
pub struct Dataset {
    sources: Vec<DataSource>,
    /// Set for a mixture.
    blend: Option<Arc<Blend>>,
    /// Tokens per sequence.
    max_len: usize,
    /// Tokens of the largest group; 0 without groups.
    largest: usize,
    /// What a row is.
    kind: SampleKind,
    report: Report,
    fingerprint: u64,
}

struct DataSource {
    rows: RowSource,
    /// The numbers of its rows within the data set, where sources are concatenated.
    numbers: Range<u64>,
    report: Report,
}

impl Dataset {
    /// The files to read and how; None for generated data. Refuses settings that do not fit.
    pub(super) fn find(options: &DataOptions) -> Result<Option<(Corpus, Recipe)>> {
        let DataOptions { paths, tokenizer, format, vocab, max_len, max_samples, cargo_home, .. } = options;
        format.check()?;
        if format.learns_responses() || format.join_rows {
            tokenizer.end_of_text()?;
        }
        if format.reads_text() {
            tokenizer.check_vocab(*vocab)?;
        }
        let tokenizer = &tokenizer.for_model(*vocab);
        if *max_len == 0 {
            return Err(Error::input("max_len is 0; it must be at least 1"));
        }
        if let Some(0) = max_samples {
            return Err(Error::input("max_samples is 0; it must be at least 1"));
        }
        if paths.iter().any(|p| p == Path::new("synthetic")) {
            if paths.len() > 1 {
                return Err(Error::input("`dataset: synthetic` cannot be combined with files: name it alone"));
            }
            refuse_row_settings(&format.row_settings(), "synthetic", "is a stream of tokens")?;
            refuse_preferences(format, "synthetic", "is a stream of tokens")?;
            return Ok(None);
        }
        let corpus = match paths.is_empty() {
            true => Corpus::default(cargo_home.as_deref())?,
            false => Corpus::find(paths)?,
        };
        if let Some(doubt) = corpus.doubt.as_ref().filter(|_| !format.pretrain_mode) {
            return Err(Error::input(doubt));
        }
        if !corpus.kind.is_rows() {
            let what = if corpus.kind == CorpusKind::Text { "is text" } else { "is an array of tokens" };
            // `pretrain_mode` says that it is text.
            let is_said = |name: &str| corpus.doubt.is_some() && name == "pretrain_mode";
            let settings = format.row_settings().map(|(name, given)| (name, given && !is_said(name)));
            refuse_row_settings(&settings, &corpus.what, what)?;
            refuse_preferences(format, &corpus.what, what)?;
        }
        if corpus.kind == CorpusKind::Text {
            tokenizer.usable()?;
        }
        // Our own tokens fit any vocabulary that is large enough, so one file serves all such models.
        let bound = if corpus.kind == CorpusKind::Text { tokenizer.vocab() } else { *vocab };
        let recipe = Recipe { format: format.clone(), tokenizer: tokenizer.clone(), bound, max_len: *max_len };
        Ok(Some((corpus, recipe)))
    }

    /// Finds the files, and builds their token file unless it is cached. All ranks may call this at the same time.
    ///
    /// [`Error::Input`] if the data is at fault: a missing path, no text, a malformed row, or an id the model does not
    /// have.
    pub fn open(options: &DataOptions) -> Result<Dataset> {
        let DataOptions { format, vocab, max_len, max_samples, seed, cache, .. } = options;
        let limit = max_samples.unwrap_or(u64::MAX);
        let Some((corpus, recipe)) = Dataset::find(options)? else {
            return Dataset::synthetic(Synthetic::new(*vocab, *seed)?, *max_len, limit);
        };
        let read = |out: &mut TokenWriter| reader::read(&corpus, &recipe, out);
        let Opened { file, built, unkept } = cache::open(cache, key(&corpus, &recipe), recipe.bound, read)?;
        let is_rows = corpus.kind.is_rows() && !format.join_rows;
        let rows = if is_rows { file.rows() } else { file.words().saturating_sub(1) / *max_len as u64 };
        if rows == 0 {
            return Err(nothing(&corpus, &file, *max_len));
        }
        let (rows, kind) = (rows.min(limit), format.sample());
        if kind == SampleKind::Labeled && rows == 1 {
            return Err(Error::input(format!(
                "`dataset` {}: has one row, but the KL divergence is estimated with the answers of other rows: add rows",
                corpus.what
            )));
        }
        let TokenCounts { files, skipped, bytes, dropped, bad, cut } = file.counts();
        let (notes, fingerprint, words) = (file.notes().clone(), file.content(), file.words());
        let source = match is_rows {
            true if let Some(Preferences::Prompts(room)) = format.preferences => RowSource::Prompts(file, room),
            true if kind == SampleKind::Group => RowSource::Groups(file),
            true if format.has_numbers() => RowSource::Numbered(file),
            true => RowSource::Rows(file),
            false => RowSource::Stream(file),
        };
        // A pair's two sequences are as long as one row of twice the length.
        let len = |row| source.stored_len(row);
        let groups = (kind == SampleKind::Group).then(|| GroupCounts::of(&source, rows));
        let report = Report {
            what: corpus.what,
            files,
            skipped,
            bytes,
            tokens: if is_rows { (0..rows).map(|row| len(row) as u64).sum() } else { words },
            rows,
            samples: is_rows,
            kind,
            max_len: *max_len,
            cut,
            dropped,
            bad,
            groups,
            notes,
            built,
            unkept,
        };
        let dataset = Dataset::of(source, *max_len, report, fingerprint);
        Ok(Dataset { kind, largest: groups.map_or(0, |groups| groups.largest), ..dataset })
    }

    fn synthetic(task: Synthetic, max_len: usize, limit: u64) -> Result<Dataset> {
        let rows = limit.min(Synthetic::ROWS);
        let report = Report {
            what: format!("synthetic Markov chain (minimum loss {:.4})", Synthetic::FLOOR),
            files: 0,
            skipped: 0,
            bytes: 0,
            tokens: rows * max_len as u64,
            rows,
            samples: false,
            kind: SampleKind::Tokens,
            max_len,
            cut: 0,
            dropped: Default::default(),
            bad: 0,
            groups: None,
            notes: Notes::default(),
            built: false,
            unkept: None,
        };
        let fingerprint = task.fingerprint();
        Ok(Dataset::of(RowSource::Synthetic(task), max_len, report, fingerprint))
    }

    fn of(rows: RowSource, max_len: usize, report: Report, fingerprint: u64) -> Dataset {
        let source = DataSource { rows, numbers: 0..report.rows, report: report.clone() };
        let kind = SampleKind::Tokens;
        Dataset { sources: vec![source], blend: None, max_len, largest: 0, kind, report, fingerprint }
    }

    /// Mixes data sets by weight; see [Note: blends] and [Note: epochs]. Each was opened with the same `max_len` and
    /// none is itself a mixture. A single data set is returned unchanged.
    pub fn mix(parts: Vec<(Dataset, f64)>) -> Result<Dataset> {
        let (mut parts, weights): (Vec<Dataset>, Vec<f64>) = parts.into_iter().unzip();
        let blend = Blend::new(&weights)?;
        match (parts.pop(), parts.is_empty()) {
            (Some(alone), true) => return Ok(alone),
            (last, _) => parts.extend(last),
        }
        let named = parts.iter().enumerate().map(|(i, part)| {
            let percent = (blend.share(i) * 1e4).round() / 1e2;
            format!("{percent} % {}", part.report.what)
        });
        let what = format!("mixture of {}", named.collect::<Vec<_>>().join(", "));
        if parts.iter().any(|part| part.blend.is_some()) {
            return Err(Error::op("mix", "a part is itself a mixture"));
        }
        let nothing = || Error::input("a mixture of no data sets");
        let report = Report::sum(what, parts.iter().map(|part| &part.report)).ok_or_else(nothing)?;
        let (mut hash, mut sources, mut first) = (Xxh3::new(), Vec::new(), 0);
        let (max_len, kind) = (parts[0].max_len, parts[0].kind);
        if parts.iter().any(|part| part.max_len != max_len) {
            return Err(Error::op("mix", "parts were opened with different lengths"));
        }
        let largest = parts.iter().map(|part| part.largest).max().unwrap_or(0);
        for part in parts {
            hash.update(format!("{:016x} {}\n", part.fingerprint, part.report.rows).as_bytes());
            for source in part.sources {
                let numbers = first..first + source.report.rows;
                first = numbers.end;
                sources.push(DataSource { numbers, ..source });
            }
        }
        Ok(Dataset {
            sources,
            blend: Some(Arc::new(blend)),
            max_len,
            largest,
            kind,
            report,
            fingerprint: hash.digest(),
        })
    }
    /// Whether the files at `paths` are read only as `pretrain_mode` says: as text, though they look like data.
    pub fn looks_like_data(paths: &[PathBuf]) -> bool {
        Corpus::find(paths).is_ok_and(|corpus| corpus.doubt.is_some())
    }
    /// Whether the files at `paths` hold rows.
    pub fn holds_rows(paths: &[PathBuf]) -> bool {
        Corpus::find(paths).is_ok_and(|corpus| corpus.kind.is_rows())
    }

    pub fn rows(&self) -> u64 {
        self.report.rows
    }
    /// Maximum tokens of a row.
    pub fn max_len(&self) -> usize {
        self.largest.max(self.max_len * self.kind.sequences())
    }
    /// Tokens of the largest group; 0 without groups.
    pub fn largest_group(&self) -> usize {
        self.largest
    }
    /// Rows are prompts whose samples are drawn while the run trains.
    pub fn draws_samples(&self) -> bool {
        self.report.groups.is_some_and(|groups| groups.drawn.is_some())
    }
    /// What a row is.
    pub fn kind(&self) -> SampleKind {
        self.kind
    }
    /// Maximum tokens of a sequence.
    pub fn max_sequence(&self) -> usize {
        self.max_len
    }
    /// The tokens of its longest sequence.
    pub fn longest_sequence(&self) -> usize {
        let of = |DataSource { rows, numbers, .. }: &DataSource| match rows.has_rows() {
            true => {
                (0..numbers.end - numbers.start).map(|row| rows.longest_sequence(row, self.kind, self.max_len())).max()
            }
            false => Some(self.max_len()),
        };
        self.sources.iter().filter_map(of).max().unwrap_or(0)
    }
    /// Lowers the maximum tokens of a sequence to `max_len`, which none exceeds: text has the length that it was opened
    /// with.
    pub fn shrink(&mut self, max_len: usize) {
        self.max_len = max_len;
        let reports = self.sources.iter_mut().map(|source| &mut source.report).chain([&mut self.report]);
        reports.for_each(|report| report.max_len = max_len);
    }
    /// The report is of the files that this was made from. Rows of `bad` were skipped: how many, and what the first is.
    /// `unread`: what nothing reads, and in how many rows.
    pub fn made_from(mut self, made: &RowFiles, bad: (u64, Option<&String>), unread: Option<(String, u64)>) -> Dataset {
        for report in self.sources.iter_mut().map(|source| &mut source.report).chain([&mut self.report]) {
            report.what.clone_from(&made.what);
            (report.files, report.bytes, report.bad) = (made.files, made.bytes, bad.0);
            report.notes.first_bad = bad.1.cloned();
            report.notes.unread.extend(unread.clone());
        }
        self
    }
    pub fn report(&self) -> &Report {
        &self.report
    }
    /// Equal for equal tokens, on any machine: detects that the data changed between a run and its resumption.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
    /// The fingerprint as stored in checkpoints.
    pub fn fingerprint_text(&self) -> String {
        format!("{:016x}", self.fingerprint)
    }
    /// For a mixture, the report of each source and its share of the samples; empty for a single source.
    pub fn sources(&self) -> impl Iterator<Item = (&Report, f64)> {
        let blend = self.blend.iter();
        blend.flat_map(|blend| self.sources.iter().enumerate().map(move |(i, s)| (&s.report, blend.share(i))))
    }
    /// The source of each sample of a mixture.
    pub(super) fn blend(&self) -> Option<&Arc<Blend>> {
        self.blend.as_ref()
    }
    /// For a mixture, samples of each source per period.
    pub fn shares(&self) -> Option<&[u64]> {
        self.blend.as_ref().map(|blend| blend.shares())
    }
    /// The row numbers of each source, and whether its rows are individual samples.
    pub(super) fn numbers(&self) -> impl Iterator<Item = (Range<u64>, bool)> {
        self.sources.iter().map(|source| (source.numbers.clone(), source.rows.has_rows()))
    }
    pub(super) fn source_of(&self, row: u64) -> usize {
        self.sources.partition_point(|source| source.numbers.end <= row)
    }
    /// The minimum loss, in nats per token, if it is known.
    pub fn loss_floor(&self) -> Option<f64> {
        self.sources.iter().all(|s| matches!(s.rows, RowSource::Synthetic(_))).then_some(Synthetic::FLOOR)
    }
    /// [`Error::Input`] if one of `settings`, which apply only to rows, is given and the data has none.
    pub fn check_row_settings(&self, settings: &[(&str, bool)]) -> Result<()> {
        match self.has_rows_of_its_own() {
            true => Ok(()),
            false => refuse_row_settings(settings, &self.report.what, "has no rows"),
        }
    }
    /// Some rows are individual samples, not slices of a stream.
    pub fn has_rows_of_its_own(&self) -> bool {
        self.sources.iter().any(|source| source.rows.has_rows())
    }
    /// The last row that was sliced from a stream, if there is one.
    pub fn last_of_a_stream(&self) -> Option<u64> {
        let streams = self.sources.iter().filter(|source| matches!(source.rows, RowSource::Stream(_)));
        streams.map(|source| source.numbers.end - 1).next_back()
    }

    /// Tokens of `row`, at most `max_len`. `row` is below [`Dataset::rows`].
    pub fn row_len(&self, row: u64) -> usize {
        let source = &self.sources[self.source_of(row)];
        source.rows.row_len(row - source.numbers.start, self.max_len())
    }
    /// Sequences of `row`.
    pub(super) fn sequences(&self, row: u64) -> usize {
        let source = &self.sources[self.source_of(row)];
        source.rows.sequences(row - source.numbers.start, self.kind)
    }
    /// Appends what was recorded with the group of `row`, whose `targets` are given.
    pub(super) fn record(&self, row: u64, targets: &[i32], out: &mut Recorded) {
        let source = &self.sources[self.source_of(row)];
        source.rows.record(row - source.numbers.start, targets, out);
    }
    /// The number of `row` ([`super::MicroBatch::numbers`]), where rows have one.
    pub fn number(&self, row: u64) -> Option<f32> {
        let source = &self.sources[self.source_of(row)];
        source.rows.number(row - source.numbers.start)
    }
    /// Tokens that a packed sequence reserves for `row`: those of its longer form, with its own answer or another's.
    pub fn row_room(&self, row: u64) -> usize {
        self.mismatched(row).map_or(0, |mismatched| mismatched.len).max(self.row_len(row))
    }
    /// The prompt of labeled `row` with another row's answer; None if rows are not labeled.
    pub(super) fn mismatched(&self, row: u64) -> Option<Mismatched<'_>> {
        let DataSource { rows, numbers, .. } = &self.sources[self.source_of(row)];
        let labeled = (self.kind == SampleKind::Labeled).then_some(rows)?;
        Mismatched::of(labeled, row - numbers.start, numbers.end - numbers.start, self.max_len())
    }
    /// Writes `row` into `tokens` and `targets`, each [`Dataset::row_len`] long. `targets[t]` is the token after
    /// position t.
    pub fn fill(&self, row: u64, tokens: &mut [u32], targets: &mut [i32]) {
        let source = &self.sources[self.source_of(row)];
        source.rows.fill(row - source.numbers.start, self.max_len(), tokens, targets);
    }
}

/// Identifies a token file: equal keys, equal files.
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
        hash.update(format!("\0{} {:?} {} {:?}\n", file.size, file.version, file.named, file.slice).as_bytes());
    }
    hash.digest()
}

/// [`Error::Input`] if a setting that applies only to rows is given for data without rows.
fn refuse_row_settings(settings: &[(&str, bool)], what: &str, is: &str) -> Result<()> {
    match settings.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((setting, _)) => Err(Error::input(format!(
            "`{setting}` has no effect here: `dataset` {what} {is}. It applies to rows only (.jsonl, .parquet, or \
             .json arrays of objects): remove `{setting}` or name such files"
        ))),
    }
}

fn refuse_preferences(format: &Format, what: &str, is: &str) -> Result<()> {
    let (has, keys) = match &format.preferences {
        None => return Ok(()),
        Some(Preferences::Pairs(keys)) => {
            ("pairs", format!("`{}`, `{}` and `{}`", keys.prompt, keys.chosen, keys.rejected))
        }
        Some(Preferences::Labels(keys)) => {
            ("labeled answers", format!("`{}`, `{}` and `{}`", keys.prompt, keys.completion, keys.label))
        }
        Some(Preferences::Prompts(_)) => ("prompts", PROMPT_KEYS.map(|key| format!("`{key}`")).join(" and ")),
        Some(Preferences::Rollouts) => ("rollouts", GROUP_KEYS.map(|key| format!("`{key}`")).join(" and ")),
    };
    Err(Error::input(format!(
        "`dataset` {what} {is}, which has no {has}. Name rows (.jsonl, .parquet, or .json arrays of objects) with {keys}"
    )))
}

/// What is wrong with rows of which there are none.
pub(super) fn no_rows(corpus: &Corpus) -> String {
    let empty = if corpus.files.iter().any(|file| file.slice.is_some()) { "slice" } else { "file" };
    format!("`dataset` {}: no rows: the {empty} is empty", corpus.what)
}

fn nothing(corpus: &Corpus, file: &TokenFile, max_len: usize) -> Error {
    let what = &corpus.what;
    let TokenCounts { files, skipped, dropped, bad, .. } = file.counts();
    Error::input(match (corpus.kind, files) {
        (kind, _) if kind.is_rows() => {
            let room = dropped[Drop::NoRoom as usize];
            let all: u64 = dropped.iter().sum::<u64>() + bad;
            let mut why: Vec<String> = Report::dropped(&dropped).collect();
            if bad > 0 {
                let first =
                    file.notes().first_bad.as_ref().map_or(String::new(), |first| format!(" (the first: {first})"));
                why.push(format!("{bad} bad and skipped{first}"));
            }
            let long = room + dropped[Drop::TooLong as usize] > 0;
            let more = if long { ". Increase `max_len`" } else { "" };
            match all {
                0 if file.words() > 0 => too_short(corpus, file, max_len),
                0 => no_rows(corpus),
                _ if room == all => format!(
                    "`dataset` {what}: none of its {all} rows leaves room for a response within max_len {max_len}. \
                     Increase `max_len`"
                ),
                _ => format!(
                    "`dataset` {what}: none of its {all} rows can be trained on with max_len {max_len}: {}{more}",
                    why.join("; ")
                ),
            }
        }
        (_, 0) => format!("`dataset` {what}: no readable text in {skipped} files (binary or empty). Name {READ} files"),
        _ => too_short(corpus, file, max_len),
    })
}

fn too_short(corpus: &Corpus, file: &TokenFile, max_len: usize) -> String {
    format!(
        "`dataset` {}: {} tokens are fewer than the {} needed for one row of max_len {max_len}. Add text or reduce \
         `max_len`",
        corpus.what,
        file.words(),
        max_len + 1
    )
}
