//! The filter `tojson` as transformers defines it: `json.dumps(value, ensure_ascii=False, ..)`. Never escapes for HTML.
use super::budget;
use super::python::{self, Sequence, SequenceKind, WideInteger, type_error, type_name};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Error, State};
use std::fmt::Write;

/// The arguments of `tojson`.
struct Dumps {
    item: String,
    colon: String,
    /// What a line starts with, once per level.
    indent: Option<String>,
    ascii: bool,
    sort: bool,
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`
pub(super) fn tojson(state: &State, value: Value, args: Rest<Value>) -> Result<String, Error> {
    type Given = Option<Value>;
    let (ascii, indent, separators, sort, named): (Given, Given, Given, Given, Kwargs) = from_args(&args)?;
    let option = |given: Given, name: &str| -> Result<Given, Error> {
        let given = match given {
            Some(given) => Some(given),
            None => named.get::<Given>(name)?,
        };
        Ok(given.filter(|value| !value.is_none()))
    };
    let truth = |value: Given| value.is_some_and(|value| value.is_true());
    let (ascii, sort) = (truth(option(ascii, "ensure_ascii")?), truth(option(sort, "sort_keys")?));
    let weight = budget::weigh(state, std::slice::from_ref(&value))?;
    let spaces = |width: Value| -> Result<String, Error> {
        if let Some(text) = width.as_str() {
            return Ok(text.into());
        }
        // Like Python's, a number below 0 or a boolean.
        let width = i64::try_from(width.clone()).map_or(width.is_true() as u64, |n| n.max(0) as u64);
        budget::spend(state, width)?;
        Ok(" ".repeat(width as usize))
    };
    let indent = option(indent, "indent")?.map(spaces).transpose()?;
    let [item, colon] = match option(separators, "separators")? {
        None => [if indent.is_some() { "," } else { ", " }.into(), ": ".into()],
        Some(pair) => {
            let texts: Vec<Value> = pair.try_iter()?.collect();
            match (texts.as_slice(), texts.iter().all(|t| t.as_str().is_some())) {
                ([item, colon], true) => [item.to_string(), colon.to_string()],
                _ => return Err(type_error("`separators` of tojson are two strings".into())),
            }
        }
    };
    named.assert_all_used()?;
    let line = (indent.as_ref().map_or(0, String::len) as u64).saturating_mul(u64::from(weight.depth) + 1);
    let each = line.saturating_add((item.len() + colon.len()) as u64);
    budget::spend(state, weight.text.saturating_add(weight.parts.saturating_mul(each)))?;
    let mut out = String::new();
    Dumps { item, colon, indent, ascii, sort }.write(&mut out, &value, 0)?;
    Ok(out)
}

impl Dumps {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => *out += "null",
            ValueKind::Bool => *out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => *out += &number(value),
            ValueKind::String => self.quoted(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let view = value.downcast_object_ref::<Sequence>();
                if view.is_some_and(|s| !matches!(s.kind, SequenceKind::Tuple)) {
                    return Err(unserializable(value));
                }
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(out, ['[', ']'], depth, items.iter(), |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut pairs: Vec<(Value, Value)> = python::pairs(value).collect();
                if self.sort {
                    let kinds = || pairs.iter().map(|(key, _)| key.kind());
                    if kinds().zip(kinds().skip(1)).any(|(a, b)| a != b) {
                        return Err(type_error("`sort_keys` of tojson needs keys of one type".into()));
                    }
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container(out, ['{', '}'], depth, pairs.iter(), |out, (key, value)| {
                    self.quoted(out, &spelled(key)?);
                    *out += &self.colon;
                    self.write(out, value, depth + 1)
                })?;
            }
            _ if let Some(WideInteger(digits)) = value.downcast_object_ref() => *out += digits,
            _ => return Err(unserializable(value)),
        }
        Ok(())
    }

    fn container<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: impl ExactSizeIterator<Item = T>,
        mut each: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| *out += indent);
            }
        };
        let filled = items.len() > 0;
        out.push(open);
        for (i, item) in items.enumerate() {
            *out += if i > 0 { &self.item } else { "" };
            line(out, depth + 1);
            each(out, item)?;
        }
        if filled {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn quoted(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => *out += "\\\"",
                '\\' => *out += "\\\\",
                '\n' => *out += "\\n",
                '\r' => *out += "\\r",
                '\t' => *out += "\\t",
                '\u{8}' => *out += "\\b",
                '\u{c}' => *out += "\\f",
                c if c < ' ' || self.ascii && !(' '..='~').contains(&c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}"); // cannot fail
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> String {
    match python::number(value).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        finite => finite.into(),
    }
}

/// A key of an object.
fn spelled(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().into()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        _ => Err(type_error(format!("keys must be str, int, float, bool or None, not {}", type_name(key)))),
    }
}

fn unserializable(value: &Value) -> Error {
    type_error(format!("Object of type {} is not JSON serializable", type_name(value)))
}
