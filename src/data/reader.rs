//! Tokenizes the files of a corpus into a token file, or passes its rows on, in one pass and constant memory. Never
//! decides where the cache is.
use super::corpus::{Corpus, CorpusFile, CorpusKind};
use super::fields::{JsonRow, RowResult};
use super::kind::FileForm;
use super::npy;
use super::recipe::Recipe;
use super::row_names::RowNames;
use super::rows::{EachRow, RowUse, Rows};
use super::text::Texts;
use super::token_file::TokenWriter;
use crate::base::{Error, Result};
use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;

/// Writes every file of `corpus`.
pub(super) fn read(corpus: &Corpus, recipe: &Recipe, out: &mut TokenWriter) -> Result<()> {
    if corpus.kind == CorpusKind::Text {
        return Texts::new(&recipe.tokenizer, out)?.read(&corpus.files);
    }
    for (file, window) in windows(&corpus.files)? {
        match corpus.kind.is_rows() {
            true => rows(file, window, RowUse::Tokens(recipe, out))?,
            false => npy::read(&file.path, recipe.bound, |ids| out.tokens(ids))?,
        }
        out.counts.files += 1;
        out.counts.bytes += file.size;
    }
    Ok(())
}

/// The files from which rows are read, and which of their rows.
pub(super) fn windows(files: &[CorpusFile]) -> Result<Vec<(&CorpusFile, Range<u64>)>> {
    let mut all = Vec::new();
    for part in files.chunk_by(|one, next| one.slice == next.slice) {
        let Some((_, slice)) = part[0].slice else {
            all.extend(part.iter().map(|file| (file, 0..u64::MAX)));
            continue;
        };
        // What is beyond the slice need not be counted, and neither need the last file.
        let end = if slice.needs_count() { u64::MAX } else { slice.end() };
        let (mut ends, mut seen) = (Vec::new(), 0);
        for (i, file) in part.iter().enumerate() {
            let is_last = i + 1 == part.len() && !slice.needs_count();
            seen = if is_last || seen >= end { u64::MAX } else { seen + count(file)? };
            ends.push(seen);
        }
        let (rows, mut first) = (slice.range(seen), 0);
        for (file, last) in part.iter().zip(ends) {
            let window = rows.start.saturating_sub(first)..rows.end.min(last).saturating_sub(first);
            first = last;
            all.extend(Some((file, window)).filter(|(_, window)| !window.is_empty()));
        }
    }
    Ok(all)
}

fn count(file: &CorpusFile) -> Result<u64> {
    let mut count = 0;
    rows(file, 0..u64::MAX, RowUse::Count(&mut count))?;
    Ok(count)
}

/// Passes on the rows of a file that are in the window.
pub(super) fn rows(file: &CorpusFile, window: Range<u64>, to: RowUse) -> Result<()> {
    let mut rows = Rows::new(to, window);
    match file.form {
        FileForm::Parquet => rows.parquet(&file.path),
        FileForm::Table(delimiter) => rows.table(&file.path, delimiter),
        form => rows.json(&file.path, form),
    }
}

/// Files whose rows were passed on.
#[derive(Clone, Debug, PartialEq)]
pub struct RowFiles {
    /// See [`super::Report`].
    pub what: String,
    pub files: u64,
    pub bytes: u64,
}

/// Passes on the rows of the files and directories at `paths` with all their fields, renamed, in order.
pub fn each_row(paths: &[PathBuf], renames: &RowNames, each: &mut EachRow) -> Result<RowFiles> {
    let Corpus { kind, files, what, .. } = Corpus::find(paths)?;
    if !kind.is_rows() {
        return Err(Error::input(format!(
            "`dataset` {what}: holds {}, not rows. Name rows: .jsonl, .json, .csv or .parquet",
            kind.name()
        )));
    }
    let mut each =
        |place, row: RowResult<JsonRow>| each(place, row.and_then(|row| renames.apply(&row).map(Cow::into_owned)));
    windows(&files)?.into_iter().try_for_each(|(file, window)| rows(file, window, RowUse::Fields(&mut each)))?;
    Ok(RowFiles { what, files: files.len() as u64, bytes: files.iter().map(|file| file.size).sum() })
}
