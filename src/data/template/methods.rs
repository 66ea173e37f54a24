//! The methods of Python's strings, lists and dicts: those that minijinja's own lack or have otherwise, and what the
//! others cost. Never changes a value.
use super::budget::{read, spend};
use super::checks;
use super::format;
use super::order;
use super::python::{self, Sequence, SequenceKind, type_error, type_name};
use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// The methods of Python that minijinja's own lack, and what the others cost.
pub(super) fn method(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
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
            let three = |parts: [&str; 3]| Sequence::value(SequenceKind::Tuple, parts.map(Value::from).to_vec());
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
        (ValueKind::String, "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith") => {
            return search(value.as_str().unwrap_or_default(), method, args);
        }
        (ValueKind::String, "zfill" | "ljust" | "rjust" | "center") => {
            return padded(state, value.as_str().unwrap_or_default(), method, args).map(Value::from);
        }
        (ValueKind::String, "expandtabs") => {
            let (size, named): (Option<i64>, Kwargs) = from_args(args)?;
            let size = size.map_or_else(|| named.get::<Option<i64>>("tabsize"), |given| Ok(Some(given)))?.unwrap_or(8);
            named.assert_all_used()?;
            return expanded(state, value.as_str().unwrap_or_default(), size.max(0) as usize).map(Value::from);
        }
        (ValueKind::String, "swapcase" | "casefold" | "title" | "isdecimal" | "istitle") => {
            let () = from_args(args)?;
            let text = value.as_str().unwrap_or_default();
            return Ok(match method {
                "swapcase" => text.chars().map(swapped).collect::<String>().into(),
                "casefold" => text.chars().map(folded).collect::<String>().into(),
                "title" => titled(text).into(),
                "isdecimal" => Value::from(checks::is_decimal(text)),
                _ => Value::from(checks::is_title(text)),
            });
        }
        (ValueKind::String, "format_map") => {
            let (map,): (Value,) = from_args(args)?;
            let named = Kwargs::from_iter(
                python::pairs(&map).filter_map(|(key, value)| Some((key.as_str()?.to_string(), value))),
            );
            return format::braces(state, value.as_str().unwrap_or_default(), &[named.into()]).map(Value::from);
        }
        (ValueKind::Seq, "index") => {
            let (wanted, start, stop): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            let items: Vec<Value> = value.try_iter()?.collect();
            read(state, 64 * items.len() as u64)?;
            let (from, to) = between(start, stop, items.len());
            let found =
                (from..to.max(from)).find(|&at| items.get(at).is_some_and(|item| order::is_equal(item, wanted)));
            let fault = || Error::new(ErrorKind::InvalidOperation, "the list has no such item");
            return found.map(Value::from).ok_or_else(fault);
        }
        (ValueKind::Seq | ValueKind::Map, "copy") if value.downcast_object_ref::<Sequence>().is_none() => {
            let () = from_args(args)?;
            return Ok(value.clone()); // no template changes a value
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

/// The places that `start` and `stop` of a search mean among `len` items; the first may be beyond the last.
fn between(start: Option<i64>, stop: Option<i64>, len: usize) -> (usize, usize) {
    let place = |at: i64| if at < 0 { at.saturating_add(len as i64).max(0) } else { at } as usize;
    (start.map_or(0, place), stop.map_or(len, |stop| place(stop).min(len)))
}

/// The methods that look for texts between two places, counted in characters.
fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, stop): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let (from, to) = between(start, stop, text.chars().count());
    let at = |place: usize| text.char_indices().nth(place).map_or(text.len(), |(at, _)| at);
    let part = (from <= to).then(|| &text[at(from)..at(to)]);
    if let "startswith" | "endswith" = method {
        let several = wanted.kind() == ValueKind::Seq;
        let all = if several { wanted.try_iter()?.collect() } else { vec![wanted.clone()] };
        for one in &all {
            let one = one.as_str().ok_or_else(|| {
                let found = type_name(one);
                type_error(format!("{method} first arg must be str or a tuple of str, not {found}"))
            })?;
            if part.is_some_and(|part| if method == "endswith" { part.ends_with(one) } else { part.starts_with(one) }) {
                return Ok(Value::from(true));
            }
        }
        return Ok(Value::from(false));
    }
    let Some(wanted) = wanted.as_str() else {
        return Err(type_error(format!("must be str, not {}", type_name(wanted))));
    };
    if method == "count" {
        return Ok(Value::from(part.map_or(0, |part| part.matches(wanted).count())));
    }
    let found = part.and_then(|part| {
        let at = if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
        at.map(|at| from + part[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
    }
}

/// A text with characters before and after it, up to a width.
pub(super) fn padded(state: &State, text: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let (width, fill): (i64, Option<&str>) = match method {
        "zfill" => (from_args::<(i64,)>(args)?.0, Some("0")),
        _ => from_args(args)?,
    };
    let mut fill = fill.unwrap_or(" ").chars();
    let (Some(fill), None) = (fill.next(), fill.next()) else {
        return Err(type_error("The fill character must be exactly one character long".into()));
    };
    let width = usize::try_from(width).unwrap_or(0);
    let pad = width.saturating_sub(text.chars().count());
    spend(state, (text.len() as u64).saturating_add(4 * pad as u64))?;
    let some = |n: usize| String::from_iter(std::iter::repeat_n(fill, n));
    Ok(match method {
        "zfill" => {
            let sign = usize::from(text.starts_with(['+', '-']));
            [&text[..sign], &some(pad), &text[sign..]].concat()
        }
        "ljust" => text.to_string() + &some(pad),
        "rjust" => some(pad) + text,
        _ => {
            let left = pad / 2 + (pad & width & 1);
            [&some(left), text, &some(pad - left)].concat()
        }
    })
}

/// `str.expandtabs(size)`
fn expanded(state: &State, text: &str, size: usize) -> Result<String, Error> {
    spend(state, (text.matches('\t').count() as u64).saturating_mul(size as u64))?;
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}

fn swapped(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// `str.title`: a letter is in upper case unless it follows another one.
fn titled(text: &str) -> String {
    let mut follows = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let mut upper = c.to_uppercase();
        match c {
            _ if follows => out.extend(c.to_lowercase()),
            // Two letters in one character: only the first is in upper case.
            '\u{1c4}'..='\u{1cc}' => out.extend(char::from_u32(u32::from(c) - (u32::from(c) - 0x1c4) % 3 + 1)),
            '\u{1f1}'..='\u{1f3}' => out.push('\u{1f2}'),
            _ => out.extend(upper.next().into_iter().chain(upper.flat_map(char::to_lowercase))),
        }
        follows = checks::is_cased(c);
    }
    out
}

/// A character as `str.casefold` has it, which is its lower case but for a few letters and Cherokee.
fn folded(c: char) -> String {
    match c {
        '\u{131}' => c.into(),
        '\u{13a0}'..='\u{13fd}' | '\u{ab70}'..='\u{abbf}' => c.to_uppercase().collect(),
        _ => c.to_lowercase().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect(),
    }
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

/// `str.splitlines(keep)`
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
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
