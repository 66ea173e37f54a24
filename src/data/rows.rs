//! Tokenizes rows in chunks on several threads, in order, as they are read by format, or passes them on as they are.
//! Never holds more than one chunk of a file.
mod columnar; // Parquet
mod csv; // tables of text
mod json; // arrays, and an object per line

use super::fields::{JsonRow, RowFault, RowResult};
use super::place::TokenPlace;
use super::recipe::{Drop, Outcome, Recipe, TokenizedRow};
use super::token_file::TokenWriter;
use crate::base::Result;
use parquet::schema::types::Type;
use std::ops::Range;

/// A longer line is an error of its row.
const LONGEST: u64 = 256 << 20;
/// A chunk is full at [`ROWS`] rows or [`BYTES`] bytes.
const ROWS: usize = 512;
const BYTES: usize = 4 << 20;

/// Receives rows in the order of their files.
pub(super) trait RowSink {
    fn kept(&mut self, row: &TokenizedRow) -> Result<()>;
    fn dropped(&mut self, why: Drop) -> Result<()>;
    /// A malformed row that is skipped: its place, and what is wrong with it.
    fn bad(&mut self, what: String) -> Result<()>;
    /// So many rows hold something that nothing reads.
    fn unread(&mut self, what: &str, rows: u64);
}

impl RowSink for TokenWriter {
    fn kept(&mut self, row: &TokenizedRow) -> Result<()> {
        self.counts.cut += u64::from(row.cut);
        if row.joined { self.tokens(&row.ids) } else { self.row(&row.ids, &row.labels) }
    }
    fn dropped(&mut self, why: Drop) -> Result<()> {
        self.counts.dropped[why as usize] += 1;
        Ok(())
    }
    fn bad(&mut self, what: String) -> Result<()> {
        self.counts.bad += 1;
        self.notes.first_bad.get_or_insert(what);
        Ok(())
    }
    fn unread(&mut self, what: &str, rows: u64) {
        *self.notes.unread.entry(what.to_string()).or_default() += rows;
    }
}

/// Receives each row's place with all its fields, or with what is wrong with it.
pub type EachRow<'a> = dyn FnMut(String, RowResult<JsonRow>) -> Result<()> + 'a;

/// What becomes of rows.
pub(super) enum RowUse<'a> {
    Tokens(&'a Recipe, &'a mut dyn RowSink),
    Fields(&'a mut EachRow<'a>),
    Count(&'a mut u64),
}

/// A row as its reader has it.
trait RawRow: Sync {
    fn tokenize(&self, recipe: &Recipe, out: &mut TokenizedRow) -> RowResult<Outcome>;
    fn fields(self) -> RowResult<JsonRow>;
}

/// Reads files of rows, one after another.
pub(super) struct Rows<'a> {
    to: RowUse<'a>,
    /// The rows of the file that are passed on, and how many there were before the next.
    window: Range<u64>,
    seen: u64,
    threads: usize,
    /// Results of one chunk, reused for the next.
    made: Vec<(TokenizedRow, RowResult<Outcome>)>,
}

/// A row's number with the row, or with what is wrong with it.
type NumberedRow<T> = (u64, RowResult<T>);

impl<'a> Rows<'a> {
    pub fn new(to: RowUse<'a>, window: Range<u64>) -> Rows<'a> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        Rows { to, window, seen: 0, threads, made: Vec::new() }
    }

    /// No later row is in the window.
    fn is_over(&self) -> bool {
        self.seen >= self.window.end
    }

    /// The column of texts that are learned verbatim, which no other column changes. None: all columns, as rows of JSON
    /// have them, or the texts' is missing, so that the error can list those present.
    fn columns(&self, schema: &Type) -> Option<Type> {
        let RowUse::Tokens(Recipe { format, .. }, _) = &self.to else { return None };
        if !format.renames.is_empty() {
            return None;
        }
        let name = format.input_key.as_deref().unwrap_or("text");
        let texts = schema.get_fields().iter().find(|field| field.name() == name).filter(|_| format.pretrain_mode)?;
        Type::group_type_builder(schema.name()).with_fields(vec![texts.clone()]).build().ok()
    }

    /// Tokenizes the rows of a chunk on several threads and writes them in order.
    fn put<'p, T: RawRow>(
        &mut self,
        piece: &mut Vec<NumberedRow<T>>,
        place: &dyn Fn(u64) -> TokenPlace<'p>,
    ) -> Result<()> {
        let first = self.seen;
        self.seen += piece.len() as u64;
        piece.truncate(usize::try_from(self.window.end.saturating_sub(first)).unwrap_or(usize::MAX));
        piece.drain(..piece.len().min(self.window.start.saturating_sub(first) as usize));
        let n = piece.len();
        let Rows { to, threads, made, .. } = self;
        let (recipe, out) = match to {
            RowUse::Tokens(recipe, out) => (*recipe, out),
            RowUse::Fields(each) => {
                let mut rows = piece.drain(..);
                return rows.try_for_each(|(n, row)| each(place(n).to_string(), row.and_then(RawRow::fields)));
            }
            RowUse::Count(rows) => {
                **rows += n as u64;
                piece.clear();
                return Ok(());
            }
        };
        if made.len() < n {
            made.resize_with(n, || (TokenizedRow::default(), Ok(Outcome::Text)));
        }
        let each = n.div_ceil(*threads).max(16);
        let work = |raw: &[NumberedRow<T>], made: &mut [(TokenizedRow, RowResult<Outcome>)]| {
            for ((_, raw), (row, outcome)) in raw.iter().zip(made) {
                *outcome = match raw {
                    Ok(raw) => raw.tokenize(recipe, row),
                    Err(fault) => Err(fault.clone()),
                };
            }
        };
        std::thread::scope(|scope| {
            let mut parts = piece.chunks(each).zip(made[..n].chunks_mut(each));
            let first = parts.next();
            parts.for_each(|(raw, made)| drop(scope.spawn(|| work(raw, made))));
            first.into_iter().for_each(|(raw, made)| work(raw, made));
        });
        for ((number, _), (row, outcome)) in piece.iter().zip(&*made) {
            match outcome {
                Ok(Outcome::Kept) => {
                    out.kept(row)?;
                    row.other.iter().try_for_each(|other| out.kept(other))?;
                    row.unread.iter().for_each(|what| out.unread(what, 1));
                }
                Ok(Outcome::Dropped(why)) => out.dropped(*why)?,
                // Not the fault of one row, so `skip_bad_rows` does not apply.
                Ok(Outcome::Text) => {
                    let why = recipe.tokenizer.usable().err().map_or(String::new(), |why| why.to_string());
                    return Err(place(*number)
                        .error(format!("holds text, which needs a tokenizer: {why}. Rows of `input_ids` do not")));
                }
                Err(fault) if recipe.format.skip_bad_rows => {
                    out.bad(place(*number).error(fault).to_string())?;
                }
                Err(fault) => {
                    let fault = format!("{fault} (set `skip_bad_rows` to skip and count such rows)");
                    return Err(place(*number).error(fault));
                }
            }
        }
        piece.clear();
        Ok(())
    }
}

fn too_long() -> RowFault {
    format!("is longer than {} MiB", LONGEST >> 20)
}
