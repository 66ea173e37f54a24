//! Untrusted text in error messages: truncated, with terminal control characters escaped. Never formats more than it
//! keeps.
use std::fmt::{self, Display, Write};

/// Displays at most 200 characters of `text`, followed by an ellipsis if it is longer.
pub fn quote<T: Display>(text: T) -> Quote<T> {
    Quote { text, most: 200, keeps: &[] }
}

/// The same, with a limit of `most` characters.
pub fn printable(text: &str, most: usize) -> String {
    Quote { text, most, keeps: &[] }.to_string()
}

/// Sanitizes a whole message, in case a [`quote`] was forgotten.
pub(super) fn message<T: Display>(text: T) -> Quote<T> {
    Quote { text, most: 2000, keeps: &['\n'] }
}

/// Text of data or of a model, for a terminal: in its lines, with whatever else a terminal obeys escaped.
pub fn on_terminal(text: &str) -> String {
    Quote { text, most: usize::MAX, keeps: &['\n', '\t'] }.to_string()
}

pub struct Quote<T> {
    text: T,
    most: usize,
    /// Control characters that are not escaped.
    keeps: &'static [char],
}

impl<T: Display> Display for Quote<T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut out = Beginning { out: f, left: self.most, keeps: self.keeps, cut: false };
        let result = write!(out, "{}", self.text);
        match out.cut {
            true => f.write_str("..."),
            false => result,
        }
    }
}

/// Keeps the beginning, and stops the formatting with an error once it is full.
struct Beginning<'a, 'b> {
    out: &'a mut fmt::Formatter<'b>,
    left: usize,
    keeps: &'static [char],
    cut: bool,
}

impl Write for Beginning<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.left == 0 {
                self.cut = true;
                return Err(fmt::Error);
            }
            self.left -= 1;
            match is_obeyed(c) && !self.keeps.contains(&c) {
                true => write!(self.out, "{}", c.escape_default())?,
                false => self.out.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Control characters and bidirectional overrides.
fn is_obeyed(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_long_text() {
        assert_eq!(quote("short").to_string(), "short");
        assert_eq!(quote("ä".repeat(200)).to_string(), "ä".repeat(200));
        assert_eq!(quote("ä".repeat(201)).to_string(), "ä".repeat(200) + "...");
        assert_eq!(printable("12345678", 8), "12345678");
        assert_eq!(printable("123456789", 8), "12345678...");
        let long = crate::Error::input("x".repeat(1 << 20)).to_string();
        assert_eq!(long.len(), 2003);
        let list = serde_json::json!(vec!["full_attention"; 1_000_000]);
        assert_eq!(quote(&list).to_string().len(), 203);
    }

    #[test]
    fn what_a_terminal_obeys_is_spelled_out() {
        assert_eq!(quote("node-7.cluster größe 机").to_string(), "node-7.cluster größe 机");
        assert_eq!(
            quote("a\x1b[2J\r\n\u{9b}31m\u{7f}\u{202e}b").to_string(),
            "a\\u{1b}[2J\\r\\n\\u{9b}31m\\u{7f}\\u{202e}b"
        );
        assert_eq!(crate::Error::input("two\nlines \x1b[2J").to_string(), "two\nlines \\u{1b}[2J");
        assert_eq!(on_terminal("a\tb\n\x1b[2Jc\r"), "a\tb\n\\u{1b}[2Jc\\r");
    }
}
