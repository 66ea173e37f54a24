//! Text that others wrote, made fit for a message: a terminal obeys what some characters say. Never touches text of our own.

/// `text` on one line, with every character that a terminal might obey written as an escape, and no longer than `most` characters
/// and an ellipsis.
pub fn printable(text: &str, most: usize) -> String {
    let mut shown = String::with_capacity(text.len().min(4 * most));
    for (i, c) in text.chars().enumerate() {
        if i == most {
            shown.push('…');
            break;
        }
        // Control characters; marks that turn the order of letters.
        match c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn what_a_terminal_obeys_is_spelled_out() {
        assert_eq!(printable("node-7.cluster größe 机", 99), "node-7.cluster größe 机");
        assert_eq!(
            printable("a\x1b[2J\r\n\u{9b}31m\u{7f}\u{202e}b", 99),
            "a\\u{1b}[2J\\r\\n\\u{9b}31m\\u{7f}\\u{202e}b"
        );
        assert_eq!(printable(&"x".repeat(50), 8), "xxxxxxxx…");
        assert_eq!(printable("12345678", 8), "12345678");
    }
}
