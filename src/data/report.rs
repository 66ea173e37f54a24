//! A one-line summary of a data set. Never reads it.
use super::format::{SampleKind, SampleRoom};
use super::recipe::Drop;
use super::source::RowSource;
use super::token_file::Notes;

/// What was found in a data set, for the log and the metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Such as "Rust sources of 85 crates".
    pub what: String,
    pub files: u64,
    /// Files of a directory that were skipped because they are not text.
    pub skipped: u64,
    /// Total size of the files.
    pub bytes: u64,
    pub tokens: u64,
    pub rows: u64,
    /// Rows are individual samples of up to `max_len` tokens, not slices of a stream.
    pub samples: bool,
    /// What a row is.
    pub kind: SampleKind,
    pub max_len: usize,
    /// Rows of more than `max_len` tokens, which were cut.
    pub cut: u64,
    /// Rows that are not trained on, by [`Drop::ALL`].
    pub dropped: [u64; Drop::ALL.len()],
    /// Malformed rows that were skipped.
    pub bad: u64,
    /// The samples of rollouts.
    pub groups: Option<GroupCounts>,
    /// What was noted while reading.
    pub notes: Notes,
    /// This call built the token file; it was not in the cache.
    pub built: bool,
    /// The cache directory that could not be written, and why: each process tokenized for itself.
    pub unkept: Option<String>,
}

/// The samples of groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupCounts {
    pub samples: u64,
    /// Groups of one sample.
    pub alone: u64,
    /// Tokens of the largest group.
    pub largest: usize,
    /// They are drawn while the run trains.
    pub drawn: Option<SampleRoom>,
}

impl GroupCounts {
    /// Counts the samples of the first `rows`.
    pub(super) fn of(source: &RowSource, rows: u64) -> GroupCounts {
        let samples = |row| source.sequences(row, SampleKind::Group) as u64;
        GroupCounts {
            samples: (0..rows).map(samples).sum(),
            alone: (0..rows).filter(|&row| samples(row) == 1).count() as u64,
            largest: (0..rows).map(|row| source.row_len(row, usize::MAX)).max().unwrap_or(0),
            drawn: if let RowSource::Prompts(_, room) = source { Some(*room) } else { None },
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Report { what, files, skipped, bytes, tokens, rows, max_len, cut, dropped, bad, notes, .. } = self;
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        write!(f, "{what}: ")?;
        if *files > 0 {
            write!(f, "{files} file{}, {:.1} MiB, ", plural(*files), *bytes as f64 / (1 << 20) as f64)?;
        }
        match self.samples {
            _ if let Some(GroupCounts { drawn: Some(SampleRoom { samples, longest }), .. }) = self.groups => {
                write!(f, "{tokens} tokens in {rows} prompt{}; ", plural(*rows))?;
                write!(f, "{samples} sample{} of each, of up to {longest} tokens", plural(samples as u64))?;
            }
            _ if let Some(GroupCounts { samples, alone, .. }) = self.groups => {
                write!(f, "{tokens} tokens in {samples} sample{} of up to {max_len} in ", plural(samples))?;
                write!(f, "{rows} group{}", plural(*rows))?;
                if alone > 0 {
                    write!(f, "; {alone} of one sample, whose advantage is 0")?;
                }
            }
            _ if self.kind == SampleKind::Pair => {
                write!(f, "{tokens} tokens in {rows} pair{} of up to {max_len} each", plural(*rows))?
            }
            true => write!(f, "{tokens} tokens in {rows} sample{} of up to {max_len}", plural(*rows))?,
            false => write!(f, "{tokens} tokens in {rows} row{} of {max_len}", plural(*rows))?,
        }
        if *skipped > 0 {
            write!(f, "; {skipped} skipped (not text)")?;
        }
        if *cut > 0 {
            write!(f, "; {cut} longer row{} cut at {max_len} tokens", plural(*cut))?;
        }
        let what = match self.kind {
            SampleKind::Pair => "pair",
            SampleKind::Group if self.groups.is_some_and(|groups| groups.drawn.is_some()) => "prompt",
            SampleKind::Group => "group",
            SampleKind::Tokens | SampleKind::Labeled => "row",
        };
        let all: u64 = dropped.iter().sum();
        if all > 0 {
            let why: Vec<String> = Report::dropped(dropped).collect();
            write!(f, "; {all} {what}{} dropped ({})", plural(all), why.join("; "))?;
        }
        if *bad > 0 {
            write!(f, "; {bad} bad row{} skipped", plural(*bad))?;
        }
        if let Some(first) = &notes.first_bad {
            write!(f, " (the first: {first})")?;
        }
        if !notes.unread.is_empty() {
            let unread = notes.unread.iter().map(|(what, rows)| format!("{what} in {rows} row{}", plural(*rows)));
            write!(f, "; not read: {}", unread.collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

impl Report {
    /// Why rows were dropped, with their numbers.
    pub(super) fn dropped(counts: &[u64; Drop::ALL.len()]) -> impl Iterator<Item = String> {
        let each = Drop::ALL.into_iter().zip(counts).filter(|(_, rows)| **rows > 0);
        each.map(|(why, rows)| format!("{why}: {rows}"))
    }
    /// The sums over several data sets, named `what`.
    pub(super) fn sum<'a>(what: String, parts: impl IntoIterator<Item = &'a Report>) -> Option<Report> {
        let mut parts = parts.into_iter();
        let mut sum = Report { what, ..parts.next()?.clone() };
        for part in parts {
            sum.files += part.files;
            sum.skipped += part.skipped;
            sum.bytes += part.bytes;
            sum.tokens += part.tokens;
            sum.rows += part.rows;
            sum.samples |= part.samples;
            sum.cut += part.cut;
            sum.dropped.iter_mut().zip(part.dropped).for_each(|(sum, part)| *sum += part);
            sum.bad += part.bad;
            if let (Some(sum), Some(part)) = (&mut sum.groups, part.groups) {
                sum.samples += part.samples;
                sum.alone += part.alone;
                sum.largest = sum.largest.max(part.largest);
            }
            sum.notes.first_bad = sum.notes.first_bad.or(part.notes.first_bad.clone());
            for (what, rows) in &part.notes.unread {
                *sum.notes.unread.entry(what.clone()).or_default() += rows;
            }
            sum.built |= part.built;
            sum.unkept = sum.unkept.or(part.unkept.clone());
        }
        Some(sum)
    }
}
