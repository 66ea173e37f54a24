//! The last number in a text, for `--reward number`. Never computes an expression.
//!
//! A number has digits, with commas between thousands, a decimal point and an exponent if any (`1,234.5`, `.5`,
//! `1e-3`, `10^{5}`, `3 \times 10^5`). A hyphen or a minus sign right before it, or before its currency sign, is its
//! sign, unless it follows a letter, a digit or a parenthesis (`10-15`, `covid-19`). `1/2`, `2 1/2` and `\frac{1}{2}`
//! are fractions, but no date. Where there is a `\boxed{}`, only the last one counts.
//!
//! A last number that is a part of something else is none: of `\sqrt{2}`, `2\pi`, `x^2 + 3` or `(1, 2)`.

/// The value of the last number.
pub(super) fn last_number(text: &str) -> Option<f64> {
    let text = text.replace(['\u{2212}', '\u{2013}'], "-"); // minus sign, en dash
    let text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", ","); // as LaTeX separates thousands
    let text = boxed(&text);
    let (mut at, mut last) = (0, None);
    while let Some(c) = text[at..].chars().next() {
        match number(text, at) {
            Some((value, len)) => {
                let (before, behind) = (&text[..at], &text[at + len..]);
                let value = if is_negative(before) { -value } else { value };
                last = (!is_part(before, behind)).then_some(value);
                at += len;
            }
            None => at += c.len_utf8(),
        }
    }
    last
}

/// What the last `\boxed{}` holds; all of a text without one.
fn boxed(text: &str) -> &str {
    const BOX: &str = "\\boxed{";
    let Some(inner) = text.rfind(BOX).map(|at| &text[at + BOX.len()..]) else { return text };
    let mut open = 1;
    let closes = |(at, c): (usize, char)| {
        open += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        (open == 0).then_some(at)
    };
    inner.char_indices().find_map(closes).map_or(inner, |end| &inner[..end])
}

/// Whether the number between these is a part of an expression, whose value is another.
fn is_part(before: &str, behind: &str) -> bool {
    const OF: [&str; 15] = [
        "\\sqrt", "\\log", "\\ln", "\\exp", "\\sin", "\\cos", "\\tan", "\\binom", "\\dbinom", "\\frac", "\\dfrac",
        "\\tfrac", "\\pm", "√", "}",
    ];
    const TIMES: [&str; 6] = ["\\pi", "π", "\\sqrt", "√", "\\frac", "\\dfrac"];
    let signed = before.strip_suffix('-').unwrap_or(before);
    // An argument, an exponent or an index.
    let argument = signed.strip_suffix('{');
    let of = argument.unwrap_or(signed).trim_end();
    let is_argument = OF.iter().any(|name| of.ends_with(name) && (*name != "}" || argument.is_some()));
    let is_raised = behind.starts_with('^') && !["^\\circ", "^{\\circ"].iter().any(|unit| behind.starts_with(unit));
    let mut letters = behind.chars();
    let variable = letters.next().is_some_and(|c| matches!(c, 'i' | 'x' | 'y' | 'z'))
        && !letters.next().is_some_and(char::is_alphanumeric);
    let factor = variable || TIMES.iter().any(|name| behind.trim_start().starts_with(name));
    // `x + 3` and `x^2 + 3`, where a word has no single letter.
    let operand = before.trim_end().strip_suffix(['+', '-', '*']).map(str::trim_end);
    let is_sum = operand.is_some_and(|operand| {
        let raised = operand.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '{' | '}'));
        let mut last = operand.chars().rev();
        raised.ends_with('^')
            || last.next().is_some_and(|c| c.is_ascii_lowercase() || c == '}')
                && !last.next().is_some_and(char::is_alphanumeric)
    });
    // `(1, 2)`, `\{1, 2\}`
    let opened = before.rfind(['(', '[', '{']).map(|at| &before[at + 1..]);
    let of_numbers = |list: &str| list.contains(',') && !list.contains(|c: char| c.is_alphabetic() || c == ')');
    let closed = behind.trim_start();
    let closed = closed.strip_prefix("\\right").unwrap_or(closed);
    let closed = closed.starts_with([')', ']']) || closed.starts_with("\\}");
    let is_listed = closed && opened.is_some_and(of_numbers);
    is_argument || of.ends_with(['^', '_']) || is_raised || factor || is_sum || is_listed
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
    let spaces = rest[len..].len() - rest[len..].trim_start().len();
    let behind = &rest[len + spaces..];
    let mixed = latex(behind).or_else(|| over(behind, digits(behind)).filter(|_| spaces == 1));
    if let Some((part, more)) = mixed.filter(|(part, _)| (0.0..1.0).contains(part) && digits(rest) == len) {
        return Some((value + part, len + spaces + more));
    }
    if let Some((exponent, more)) = raised(&rest[len..]) {
        return Some((value.powi(exponent), len + more));
    }
    let times = ["\\times", "\\cdot", "×"].iter().find_map(|name| behind.strip_prefix(name));
    let tens = times.map(str::trim_start).and_then(|tens| tens.strip_prefix("10"));
    if let Some((tens, (exponent, more))) = tens.and_then(|tens| Some((tens, raised(tens)?))) {
        return Some((value * 10f64.powi(exponent), rest.len() - tens.len() + more));
    }
    match over(rest, len).filter(|_| before != Some('/')) {
        Some(fraction) => Some(fraction),
        None => Some((value, len)),
    }
}

/// `^5`, `^{-3}`
fn raised(text: &str) -> Option<(i32, usize)> {
    let exponent = text.strip_prefix('^')?;
    let (number, braces) = match exponent.strip_prefix('{') {
        Some(inner) => (&inner[..inner.find('}')?], 2),
        None => (&exponent[..digits(exponent)], 0),
    };
    Some((number.trim().parse().ok()?, 1 + number.len() + braces))
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
            ("it is \\boxed{72}, my answer to question 3", 72.0),
            ("\\boxed{1} or \\boxed{\\text{about } 2}", 2.0),
            ("10^{5}", 1e5),
            ("2^3", 8.0),
            ("-3 \\times 10^{-2}", -0.03),
            ("2 \\frac{1}{2}", 2.5),
            ("45^\\circ", 45.0),
            ("x = 3", 3.0),
            ("(see 1, 2)", 2.0),
            ("5\\text{ cm}", 5.0),
            ("50%", 50.0),
            ("3.25.", 3.25),
            ("٣ and 7é", 7.0),
        ] {
            assert_eq!(last_number(text), Some(number), "{text}");
        }
        for text in [
            "",
            "none",
            "-",
            ".",
            "\\frac{}{}",
            "\\frac{x}{2}",
            "\\sqrt{2}",
            "3\\sqrt2",
            "2\\pi",
            "x^{2}",
            "x^2 + 3",
            "2^x",
            "a - 1",
            "(1, 2)",
            "\\left( 0, -5 \\right)",
            "\\boxed{\\text{none}} of 3",
            "4x",
            "3+4i",
            "\\{1,2\\}",
            "\\pm 3",
        ] {
            assert_eq!(last_number(text), None, "{text}");
        }
    }
}
