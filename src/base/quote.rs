//! Text of others in a message of ours: its beginning, and how much there is. Never formats more than it keeps.
use std::fmt::{self, Display, Write};

/// Displays at most 200 characters of `text`, and an ellipsis where that is not all.
pub fn quote<T: Display>(text: T) -> Quote<T> {
    Quote(text, 200)
}

/// A whole message, within which somebody may have forgotten to [`quote`].
pub(super) fn message<T: Display>(text: T) -> Quote<T> {
    Quote(text, 2000)
}

pub struct Quote<T>(T, usize);

impl<T: Display> Display for Quote<T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut out = Beginning { out: f, left: self.1, cut: false };
        let result = write!(out, "{}", self.0);
        match out.cut {
            true => f.write_str("..."),
            false => result,
        }
    }
}

/// Ends the formatting with an error where nothing more is kept.
struct Beginning<'a, 'b> {
    out: &'a mut fmt::Formatter<'b>,
    left: usize,
    cut: bool,
}

impl Write for Beginning<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = text.char_indices().nth(self.left).map_or(text.len(), |(at, _)| at);
        self.out.write_str(&text[..end])?;
        self.left -= text[..end].chars().count();
        self.cut |= end < text.len();
        if self.cut { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_long_text() {
        assert_eq!(quote("short").to_string(), "short");
        assert_eq!(quote("ä".repeat(200)).to_string(), "ä".repeat(200));
        assert_eq!(quote("ä".repeat(201)).to_string(), "ä".repeat(200) + "...");
        let long = crate::base::Error::input("x".repeat(1 << 20)).to_string();
        assert_eq!(long.len(), 2003);
        let list = serde_json::json!(vec!["full_attention"; 1_000_000]);
        assert_eq!(quote(&list).to_string().len(), 203);
    }
}
