//! Python's two ways to format a text: `"%s" % value`, which the filter `format` shares, and `"{}".format(value)`.
//! Values become text as [`super::python`] has it; numbers with a width or precision are left to minijinja. Never
//! formats an output that was not charged.
use super::budget::spend;
use super::python::{self, type_error, type_name};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, FormatStyle, State, format_filter};

/// `text % args`; `mapping` is what `%(name)s` reads from. Without one, each of `args` must be used.
pub(super) fn percent(state: &State, text: &str, args: &[Value], mapping: Option<&Value>) -> Result<String, Error> {
    let mut out = String::new();
    let (mut rest, mut left) = (text, args.iter());
    let mut next = || left.next().ok_or_else(|| type_error("not enough arguments for format string".into()));
    let mut named = mapping.is_some_and(|m| m.kind() == ValueKind::Map);
    while let Some((before, after)) = rest.split_once('%') {
        spend(state, before.len() as u64)?;
        out += before;
        let (key, after) = match after.strip_prefix('(') {
            Some(inside) => {
                let end = closing(inside, '(', ')').ok_or_else(|| type_error("incomplete format key".into()))?;
                (Some(&inside[..end]), &inside[end + 1..])
            }
            None => (None, after),
        };
        let end = after.find(|c: char| !"#0123456789- +.*hlL".contains(c));
        let kind = end.and_then(|end| after[end..].chars().next());
        let (Some(end), Some(kind)) = (end, kind) else { return Err(type_error("incomplete format".into())) };
        rest = &after[end + kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let mut spec = after[..end].replace(['h', 'l', 'L'], "");
        while spec.contains('*') {
            let width = next()?;
            let width = i64::try_from(width.clone()).map_err(|_| type_error("* wants int".into()))?;
            spec = spec.replacen('*', &width.to_string(), 1);
        }
        let keyed;
        let value = match key {
            Some(key) => {
                let from = mapping.filter(|m| m.kind() == ValueKind::Map);
                let from = from.ok_or_else(|| type_error("format requires a mapping".into()))?;
                named = true;
                keyed = from.get_item(&Value::from(key))?;
                if keyed.is_undefined() {
                    return Err(type_error(format!("the format's key '{key}' is missing")));
                }
                &keyed
            }
            None => next()?,
        };
        wide(state, &spec)?;
        match kind {
            's' | 'r' => {
                let text = if kind == 's' { python::text(state, value)? } else { python::repr(state, value)?.into() };
                spend(state, text.len() as u64)?;
                pad(&mut out, &text, &spec);
            }
            'a' => return Err(type_error("the format %a is not supported".into())),
            kind => {
                let (kind, value) = match kind {
                    'd' | 'i' | 'u' => ('d', truncated(value)?),
                    kind => (kind, real(value, kind)),
                };
                out += &format_filter(FormatStyle::Printf, &format!("%{spec}{kind}"), &[value])?;
            }
        }
    }
    if next().is_ok() && !named {
        return Err(type_error("not all arguments converted during string formatting".into()));
    }
    spend(state, rest.len() as u64)?;
    Ok(out + rest)
}

/// `%d` drops a fraction.
fn truncated(value: &Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return Ok(value.clone());
    }
    match f64::try_from(value.clone()).ok().filter(|x| x.abs() < i128::MAX as f64) {
        Some(x) => Ok(Value::from(x as i128)),
        None => Err(type_error(format!("cannot convert float {} to integer", python::number(value)))),
    }
}

/// A format of this type reads an integer as a float.
fn real(value: &Value, kind: char) -> Value {
    match python::whole(value) {
        Ok(n) if "eEfFgG".contains(kind) => Value::from(n as f64),
        _ => value.clone(),
    }
}

/// Pads and cuts a text as flags, width and precision of `%s` say.
fn pad(out: &mut String, text: &str, spec: &str) {
    let (width, precision) = spec.split_once('.').map_or((spec, None), |(w, p)| (w, Some(p)));
    let cut = precision.map(|p| p.parse().unwrap_or(0)).and_then(|p| text.char_indices().nth(p));
    let text = cut.map_or(text, |(at, _)| &text[..at]);
    let width: usize = width.trim_start_matches(['#', '0', '-', ' ', '+']).parse().unwrap_or(0);
    let fill = " ".repeat(width.saturating_sub(text.chars().count()));
    match spec.contains('-') {
        true => out.extend([text, &fill]),
        false => out.extend([&fill, text]),
    }
}

/// A text as `[[fill]align][0][width][.precision][s]` says; `align` if that says nothing.
fn aligned(state: &State, text: &str, spec: &str, align: char) -> Result<String, Error> {
    let unknown = || type_error(format!("the format {spec} does not apply to {text}"));
    let is_align = |c: Option<&char>| c.is_some_and(|c| "<>^".contains(*c));
    let chars: Vec<char> = spec.chars().collect();
    let (fill, align, rest) = match (is_align(chars.get(1)), is_align(chars.first())) {
        (true, _) => (Some(chars[0]), chars[1], &chars[2..]),
        (_, true) => (None, chars[0], &chars[1..]),
        _ => (None, align, &chars[..]),
    };
    let rest: String = rest.iter().collect();
    let rest = rest.strip_suffix('s').unwrap_or(&rest);
    let (width, precision) = rest.split_once('.').map_or((rest, None), |(w, p)| (w, Some(p)));
    let number = |digits: &str| match digits.bytes().all(|b| b.is_ascii_digit()) {
        true => Ok(digits.parse::<usize>().unwrap_or(0)),
        false => Err(unknown()),
    };
    let fill = fill.unwrap_or(if width.starts_with('0') { '0' } else { ' ' });
    let (width, precision) = (number(width)?, precision.map(number).transpose()?);
    let cut = precision.and_then(|p| text.char_indices().nth(p));
    let text = cut.map_or(text, |(at, _)| &text[..at]);
    let space = width.saturating_sub(text.chars().count());
    spend(state, (text.len() + space * fill.len_utf8()) as u64)?;
    let before = match align {
        '<' => 0,
        '>' => space,
        _ => space / 2,
    };
    let some = |n: usize| std::iter::repeat_n(fill, n);
    Ok(some(before).chain(text.chars()).chain(some(space - before)).collect())
}

/// Charges what width and precision may add.
fn wide(state: &State, spec: &str) -> Result<(), Error> {
    let numbers = spec.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.into_iter().try_for_each(|digits| spend(state, digits.parse().unwrap_or(u64::MAX)))
}

/// Where the bracket closes that was opened before `text`.
fn closing(text: &str, open: char, close: char) -> Option<usize> {
    let mut depth = 0;
    text.char_indices()
        .find(|&(_, c)| {
            depth += i32::from(c == open) - i32::from(c == close);
            depth < 0
        })
        .map(|(at, _)| at)
}

/// `text.format(*args)`, the last of which may be the named ones.
pub(super) fn braces(state: &State, text: &str, args: &[Value]) -> Result<String, Error> {
    let (args, named) = match args.split_last() {
        Some((last, args)) if last.is_kwargs() => (args, Some(last)),
        _ => (args, None),
    };
    Fields { state, args, named, next: 0 }.format(text, 2)
}

struct Fields<'a, 's, 'e> {
    state: &'a State<'s, 'e>,
    args: &'a [Value],
    named: Option<&'a Value>,
    /// Index of the next field without a name.
    next: usize,
}

impl Fields<'_, '_, '_> {
    fn format(&mut self, text: &str, levels: usize) -> Result<String, Error> {
        if levels == 0 {
            return Err(type_error("Max string recursion exceeded".into()));
        }
        let (mut out, mut rest) = (String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            spend(self.state, at as u64 + 1)?;
            out += &rest[..at];
            let (brace, after) = rest[at..].split_at(1);
            if after.starts_with(brace) {
                out += brace;
                rest = &after[1..];
                continue;
            }
            let end = if brace == "{" { closing(after, '{', '}') } else { None };
            let end = end.ok_or_else(|| type_error(format!("Single '{brace}' encountered in format string")))?;
            out += &self.field(&after[..end], levels)?;
            rest = &after[end + 1..];
        }
        spend(self.state, rest.len() as u64)?;
        Ok(out + rest)
    }

    /// The text of `name!conversion:spec`.
    fn field(&mut self, field: &str, levels: usize) -> Result<String, Error> {
        let mut inside = false; // of brackets, where a colon is part of a key
        let colon = field.char_indices().find(|&(_, c)| {
            inside = (inside || c == '[') && c != ']';
            c == ':' && !inside
        });
        let (name, spec) = colon.map_or((field, ""), |(at, _)| (&field[..at], &field[at + 1..]));
        let (name, conversion) = name.rsplit_once('!').map_or((name, None), |(name, c)| (name, Some(c)));
        let value = self.value(name)?;
        let spec = if spec.is_empty() { String::new() } else { self.format(spec, levels - 1)? };
        let value = match conversion {
            None => value,
            Some("s") => python::text_value(self.state, &value)?,
            Some("r") => Value::from(python::repr(self.state, &value)?),
            Some(other) => return Err(type_error(format!("the conversion !{other} is not supported"))),
        };
        if spec.is_empty() {
            let text = python::text(self.state, &value)?;
            spend(self.state, text.len() as u64)?;
            return Ok(text.into_owned());
        }
        wide(self.state, &spec)?;
        let value = python::whole(&value).map_or(value, Value::from); // True is 1 where it has a format
        let kind = spec.chars().next_back().filter(|c| c.is_ascii_alphabetic() || *c == '%');
        match value.kind() {
            ValueKind::String => return aligned(self.state, value.as_str().unwrap_or_default(), &spec, '<'),
            ValueKind::Number if value.is_integer() => {
                if spec.contains('.') && kind.is_none_or(|kind| !"eEfFgG%".contains(kind)) {
                    return Err(type_error("Precision not allowed in integer format specifier".into()));
                }
            }
            ValueKind::Number if kind.is_some() || spec.contains('.') && value.is_true() => {}
            ValueKind::Number => {
                let (spec, _) = spec.split_once('.').unwrap_or((&spec, "")); // 0.0 at any precision
                return aligned(self.state, &python::number(&value), spec, '>');
            }
            _ => {
                let name = type_name(&value);
                return Err(type_error(format!("unsupported format string passed to {name}.__format__")));
            }
        }
        let value = real(&value, kind.unwrap_or_default());
        format_filter(FormatStyle::StrFormat, &format!("{{:{spec}}}"), &[value])
    }

    /// The value that `0`, `name`, `0.attribute` or `name[key]` names.
    fn value(&mut self, name: &str) -> Result<Value, Error> {
        let (head, mut path) = name.split_at(name.find(['.', '[']).unwrap_or(name.len()));
        let index = match head {
            "" => {
                self.next += 1;
                Some(self.next - 1)
            }
            head => head.parse().ok(),
        };
        let found = match index {
            Some(index) => self.args.get(index).cloned(),
            None => self.named.and_then(|named| named.get_item(&Value::from(head)).ok()).filter(|v| !v.is_undefined()),
        };
        let mut value = found.ok_or_else(|| type_error(format!("the format has no value for {{{name}}}")))?;
        while !path.is_empty() {
            let malformed = || type_error(format!("the format names {{{name}}}, which is malformed"));
            match path.strip_prefix('[') {
                Some(inside) => {
                    let (key, after) = inside.split_once(']').ok_or_else(malformed)?;
                    let key = key.parse::<u64>().map_or_else(|_| Value::from(key), Value::from);
                    (value, path) = (value.get_item(&key)?, after);
                }
                None => {
                    let attribute = path.strip_prefix('.').ok_or_else(malformed)?;
                    let (attribute, after) = attribute.split_at(attribute.find(['.', '[']).unwrap_or(attribute.len()));
                    (value, path) = (value.get_attr(attribute)?, after);
                }
            }
        }
        Ok(value)
    }
}
