//! The last number in a text, for `--reward number`. Never computes an expression.
//!
//! A number has digits, with commas between thousands, a decimal point and an exponent if any (`1,234.5`, `.5`, `1e-3`,
//! `10^{5}`, `3 \times 10^5`). A hyphen or a minus sign right before it, or before its currency sign, is its sign,
//! unless it follows a letter, a digit or a parenthesis (`10-15`, `covid-19`). `1/2`, `2 1/2` and `\frac{1}{2}` are
//! fractions, but no date. Where there is a `\boxed{}`, only the last one counts. The exponent of a unit (`cm^2`) is no
//! number.
//!
//! A last number that is a part of something else is none: of `\sqrt{2}`, `2\pi`, `x/2`, `x^2 + 3` or `(1, 2)`. In a
//! box, or a text without spaces, so is a number next to a comma, a comparison or a factorial's sign, which prose may
//! have.

/// A number, and its digits if it is written out: these tell integers apart that are equal as floats.
#[derive(Clone, Debug)]
pub(super) struct Number {
    value: f64,
    digits: Option<String>,
}

impl Number {
    fn new(value: f64, text: &str) -> Number {
        let plain = text.bytes().all(|c| c.is_ascii_digit() || matches!(c, b',' | b'.'));
        let text = text.replace(',', "");
        let (whole, part) = text.split_once('.').unwrap_or((&text, ""));
        let (whole, part) = (whole.trim_start_matches('0'), part.trim_end_matches('0'));
        let sign = if value < 0.0 { "-" } else { "" };
        Number { value, digits: plain.then(|| format!("{sign}{whole}.{part}")) }
    }
}

impl PartialEq for Number {
    fn eq(&self, other: &Number) -> bool {
        match (&self.digits, &other.digits) {
            (Some(digits), Some(others)) => digits == others,
            _ => self.value == other.value,
        }
    }
}

/// The last number, if it stands for itself and is finite.
pub(super) fn last_number(text: &str) -> Option<Number> {
    let text = text.replace(['\u{2212}', '\u{2013}'], "-"); // minus sign, en dash
    let text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", ","); // as LaTeX separates thousands
    let (text, strict) =
        boxed(&text).map_or((&text[..], !text.trim().contains(char::is_whitespace)), |text| (text, true));
    let (mut at, mut last) = (0, None);
    while let Some(c) = text[at..].chars().next() {
        match number(text, at) {
            Some((_, len)) if last.is_some() && raises_unit(&text[..at]) => at += len,
            Some((value, len)) => {
                let (before, behind) = (&text[..at], &text[at + len..]);
                let value = if is_negative(before) { -value } else { value };
                let alone = value.is_finite() && !is_part(before, behind) && !(strict && is_among(before, behind));
                last = (alone && !is_operand(before, behind, strict)).then(|| Number::new(value, &text[at..at + len]));
                at += len;
            }
            None => at += c.len_utf8(),
        }
    }
    last
}

/// What the last `\boxed{}` holds.
fn boxed(text: &str) -> Option<&str> {
    const BOX: &str = "\\boxed{";
    let inner = text.rfind(BOX).map(|at| &text[at + BOX.len()..])?;
    let mut open = 1;
    let closes = |(at, c): (usize, char)| {
        open += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        (open == 0).then_some(at)
    };
    Some(inner.char_indices().find_map(closes).map_or(inner, |end| &inner[..end]))
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
    // `(1, 2)`, `\{1, 2\}`
    let opened = before.rfind(['(', '[', '{']).map(|at| &before[at + 1..]);
    let of_numbers = |list: &str| list.contains(',') && !list.contains(|c: char| c.is_alphabetic() || c == ')');
    let closed = behind.trim_start();
    let closed = closed.strip_prefix("\\right").unwrap_or(closed);
    let closed = closed.starts_with([')', ']']) || closed.starts_with("\\}");
    let is_listed = closed && opened.is_some_and(of_numbers);
    is_argument || of.ends_with(['^', '_']) || is_raised || factor || is_listed
}

const OPERATORS: [&str; 9] = ["+", "-", "*", "/", "\\cdot", "\\times", "\\div", "×", "÷"];
/// What sets units in upright type.
const UPRIGHT: [&str; 4] = ["\\text", "\\textrm", "\\mathrm", "\\mbox"];
const COMPARISONS: [&str; 12] = ["\\leq", "\\geq", "\\neq", "\\le", "\\ge", "\\ne", "\\lt", "\\gt", "≤", "≥", "≠", "<"];

/// Whether the number between these is added to something on its line, or multiplied: in `x + 3`, `\pi/4`, `1/\pi`.
fn is_operand(before: &str, behind: &str, strict: bool) -> bool {
    let left = before.rsplit('\n').next().unwrap_or_default().trim_end();
    let right = behind.split('\n').next().unwrap_or_default();
    let follows = |(operator, left): (&str, &str)| {
        let rest = left.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let letters = left.len() - rest.len();
        match left.chars().next_back() {
            // Not `10-15`, and outside of a box not `10/12/2024`.
            Some(c) if c.is_ascii_digit() => match operator {
                "-" => left.trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '{' | '}')).ends_with('^'),
                "/" => strict,
                _ => true,
            },
            Some('}' | '!' | 'π') => true,
            Some(')' | ']') => strict || operator != "-",
            Some(_) if rest.ends_with('\\') => letters > 0,
            // A word has no single letter, and `B-52` is one.
            Some(c) => letters == 1 && !rest.ends_with(char::is_alphanumeric) && (operator != "-" || c.is_lowercase()),
            None => false,
        }
    };
    let precedes = |(operator, right): (&str, &str)| {
        let mut letters = right.chars();
        match letters.next() {
            Some('\\') => {
                let unit = UPRIGHT.iter().any(|name| right.starts_with(name));
                !unit && letters.next().is_some_and(|c| c.is_ascii_alphabetic())
            }
            Some('(' | 'π' | '√') => strict || operator == "*",
            Some(c) => strict && c.is_ascii_alphabetic() && !letters.next().is_some_and(char::is_alphanumeric),
            None => false,
        }
    };
    // `**5**` is printed in bold type.
    let bold = left.ends_with('*') && right.starts_with('*');
    let mut of_left = OPERATORS.iter().filter_map(|&op| Some((op, left.strip_suffix(op)?.trim_end())));
    let mut of_right = OPERATORS.iter().filter_map(|&op| Some((op, right.trim_start().strip_prefix(op)?.trim_start())));
    !bold && (of_left.any(follows) || of_right.any(precedes))
}

/// Whether the number between these is one of several, a bound, or a factorial's.
fn is_among(before: &str, behind: &str) -> bool {
    let (before, behind) = (before.trim_end(), behind.trim_start());
    let list = before.strip_suffix([',', ';']).map(str::trim_end);
    let named = before.strip_suffix('=').is_some_and(|before| before.contains('=') && before.contains([',', ';']));
    // `<answer>5</answer>` and `->5` compare nothing.
    let tagged = behind.starts_with("</") || before.contains('<') && before.ends_with('>');
    let compared = COMPARISONS.iter().any(|sign| before.ends_with(sign) || behind.starts_with(sign))
        || before.ends_with('>') && !["->", "=>"].iter().any(|arrow| before.ends_with(arrow))
        || behind.starts_with('>');
    list.is_some_and(|list| list.ends_with(|c: char| c.is_ascii_digit() || matches!(c, '}' | ')')))
        || named
        || compared && !tagged
        || behind.starts_with('!')
}

/// Whether what stands before a number makes it the exponent of a unit: `cm^`, `\text{ m}^{`, `m/s^`.
fn raises_unit(before: &str) -> bool {
    const UNITS: [&str; 18] = [
        "mm", "cm", "dm", "km", "in", "ft", "yd", "mi", "inch", "inches", "foot", "feet", "unit", "units", "meter",
        "meters", "miles", "yards",
    ];
    let Some(unit) = before.strip_suffix('{').unwrap_or(before).strip_suffix('^') else { return false };
    if let Some(inner) = unit.strip_suffix('}') {
        let Some(at) = inner.rfind('{') else { return false };
        return UPRIGHT.iter().any(|name| inner[..at].ends_with(name));
    }
    let rest = unit.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    UNITS.contains(&&unit[rest.len()..]) && !rest.ends_with('\\') || unit.ends_with("m/s")
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
            ("5\\text{ cm}^2", 5.0),
            ("the area is 5 cm^{2}.", 5.0),
            ("9.8\\text{ m/s}^2", 9.8),
            ("it is **5**", 5.0),
            ("I got a *5*", 5.0),
            ("of 3:\n* 5 eggs", 5.0),
            ("the answer is 5!", 5.0),
            ("it is 5 - a lot", 5.0),
            ("she earns $5/h", 5.0),
            ("<answer>5</answer>", 5.0),
            ("=>5", 5.0),
            ("x>3, so 5", 5.0),
            ("\\boxed{\\text{Yes, } 5}", 5.0),
            ("\\boxed{x_{2} = 4}", 4.0),
            ("2 * 3 = 6", 6.0),
            ("\\boxed{5}!", 5.0),
            ("\\boxed{-5\\,^\\circ\\text{C}}", -5.0),
            ("\\boxed{5\\text{ km}/\\text{h}}", 5.0),
        ] {
            assert_eq!(last_number(text).map(|found| found.value), Some(number), "{text}");
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
            "\\boxed{\\pi/4}",
            "\\boxed{1/\\pi}",
            "so it is x/2",
            "\\frac{x}{2}/4",
            "n/4",
            "4/n",
            "\\boxed{\\alpha / 4}",
            "\\boxed{\\sqrt{3}/2}",
            "2+3",
            "2*3",
            "2 \\cdot 3",
            "(a + b)/2",
            "5!",
            "\\boxed{5!}",
            "1,2",
            "1,2345",
            "\\boxed{1, 2}",
            "\\boxed{x=1, y=2}",
            "x<5",
            "\\boxed{x \\geq 5}",
            "\\boxed{5 < x}",
            "\\boxed{5 + \\sqrt{2}}",
            "5 - 2\\pi",
            "\\boxed{3 - x}",
            "5/0",
            "1e400",
        ] {
            assert!(last_number(text).is_none(), "{text}");
        }
    }

    #[test]
    fn numbers_that_are_written_out_are_compared_by_their_digits() {
        let equal = |a: &str, b: &str| last_number(a).unwrap() == last_number(b).unwrap();
        for (a, b) in [("1,000", "1000.0"), ("007", "7"), ("-0", "0"), ("0.50", "1/2"), (".5", "0.5"), ("1e3", "1000")]
        {
            assert!(equal(a, b), "{a} {b}");
        }
        for (a, b) in [
            ("12345678901234567890", "12345678901234567891"),
            ("9007199254740993", "9007199254740992"),
            ("-5", "5"),
            ("0.333", "1/3"),
        ] {
            assert!(!equal(a, b), "{a} {b}");
        }
    }
}
