//! Parses a row that is a JSON object, also with numbers that Python's `json` module has and Rust's lacks. Never knows
//! what a row means.
use super::fields::{JsonRow, NUMBER, RowResult};

/// From this depth on, integers beyond 64 bits and `-0` stand as they are written: only chat templates print what is
/// nested so deeply.
const DEEP: usize = 2;

/// A row as parsed, and the first number in it that JSON does not have: NaN, Infinity, or one beyond 64 bits of float.
/// An object stands for it ([`NUMBER`]), which no field accepts and a chat template prints as Python does.
pub(crate) fn object(bytes: &[u8]) -> RowResult<(JsonRow, Option<String>)> {
    let text = std::str::from_utf8(bytes).map_err(|_| "is not valid UTF-8")?;
    let parse = |text: &str| {
        serde_json::from_str(text).map_err(|e| {
            let shown: String = text.trim_end().chars().take(80).collect();
            format!("is not a JSON object ({e}): {shown}")
        })
    };
    match parse(text) {
        Ok(row) if !has_wide(bytes) => Ok((row, None)),
        parsed => match replaced(text) {
            Some((text, number)) => parse(&text).map(|row| (row, number)),
            None => parsed.map(|row| (row, None)),
        },
    }
}

/// Whether a text may hold an integer beyond 64 bits, or `-0`.
fn has_wide(text: &[u8]) -> bool {
    let (mut digits, mut last) = (0, b' ');
    text.iter().any(|&b| {
        digits = if b.is_ascii_digit() { digits + 1 } else { 0 };
        let minus = b == b'0' && last == b'-';
        last = b;
        minus || digits > 18
    })
}

/// What a token of JSON is.
enum NumberToken {
    Plain,
    /// A number that JSON has, in digits that Rust's parser does not keep.
    Wide,
    /// A number that JSON does not have.
    Foreign,
}

impl NumberToken {
    fn of(token: &str) -> NumberToken {
        let digits = token.strip_prefix('-').unwrap_or(token);
        let integer = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        let number = token.bytes().all(|b| matches!(b, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E'));
        match token {
            "NaN" | "Infinity" | "-Infinity" => NumberToken::Foreign,
            _ if number && token.parse::<f64>().is_ok_and(f64::is_infinite) => NumberToken::Foreign,
            "-0" => NumberToken::Wide,
            _ if integer
                && !digits.starts_with('0')
                && token.parse::<i64>().is_err()
                && token.parse::<u64>().is_err() =>
            {
                NumberToken::Wide
            }
            _ => NumberToken::Plain,
        }
    }
}

/// `text` with objects in place of such numbers, if there are any; and the first that JSON does not have.
fn replaced(text: &str) -> Option<(String, Option<String>)> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let (bytes, mut out, mut done, mut at, mut depth) = (text.as_bytes(), String::new(), 0, 0, 0_usize);
    let mut found = None;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                let mut escaped = false;
                let ends = |&b: &u8| {
                    let ends = b == b'"' && !escaped;
                    escaped = b == b'\\' && !escaped;
                    ends
                };
                at += 2 + bytes[at + 1..].iter().position(ends).unwrap_or(bytes.len());
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        let word = |b: &&u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
        let len = bytes[at..].iter().take_while(word).count();
        let token = &text[at..at + len];
        let kind = NumberToken::of(token);
        if matches!(kind, NumberToken::Foreign) || matches!(kind, NumberToken::Wide) && depth >= DEEP {
            out += &text[done..at];
            out += &serde_json::json!({NUMBER: token}).to_string();
            done = at + len;
        }
        if matches!(kind, NumberToken::Foreign) {
            found.get_or_insert_with(|| token.chars().take(20).collect());
        }
        at += len.max(1);
        while !text.is_char_boundary(at.min(text.len())) {
            at += 1;
        }
    }
    (done > 0).then(|| (out + &text[done..], found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_of_python_are_replaced_outside_of_strings() {
        let row = r#"{"a": NaN, "b": [-Infinity, 1e999], "é": "NaN, \" Infinity \\", "c": {"d": Infinity}}"#;
        let (found, number) = object(row.as_bytes()).unwrap();
        let stands = |number: &str| json!({NUMBER: number});
        let expected = json!({
            "a": stands("NaN"), "b": [stands("-Infinity"), stands("1e999")], "é": "NaN, \" Infinity \\", "c": {"d": stands("Infinity")},
        });
        assert_eq!((serde_json::Value::Object(found), number.as_deref()), (expected, Some("NaN")));
        let large = format!("{{\"a\": -{}, \"b\": 1}}", "9".repeat(400));
        assert_eq!(object(large.as_bytes()).unwrap().1.unwrap().len(), 20);
        let plain = format!("{{\"a\": {}, \"a\": \"NaN\"}}", u128::MAX);
        assert_eq!(object(plain.as_bytes()).unwrap().1, None);
        let wide = r#"{"id": 18446744073709551616, "zero": -0, "b": [-0, -0.0, 01234567890123456789]}"#;
        assert!(object(wide.as_bytes()).is_err(), "a zero before other digits");
        let (found, number) = object(wide.replace(", 01", ", 1").as_bytes()).unwrap();
        let expected =
            json!({"id": 18446744073709551616.0, "zero": -0.0, "b": [stands("-0"), -0.0, 1234567890123456789_u64]});
        assert_eq!((serde_json::Value::Object(found), number), (expected, None));
        for wrong in
            ["NaN", "{\"a\": Nan}", "{\"a\": NaNs}", "{NaN: 1}", "{\"a\": -inf}", "{\"a\": \"NaN", "{\"a\": é", ""]
        {
            assert!(object(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
