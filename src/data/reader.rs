//! Tokenizes the files of a corpus into a token file, or passes its rows on, in one pass and constant memory. Never
//! decides where the cache is.
use super::corpus::{Corpus, CorpusFile, CorpusKind};
use super::kind::FileForm;
use super::npy;
use super::recipe::Recipe;
use super::rows::{EachRow, RowUse, Rows};
use super::text::Texts;
use super::token_file::TokenWriter;
use crate::base::{Error, Result};
use std::path::PathBuf;

/// Writes every file of `corpus`.
pub(super) fn read(corpus: &Corpus, recipe: &Recipe, out: &mut TokenWriter) -> Result<()> {
    if corpus.kind == CorpusKind::Text {
        return Texts::new(&recipe.tokenizer, out)?.read(&corpus.files);
    }
    for file in &corpus.files {
        match corpus.kind.is_rows() {
            true => rows(file, RowUse::Tokens(recipe, out))?,
            false => npy::read(&file.path, recipe.bound, |ids| out.tokens(ids))?,
        }
        out.counts.files += 1;
        out.counts.bytes += file.size;
    }
    Ok(())
}

/// Passes the rows of a file on.
pub(super) fn rows(file: &CorpusFile, to: RowUse) -> Result<()> {
    let mut rows = Rows::new(to);
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

/// Passes on the rows of the files and directories at `paths` with all their fields, in order.
pub fn each_row(paths: &[PathBuf], each: &mut EachRow) -> Result<RowFiles> {
    let Corpus { kind, files, what, .. } = Corpus::find(paths)?;
    if !kind.is_rows() {
        return Err(Error::input(format!(
            "`dataset` {what}: holds {}, not rows. Name rows: .jsonl, .json, .csv or .parquet",
            kind.name()
        )));
    }
    files.iter().try_for_each(|file| rows(file, RowUse::Fields(each)))?;
    Ok(RowFiles { what, files: files.len() as u64, bytes: files.iter().map(|file| file.size).sum() })
}
