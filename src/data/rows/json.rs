//! Reads rows of JSON: an array, an array within an object, or an object per line. Never holds more than one chunk of
//! rows.
use super::{BYTES, LONGEST, NumberedRow, ROWS, RawRow, Rows, too_long};
use crate::base::{Error, Result};
use crate::data::array::{self, Broken, Elements, Lists};
use crate::data::content::{self, failed};
use crate::data::fields::{JsonRow, RowResult};
use crate::data::json;
use crate::data::kind::FileForm;
use crate::data::place::TokenPlace;
use crate::data::recipe::{Outcome, Recipe, TokenizedRow};
use std::io::{BufRead, Read};
use std::path::Path;

impl RawRow for Vec<u8> {
    fn tokenize(&self, recipe: &Recipe, out: &mut TokenizedRow) -> RowResult<Outcome> {
        recipe.line(self, out)
    }
    fn fields(self) -> RowResult<JsonRow> {
        match json::object(&self)? {
            (row, None) => Ok(row),
            (_, Some(number)) => Err(format!("holds {number}, which is not a number of JSON: write null")),
        }
    }
}

impl Rows<'_> {
    /// Rows that are laid out as `form` says.
    pub fn json(&mut self, path: &Path, form: FileForm) -> Result<()> {
        let mut file = content::buffered(path)?;
        match form {
            FileForm::Wrapped => self.wrapped(path, Lists::of(file)),
            FileForm::Array if array::opens(&mut file).map_err(|e| failed(path, e))? => {
                self.array(path, &mut Elements::of(file))
            }
            _ => self.lines(path, file),
        }
    }

    fn array(&mut self, path: &Path, elements: &mut Elements<impl BufRead>) -> Result<()> {
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
                Err(broken) => {
                    self.put(&mut piece, &place)?; // an error in an earlier row is reported first
                    return Err(error(path, broken, &place(number)));
                }
            }
            if piece.len() == ROWS || bytes >= BYTES {
                self.put(&mut piece, &place)?;
                bytes = 0;
                if self.is_over() {
                    break;
                }
            }
        }
        self.put(&mut piece, &place)
    }

    /// The only list of objects in an object.
    fn wrapped(&mut self, path: &Path, mut lists: Lists<impl BufRead>) -> Result<()> {
        let broken = |broken| error(path, broken, &TokenPlace::Row(path, 0));
        let Some(key) = lists.next().map_err(broken)? else { return Ok(()) };
        self.array(path, lists.elements())?;
        if self.is_over() {
            return Ok(()); // within the list
        }
        match lists.next().map_err(broken)? {
            None => Ok(()),
            Some(other) => Err(Error::in_file(
                path,
                format!(
                    "holds lists of objects in `{key}` and in `{other}`, and only one can be the rows. Write its rows \
                     as an array, or one per line"
                ),
            )),
        }
    }

    /// One row per line; blank lines are skipped.
    fn lines(&mut self, path: &Path, mut file: impl BufRead) -> Result<()> {
        let (mut piece, mut bytes): (Vec<NumberedRow<Vec<u8>>>, usize) = (Vec::new(), 0);
        for number in 1.. {
            let mut line = Vec::new();
            let read = file.by_ref().take(LONGEST).read_until(b'\n', &mut line);
            let n = match read {
                Ok(n) => n,
                Err(e) => {
                    self.put(&mut piece, &|n| TokenPlace::Line(path, n))?;
                    return Err(failed(path, e));
                }
            };
            if n == 0 {
                break;
            }
            if n as u64 == LONGEST && !line.ends_with(b"\n") {
                file.skip_until(b'\n').map_err(|e| failed(path, e))?;
                piece.push((number, Err(too_long())));
            } else if !line.trim_ascii().is_empty() {
                bytes += n;
                piece.push((number, Ok(line)));
            }
            if piece.len() == ROWS || bytes >= BYTES {
                self.put(&mut piece, &|n| TokenPlace::Line(path, n))?;
                bytes = 0;
                if self.is_over() {
                    break;
                }
            }
        }
        self.put(&mut piece, &|n| TokenPlace::Line(path, n))
    }
}

fn error(path: &Path, broken: Broken, place: &TokenPlace) -> Error {
    match broken {
        Broken::Array(what) => place.error(what),
        Broken::Io(e) => failed(path, e),
    }
}
