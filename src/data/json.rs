//! Parses a row that is a JSON object, also with the numbers that Python's `json` module writes and JSON does not have.
//! Never knows what a row means.
use super::fields::{JsonRow, RowResult};

/// A row as parsed, and the first number in it that JSON does not have: NaN, Infinity, or one beyond 64 bits of float.
/// An empty object stands for it, which no field accepts.
pub(crate) fn object(bytes: &[u8]) -> RowResult<(JsonRow, Option<String>)> {
    let text = std::str::from_utf8(bytes).map_err(|_| "is not valid UTF-8")?;
    let parse = |text: &str| {
        serde_json::from_str(text).map_err(|e| {
            let shown: String = text.trim_end().chars().take(80).collect();
            format!("is not a JSON object ({e}): {shown}")
        })
    };
    match parse(text) {
        Ok(row) => Ok((row, None)),
        Err(fault) => match replaced(text) {
            Some((text, number)) => parse(&text).map(|row| (row, Some(number))),
            None => Err(fault),
        },
    }
}

/// `text` with empty objects in place of such numbers, which keep their length; and the first of them.
fn replaced(text: &str) -> Option<(String, String)> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let (bytes, mut out, mut found, mut at) = (text.as_bytes(), text.as_bytes().to_vec(), None, 0);
    while at < bytes.len() {
        if bytes[at] == b'"' {
            let mut escaped = false;
            let ends = |&b: &u8| {
                let ends = b == b'"' && !escaped;
                escaped = b == b'\\' && !escaped;
                ends
            };
            at += 2 + bytes[at + 1..].iter().position(ends).unwrap_or(bytes.len());
            continue;
        }
        let word = |b: &&u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
        let len = bytes[at..].iter().take_while(word).count();
        let token = &text[at..at + len];
        let digits = |token: &str| token.bytes().all(|b| matches!(b, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E'));
        let large = || digits(token) && token.parse::<f64>().is_ok_and(f64::is_infinite);
        if matches!(token, "NaN" | "Infinity" | "-Infinity") || large() {
            out[at..at + len].fill(b' ');
            (out[at], out[at + len - 1]) = (b'{', b'}');
            found.get_or_insert_with(|| token.chars().take(20).collect());
        }
        at += len.max(1);
        while !text.is_char_boundary(at.min(text.len())) {
            at += 1;
        }
    }
    Some((String::from_utf8(out).ok()?, found?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_of_python_are_replaced_outside_of_strings() {
        let row = r#"{"a": NaN, "b": [-Infinity, 1e999], "é": "NaN, \" Infinity \\", "c": {"d": Infinity}}"#;
        let (found, number) = object(row.as_bytes()).unwrap();
        let expected = json!({"a": {}, "b": [{}, {}], "é": "NaN, \" Infinity \\", "c": {"d": {}}});
        assert_eq!((serde_json::Value::Object(found), number.as_deref()), (expected, Some("NaN")));
        let large = format!("{{\"a\": -{}, \"b\": 1}}", "9".repeat(400));
        assert_eq!(object(large.as_bytes()).unwrap().1.unwrap().len(), 20);
        let plain = format!("{{\"a\": {}, \"a\": \"NaN\"}}", u128::MAX);
        assert_eq!(object(plain.as_bytes()).unwrap().1, None);
        for wrong in
            ["NaN", "{\"a\": Nan}", "{\"a\": NaNs}", "{NaN: 1}", "{\"a\": -inf}", "{\"a\": \"NaN", "{\"a\": é", ""]
        {
            assert!(object(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
