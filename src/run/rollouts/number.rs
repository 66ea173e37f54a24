//! The last number in a text, for `--reward number`. Never computes an expression.
//!
//! A number has digits, with commas between thousands, a decimal point and an exponent if any (`1,234.5`, `.5`,
//! `1e-3`). A hyphen or a minus sign right before it, or before its currency sign, is its sign, unless it follows a
//! letter, a digit or a parenthesis (`10-15`, `covid-19`). `1/2`, `2 1/2` and `\frac{1}{2}` are fractions, but no date.

/// The value of the last number.
pub(super) fn last_number(text: &str) -> Option<f64> {
    let text = text.replace(['\u{2212}', '\u{2013}'], "-"); // minus sign, en dash
    let text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", ","); // as LaTeX separates thousands
    let (mut at, mut last) = (0, None);
    while let Some(c) = text[at..].chars().next() {
        match number(&text, at) {
            Some((value, len)) => {
                last = Some(if is_negative(&text[..at]) { -value } else { value });
                at += len;
            }
            None => at += c.len_utf8(),
        }
    }
    last
}

/// The number that begins at a place, without its sign, and its length.
fn number(text: &str, at: usize) -> Option<(f64, usize)> {
    let rest = &text[at..];
    if let Some(fraction) = latex(rest) {
        return Some(fraction);
    }
    let before = text[..at].chars().next_back();
    if rest.starts_with('.') && before.is_some_and(|c| c.is_alphanumeric() || c == '.') {
        return None; // the end of a sentence
    }
    let (value, len) = decimal(rest)?;
    // A whole number with a fraction.
    let mixed = rest[len..].strip_prefix(' ').and_then(|rest| over(rest, digits(rest)));
    if let Some((part, more)) = mixed.filter(|(part, _)| *part < 1.0 && digits(rest) == len) {
        return Some((value + part, len + 1 + more));
    }
    match over(rest, len).filter(|_| before != Some('/')) {
        Some(fraction) => Some(fraction),
        None => Some((value, len)),
    }
}

fn digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

/// `text`, whose first number has `len` bytes, as a fraction of two numbers, unless a third one follows, as in a date.
fn over(text: &str, len: usize) -> Option<(f64, usize)> {
    let below = text[len..].strip_prefix('/')?;
    let whole = digits(below);
    let third = below[whole..].strip_prefix('/').is_some_and(|rest| digits(rest) > 0);
    let (above, below) = (text[..len].replace(',', "").parse::<f64>().ok()?, below[..whole].parse::<f64>().ok()?);
    (!third && below != 0.0).then(|| (above / below, len + 1 + whole))
}

fn decimal(text: &str) -> Option<(f64, usize)> {
    let mut len = digits(text);
    if (1..=3).contains(&len) {
        while text[len..].starts_with(',') && digits(&text[len + 1..]) == 3 {
            len += 4;
        }
    }
    if text[len..].starts_with('.') {
        let decimals = digits(&text[len + 1..]);
        len += if decimals > 0 { 1 + decimals } else { 0 };
    }
    if len > 0 && text[len..].starts_with(['e', 'E']) {
        let sign = text[len + 1..].starts_with(['+', '-']) as usize;
        let exponent = digits(&text[len + 1 + sign..]);
        let end = len + 1 + sign + exponent;
        len = if exponent > 0 && !text[end..].starts_with(char::is_alphanumeric) { end } else { len };
    }
    Some((text[..len].replace(',', "").parse().ok()?, len))
}

/// `\frac{1}{2}`, `\dfrac12` and the like, whose parts are numbers.
fn latex(text: &str) -> Option<(f64, usize)> {
    let rest = ["\\frac", "\\dfrac", "\\tfrac"].iter().find_map(|name| text.strip_prefix(name))?;
    let part = |text: &'_ str| -> Option<(f64, usize)> {
        let Some(inner) = text.strip_prefix('{') else {
            return Some((text.get(..1).filter(|_| digits(text) > 0)?.parse().ok()?, 1));
        };
        let inner = &inner[..inner.find('}')?];
        let (minus, number) = inner.trim().strip_prefix('-').map_or((1.0, inner.trim()), |rest| (-1.0, rest.trim()));
        let (value, len) = decimal(number)?;
        (len == number.len()).then_some((minus * value, inner.len() + 2))
    };
    let (above, first) = part(rest)?;
    let (below, second) = part(&rest[first..])?;
    (below != 0.0).then(|| (above / below, text.len() - rest.len() + first + second))
}

/// Whether what stands before a number ends with its sign.
fn is_negative(before: &str) -> bool {
    let before = before.strip_suffix(['$', '€', '£']).unwrap_or(before);
    let Some(before) = before.strip_suffix('\\').unwrap_or(before).strip_suffix('-') else { return false };
    !before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, ')' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_read_as_people_write_it() {
        for (text, number) in [
            ("#### 72", 72.0),
            ("so 1,234.50 in all.", 1234.5),
            ("1,234,567", 1_234_567.0),
            ("one of 1,2", 2.0),
            ("1,2345", 2345.0),
            ("2 - 5 = -3", -3.0),
            ("\u{2212}3", -3.0),
            ("-$5", -5.0),
            ("$-5.", -5.0),
            ("-\\$1{,}200", -1200.0),
            ("5\\,000", 5000.0),
            ("10-15", 15.0),
            ("10\u{2013}15", 15.0),
            ("covid-19", 19.0),
            ("- 5 apples", 5.0),
            ("so...5", 5.0),
            ("No.5", 5.0),
            ("about .5", 0.5),
            ("1e3", 1000.0),
            ("2.5E-1", 0.25),
            ("3 eggs, 4e", 4.0),
            ("1e16", 1e16),
            ("it is 1/2", 0.5),
            ("-3/4", -0.75),
            ("2 1/2 cups", 2.5),
            ("on 10/12/2024", 2024.0),
            ("5/0", 0.0),
            ("\\boxed{\\frac{7}{2}}", 3.5),
            ("\\boxed{-\\dfrac12}", -0.5),
            ("\\frac{-1}{4}", -0.25),
            ("\\frac{x}{2}", 2.0),
            ("50%", 50.0),
            ("3.25.", 3.25),
            ("٣ and 7é", 7.0),
        ] {
            assert_eq!(last_number(text), Some(number), "{text}");
        }
        for text in ["", "none", "-", ".", "\\frac{}{}"] {
            assert_eq!(last_number(text), None, "{text}");
        }
    }
}
