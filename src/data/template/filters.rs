//! The filters and methods of Jinja and Python that make a text of a value: each converts it as [`super::python`] does
//! and charges what it makes before it makes it. Never changes a filter that only computes with values.
use super::budget::{read, spend, too_much};
use super::checks;
use super::format;
use super::json::tojson;
use super::python::{self, Sequence, SequenceKind, text, text_value, type_error, type_name};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::borrow::Cow;

pub(super) fn install(env: &mut Environment) {
    env.add_filter("tojson", tojson);
    env.add_filter("string", |state: &State, value: Value| text_value(state, &value));
    for (name, plain) in [
        ("upper", Value::from_function(filters::upper)),
        ("lower", Value::from_function(filters::lower)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("trim", Value::from_function(filters::trim)),
        ("safe", Value::from_function(filters::safe)),
    ] {
        env.add_filter(name, move |state: &State, mut args: Rest<Value>| {
            if let Some(first) = args.first_mut() {
                *first = text_value(state, first)?;
            }
            plain.call(state, &args)
        });
    }
    for name in ["escape", "e"] {
        env.add_filter(name, |state: &State, value: Value| match value.is_safe() {
            true => Ok(value),
            false => escaped(state, &text(state, &value)?).map(Value::from_safe_string),
        });
    }
    env.add_filter("replace", replace);
    env.add_filter("join", join);
    env.add_filter("indent", indent);
    env.add_filter("round", round);
    env.add_filter("format", |state: &State, template: Value, args: Rest<Value>| {
        let (args, named): (&[Value], Kwargs) = from_args(&args)?;
        let template = text(state, &template)?;
        let some = named.args().next().is_some();
        match (some, args) {
            (true, []) => format::percent(state, &template, &[], Some(&Value::from(named))),
            (true, _) => Err(type_error("can't handle positional and keyword arguments at the same time".into())),
            (false, args) => format::percent(state, &template, args, None),
        }
    });
    env.remove_filter("pprint"); // prints Rust's structures
    let list = Value::from_function(filters::list);
    env.add_filter("list", move |state: &State, value: Value| {
        python::iterable(&value)?;
        list.call(state, &[value])
    });
    // What Jinja has for an undefined value, which is empty.
    let length = Value::from_function(filters::length);
    for name in ["length", "count"] {
        let length = length.clone();
        env.add_filter(name, move |state: &State, value: Value| match value.is_undefined() {
            true => Ok(Value::from(0)),
            false => length.call(state, &[value]),
        });
    }
    env.add_filter("items", |value: Value| match value.kind() {
        ValueKind::Map => Ok(Value::from(Sequence::pairs(&value))),
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        _ => Err(type_error("Can only get item pairs from a mapping.".into())),
    });
    let dictsort = Value::from_function(filters::dictsort);
    env.add_filter("dictsort", move |state: &State, args: Rest<Value>| {
        let sorted = dictsort.call(state, &args)?;
        let tuple = |pair: Value| Ok(Sequence::pair(pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
        sorted.try_iter()?.map(tuple).collect::<Result<Vec<Value>, Error>>().map(Value::from)
    });
    env.set_unknown_method_callback(method);
}

/// The methods of Python that minijinja's own lack, and what the others cost.
fn method(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let length = |value: Option<&Value>| value.and_then(Value::as_str).map_or(0, str::len) as u64;
    let first = args.first();
    match (value.kind(), method) {
        (ValueKind::String, "replace") => {
            if let (Some(text), [from, to, ..]) = (value.as_str(), args) {
                let (from, to) = (from.as_str().unwrap_or_default(), to.as_str().unwrap_or_default());
                spend(state, (text.matches(from).count() as u64).saturating_mul(to.len() as u64))?;
            }
        }
        (ValueKind::String, "join") => {
            let list = first.map(Value::try_iter).transpose()?.into_iter().flatten();
            for (i, item) in list.enumerate() {
                spend(state, length(Some(value)))?;
                if item.as_str().is_none() {
                    let found = type_name(&item);
                    return Err(type_error(format!("sequence item {i}: expected str instance, {found} found")));
                }
            }
        }
        (ValueKind::String, "format") => {
            return format::braces(state, value.as_str().unwrap_or_default(), args).map(Value::from);
        }
        (ValueKind::String, "splitlines") => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            let lines = lines(value.as_str().unwrap_or_default(), keep.unwrap_or(false));
            return Ok(lines.into_iter().map(Value::from).collect());
        }
        (ValueKind::String, "split" | "rsplit") => {
            let (separator, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.map_or_else(|| named.get::<Option<Value>>("sep"), |given| Ok(Some(given)))?;
            let most = most.map_or_else(|| named.get::<Option<i64>>("maxsplit"), |given| Ok(Some(given)))?;
            named.assert_all_used()?;
            let separator = separator.filter(|separator| !separator.is_none());
            let (text, most) = (value.as_str().unwrap_or_default(), most.unwrap_or(-1));
            if method == "rsplit" {
                return rsplit(text, separator.as_ref(), usize::try_from(most).unwrap_or(usize::MAX)).map(Value::from);
            }
            return unknown_method_callback(state, value, method, &[separator.into(), most.into()]);
        }
        (ValueKind::String, "partition" | "rpartition" | "removeprefix" | "removesuffix") => {
            let (part,): (&str,) = from_args(args)?;
            let text = value.as_str().unwrap_or_default();
            let three = |parts: [&str; 3]| Value::from(parts.map(Value::from).to_vec());
            return match method {
                "removeprefix" => Ok(Value::from(text.strip_prefix(part).unwrap_or(text))),
                "removesuffix" => Ok(Value::from(text.strip_suffix(part).unwrap_or(text))),
                _ if part.is_empty() => Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
                "partition" => Ok(text.split_once(part).map_or(three([text, "", ""]), |(a, b)| three([a, part, b]))),
                _ => Ok(text.rsplit_once(part).map_or(three(["", "", text]), |(a, b)| three([a, part, b]))),
            };
        }
        (ValueKind::String, "strip" | "lstrip" | "rstrip") => {
            read(state, length(Some(value)).saturating_mul(length(first)))?;
        }
        (ValueKind::String, "isdigit" | "isnumeric" | "isalpha" | "isalnum" | "isspace" | "isascii")
            if value.as_str() == Some("") =>
        {
            let () = from_args(args)?;
            return Ok(Value::from(method == "isascii"));
        }
        (ValueKind::String, "islower" | "isupper") => {
            let () = from_args(args)?;
            return Ok(Value::from(checks::in_case(value.as_str().unwrap_or_default(), method == "isupper")));
        }
        (ValueKind::String, "count") if first.and_then(Value::as_str) == Some("") => {
            return Err(too_much("count() of an empty string never ends".into()));
        }
        (ValueKind::Map, "items" | "keys" | "values") => {
            let () = from_args(args)?;
            let pairs = python::pairs(value);
            return Ok(match method {
                "items" => Sequence::value(SequenceKind::Items, Sequence::pairs(value)),
                "keys" => Sequence::value(SequenceKind::Keys, pairs.map(|(key, _)| key).collect()),
                _ => Sequence::value(SequenceKind::Values, pairs.map(|(_, value)| value).collect()),
            });
        }
        (ValueKind::Map, "get") => first.map_or(Ok(()), python::hashable)?,
        _ => {}
    }
    unknown_method_callback(state, value, method, args)
}

/// `str(value).replace(str(old), str(new), count)`
fn replace(state: &State, value: Value, old: Value, new: Value, count: Option<Value>) -> Result<String, Error> {
    let (value, old, new) = (text(state, &value)?, text(state, &old)?, text(state, &new)?);
    let count = count.filter(|count| !count.is_none()).map(i64::try_from).transpose()?;
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let found = value.matches(&*old).count().min(count) as u64;
    spend(state, found.saturating_mul(new.len() as u64))?;
    Ok(value.replacen(&*old, &new, count))
}

/// `str(d).join(map(str, value))`, of an attribute of each item if one is named.
fn join(state: &State, value: Value, args: Rest<Value>) -> Result<String, Error> {
    let (given, named): (&[Value], Kwargs) = from_args(&args)?;
    let option = |at: usize, name: &str| match given.get(at) {
        Some(value) => Ok(Some(value.clone())),
        None if named.has(name) => named.get::<Value>(name).map(Some),
        None => Ok(None),
    };
    let (d, attribute) = (option(0, "d")?, option(1, "attribute")?.filter(|a| !a.is_none()));
    named.assert_all_used()?;
    if given.len() > 2 {
        return Err(type_error(format!("join takes a separator and an attribute, not {} values", given.len())));
    }
    let d = d.as_ref().map_or(Ok(Cow::Borrowed("")), |d| text(state, d))?;
    python::iterable(&value)?;
    let mut out = String::new();
    for (i, mut item) in value.try_iter()?.enumerate() {
        if i > 0 {
            spend(state, d.len() as u64)?;
            out += &d;
        }
        for step in attribute.iter().flat_map(|a| a.to_string().split('.').map(String::from).collect::<Vec<_>>()) {
            item = item.get_item(&step.parse::<u64>().map_or_else(|_| Value::from(step), Value::from))?;
        }
        out += &text(state, &item)?;
    }
    Ok(out)
}

/// `str.rsplit(separator, most)`
fn rsplit(text: &str, separator: Option<&Value>, most: usize) -> Result<Vec<Value>, Error> {
    let mut parts: Vec<&str> = match separator.map(|separator| separator.as_str().unwrap_or_default()) {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => text.rsplitn(most.saturating_add(1), separator).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while let Some((before, word)) = rest.rsplit_once(char::is_whitespace).filter(|_| parts.len() < most) {
                parts.push(word);
                rest = before.trim_end();
            }
            parts.extend(Some(rest).filter(|rest| !rest.trim_start().is_empty()));
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `round(value, precision=0, method="common")`: exact halves go to the even neighbor, as in Python.
fn round(value: Value, args: Rest<Value>) -> Result<Value, Error> {
    type Given<T> = Option<T>;
    let (precision, method, named): (Given<i32>, Given<String>, Kwargs) = from_args(&args)?;
    let precision =
        precision.map_or_else(|| named.get::<Given<i32>>("precision"), |given| Ok(Some(given)))?.unwrap_or(0);
    let method = method.map_or_else(|| named.get::<Given<String>>("method"), |given| Ok(Some(given)))?;
    named.assert_all_used()?;
    let precision = precision.clamp(-400, 400);
    let (x, scale) = (f64::try_from(value.clone())?, 10_f64.powi(precision));
    let rounded = match method.as_deref().unwrap_or("common") {
        "common" if value.is_integer() && precision >= 0 => return Ok(value),
        "common" if value.is_integer() => return Ok(Value::from(((x * scale).round_ties_even() / scale) as i64)),
        "common" if precision < 0 => (x * scale).round_ties_even() / scale,
        "common" => format!("{x:.*}", precision as usize).parse().unwrap_or(x),
        "ceil" => (x * scale).ceil() / scale,
        "floor" => (x * scale).floor() / scale,
        _ => return Err(Error::new(ErrorKind::InvalidOperation, "method must be common, ceil or floor")),
    };
    Ok(Value::from(rounded))
}

/// `str.splitlines(keep)`
fn lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some((at, end)) = rest.char_indices().find(|&(_, c)| ends(c)) {
        let length = if rest[at..].starts_with("\r\n") { 2 } else { end.len_utf8() };
        lines.push(&rest[..if keep { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// A text with the characters replaced that have a meaning in HTML.
pub(super) fn escaped(state: &State, text: &str) -> Result<String, Error> {
    let more = text.matches(['&', '<', '>', '"', '\'']).count() as u64;
    spend(state, text.len() as u64 + 4 * more)?;
    let mut out = String::with_capacity(text.len() + 4 * more as usize);
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&#34;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    Ok(out)
}

/// The lines of a text, each but the first after `width` spaces or the text `width`. An empty line only with `blank`.
fn indent(state: &State, value: Value, args: Rest<Value>) -> Result<String, Error> {
    type Given = Option<Value>;
    let (width, first, blank, named): (Given, Given, Given, Kwargs) = from_args(&args)?;
    let option = |given: Given, name: &str| given.map_or_else(|| named.get::<Given>(name), |given| Ok(Some(given)));
    let (width, first, blank) = (option(width, "width")?, option(first, "first")?, option(blank, "blank")?);
    named.assert_all_used()?;
    let Some(text) = value.as_str() else {
        return Err(type_error(format!("indent needs a text, not {}", type_name(&value))));
    };
    let spaces = |n: u64| spend(state, n).map(|()| " ".repeat(n as usize));
    let width = match &width {
        None => spaces(4)?,
        Some(width) => match width.as_str() {
            Some(text) => text.into(),
            None => spaces(i64::try_from(width.clone())?.max(0) as u64)?,
        },
    };
    let on = |given: Given| given.is_some_and(|given| given.is_true());
    let (first, blank) = (on(first), on(blank));
    let text = format!("{text}\n");
    let lines = lines(&text, false);
    spend(state, (lines.len() as u64).saturating_mul(width.len() as u64))?;
    let mut out = String::new();
    for (i, line) in lines.into_iter().enumerate() {
        out += if i > 0 { "\n" } else { "" };
        if first && i == 0 || i > 0 && (blank || !line.is_empty()) {
            out += &width;
        }
        out += line;
    }
    Ok(out)
}
