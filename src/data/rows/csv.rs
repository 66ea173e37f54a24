//! Reads tables of text: fields between commas or tabs, quoted as RFC 4180 says, after a header. Never guesses a type:
//! a value is a string, or absent where the field is empty; columns of token ids and masks hold JSON lists.
use super::{BYTES, LONGEST, NumberedRow, ROWS, RawRow, Rows, too_long};
use crate::base::{Error, Result};
use crate::data::content::{self, failed};
use crate::data::fields::{JsonRow, RowResult};
use crate::data::place::TokenPlace;
use crate::data::recipe::{Outcome, Recipe, TokenizedRow};
use crate::data::shapes;
use serde_json::Value;
use std::io::{self, BufRead, Read};
use std::path::Path;

impl RawRow for JsonRow {
    fn tokenize(&self, recipe: &Recipe, out: &mut TokenizedRow) -> RowResult<Outcome> {
        recipe.row(self, out)
    }
    fn fields(self) -> RowResult<JsonRow> {
        Ok(self)
    }
}

impl Rows<'_> {
    pub fn table(&mut self, path: &Path, delimiter: u8) -> Result<()> {
        let place = |n| TokenPlace::Line(path, n);
        let wrong = |e| match e {
            BrokenTable::Io(e) => failed(path, e),
            BrokenTable::Row(line, what) => place(line).error(what),
        };
        let mut records = Records::begin(content::buffered(path)?, delimiter).map_err(wrong)?;
        let Some((_, header)) = records.next().map_err(wrong)? else { return Ok(()) };
        let header = header
            .and_then(|header| columns(header, delimiter))
            .map_err(|what| Error::in_file(path, format!("its header {what}: the first line names the columns")))?;
        // What is next to token ids may say which of them are learned.
        let of_tokens = header.iter().any(|name| name.ends_with("_ids") && shapes::is_of_tokens(name));
        let (mut piece, mut bytes): (Vec<NumberedRow<JsonRow>>, usize) = (Vec::new(), 0);
        loop {
            let record = match records.next() {
                Ok(Some(record)) => record,
                Ok(None) => break,
                Err(e) => {
                    self.put(&mut piece, &place)?; // an error in an earlier row is reported first
                    return Err(wrong(e));
                }
            };
            bytes += records.last.len();
            piece.push((record.0, record.1.and_then(|fields| row(&header, of_tokens, fields))));
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
}

/// The names of the columns.
fn columns(header: Vec<Vec<u8>>, delimiter: u8) -> RowResult<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for name in header {
        let name = String::from_utf8(name).map_err(|_| "is not valid UTF-8")?.trim().to_string();
        if names.contains(&name) {
            return Err(format!("has two columns `{name}`"));
        }
        names.push(name);
    }
    let other = [(',', "commas"), ('\t', "tabs"), (';', "semicolons")];
    let other = other.iter().find(|(b, _)| *b as u32 != u32::from(delimiter) && names[0].contains(*b));
    match (&names[..], other) {
        ([name], Some((_, between))) => {
            Err(format!("is one column `{name}`, with {between}: a .csv has commas between its fields, a .tsv tabs"))
        }
        _ => Ok(names),
    }
}

/// `lists`: columns may hold JSON lists.
fn row(header: &[String], lists: bool, fields: Vec<Vec<u8>>) -> RowResult<JsonRow> {
    if fields.len() != header.len() {
        return Err(format!("has {} fields, but the header has {}", fields.len(), header.len()));
    }
    let value = |field: Vec<u8>| match String::from_utf8(field) {
        Ok(text) if text.is_empty() => Ok(Value::Null),
        Ok(text) => Ok(Value::String(text)),
        Err(_) => Err("is not valid UTF-8"),
    };
    let fields = fields.into_iter().map(value).collect::<std::result::Result<Vec<_>, _>>()?;
    let typed = |value: Value| match value {
        Value::String(text) if lists && text.starts_with('[') => {
            serde_json::from_str::<Vec<Value>>(&text).map_or(Value::String(text), Value::Array)
        }
        value => value,
    };
    Ok(header.iter().zip(fields).map(|(name, value)| (name.clone(), typed(value))).collect())
}

/// Nothing after this point is a row.
enum BrokenTable {
    Io(io::Error),
    /// A line, and what is wrong with the record that begins there.
    Row(u64, String),
}

/// The records of a table, one after another.
struct Records<R> {
    file: R,
    delimiter: u8,
    /// What ends a line: a line feed, or in files without any a carriage return.
    end: u8,
    /// Lines read.
    line: u64,
    /// The last line read.
    last: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    Start,
    Bare,
    Quoted,
    /// After a quotation mark in a quoted field: its end, or the first half of a quotation mark.
    Closed,
}

/// A table and what was read of it already.
type StartedTable<R> = io::Chain<io::Cursor<Vec<u8>>, R>;

impl<R: BufRead> Records<R> {
    fn begin(mut file: R, delimiter: u8) -> std::result::Result<Records<StartedTable<R>>, BrokenTable> {
        // The first line ends within this, as headers do.
        let mut start = Vec::new();
        file.by_ref().take(BYTES as u64).read_to_end(&mut start).map_err(BrokenTable::Io)?;
        let end = if start.contains(&b'\r') && !start.contains(&b'\n') { b'\r' } else { b'\n' };
        Ok(Records { file: io::Cursor::new(start).chain(file), delimiter, end, line: 0, last: Vec::new() })
    }
    /// The next record and the line it begins at; blank lines are skipped.
    fn next(&mut self) -> std::result::Result<Option<NumberedRow<Vec<Vec<u8>>>>, BrokenTable> {
        let (mut fields, mut field, mut at, mut bytes) = (Vec::new(), Vec::new(), At::Start, 0);
        let (mut begin, mut fault) = (0, None);
        loop {
            self.last.clear();
            let n = self.file.by_ref().take(LONGEST).read_until(self.end, &mut self.last).map_err(BrokenTable::Io)?;
            if n == 0 && at == At::Quoted {
                return Err(BrokenTable::Row(begin, "has a quotation mark that is never closed".into()));
            }
            if n == 0 {
                return Ok(None);
            }
            self.line += 1;
            bytes += n as u64;
            if begin == 0 && self.last.trim_ascii().is_empty() && !self.last.contains(&self.delimiter) {
                continue;
            }
            begin = if begin == 0 { self.line } else { begin };
            if bytes >= LONGEST {
                return Err(BrokenTable::Row(begin, too_long()));
            }
            let line = self.last.strip_suffix(&[self.end]);
            let end = line.map_or(n, |line| line.strip_suffix(b"\r").unwrap_or(line).len());
            for &b in &self.last[..end] {
                at = match (at, b) {
                    (At::Start, b'"') => At::Quoted,
                    (At::Quoted, b'"') => At::Closed,
                    (At::Closed, b'"') => {
                        field.push(b);
                        At::Quoted
                    }
                    (At::Start | At::Bare | At::Closed, b) if b == self.delimiter => {
                        fields.push(std::mem::take(&mut field));
                        At::Start
                    }
                    (At::Closed, _) => {
                        fault =
                            Some("has text after the quotation mark that closes a field: write a quotation mark twice");
                        At::Bare
                    }
                    (at, b) => {
                        field.push(b);
                        if at == At::Quoted { At::Quoted } else { At::Bare }
                    }
                };
            }
            if at == At::Quoted {
                field.extend_from_slice(&self.last[end..]);
                continue;
            }
            fields.push(field);
            return Ok(Some((begin, fault.map_or(Ok(fields), |fault| Err(fault.to_string())))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &str) -> Vec<(u64, RowResult<Vec<String>>)> {
        let Ok(mut records) = Records::begin(text.as_bytes(), b',') else { panic!("text is read") };
        let mut all = Vec::new();
        while let Ok(Some((line, fields))) = records.next() {
            let text = |fields: Vec<Vec<u8>>| fields.into_iter().map(|f| String::from_utf8(f).unwrap()).collect();
            all.push((line, fields.map(text)));
        }
        all
    }

    #[test]
    fn fields_are_quoted_as_rfc_4180_says() {
        let text = "a,\"b \"\"c\"\"\n, d\",\r\n\n\"\",5\" x,\"\r\n\"\nlast,,\"\"\"\"";
        let expected = [(1, ["a", "b \"c\"\n, d", ""]), (4, ["", "5\" x", "\r\n"]), (6, ["last", "", "\""])];
        let expected: Vec<_> = expected.iter().map(|(n, f)| (*n, Ok(f.map(String::from).to_vec()))).collect();
        assert_eq!(records(text), expected);
        assert!(records("a\n\"b\" c\nd\n")[1].1.is_err());
        assert_eq!(records("a\n\"b\nc").len(), 1);
        assert_eq!(records("").len(), 0);
        let lines = |text: &str| records(text).into_iter().map(|(n, fields)| (n, fields.unwrap())).collect::<Vec<_>>();
        assert_eq!(lines("a,b\r\"c\r\",d\r"), [(1, vec!["a".into(), "b".into()]), (2, vec!["c\r".into(), "d".into()])]);
    }
}
