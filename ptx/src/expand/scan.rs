//! A cursor over source text that counts lines and tells code from text: brackets within comments and strings are text.
//! Never knows what a directive means.

#[derive(Clone)]
pub struct Cursor<'a> {
    pub rest: &'a str,
    pub line: usize,
    /// Whether there are only blanks since the start of the statement.
    pub fresh: bool,
}

/// A piece of source and its first line.
#[derive(Clone)]
pub struct SourceSpan<'a> {
    pub text: &'a str,
    pub line: usize,
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}
/// Length of the identifier that `s` starts with.
pub fn word(s: &str) -> usize {
    s.bytes().position(|b| !in_word(b)).unwrap_or(s.len())
}

/// Whether a statement may start after it.
fn ends(c: char) -> bool {
    matches!(c, '\n' | ';' | '{' | '}')
}
/// Whether a statement may start after `text`, if it may (`fresh`) before it.
fn fresh_after(text: &str, fresh: bool) -> bool {
    match text.bytes().rfind(|&b| b == b'\n' || !b.is_ascii_whitespace()) {
        Some(last) => ends(last.into()),
        None => fresh,
    }
}

/// Length of the text at the start of `s` that passes through an expansion: up to the next comment, string, name, macro
/// call, or what may be a directive. Most of a source is such text, and loops are scanned once per iteration.
pub fn plain(s: &str, mut fresh: bool) -> usize {
    let bytes = s.as_bytes();
    let mut n = 0;
    while let Some(&byte) = bytes.get(n) {
        let after = || n + 1 + bytes[n + 1..].iter().position(|&b| !in_word(b)).unwrap_or(bytes.len() - n - 1);
        let c = char::from(byte);
        let next = match c {
            '$' | '/' | '"' => return n,
            '.' if fresh => return n,
            '%' | '.' | '_' | '0'..='9' | 'A'..='Z' | 'a'..='z' => after(),
            _ => n + 1,
        };
        let special = match c {
            '%' => bytes.get(next) == Some(&b'['),
            '_' | 'A'..='Z' | 'a'..='z' => bytes[next..].starts_with(b"!("),
            _ => false,
        };
        if special {
            return n;
        }
        fresh = ends(c) || fresh && c.is_ascii_whitespace();
        n = next;
    }
    n
}

/// Number of line breaks.
pub fn breaks(text: &str) -> usize {
    text.bytes().filter(|&b| b == b'\n').count()
}

/// Length of the comment or string at the start of `s`; 0 if there is none.
pub fn opaque(s: &str) -> Result<usize, String> {
    if !s.starts_with(['/', '"']) {
        return Ok(0);
    }
    if s.starts_with("//") {
        return Ok(s.find('\n').unwrap_or(s.len()));
    }
    if let Some(body) = s.strip_prefix("/*") {
        return Ok(4 + body.find("*/").ok_or("a /* comment is not closed")?);
    }
    if let Some(body) = s.strip_prefix('"') {
        let end = body.find(['"', '\n']).filter(|&e| body[e..].starts_with('"'));
        return Ok(2 + end.ok_or("a string is not closed on its line")?);
    }
    Ok(0)
}

/// Splits at `separator` outside brackets, comments and strings. Empty text gives no pieces.
pub fn split(text: &str, separator: char) -> Result<Vec<&str>, String> {
    let (mut depth, mut start, mut at, mut pieces) = (0, 0, 0, vec![]);
    while let Some(c) = text[at..].chars().next() {
        let skip = opaque(&text[at..])?;
        if skip > 0 {
            at += skip;
            continue;
        }
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ if c == separator && depth == 0 => {
                pieces.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
        at += c.len_utf8();
    }
    let last = text[start..].trim();
    if !last.is_empty() || !pieces.is_empty() {
        pieces.push(last);
    }
    Ok(pieces)
}

impl<'a> Cursor<'a> {
    pub fn new(span: SourceSpan<'a>) -> Cursor<'a> {
        Cursor { rest: span.text, line: span.line, fresh: true }
    }
    /// Takes `n` bytes.
    pub fn take(&mut self, n: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(n);
        self.line += breaks(taken);
        self.fresh = fresh_after(taken, self.fresh);
        self.rest = rest;
        taken
    }
    /// Skips blanks and comments.
    pub fn blanks(&mut self) -> Result<(), String> {
        loop {
            let blank = self.rest.len() - self.rest.trim_start().len();
            let comment = if self.rest.trim_start().starts_with('"') { 0 } else { opaque(self.rest.trim_start())? };
            if blank + comment == 0 {
                return Ok(());
            }
            self.take(blank + comment);
        }
    }
    /// An identifier, after blanks.
    pub fn word(&mut self, what: &str) -> Result<&'a str, String> {
        self.blanks()?;
        match word(self.rest) {
            n if n > 0 && !self.rest.starts_with(|c: char| c.is_ascii_digit()) => Ok(self.take(n)),
            _ => Err(format!("{what} expected")),
        }
    }
    /// Takes the text up to and including `stop`, which must be outside comments and strings.
    pub fn until(&mut self, stop: char) -> Result<SourceSpan<'a>, String> {
        let mut n = 0;
        while let Some(found) = self.rest[n..].find([stop, '/', '"']) {
            n += found;
            let skip = opaque(&self.rest[n..])?;
            if skip == 0 && self.rest[n..].starts_with(stop) {
                let span = SourceSpan { text: &self.rest[..n], line: self.line };
                self.take(n + stop.len_utf8());
                return Ok(span);
            }
            n += skip.max(1);
        }
        Err(format!("'{stop}' expected"))
    }
    /// After blanks: takes the text between `open` and its closing bracket.
    pub fn group(&mut self, open: char, shut: char) -> Result<SourceSpan<'a>, String> {
        self.blanks()?;
        if !self.rest.starts_with(open) {
            return Err(format!("'{open}' expected"));
        }
        self.take(1);
        let (mut depth, mut n) = (1, 0);
        while let Some(found) = self.rest[n..].find([open, shut, '/', '"']) {
            n += found;
            let skip = opaque(&self.rest[n..])?;
            if skip == 0 {
                depth += self.rest[n..].starts_with(open) as i32 - self.rest[n..].starts_with(shut) as i32;
                if depth == 0 {
                    let span = SourceSpan { text: &self.rest[..n], line: self.line };
                    self.take(n + 1);
                    return Ok(span);
                }
            }
            n += skip.max(1);
        }
        Err(format!("no '{shut}' closes this '{open}'"))
    }
}
