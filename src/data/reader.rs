//! From the files of a corpus to the words of a cache, in one pass and in constant memory. Never decides where the
//! cache is.
use super::cache::Writer;
use super::corpus::{Corpus, Kind};
use super::npy;
use super::recipe::{Recipe, token_id};
use super::rows::Rows;
use super::text::Texts;
use crate::base::{Error, Result};
use std::path::Path;

/// Where a token was read, for messages that name it.
pub(super) enum Place<'a> {
    /// Counted from 1.
    Line(&'a Path, u64),
    /// Counted from 0, of Parquet or of a JSON array.
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

/// Writes every file of `corpus`. What is wrong with the first row that was skipped, if one was.
pub(super) fn read(corpus: &Corpus, recipe: &Recipe, out: &mut Writer) -> Result<Option<String>> {
    if corpus.kind == Kind::Text {
        return Texts::new(&recipe.tokenizer, out)?.read(&corpus.files).map(|()| None);
    }
    let mut first_bad = None;
    for file in &corpus.files {
        match corpus.kind {
            Kind::Rows | Kind::Parquet => {
                let mut rows = Rows::new(recipe, out);
                match corpus.kind {
                    Kind::Rows => rows.json(&file.path)?,
                    _ => rows.parquet(&file.path)?,
                }
                first_bad = first_bad.or(rows.first_bad);
            }
            _ => npy::read(&file.path, recipe.bound, |ids| out.tokens(ids))?,
        }
        out.files += 1;
        out.bytes += file.size;
    }
    Ok(first_bad)
}
