//! Splits a JSON array into its elements as it is read, and finds arrays in an object. Never parses an element it
//! returns, and never holds more than one.
use std::io::{self, BufRead};

/// Maximum bytes of an object's key.
const KEY: usize = 1 << 16;

/// The elements of an array; the reader is past its opening bracket.
pub(super) struct Elements<R> {
    pub file: R,
    first: bool,
    /// The array is a value of an object, which goes on after it.
    inside: bool,
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

/// Whether the file is an array; if so, advances past the bracket, and otherwise past whitespace.
pub(super) fn opens(file: &mut impl BufRead) -> io::Result<bool> {
    let opens = next(file)? == Some(b'[');
    file.consume(opens.into());
    Ok(opens)
}

impl<R: BufRead> Elements<R> {
    pub fn of(file: R) -> Elements<R> {
        Elements { file, first: true, inside: false }
    }
    fn inside(file: R) -> Elements<R> {
        Elements { file, first: true, inside: true }
    }

    /// Reads the next element into `out`; false at the end of the array. `Ok(None)`: an element of more than `most`
    /// bytes was skipped.
    pub fn next(&mut self, most: u64, out: &mut Vec<u8>) -> Result<Option<bool>, Broken> {
        out.clear();
        let first = std::mem::replace(&mut self.first, false);
        match (next(&mut self.file)?, first) {
            (Some(b']'), _) => {
                self.file.consume(1);
                return match next(&mut self.file)? {
                    None => Ok(Some(false)),
                    Some(_) if self.inside => Ok(Some(false)),
                    Some(_) => Err(Broken::Array("follows the end of the array: a file must be a single array")),
                };
            }
            (Some(b','), false) => {
                self.file.consume(1);
                next(&mut self.file)?;
            }
            (Some(_), _) => {}
            (None, _) => {
                return Err(Broken::Array("is missing: the file is truncated, its array has no end"));
            }
        }
        let (mut nesting, mut len) = (Nesting::default(), 0u64);
        loop {
            let buffered = self.file.fill_buf()?;
            if buffered.is_empty() && nesting.is_outside() && len > 0 {
                break; // this element is complete; the next one is missing
            }
            if buffered.is_empty() {
                return Err(Broken::Array("is truncated: the file ends inside it"));
            }
            let end = buffered.iter().position(|&b| nesting.ends(b, b']'));
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
}

/// The lists of objects among the values of an object that is read as it comes.
pub(super) struct Lists<R> {
    elements: Elements<R>,
    started: bool,
}

impl<R: BufRead> Lists<R> {
    pub fn of(file: R) -> Lists<R> {
        Lists { elements: Elements::inside(file), started: false }
    }

    /// The key of the next list of objects, all of whose elements must then be read. None at the end of the object.
    pub fn next(&mut self) -> Result<Option<String>, Broken> {
        let file = &mut self.elements.file;
        let wrong = |byte: Option<u8>| {
            Broken::Array(match byte {
                None => "is missing: the file is truncated inside its object",
                Some(_) => "cannot be found: the file is not a JSON object",
            })
        };
        loop {
            match (next(file)?, self.started) {
                (Some(b'{'), false) | (Some(b','), true) => file.consume(1),
                (Some(b'}'), true) => {
                    file.consume(1);
                    return match next(file)? {
                        None => Ok(None),
                        Some(_) => Err(Broken::Array("follows the end of the object: a file must be a single object")),
                    };
                }
                (other, _) => return Err(wrong(other)),
            }
            self.started = true;
            let key = match next(file)? {
                Some(b'"') => string(file)?,
                Some(b'}') => continue,
                other => return Err(wrong(other)),
            };
            match next(file)? {
                Some(b':') => file.consume(1),
                other => return Err(wrong(other)),
            }
            if next(file)? == Some(b'[') {
                file.consume(1);
                if next(file)? == Some(b'{') {
                    self.elements.first = true;
                    return Ok(Some(key));
                }
                skip(file, 1)?;
            } else {
                skip(file, 0)?;
            }
        }
    }
    /// The elements of that list.
    pub fn elements(&mut self) -> &mut Elements<R> {
        &mut self.elements
    }
}

/// The string that begins at the reader, at most [`KEY`] bytes of it, as it is written.
fn string(file: &mut impl BufRead) -> io::Result<String> {
    let (mut escaped, mut out) = (false, Vec::new());
    file.consume(1);
    loop {
        let buffered = file.fill_buf()?;
        let Some(&b) = buffered.first() else { break };
        file.consume(1);
        if b == b'"' && !escaped {
            break;
        }
        escaped = b == b'\\' && !escaped;
        if out.len() < KEY {
            out.push(b);
        }
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Skips a value up to the comma or brace that follows it. `depth`: brackets that are open.
fn skip(file: &mut impl BufRead, depth: u64) -> Result<(), Broken> {
    let mut nesting = Nesting { depth, ..Nesting::default() };
    loop {
        let buffered = file.fill_buf()?;
        if buffered.is_empty() {
            return Err(Broken::Array("is missing: the file is truncated inside its object"));
        }
        let (end, len) = (buffered.iter().position(|&b| nesting.ends(b, b'}')), buffered.len());
        file.consume(end.unwrap_or(len));
        if end.is_some() {
            return Ok(());
        }
    }
}

/// How deep a reader is in a value.
#[derive(Default)]
struct Nesting {
    /// Brackets that are open.
    depth: u64,
    /// Within a string, and after a backslash in it.
    text: bool,
    escaped: bool,
}

impl Nesting {
    fn is_outside(&self) -> bool {
        self.depth == 0 && !self.text
    }
    /// Goes on past `b`. Whether that ends the value: a comma, or the `closing` bracket of what the value is in.
    fn ends(&mut self, b: u8, closing: u8) -> bool {
        if self.text {
            (self.text, self.escaped) = (self.escaped || b != b'"', !self.escaped && b == b'\\');
            return false;
        }
        match b {
            b'"' => self.text = true,
            b'{' | b'[' => self.depth += 1,
            _ if self.depth == 0 && (b == b',' || b == closing) => return true,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}

/// The next byte that is not whitespace, without consuming it.
fn next(file: &mut impl BufRead) -> io::Result<Option<u8>> {
    loop {
        let buffered = file.fill_buf()?;
        let (len, at) = (buffered.len(), buffered.iter().position(|b| !b.is_ascii_whitespace()));
        let found = at.map(|at| buffered[at]);
        file.consume(at.unwrap_or(len));
        if found.is_some() || len == 0 {
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

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

    #[test]
    fn lists_of_objects_are_found_in_an_object() {
        let text = r#" {"version": "1[{", "n": [1, [{}]], "e": [], "d": {"x": [{"y": 1}]}, "data": [ {"a": "]"}, {"b": [{}]} ],
            "last": null, "more": [{}]} "#;
        for room in [2, 3, 7, 1000] {
            let (mut lists, mut found) = (Lists::of(BufReader::with_capacity(room, text.as_bytes())), Vec::new());
            while let Some(key) = lists.next().ok().unwrap() {
                let (mut n, mut out) = (0, Vec::new());
                while lists.elements().next(99, &mut out).ok().unwrap() == Some(true) {
                    n += 1;
                }
                found.push((key, n));
            }
            assert_eq!(found, [("data".to_string(), 2), ("more".to_string(), 1)], "{room}");
        }
        for wrong in ["", "{", "{\"a\": 1", "{\"a\": [1", "{\"a\" 1}", "{} {}", "{a: 1}", "3", "{\"a\": 1}}"] {
            assert!(Lists::of(wrong.as_bytes()).next().is_err(), "{wrong}");
        }
    }
}
