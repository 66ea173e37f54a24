//! Jinja's filters and functions that minijinja lacks or has otherwise: those for HTML and addresses, words, groups and
//! ranges. Never changes what the others give.
use super::budget::{PARTS, spend, too_much};
use super::filters::escaped;
use super::methods::padded;
use super::operators;
use super::order::{Key, compare, items, option};
use super::python::{self, Sequence, SequenceKind, text, type_error, type_name};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use minijinja_contrib::globals::{cycler, joiner};
use std::fmt::Write;

/// Items of a range, as in Jinja's sandbox.
const RANGE: usize = 100_000;

pub(super) fn install(env: &mut Environment) {
    env.add_function("range", range);
    env.add_function("cycler", |items: Rest<Value>| cycler(items.0));
    env.add_function("joiner", joiner);
    env.add_filter("truncate", truncate);
    env.add_filter("sum", |state: &State, value: Value, args: Rest<Value>| {
        let (attribute, start, named): (Option<Value>, Option<Value>, Kwargs) = from_args(&args)?;
        let (attribute, start) = (option(attribute, &named, "attribute")?, option(start, &named, "start")?);
        named.assert_all_used()?;
        let key = Key::of(Some(true.into()), attribute);
        items(state, &value)?.iter().try_fold(start.unwrap_or_else(|| 0.into()), |sum, item| {
            key.values(item)?.iter().try_fold(sum, |sum, part| operators::add(state, &sum, part))
        })
    });
    env.add_filter("wordcount", |state: &State, value: Value| {
        let text = text(state, &value)?;
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        Ok::<_, Error>(text.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count())
    });
    env.add_filter("center", |state: &State, value: Value, width: Option<i64>| {
        let text = text(state, &value)?;
        padded(state, &text, "center", &[width.unwrap_or(80).into()])
    });
    env.add_filter("urlencode", urlencode);
    env.add_filter("forceescape", |state: &State, value: Value| {
        escaped(state, &text(state, &value)?).map(Value::from_safe_string)
    });
    env.add_filter("xmlattr", xmlattr);
    let grouped = Value::from_function(filters::groupby);
    env.add_filter("groupby", move |state: &State, args: Rest<Value>| {
        let pair = |group: Value| {
            let parts = ["grouper", "list"].map(|name| group.get_attr(name));
            let [grouper, list] = parts;
            Ok::<_, Error>(Sequence::value(SequenceKind::Group, vec![grouper?, list?.try_iter()?.collect()]))
        };
        let groups: Vec<Value> = grouped.call(state, &args)?.try_iter()?.map(pair).collect::<Result<_, _>>()?;
        if args.first().and_then(Value::len).is_some_and(|len| len > 1) {
            // Python sorts them.
            groups
                .iter()
                .try_for_each(|group| group.get_attr("grouper").and_then(|key| compare(&key, &key)).map(drop))?;
        }
        Ok::<_, Error>(Value::from(groups))
    });
}

/// `range(start, stop, step)`
fn range(args: Rest<Value>) -> Result<Value, Error> {
    let whole = |value: &Value| {
        python::whole(value).and_then(|n| i64::try_from(n).map_err(|_| type_error("a range is too long".into())))
    };
    let (start, stop, step) = match &args.iter().map(whole).collect::<Result<Vec<i64>, Error>>()?[..] {
        [stop] => (0, *stop, 1),
        [start, stop] => (*start, *stop, 1),
        [start, stop, step] => (*start, *stop, *step),
        args => return Err(type_error(format!("range takes one to three numbers, not {}", args.len()))),
    };
    let span = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let length = match step {
        0 => return Err(Error::new(ErrorKind::InvalidOperation, "range() arg 3 must not be zero")),
        step => (span.max(0) as u64).div_ceil(step.unsigned_abs()) as usize,
    };
    if length > RANGE.min(PARTS as usize) {
        return Err(too_much(format!("a range has more than {RANGE} items")));
    }
    let items = (0..length).map(|i| Value::from(start + step * i as i64)).collect();
    Ok(Sequence::value(SequenceKind::Range(start, stop, step), items))
}

/// `truncate(length=255, killwords=False, end="...", leeway=5)`
fn truncate(state: &State, value: Value, args: Rest<Value>) -> Result<Value, Error> {
    type Given = Option<Value>;
    let (length, kill, end, leeway, named): (Given, Given, Given, Given, Kwargs) = from_args(&args)?;
    let option = |given: Given, name: &str| given.map_or_else(|| named.get::<Given>(name), |given| Ok(Some(given)));
    let (length, kill) = (option(length, "length")?, option(kill, "killwords")?);
    let (end, leeway) = (option(end, "end")?, option(leeway, "leeway")?.filter(|leeway| !leeway.is_none()));
    named.assert_all_used()?;
    let size = |given: Given, usual: usize| given.map_or(Ok(usual), usize::try_from);
    let (length, leeway) = (size(length, 255)?, size(leeway, 5)?);
    let end = end.map_or_else(|| "...".into(), |end| end.to_string());
    let rest = length
        .checked_sub(end.chars().count())
        .ok_or_else(|| type_error(format!("truncate: length {length} is shorter than the end {end:?}")))?;
    if value.len().is_some_and(|len| len <= length.saturating_add(leeway)) {
        return Ok(value);
    }
    let whole =
        value.as_str().ok_or_else(|| type_error(format!("truncate needs a text, not {}", type_name(&value))))?;
    let at = whole.char_indices().nth(rest).map_or(whole.len(), |(at, _)| at);
    let cut = &whole[..at];
    let cut =
        if kill.is_some_and(|on| on.is_true()) { cut } else { cut.rsplit_once(' ').map_or(cut, |(before, _)| before) };
    spend(state, (cut.len() + end.len()) as u64)?;
    Ok(Value::from(cut.to_string() + &end))
}

/// A text for an address; of a dict or of pairs, its query.
fn urlencode(state: &State, value: Value) -> Result<String, Error> {
    let pairs: Vec<Value> = match value.kind() {
        ValueKind::Map => Sequence::pairs(&value),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Undefined => value.try_iter()?.collect(),
        _ => return quoted(state, &value, false),
    };
    let query = |pair: &Value| {
        python::iterable(pair)?;
        match &pair.try_iter()?.take(3).collect::<Vec<_>>()[..] {
            [key, value] => Ok(format!("{}={}", quoted(state, key, true)?, quoted(state, value, true)?)),
            _ => Err(type_error("urlencode needs pairs of a key and a value".into())),
        }
    };
    Ok(pairs.iter().map(query).collect::<Result<Vec<String>, Error>>()?.join("&"))
}

/// `urllib.parse.quote`
fn quoted(state: &State, value: &Value, query: bool) -> Result<String, Error> {
    let text = text(state, value)?;
    spend(state, 3 * text.len() as u64)?;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' ' if query => out.push('+'),
            b'/' if !query => out.push('/'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(byte.into()),
            // Writing to a String cannot fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    Ok(out)
}

/// The attributes of a tag, but those that are null or undefined.
fn xmlattr(state: &State, value: Value, space: Option<bool>) -> Result<String, Error> {
    if value.kind() != ValueKind::Map {
        return Err(type_error(format!("xmlattr needs a dict, not {}", type_name(&value))));
    }
    let mut out = Vec::new();
    for (key, value) in python::pairs(&value).filter(|(_, value)| !value.is_none() && !value.is_undefined()) {
        let escape = |value: &Value| match value.is_safe() {
            true => Ok(value.to_string()),
            false => escaped(state, &text(state, value)?),
        };
        let name = text(state, &key)?;
        if name.contains(|c: char| c.is_whitespace() || "/>=".contains(c)) {
            return Err(type_error(format!("Invalid character in attribute name: {name:?}")));
        }
        out.push(format!("{}=\"{}\"", escape(&key)?, escape(&value)?));
    }
    let out = out.join(" ");
    Ok(if space.unwrap_or(true) && !out.is_empty() { format!(" {out}") } else { out })
}
