//! Reads the fields of a row as the types they must have, and describes the ones that are not. Never knows what a row
//! means.
use serde_json::{Map, Value};
use std::borrow::Cow;

/// A row as parsed.
pub type JsonRow = Map<String, Value>;

/// What is wrong with a row; follows its position: "line 3 has no `messages`; ...".
pub type RowFault = String;
pub type RowResult<T> = Result<T, RowFault>;

/// The key of an object that stands for a number, which is the text of its value: `json.rs` makes them.
pub(super) const NUMBER: &str = "\0number";
/// The key of an object that stands for a value without a form in JSON, such as a date: what it is.
pub(super) const FOREIGN: &str = "\0foreign";

/// The text of the number that `value` stands for, if it does.
pub(crate) fn number_in(value: &JsonRow) -> Option<&str> {
    value.get(NUMBER)?.as_str()
}

/// A finite number, however it is written.
pub(super) fn finite(value: &Value) -> Option<f64> {
    let written = || value.as_object().and_then(number_in)?.parse().ok();
    value.as_f64().or_else(written).filter(|x: &f64| x.is_finite())
}

/// A value as its file has it.
pub(super) fn printed(value: &Value) -> String {
    let number = value.as_object().and_then(number_in);
    number.map_or_else(|| value.to_string(), str::to_string)
}

/// A row for other programs: what stands for a number that JSON has is the nearest one, and for any other value null.
pub fn in_json(row: JsonRow) -> JsonRow {
    fn plain(value: Value) -> Value {
        match value {
            Value::Array(list) => list.into_iter().map(plain).collect(),
            Value::Object(map) if map.contains_key(FOREIGN) => Value::Null,
            Value::Object(map) => match number_in(&map) {
                Some(number) => number.parse::<f64>().ok().map_or(Value::Null, Value::from),
                None => Value::Object(in_json(map)),
            },
            other => other,
        }
    }
    row.into_iter().map(|(key, value)| (key, plain(value))).collect()
}

/// A field that is present and not null.
pub(super) fn present<'a>(row: &'a JsonRow, key: &str) -> Option<&'a Value> {
    row.get(key).filter(|v| !v.is_null())
}

/// A JSON number as a token id.
pub(super) fn token_id(id: i64, bound: usize) -> RowResult<u32> {
    match u32::try_from(id) {
        Ok(id) if (id as usize) < bound => Ok(id),
        Err(_) if id < 0 => Err(format!("has token id {id}: ids are 0 or more")),
        _ => Err(format!(
            "has token id {id}, but vocab_size is {bound}: tokenizer mismatch. Set vocab_size to the vocabulary size \
             of the tokenizer that produced these ids"
        )),
    }
}

pub(super) fn field<'a>(row: &'a JsonRow, key: &str) -> RowResult<&'a Value> {
    row.get(key).filter(|v| !v.is_null()).ok_or_else(|| {
        let named =
            |(key, value): (&String, &Value)| if value.is_null() { format!("{key} (null)") } else { key.clone() };
        let keys: Vec<String> = row.iter().map(named).collect();
        format!("has no `{key}`; its keys are: {}", keys.join(", "))
    })
}

pub(super) fn string<'a>(row: &'a JsonRow, key: &str) -> RowResult<&'a str> {
    let value = field(row, key)?;
    value.as_str().ok_or_else(|| format!("has {} as {key}; a string is expected", kind(value)))
}

pub(super) fn array<'a>(value: &'a Value, key: &str) -> RowResult<&'a Vec<Value>> {
    value.as_array().ok_or_else(|| format!("has {} as {key}; a list is expected", kind(value)))
}

/// A list, or JSON text of one: what CSV files hold, and Parquet files where rows differ.
pub(super) fn list<'a>(value: &'a Value, key: &str) -> RowResult<Cow<'a, [Value]>> {
    match value {
        Value::String(text) if text.trim_start().starts_with('[') => {
            let parsed: Result<Vec<Value>, _> = serde_json::from_str(text);
            parsed.map(Cow::Owned).map_err(|e| format!("has {key} that are text, but not JSON ({e})"))
        }
        value => array(value, key).map(|list| Cow::Borrowed(&list[..])),
    }
}

pub(super) fn whole(value: &Value, key: &str) -> RowResult<i64> {
    value.as_i64().ok_or_else(|| format!("has {value} in its {key}, which must be integers"))
}

/// True or false, or 1 or 0.
pub(super) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(on) => Some(*on),
        number if number.as_f64() == Some(1.0) => Some(true),
        number if number.as_f64() == Some(0.0) => Some(false),
        _ => None,
    }
}

/// The same of text, as tables have it.
pub(super) fn truth_in(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" => Some(true),
        "false" => Some(false),
        number => truth(&number.parse::<f64>().ok()?.into()),
    }
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(map) if number_in(map).is_some() => "a number",
        Value::Object(map) if map.contains_key(FOREIGN) => "a value that JSON does not have",
        Value::Object(_) => "an object",
    }
}
