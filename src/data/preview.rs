//! The first samples of a data set, as they will be trained on before packing. Never keeps a token file of rows.
use super::batch::Recorded;
use super::dataset::{DataOptions, Dataset, no_rows};
use super::format::{Preferences, SampleKind};
use super::groups::{self, GroupEnd, ROW_NUMBER};
use super::reader;
use super::recipe::{Drop, TokenizedRow};
use super::rows::{RowSink, RowUse};
use super::words::{NUMBER, number};
use crate::base::{Error, Result};
use crate::device::IGNORE;
use std::collections::BTreeSet;

/// A sequence of a sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreviewSequence {
    pub ids: Vec<u32>,
    /// One for each of `ids`, not shifted.
    pub labels: Vec<i32>,
    pub cut: bool,
}

/// A row of a data set.
#[derive(Clone, Debug, PartialEq)]
pub enum PreviewRow {
    Sample(PreviewSequence),
    /// A chosen and a rejected answer.
    Pair([PreviewSequence; 2]),
    /// An answer, and whether it is desirable.
    Labeled(PreviewSequence, bool),
    /// A prompt from which samples will be drawn, and the number of its row.
    Prompt(PreviewSequence, u64),
    /// Samples of a prompt, and their rewards.
    Group(Vec<PreviewSequence>, Vec<f32>),
    /// Why it is not trained on.
    Dropped(String),
}

impl PreviewRow {
    fn of(kind: SampleKind, row: &TokenizedRow, numbers: usize) -> PreviewRow {
        if let (SampleKind::Group, ROW_NUMBER, Some((ids, number))) =
            (kind, numbers, row.ids.split_last_chunk::<ROW_NUMBER>())
        {
            let sequence = PreviewSequence { ids: ids.into(), labels: vec![IGNORE; ids.len()], cut: false };
            return PreviewRow::Prompt(sequence, groups::whole(number));
        }
        let end = row.ids.last_chunk().filter(|_| kind == SampleKind::Group).map(|&ids| GroupEnd::read(ids));
        let len = row.ids.len() - end.map_or(numbers, |end| end.words);
        let targets = [row.labels.get(1..len).unwrap_or_default(), &[IGNORE]].concat();
        let mut at = 0;
        let mut parts = groups::sequences(&targets).map(|targets| {
            at += targets.len();
            at - targets.len()..at
        });
        let part = |range: std::ops::Range<usize>| PreviewSequence {
            ids: row.ids[range.clone()].to_vec(),
            labels: row.labels[range].to_vec(),
            cut: row.cut,
        };
        match kind {
            SampleKind::Group => {
                let mut recorded = Recorded::default();
                groups::record(&targets, &row.ids[len..], &mut recorded);
                PreviewRow::Group(parts.map(part).collect(), recorded.rewards)
            }
            SampleKind::Tokens => PreviewRow::Sample(part(0..len)),
            SampleKind::Labeled => {
                let desirable = row.ids.last_chunk().is_some_and(|&ids| number(ids) == 1.0);
                PreviewRow::Labeled(part(0..len), desirable)
            }
            SampleKind::Pair => {
                let end = parts.next().map_or(len, |first| first.end);
                PreviewRow::Pair([part(0..end), part(end..len)])
            }
        }
    }
}

/// Receives (row number from 0, row).
pub type Show<'a> = dyn FnMut(u64, PreviewRow) -> Result<()> + 'a;

/// Stops the reader once enough samples were shown.
struct Shown<'a> {
    show: &'a mut Show<'a>,
    kind: SampleKind,
    /// Ids at the end of a row that are no tokens.
    numbers: usize,
    next: u64,
    left: u64,
    unread: BTreeSet<String>,
}

impl Shown<'_> {
    fn put(&mut self, row: PreviewRow, samples: u64) -> Result<()> {
        if self.left == 0 {
            return Err(Error::Run("the preview is complete".into())); // ends the reader; not reported
        }
        (self.show)(self.next, row)?;
        self.next += 1;
        self.left -= samples;
        Ok(())
    }
}

impl RowSink for Shown<'_> {
    fn kept(&mut self, row: &TokenizedRow) -> Result<()> {
        self.put(PreviewRow::of(self.kind, row, self.numbers), 1)
    }
    fn dropped(&mut self, why: Drop) -> Result<()> {
        self.put(PreviewRow::Dropped(why.to_string()), 0)
    }
    fn bad(&mut self, what: String) -> Result<()> {
        self.put(PreviewRow::Dropped(what), 0)
    }
    fn unread(&mut self, what: &str, _: u64) {
        self.unread.insert(what.into());
    }
}

impl Dataset {
    /// Shows the first `samples` samples in the order of the files, with the rows between them that are dropped.
    /// Returns what these rows hold and nothing reads. Errors are those of [`Dataset::open`].
    pub fn preview<'a>(options: &DataOptions, samples: u64, show: &'a mut Show<'a>) -> Result<BTreeSet<String>> {
        let limit = options.max_samples.unwrap_or(u64::MAX).min(samples);
        let found = Dataset::find(options)?;
        let Some((corpus, recipe)) = found.filter(|(corpus, _)| corpus.kind.is_rows()) else {
            let data = Dataset::open(&DataOptions { max_samples: Some(limit), ..options.clone() })?;
            for row in 0..data.rows().min(limit) {
                let len = data.row_len(row);
                let (mut ids, mut targets) = (vec![0; len], vec![0; len]);
                data.fill(row, &mut ids, &mut targets);
                let labels = ids.iter().map(|&id| id as i32).collect();
                show(row, PreviewRow::Sample(PreviewSequence { ids, labels, cut: false }))?;
            }
            return Ok(BTreeSet::new());
        };
        let numbers = match options.format.preferences {
            Some(Preferences::Prompts(_)) => ROW_NUMBER,
            _ if options.format.has_numbers() => NUMBER,
            _ => 0,
        };
        let kind = options.format.sample();
        let mut shown = Shown { show, kind, numbers, next: 0, left: limit, unread: BTreeSet::new() };
        for (file, window) in reader::windows(&corpus.files)? {
            let read = reader::rows(file, window, RowUse::Tokens(&recipe, &mut shown));
            if shown.left == 0 {
                break;
            }
            read?;
        }
        match shown.next {
            0 if limit > 0 => Err(Error::input(no_rows(&corpus))),
            _ => {
                let files = corpus.unread.iter().map(|path| path.display().to_string());
                Ok(shown.unread.into_iter().chain(files).collect())
            }
        }
    }
}
