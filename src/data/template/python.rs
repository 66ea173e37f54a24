//! Values as Python's `str()` and `repr()` print them: wherever a chat template makes a text of a value, it is this
//! text. Never formats a value for JSON.
use super::budget;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

/// `str(value)`. Charges the text, unless the value is one already.
pub(super) fn text<'v>(state: &State, value: &'v Value) -> Result<Cow<'v, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    match value.is_undefined() {
        true => Ok(Cow::Borrowed("")), // in a container: Undefined
        false => repr(state, value).map(Cow::Owned),
    }
}

/// The same as a value; safe text stays safe.
pub(super) fn text_value(state: &State, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => Ok(Value::from(text(state, value)?)),
    }
}

/// `repr(value)`, charged.
pub(super) fn repr(state: &State, value: &Value) -> Result<String, Error> {
    budget::weigh(state, std::slice::from_ref(value))?;
    let mut out = String::new();
    write(&mut out, value);
    budget::spend(state, out.len() as u64)?;
    Ok(out)
}

fn write(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::Undefined => *out += "Undefined",
        ValueKind::None => *out += "None",
        ValueKind::Bool => *out += if value.is_true() { "True" } else { "False" },
        ValueKind::Number => *out += &number(value),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let kind = value.downcast_object_ref::<Sequence>().map(|s| s.kind);
            if let Some(SequenceKind::Range(start, stop, step)) = kind {
                let step = if step == 1 { String::new() } else { format!(", {step}") };
                *out += &format!("range({start}, {stop}{step})");
                return;
            }
            let [open, close] = kind.map_or(["[", "]"], SequenceKind::brackets);
            *out += open;
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                *out += if i > 0 { ", " } else { "" };
                write(out, &item);
            }
            *out += close;
        }
        ValueKind::Map => {
            out.push('{');
            for (i, (key, value)) in pairs(value).enumerate() {
                *out += if i > 0 { ", " } else { "" };
                write(out, &key);
                *out += ": ";
                write(out, &value);
            }
            out.push('}');
        }
        // Functions, macros and loops, which no template prints on purpose.
        _ => *out += &value.to_string(),
    }
}

/// The keys and values of a dict; none of another value.
pub(super) fn pairs(dict: &Value) -> impl Iterator<Item = (Value, Value)> {
    dict.as_object().and_then(|o| o.try_iter_pairs()).into_iter().flatten()
}

/// An integer, or a float as [`float`] has it.
pub(super) fn number(value: &Value) -> String {
    match (value.is_integer(), f64::try_from(value.clone())) {
        (false, Ok(x)) => float(x),
        _ => value.to_string(),
    }
}

/// The shortest digits that read as `x`; with an exponent below 1e-4 and from 1e16.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    let scientific = format!("{x:e}");
    match scientific.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?))) {
        Some((digits, power)) if !(-4..16).contains(&power) => {
            format!("{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs())
        }
        Some(_) => format!("{x:?}"), // in this range, with ".0" where there is no fraction
        None => scientific,          // inf
    }
}

/// A string between single quotes, or double ones if it has single quotes alone.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => *out += "\\\\",
            '\n' => *out += "\\n",
            '\r' => *out += "\\r",
            '\t' => *out += "\\t",
            c if c == quote => out.extend(['\\', c]),
            c if printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                // Writing to a String cannot fail.
                let _ = match code {
                    0..0x100 => write!(out, "\\x{code:02x}"),
                    0x100..0x10000 => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// `str.isprintable`: neither a control, format, private or unassigned character nor a separator but the space. Rust
/// escapes the same, from its own version of Unicode; also marks, but not those that follow another character.
fn printable(c: char) -> bool {
    match c.is_ascii() {
        true => !c.is_ascii_control(),
        false => ["a", c.encode_utf8(&mut [0; 4])].concat().escape_debug().nth(1) == Some(c),
    }
}

/// The name of a value's type in Python, for messages.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Seq | ValueKind::Iterable => {
            value.downcast_object_ref::<Sequence>().map_or("list", |s| s.kind.name())
        }
        ValueKind::Map => "dict",
        _ => "object",
    }
}

pub(super) fn type_error(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Refuses a value that Python does not loop over, and minijinja does.
pub(super) fn iterable(value: &Value) -> Result<(), Error> {
    match value.is_undefined() || !value.is_none() && value.try_iter().is_ok() {
        true => Ok(()),
        false => Err(type_error(format!("'{}' object is not iterable", type_name(value)))),
    }
}

/// Refuses a key that Python cannot hash.
pub(super) fn hashable(key: &Value) -> Result<(), Error> {
    match key.kind() {
        ValueKind::Map => Err(type_error("unhashable type: 'dict'".into())),
        ValueKind::Seq | ValueKind::Iterable if key.downcast_object_ref::<Sequence>().is_none() => {
            Err(type_error("unhashable type: 'list'".into()))
        }
        _ => Ok(()),
    }
}

/// Whether Python has an answer to `value in container`.
pub(super) fn containable(value: &Value, container: &Value) -> Result<(), Error> {
    match container.kind() {
        ValueKind::String if value.as_str().is_none() => {
            Err(type_error(format!("'in <string>' requires string as left operand, not {}", type_name(value))))
        }
        ValueKind::Map => hashable(value),
        _ => Ok(()),
    }
}

/// An integer or boolean.
pub(super) fn whole(value: &Value) -> Result<i128, Error> {
    match value.kind() == ValueKind::Bool || value.is_integer() {
        true => i128::try_from(value.clone()),
        false => Err(type_error("not an integer".into())),
    }
}

/// An integer beyond 128 bits, by its digits: templates print it, and compute nothing with it.
#[derive(Debug)]
pub(in crate::data) struct WideInteger(pub String);

impl Object for WideInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a [`Sequence`] is in Python.
#[derive(Clone, Copy, Debug)]
pub(super) enum SequenceKind {
    Tuple,
    Keys,
    Values,
    Items,
    /// A tuple of `grouper` and `list`.
    Group,
    /// Start, stop and step.
    Range(i64, i64, i64),
}

impl SequenceKind {
    fn name(self) -> &'static str {
        match self {
            SequenceKind::Tuple | SequenceKind::Group => "tuple",
            SequenceKind::Keys => "dict_keys",
            SequenceKind::Values => "dict_values",
            SequenceKind::Items => "dict_items",
            SequenceKind::Range(..) => "range",
        }
    }
    fn brackets(self) -> [&'static str; 2] {
        match self {
            SequenceKind::Tuple | SequenceKind::Group => ["(", ")"],
            SequenceKind::Keys => ["dict_keys([", "])"],
            SequenceKind::Values => ["dict_values([", "])"],
            SequenceKind::Items => ["dict_items([", "])"],
            SequenceKind::Range(..) => ["range(", ")"],
        }
    }
}

/// A list that prints as another type of Python.
#[derive(Debug)]
pub(super) struct Sequence {
    pub kind: SequenceKind,
    items: Vec<Value>,
}

impl Sequence {
    pub fn value(kind: SequenceKind, items: Vec<Value>) -> Value {
        Value::from_object(Sequence { kind, items })
    }
    pub fn pair(key: Value, value: Value) -> Value {
        Sequence::value(SequenceKind::Tuple, vec![key, value])
    }
    /// The (key, value) tuples of a dict; none of another value.
    pub fn pairs(dict: &Value) -> Vec<Value> {
        pairs(dict).map(|(key, value)| Sequence::pair(key, value)).collect()
    }
}

impl Object for Sequence {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let place = match (self.kind, key.as_str()) {
            (SequenceKind::Group, Some(name)) => ["grouper", "list"].iter().position(|known| *known == name),
            _ => key.as_usize(),
        };
        self.items.get(place?).cloned()
    }
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }
}
