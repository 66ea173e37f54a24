//! Words in lines of a bounded width. Never knows what they say.

/// `head`, then `words` with `gap` between them. What does not fit into `columns` goes on below, as far in as `head` is
/// wide; a word is never broken.
pub fn wrap<'a>(head: &str, words: impl IntoIterator<Item = &'a str>, gap: &str, columns: usize) -> String {
    let (mut out, indent) = (head.to_string(), head.chars().count());
    let mut column = indent;
    for word in words {
        let width = word.chars().count();
        if column > indent && column + gap.len() + width > columns {
            out.push_str(&format!("\n{:indent$}", ""));
            column = indent;
        } else if column > indent {
            out.push_str(gap);
            column += gap.len();
        }
        out.push_str(word);
        column += width;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::wrap;

    #[test]
    fn long_lines_go_on_below_their_text() {
        assert_eq!(wrap("data ", ["a", "b"], " ", 9), "data a b");
        assert_eq!(wrap("data ", ["a", "b", "c", "de"], " ", 9), "data a b\n     c de");
        assert_eq!(wrap("data ", ["a", "b", "c"], "  ", 9), "data a  b\n     c");
        assert_eq!(wrap("path ", ["0123456789", "x"], " ", 9), "path 0123456789\n     x");
    }
}
