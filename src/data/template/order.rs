//! Jinja's filters that order values, and those that make numbers and titles of them, as Python compares and converts:
//! what Python cannot compare is an error. Never prints a value.
use super::budget::{read, spend};
use super::python::{self, hashable, text, type_error, type_name};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, State};
use std::cmp::Ordering;
use std::collections::BTreeSet;

pub(super) fn install(env: &mut Environment) {
    env.add_filter("sort", sort);
    env.add_filter("unique", unique);
    env.add_filter("min", |state: &State, value: Value, named: Kwargs| extreme(state, &value, &named, Ordering::Less));
    env.add_filter("max", |state: &State, value: Value, named: Kwargs| {
        extreme(state, &value, &named, Ordering::Greater)
    });
    env.add_filter("reverse", reverse);
    env.add_filter("title", |state: &State, value: Value| {
        let text = text(state, &value)?;
        spend(state, text.len() as u64)?;
        Ok::<_, Error>(title(&text))
    });
    env.add_filter("int", |value: Value, args: Rest<Value>| {
        let (given, named): (&[Value], Kwargs) = from_args(&args)?;
        let default = fallback(given, &named, 0)?;
        let base = match given.get(1) {
            Some(base) => u32::try_from(base.clone())?,
            None => named.get::<Option<u32>>("base")?.unwrap_or(10),
        };
        named.assert_all_used()?;
        int(&value, base).map(|found| found.map_or(default, Value::from))
    });
    env.add_filter("float", |value: Value, args: Rest<Value>| {
        let (given, named): (&[Value], Kwargs) = from_args(&args)?;
        let default = fallback(given, &named, 0.0)?;
        named.assert_all_used()?;
        float(&value).map(|found| found.map_or(default, Value::from))
    });
}

/// What a value that is no number becomes.
fn fallback(given: &[Value], named: &Kwargs, usual: impl Into<Value>) -> Result<Value, Error> {
    match given.first() {
        Some(value) => Ok(value.clone()),
        None if named.has("default") => named.get("default"),
        None => Ok(usual.into()),
    }
}

pub(super) fn option(given: Option<Value>, named: &Kwargs, name: &str) -> Result<Option<Value>, Error> {
    given.map_or_else(|| named.get(name), |given| Ok(Some(given)))
}

/// What a filter compares of each item.
pub(super) struct Key {
    case_sensitive: bool,
    /// The attributes: one, or several for `sort`.
    attributes: Vec<Vec<Value>>,
}

impl Key {
    pub fn of(case_sensitive: Option<Value>, attribute: Option<Value>) -> Key {
        let part = |part: &str| part.parse::<u64>().map_or_else(|_| Value::from(part), Value::from);
        let attributes = match attribute.filter(|attribute| !attribute.is_none()) {
            None => Vec::new(),
            Some(attribute) => match attribute.as_str() {
                None => vec![vec![attribute.clone()]],
                Some(names) => names.split(',').map(|name| name.split('.').map(part).collect()).collect(),
            },
        };
        Key { case_sensitive: case_sensitive.is_some_and(|on| on.is_true()), attributes }
    }
    pub fn values(&self, item: &Value) -> Result<Vec<Value>, Error> {
        let lower = |value: Value| match value.as_str().filter(|_| !self.case_sensitive) {
            Some(text) => Value::from(text.to_lowercase()),
            None => value,
        };
        if self.attributes.is_empty() {
            return Ok(vec![lower(item.clone())]);
        }
        let walk = |steps: &Vec<Value>| steps.iter().try_fold(item.clone(), |item, step| item.get_item(step));
        self.attributes.iter().map(|steps| walk(steps).map(lower)).collect()
    }
}

/// `a < b`, as an order.
pub(super) fn compare(a: &Value, b: &Value) -> Result<Ordering, Error> {
    let number = |kind| matches!(kind, ValueKind::Number | ValueKind::Bool);
    match (a.kind(), b.kind()) {
        (ValueKind::String, ValueKind::String) => Ok(a.as_str().cmp(&b.as_str())),
        (ValueKind::Seq, ValueKind::Seq) => {
            let (a, b): (Vec<Value>, Vec<Value>) = (a.try_iter()?.collect(), b.try_iter()?.collect());
            listed(&a, &b)
        }
        (x, y) if number(x) && number(y) => Ok(match [a, b].map(|value| i128::try_from(plain(value))) {
            [Ok(a), Ok(b)] => a.cmp(&b),
            _ => {
                let [a, b] = [a, b].map(|value| f64::try_from(plain(value)).unwrap_or(f64::NAN));
                a.partial_cmp(&b).unwrap_or(Ordering::Equal)
            }
        }),
        _ => {
            let (a, b) = (type_name(a), type_name(b));
            Err(type_error(format!("'<' not supported between instances of '{a}' and '{b}'")))
        }
    }
}

/// Lists, whose equal items are not compared.
fn listed(a: &[Value], b: &[Value]) -> Result<Ordering, Error> {
    match a.iter().zip(b).find(|(a, b)| a != b) {
        Some((a, b)) => compare(a, b),
        None => Ok(a.len().cmp(&b.len())),
    }
}

/// `a == b`
pub(super) fn is_equal(a: &Value, b: &Value) -> bool {
    a == b || plain(a) == plain(b)
}

/// A boolean is the integer that it is in Python.
pub(super) fn plain(value: &Value) -> Value {
    if value.kind() == ValueKind::Bool { Value::from(i64::from(value.is_true())) } else { value.clone() }
}

pub(super) fn items(state: &State, value: &Value) -> Result<Vec<Value>, Error> {
    python::iterable(value)?;
    let items: Vec<Value> = value.try_iter()?.collect();
    read(state, 16 * items.len() as u64)?;
    Ok(items)
}

fn sort(state: &State, value: Value, args: Rest<Value>) -> Result<Value, Error> {
    type Given = Option<Value>;
    let (backwards, case, attribute, named): (Given, Given, Given, Kwargs) = from_args(&args)?;
    let backwards = option(backwards, &named, "reverse")?.is_some_and(|on| on.is_true());
    let key = Key::of(option(case, &named, "case_sensitive")?, option(attribute, &named, "attribute")?);
    named.assert_all_used()?;
    let keyed = |item: Value| key.values(&item).map(|key| (key, item));
    let mut items = items(state, &value)?.into_iter().map(keyed).collect::<Result<Vec<_>, Error>>()?;
    let mut fault = None;
    items.sort_by(|(a, _), (b, _)| {
        let (a, b) = if backwards { (b, a) } else { (a, b) };
        listed(a, b).unwrap_or_else(|e| {
            fault.get_or_insert(e);
            Ordering::Equal
        })
    });
    fault.map_or(Ok(items.into_iter().map(|(_, item)| item).collect()), Err)
}

fn unique(state: &State, value: Value, args: Rest<Value>) -> Result<Value, Error> {
    let (case, attribute, named): (Option<Value>, Option<Value>, Kwargs) = from_args(&args)?;
    let key = Key::of(option(case, &named, "case_sensitive")?, option(attribute, &named, "attribute")?);
    named.assert_all_used()?;
    let (mut seen, mut kept) = (BTreeSet::new(), Vec::new());
    for item in items(state, &value)? {
        let key: Vec<Value> = key.values(&item)?.iter().map(plain).collect();
        key.iter().try_for_each(hashable)?;
        if seen.insert(key) {
            kept.push(item);
        }
    }
    Ok(Value::from(kept))
}

/// `min` and `max`: the first item whose key is on this side of all others'.
fn extreme(state: &State, value: &Value, named: &Kwargs, side: Ordering) -> Result<Value, Error> {
    let key = Key::of(named.get("case_sensitive")?, named.get("attribute")?);
    named.assert_all_used()?;
    let mut best: Option<(Vec<Value>, Value)> = None;
    for item in items(state, value)? {
        let key = key.values(&item)?;
        let better = match &best {
            None => true,
            Some((found, _)) => compare(&key[0], &found[0])? == side,
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

/// A text backwards, or the items of another value; of a dict, its keys.
fn reverse(state: &State, value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        spend(state, text.len() as u64)?;
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let mut items = items(state, &value)?;
    items.reverse();
    Ok(Value::from(items))
}

/// Words begin after spaces, hyphens and opening brackets.
fn title(text: &str) -> String {
    let mut starts = true;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match starts {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        starts = c.is_whitespace() || "-({[<".contains(c);
    }
    out
}

/// `int(value, base)`, else `int(float(value))`; None where neither is possible.
fn int(value: &Value, base: u32) -> Result<Option<i128>, Error> {
    let whole = |text: &str| {
        let (sign, digits) = match text.trim().strip_prefix('-') {
            Some(digits) => (-1, digits),
            None => (1, text.trim().strip_prefix('+').unwrap_or(text.trim())),
        };
        let prefix = match base {
            16 => Some(["0x", "0X"]),
            8 => Some(["0o", "0O"]),
            2 => Some(["0b", "0B"]),
            _ => None,
        };
        let digits = prefix.iter().flatten().find_map(|prefix| digits.strip_prefix(prefix)).unwrap_or(digits);
        let digits = if digits.starts_with(['+', '-']) { None } else { ungrouped(digits) };
        digits.and_then(|digits| i128::from_str_radix(&digits, base).ok()).map(|n| sign * n)
    };
    if !(2..=36).contains(&base) {
        return Err(type_error(format!("int() base must be from 2 to 36, not {base}")));
    }
    let found = match value.as_str() {
        Some(text) => whole(text),
        None => i128::try_from(plain(value)).ok().filter(|_| value.is_integer() || value.kind() == ValueKind::Bool),
    };
    match found {
        Some(found) => Ok(Some(found)),
        None => match float(value)? {
            Some(x) if x.is_infinite() && value.as_str().is_none() => {
                Err(type_error("cannot convert float infinity to integer".into()))
            }
            x => Ok(x.filter(|x| x.is_finite()).map(|x| x.trunc() as i128)),
        },
    }
}

/// `float(value)`; None where that is not possible.
fn float(value: &Value) -> Result<Option<f64>, Error> {
    match value.kind() {
        ValueKind::Undefined => Err(type_error("an undefined value is no number".into())),
        ValueKind::String => {
            Ok(ungrouped(value.as_str().unwrap_or_default().trim()).and_then(|text| text.parse().ok()))
        }
        _ => Ok(f64::try_from(plain(value)).ok()),
    }
}

/// Digits without the underscores that Python allows between them.
fn ungrouped(digits: &str) -> Option<String> {
    let odd = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!odd).then(|| digits.replace('_', ""))
}
