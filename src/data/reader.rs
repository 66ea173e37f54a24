//! Tokenizes the files of a corpus into a token file, in one pass and constant memory. Never decides where the cache
//! is.
use super::corpus::{Corpus, CorpusKind};
use super::npy;
use super::recipe::Recipe;
use super::rows::Rows;
use super::text::Texts;
use super::token_file::TokenWriter;
use crate::base::Result;

/// Writes every file of `corpus`. Returns what was wrong with the first bad row that was skipped, if any.
pub(super) fn read(corpus: &Corpus, recipe: &Recipe, out: &mut TokenWriter) -> Result<Option<String>> {
    if corpus.kind == CorpusKind::Text {
        return Texts::new(&recipe.tokenizer, out)?.read(&corpus.files).map(|()| None);
    }
    let mut first_bad = None;
    for file in &corpus.files {
        match corpus.kind {
            CorpusKind::Rows | CorpusKind::Parquet => {
                let mut rows = Rows::new(recipe, out);
                match corpus.kind {
                    CorpusKind::Rows => rows.json(&file.path)?,
                    _ => rows.parquet(&file.path)?,
                }
                first_bad = first_bad.or(rows.first_bad);
            }
            _ => npy::read(&file.path, recipe.bound, |ids| out.tokens(ids))?,
        }
        out.counts.files += 1;
        out.counts.bytes += file.size;
    }
    Ok(first_bad)
}
