//! Tokenizes the files of a corpus into a token file, in one pass and constant memory. Never decides where the cache
//! is.
use super::corpus::{Corpus, CorpusFile, CorpusKind};
use super::kind::FileForm;
use super::npy;
use super::recipe::Recipe;
use super::rows::{RowSink, Rows};
use super::text::Texts;
use super::token_file::TokenWriter;
use crate::base::Result;

/// Writes every file of `corpus`.
pub(super) fn read(corpus: &Corpus, recipe: &Recipe, out: &mut TokenWriter) -> Result<()> {
    if corpus.kind == CorpusKind::Text {
        return Texts::new(&recipe.tokenizer, out)?.read(&corpus.files);
    }
    for file in &corpus.files {
        match corpus.kind.is_rows() {
            true => rows(file, recipe, out)?,
            false => npy::read(&file.path, recipe.bound, |ids| out.tokens(ids))?,
        }
        out.counts.files += 1;
        out.counts.bytes += file.size;
    }
    Ok(())
}

/// Passes the rows of a file on.
pub(super) fn rows(file: &CorpusFile, recipe: &Recipe, out: &mut dyn RowSink) -> Result<()> {
    let mut rows = Rows::new(recipe, out);
    match file.form {
        FileForm::Parquet => rows.parquet(&file.path),
        FileForm::Table(delimiter) => rows.table(&file.path, delimiter),
        form => rows.json(&file.path, form),
    }
}
