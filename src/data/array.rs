//! Splits a JSON array into its elements as it is read, and detects what a `.json` file holds. Never parses an element
//! it returns, and never holds more than one.
use super::shapes;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// The byte order mark some editors write at the start of UTF-8 files.
pub(super) const BOM: &[u8] = "\u{feff}".as_bytes();
/// Maximum bytes read to detect the kind of a file.
const DETECT: u64 = 16 << 20;

/// The elements of an array; the reader is past its opening bracket.
pub(super) struct Elements<R> {
    pub file: R,
    first: bool,
}

/// The array itself is malformed, so nothing after this point is a row.
pub(super) enum Broken {
    Io(io::Error),
    /// Completes a sentence that starts with the position of the element.
    Array(&'static str),
}
impl From<io::Error> for Broken {
    fn from(e: io::Error) -> Broken {
        Broken::Io(e)
    }
}

/// Whether the file is an array; if so, advances past the bracket. Inspects only buffered bytes.
pub(super) fn opens(file: &mut impl BufRead) -> io::Result<bool> {
    let buffered = file.fill_buf()?;
    let start = buffered.iter().position(|b| !b.is_ascii_whitespace());
    let opens = start.filter(|&at| buffered[at] == b'[');
    opens.iter().for_each(|at| file.consume(at + 1));
    Ok(opens.is_some())
}

impl<R: BufRead> Elements<R> {
    pub fn of(file: R) -> Elements<R> {
        Elements { file, first: true }
    }

    /// Reads the next element into `out`; false at the end of the array. `Ok(None)`: an element of more than `most`
    /// bytes was skipped.
    pub fn next(&mut self, most: u64, out: &mut Vec<u8>) -> Result<Option<bool>, Broken> {
        out.clear();
        let first = std::mem::replace(&mut self.first, false);
        match (self.peek()?, first) {
            (Some(b']'), _) => {
                self.file.consume(1);
                return match self.peek()? {
                    None => Ok(Some(false)),
                    Some(_) => Err(Broken::Array("follows the end of the array: a file must be a single array")),
                };
            }
            (Some(b','), false) => {
                self.file.consume(1);
                self.peek()?;
            }
            (Some(_), _) => {}
            (None, _) => {
                return Err(Broken::Array("is missing: the file is truncated, its array has no end"));
            }
        }
        let (mut depth, mut text, mut escaped, mut len) = (0u64, false, false, 0u64);
        loop {
            let buffered = self.file.fill_buf()?;
            if buffered.is_empty() && depth == 0 && !text && len > 0 {
                break; // this element is complete; the next one is missing
            }
            if buffered.is_empty() {
                return Err(Broken::Array("is truncated: the file ends inside it"));
            }
            let mut end = None;
            for (at, &b) in buffered.iter().enumerate() {
                if text {
                    (text, escaped) = (escaped || b != b'"', !escaped && b == b'\\');
                    continue;
                }
                match b {
                    b'"' => text = true,
                    b'{' | b'[' => depth += 1,
                    b',' | b']' if depth == 0 => {
                        end = Some(at);
                        break;
                    }
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            let taken = end.unwrap_or(buffered.len());
            len += taken as u64;
            if len <= most {
                out.extend_from_slice(&buffered[..taken]);
            }
            self.file.consume(taken);
            if end.is_some() {
                break;
            }
        }
        match out.trim_ascii().is_empty() {
            true if len <= most => Err(Broken::Array("is missing: nothing precedes a comma or the closing bracket")),
            _ => Ok((len <= most).then_some(true)),
        }
    }

    /// The next byte that is not whitespace, without consuming it.
    fn peek(&mut self) -> io::Result<Option<u8>> {
        loop {
            let buffered = self.file.fill_buf()?;
            let (len, at) = (buffered.len(), buffered.iter().position(|b| !b.is_ascii_whitespace()));
            let found = at.map(|at| buffered[at]);
            self.file.consume(at.unwrap_or(len));
            if found.is_some() || len == 0 {
                return Ok(found);
            }
        }
    }
}

/// What a `.json` file holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holds {
    /// An array of objects, or an object per line, the first of which is a recognizable data row.
    Rows,
    /// Objects, but not recognizable as data rows.
    Objects,
    /// Anything else.
    Text,
}

/// Decided by the first element or line.
pub(super) fn holds(path: &Path) -> io::Result<Holds> {
    let mut file = BufReader::new(File::open(path)?.take(DETECT));
    if file.fill_buf()?.starts_with(BOM) {
        file.consume(BOM.len());
    }
    let mut first = Vec::new();
    let array = opens(&mut file)?;
    if array {
        // A truncated element still begins an object.
        let _ = Elements::of(file).next(DETECT, &mut first);
    } else {
        file.read_until(b'\n', &mut first)?;
    }
    let object = serde_json::from_slice::<Map<String, Value>>(&first);
    Ok(match object {
        Ok(row) if shapes::is_known(&row) => Holds::Rows,
        Ok(_) => Holds::Objects,
        Err(_) if array && matches!(first.trim_ascii_start().first(), None | Some(b'{')) => Holds::Objects,
        Err(_) => Holds::Text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements, and the error after them. `room`: buffer size in bytes.
    fn cut(text: &str, room: usize, most: u64) -> (Vec<String>, Option<&'static str>) {
        let mut file = BufReader::with_capacity(room, text.as_bytes());
        file.fill_buf().unwrap();
        assert!(opens(&mut file).unwrap(), "{text}");
        let (mut elements, mut out, mut all) = (Elements::of(file), Vec::new(), Vec::new());
        loop {
            match elements.next(most, &mut out) {
                Ok(Some(false)) => return (all, None),
                Ok(Some(true)) => all.push(String::from_utf8_lossy(&out).trim().to_string()),
                Ok(None) => all.push("too long".into()),
                Err(Broken::Array(what)) => return (all, Some(what)),
                Err(Broken::Io(e)) => panic!("{e}"),
            }
        }
    }

    #[test]
    fn elements_are_found_wherever_the_buffer_ends() {
        let text = r#"[ {"a": "]},{\"\\", "b": [1, {"c": []}]} , [], "x,]\\" ,12
            ,{"d":"\\\""}]  "#;
        let whole = [r#"{"a": "]},{\"\\", "b": [1, {"c": []}]}"#, "[]", r#""x,]\\""#, "12", r#"{"d":"\\\""}"#];
        for room in [2, 3, 7, 1000] {
            assert_eq!(cut(text, room, 99), (whole.map(String::from).to_vec(), None), "{room}");
            let (short, _) = cut(text, room, 20);
            assert_eq!(short, ["too long", "[]", "\"x,]\\\\\"", "12", "{\"d\":\"\\\\\\\"\"}"], "{room}");
        }
        assert_eq!(cut("[]", 9, 9), (vec![], None));
    }

    #[test]
    fn malformed_arrays_are_reported_with_their_position() {
        for (text, elements, says) in [
            ("[", 0, "truncated"),
            ("[{\"a\": 1}", 1, "truncated"),
            ("[{\"a\": [1}", 0, "truncated"),
            ("[{\"a\": \"1}]", 0, "truncated"),
            ("[{},", 1, "truncated"),
            ("[{},]", 1, "missing"),
            ("[,{}]", 0, "missing"),
            ("[{}] {}", 1, "follows the end"),
            ("[{}]]", 1, "follows the end"),
        ] {
            let (all, broken) = cut(text, 64, 99);
            assert_eq!(all.len(), elements, "{text}");
            assert!(broken.unwrap().contains(says), "{text}: {broken:?}");
        }
    }
}
