//! The filters of Jinja that make a text of a value: each converts it as [`super::python`] does
//! and charges what it makes before it makes it. Never changes a filter that only computes with values.
use super::budget::spend;
use super::format;
use super::json::tojson;
use super::methods::{self, lines};
use super::python::{self, Sequence, text, text_value, type_error, type_name};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters};
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
    env.set_unknown_method_callback(methods::method);
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
