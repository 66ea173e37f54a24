//! Reads JSON and Parquet files of rows in chunks and tokenizes them on several threads, in order. Never holds more
//! than one chunk of a file.
use super::array::{self, BOM, Broken, Elements};
use super::fields::{JsonRow, RowFault, RowResult};
use super::format::Preferences;
use super::place::TokenPlace;
use super::recipe::{Drop, Outcome, Recipe, TokenizedRow};
use super::shapes::{self, Shape};
use super::token_file::TokenWriter;
use crate::base::{Error, Result, open};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, reader::RowIter};
use parquet::schema::types::Type;
use serde_json::{Number, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

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
        self.row(&row.ids, &row.labels)
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

/// Reads files of rows, one after another.
pub(super) struct Rows<'a> {
    pub recipe: &'a Recipe,
    pub out: &'a mut dyn RowSink,
    pub threads: usize,
    /// Results of one chunk, reused for the next.
    made: Vec<(TokenizedRow, RowResult<Outcome>)>,
}

/// A row's number with the row, or with what is wrong with it.
type NumberedRow<T> = (u64, RowResult<T>);

impl<'a> Rows<'a> {
    pub fn new(recipe: &'a Recipe, out: &'a mut dyn RowSink) -> Rows<'a> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        Rows { recipe, out, threads, made: Vec::new() }
    }

    /// An array whose elements are rows, or one row per line.
    pub fn json(&mut self, path: &Path) -> Result<()> {
        let io = |e| Error::io("read", path, e);
        let file = open::file(path).map_err(|e| Error::io("open", path, e))?;
        let mut file = BufReader::with_capacity(1 << 20, file);
        if file.fill_buf().map_err(io)?.starts_with(BOM) {
            file.consume(BOM.len());
        }
        match array::opens(&mut file).map_err(io)? {
            true => self.array(path, Elements::of(file)),
            false => self.lines(path, file),
        }
    }

    fn array(&mut self, path: &Path, mut elements: Elements<BufReader<File>>) -> Result<()> {
        let recipe = self.recipe;
        let make = |element: &Vec<u8>, row: &mut TokenizedRow| recipe.line(element, row);
        let place = |n| TokenPlace::Row(path, n);
        let (mut piece, mut bytes): (Vec<NumberedRow<Vec<u8>>>, usize) = (Vec::new(), 0);
        for number in 0.. {
            let mut element = Vec::new();
            match elements.next(LONGEST, &mut element) {
                Ok(Some(false)) => break,
                Ok(Some(true)) => {
                    bytes += element.len();
                    piece.push((number, Ok(element)));
                }
                Ok(None) => piece.push((number, Err(too_long()))),
                Err(Broken::Array(what)) => {
                    self.put(&mut piece, &make, &place)?; // an error in an earlier row is reported first
                    return Err(place(number).error(what));
                }
                Err(Broken::Io(e)) => return Err(Error::io("read", path, e)),
            }
            if piece.len() == ROWS || bytes >= BYTES {
                self.put(&mut piece, &make, &place)?;
                bytes = 0;
            }
        }
        self.put(&mut piece, &make, &place)
    }

    /// One row per line; blank lines are skipped.
    fn lines(&mut self, path: &Path, mut file: BufReader<File>) -> Result<()> {
        let io = |e| Error::io("read", path, e);
        let recipe = self.recipe;
        let make = |line: &Vec<u8>, row: &mut TokenizedRow| recipe.line(line, row);
        let (mut piece, mut bytes): (Vec<NumberedRow<Vec<u8>>>, usize) = (Vec::new(), 0);
        for number in 1.. {
            let mut line = Vec::new();
            let n = file.by_ref().take(LONGEST).read_until(b'\n', &mut line).map_err(io)?;
            if n == 0 {
                break;
            }
            if n as u64 == LONGEST && !line.ends_with(b"\n") {
                file.skip_until(b'\n').map_err(io)?;
                piece.push((number, Err(too_long())));
            } else if !line.trim_ascii().is_empty() {
                bytes += n;
                piece.push((number, Ok(line)));
            }
            if piece.len() == ROWS || bytes >= BYTES {
                self.put(&mut piece, &make, &|n| TokenPlace::Line(path, n))?;
                bytes = 0;
            }
        }
        self.put(&mut piece, &make, &|n| TokenPlace::Line(path, n))
    }

    /// Row group by row group, reading only the columns that rows need.
    pub fn parquet(&mut self, path: &Path) -> Result<()> {
        let bad = |e: parquet::errors::ParquetError| {
            Error::input(format!("{}: cannot be read as Parquet ({e})", path.display()))
        };
        let file = open::file(path).map_err(|e| Error::io("open", path, e))?;
        let reader = SerializedFileReader::new(file).map_err(bad)?;
        let schema = reader.metadata().file_metadata().schema().clone();
        let columns = self.columns(&schema);
        if let Some(columns) = &columns {
            let read = |field: &Arc<Type>| columns.get_fields().iter().any(|read| read.name() == field.name());
            let rows = reader.metadata().file_metadata().num_rows().max(0) as u64;
            let unread = schema.get_fields().iter().filter(|field| !read(field));
            unread.for_each(|field| self.out.unread(&format!("`{}`", field.name()), rows));
        }
        let recipe = self.recipe;
        let make = |row: &JsonRow, out: &mut TokenizedRow| recipe.row(row, out);
        let place = |n| TokenPlace::Row(path, n);
        let (mut piece, mut number): (Vec<NumberedRow<JsonRow>>, u64) = (Vec::new(), 0);
        for group in 0..reader.num_row_groups() {
            let group = reader.get_row_group(group).map_err(bad)?;
            for row in RowIter::from_row_group(columns.clone(), &*group).map_err(bad)? {
                // A damaged page corrupts everything after it: this is not the fault of one row.
                let row = row.map_err(bad)?.into_columns();
                let object = row.into_iter().map(|(name, field)| Ok((name, json(field)?))).collect();
                piece.push((number, object));
                number += 1;
                if piece.len() == ROWS {
                    self.put(&mut piece, &make, &place)?;
                }
            }
        }
        self.put(&mut piece, &make, &place)
    }

    /// The schema without the columns that no row needs; the full schema if the recipe's columns are missing, so that
    /// the error can list those present.
    fn columns(&self, schema: &Type) -> Option<Type> {
        let format = &self.recipe.format;
        let by_shape = format.input_key.is_none() && !matches!(format.preferences, Some(Preferences::Pairs(_)));
        let read = |name: &str| {
            let shaped = by_shape && Shape::all_read().any(|key| key == name);
            shaped || shapes::VARIABLES.contains(&name) || format.named().contains(&name)
        };
        let fields: Vec<Arc<Type>> = schema.get_fields().iter().filter(|f| read(f.name())).cloned().collect();
        let given = |key: &Option<String>| key.iter().all(|key| fields.iter().any(|field| field.name() == key));
        let found = given(&format.input_key) && given(&format.output_key) && !fields.is_empty();
        let projected = || Type::group_type_builder(schema.name()).with_fields(fields.clone()).build().ok();
        if found { projected() } else { None }
    }

    /// Tokenizes the rows of a chunk on several threads and writes them in order.
    fn put<'p, T: Sync>(
        &mut self,
        piece: &mut Vec<NumberedRow<T>>,
        make: &(impl Fn(&T, &mut TokenizedRow) -> RowResult<Outcome> + Sync),
        place: &dyn Fn(u64) -> TokenPlace<'p>,
    ) -> Result<()> {
        let n = piece.len();
        if self.made.len() < n {
            self.made.resize_with(n, || (TokenizedRow::default(), Ok(Outcome::Text)));
        }
        let each = n.div_ceil(self.threads).max(16);
        let work = |raw: &[NumberedRow<T>], made: &mut [(TokenizedRow, RowResult<Outcome>)]| {
            for ((_, raw), (row, outcome)) in raw.iter().zip(made) {
                *outcome = match raw {
                    Ok(raw) => make(raw, row),
                    Err(fault) => Err(fault.clone()),
                };
            }
        };
        std::thread::scope(|scope| {
            let mut parts = piece.chunks(each).zip(self.made[..n].chunks_mut(each));
            let first = parts.next();
            parts.for_each(|(raw, made)| drop(scope.spawn(|| work(raw, made))));
            first.into_iter().for_each(|(raw, made)| work(raw, made));
        });
        for ((number, _), (row, outcome)) in piece.iter().zip(&self.made) {
            match outcome {
                Ok(Outcome::Kept) => {
                    self.out.kept(row)?;
                    row.unread.iter().for_each(|what| self.out.unread(what, 1));
                }
                Ok(Outcome::Dropped(why)) => self.out.dropped(*why)?,
                // Not the fault of one row, so `skip_bad_rows` does not apply.
                Ok(Outcome::Text) => {
                    let why = self.recipe.tokenizer.usable().err().map_or(String::new(), |why| why.to_string());
                    return Err(place(*number)
                        .error(format!("holds text, which needs a tokenizer: {why}. Rows of `input_ids` do not")));
                }
                Err(fault) if self.recipe.format.skip_bad_rows => {
                    self.out.bad(place(*number).error(fault).to_string())?;
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

/// A Parquet value as JSON. Times, decimals and binary data do not occur in rows.
fn json(field: Field) -> RowResult<Value> {
    let float = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
    let list = |fields: &[Field]| fields.iter().cloned().map(json).collect::<std::result::Result<Vec<_>, _>>();
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(x) => x.into(),
        Field::Byte(x) => x.into(),
        Field::Short(x) => x.into(),
        Field::Int(x) => x.into(),
        Field::Long(x) => x.into(),
        Field::UByte(x) => x.into(),
        Field::UShort(x) => x.into(),
        Field::UInt(x) => x.into(),
        Field::ULong(x) => x.into(),
        Field::Float(x) => float(x.into()),
        Field::Double(x) => float(x),
        Field::Str(x) => x.into(),
        // Strings that the writer did not mark as such.
        Field::Bytes(x) => match std::str::from_utf8(x.data()) {
            Ok(text) => text.into(),
            Err(_) => Value::Array(vec![]), // not a string: an error where one is needed
        },
        Field::ListInternal(x) => list(x.elements())?.into(),
        Field::Group(row) => {
            let fields = row.into_columns().into_iter().map(|(name, field)| Ok((name, json(field)?)));
            // Files with one schema for all messages hold null for the keys a message does not have.
            let fields = fields.filter(|f| !matches!(f, Ok((_, Value::Null))));
            Value::Object(fields.collect::<RowResult<_>>()?)
        }
        other => Value::String(other.to_string()),
    })
}
