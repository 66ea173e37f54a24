//! Expands sources: directives, macro calls and names, with markers that preserve positions. The syntax is in mod.rs.
use super::expr::{Bindings, Value, eval};
use super::scan::{Cursor, SourceSpan, breaks, opaque, plain, split, word};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::rc::Rc;

/// Position of an error, innermost first: the line, then every macro call or include that led to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpandError {
    pub what: String,
    /// File and line.
    pub at: (String, usize),
    /// "LOAD! called" or "included", with file and line.
    pub through: Vec<(String, String, usize)>,
}

impl fmt::Display for ExpandError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}: {}", self.at.0, self.at.1, self.what)?;
        self.through.iter().try_for_each(|(how, file, line)| write!(f, "\n  {how} at {file}:{line}"))
    }
}
impl std::error::Error for ExpandError {}

/// Maximum nesting of calls and includes: a recursive macro is an error, not an endless loop.
const DEPTH: usize = 64;

struct Macro {
    file: Rc<str>,
    line: usize,
    parameters: Vec<Rc<str>>,
    body: String,
    /// The names at the definition.
    names: Bindings,
}

/// Origin of text, for errors and markers.
#[derive(Clone)]
struct Origin {
    file: Rc<str>,
    /// The file as named in markers, including the call if within a macro.
    label: Rc<str>,
    depth: usize,
}

struct Expander<'a> {
    include: &'a dyn Fn(&str) -> Option<String>,
    given: HashMap<&'a str, i64>,
    used: HashSet<String>,
    macros: HashMap<String, Rc<Macro>>,
    out: String,
    /// The file label and line that the next line of output would have without a marker.
    next: (Rc<str>, usize),
}

/// Expands `source`. `file` names it in errors and markers; `given` overrides `.const` defaults, and a name in it
/// without a `.const` is an error. `include` returns the text of `.include "name"`.
pub fn expand(
    file: &str,
    source: &str,
    given: &[(&str, i64)],
    include: &dyn Fn(&str) -> Option<String>,
) -> Result<String, ExpandError> {
    let file: Rc<str> = file.into();
    let mut expander = Expander {
        include,
        given: given.iter().copied().collect(),
        used: HashSet::new(),
        macros: HashMap::new(),
        out: String::new(),
        next: (file.clone(), 1),
    };
    let here = Origin { file: file.clone(), label: file.clone(), depth: 0 };
    expander.block(&here, SourceSpan { text: source, line: 1 }, &mut Bindings::default())?;
    match given.iter().find(|(name, _)| !expander.used.contains(*name)) {
        Some((name, _)) => {
            let what = format!("'{name}' is given, but no .const has that name");
            Err(ExpandError { what, at: (file.to_string(), 1), through: vec![] })
        }
        None => Ok(expander.out),
    }
}

impl Expander<'_> {
    /// Appends text from `line`, preceded by a marker after a line break unless lines are consecutive.
    fn put(&mut self, here: &Origin, line: usize, text: &str) {
        if self.next.1 != line || self.next.0 != here.label {
            if self.out.ends_with('\n') {
                self.out += &format!("# {line} \"{}\"\n", here.label);
                self.next = (here.label.clone(), line);
            } else if let Some(end) = text.find('\n').filter(|end| end + 1 < text.len()) {
                self.put(here, line, &text[..=end]);
                return self.put(here, line + 1, &text[end + 1..]);
            }
        }
        self.out += text;
        self.next.1 += breaks(text);
    }
    fn block(&mut self, here: &Origin, span: SourceSpan, names: &mut Bindings) -> Result<(), ExpandError> {
        let mut cursor = Cursor::new(span);
        while !cursor.rest.is_empty() {
            let line = cursor.line;
            let outcome = self.piece(here, &mut cursor, names);
            outcome.map_err(|failure| match failure {
                ExpandFailure::Here(what) => ExpandError { what, at: (here.file.to_string(), line), through: vec![] },
                ExpandFailure::Inside(error) => error,
            })?;
        }
        Ok(())
    }
    /// The next directive, call, name or run of plain text.
    fn piece(&mut self, here: &Origin, cursor: &mut Cursor, names: &mut Bindings) -> Result<(), ExpandFailure> {
        let line = cursor.line;
        let skip = opaque(cursor.rest)?;
        if skip > 0 {
            let fresh = cursor.fresh;
            let text = cursor.take(skip);
            cursor.fresh = fresh; // a comment before a directive does not hide it
            self.put(here, line, text);
            return Ok(());
        }
        if cursor.fresh && cursor.rest.starts_with('.') {
            let n = 1 + word(&cursor.rest[1..]);
            match &cursor.rest[..n] {
                ".include" => return self.include(here, cursor, names),
                // PTX has its own .const: a state space, followed by a type.
                ".const" if !cursor.rest[n..].trim_start().starts_with('.') => return self.constant(cursor, names),
                ".macro" => return self.definition(here, cursor, names),
                ".for" => return self.unroll(here, cursor, names),
                ".if" => return self.choose(here, cursor, names),
                ".else" => return Err(".else without .if".to_string().into()),
                _ => {}
            }
        }
        let c = cursor.rest.chars().next().unwrap_or('\n');
        let n = word(&cursor.rest[c.len_utf8()..]) + c.len_utf8();
        if c == '$' || c == '%' && cursor.rest[n..].starts_with('[') {
            let text = self.value(cursor, names)?;
            self.put(here, line, &text);
        } else if (c.is_ascii_alphabetic() || c == '_') && cursor.rest[n..].starts_with("!(") {
            self.call(here, cursor, names)?;
        } else {
            // What begins like a directive, a comment or a name but is none, and all the text up to the next of them.
            let begins = if c.is_ascii_alphanumeric() || matches!(c, '_' | '%' | '.') { n } else { c.len_utf8() };
            let all = cursor.rest;
            cursor.take(begins);
            let follows = plain(cursor.rest, cursor.fresh);
            cursor.take(follows);
            let text = &all[..begins + follows];
            self.put(here, line, text);
        }
        Ok(())
    }
    /// `$NAME`, `${expr}`, `%name[expr]`, `%name[a .. b]`, `$NAME[expr]` for a register's name.
    fn value(&mut self, cursor: &mut Cursor, names: &Bindings) -> Result<String, String> {
        if cursor.rest.starts_with("${") {
            cursor.take(1);
            return Ok(eval(cursor.group('{', '}')?.text, names)?.to_string());
        }
        let text = cursor.take(1);
        let register = if text == "$" {
            let name = cursor.word("a name after '$'")?;
            match names.get(name) {
                Some(Value::Int(value)) => return Ok(value.to_string()),
                Some(Value::Text(text)) if text.starts_with('%') && cursor.rest.starts_with('[') => text.to_string(),
                Some(Value::Text(text)) => return Ok(text.to_string()),
                None => return Err(format!("unknown name '${name}'")),
            }
        } else {
            format!("%{}", cursor.take(word(cursor.rest)))
        };
        let index = cursor.group('[', ']')?.text;
        match range(index, names)? {
            Some(range) => Ok(range.map(|k| format!("{register}{k}")).collect::<Vec<_>>().join(", ")),
            None => Ok(format!("{register}{}", eval(index, names)?)),
        }
    }
    fn include(&mut self, here: &Origin, cursor: &mut Cursor, names: &mut Bindings) -> Result<(), ExpandFailure> {
        let line = cursor.line;
        cursor.take(".include".len());
        cursor.blanks()?;
        let n = opaque(cursor.rest)?;
        let name = cursor.take(n).trim_matches('"').to_string();
        if name.is_empty() {
            return Err("expected a quoted name after .include".to_string().into());
        }
        let text = (self.include)(&name).ok_or_else(|| format!("cannot find '{name}' to include"))?;
        let file: Rc<str> = name.into();
        let inside = Origin { file: file.clone(), label: file, depth: deeper(here)? };
        let text = SourceSpan { text: &text, line: 1 };
        Ok(self.block(&inside, text, names).map_err(|e| through(e, "included", here, line))?)
    }
    fn constant(&mut self, cursor: &mut Cursor, names: &mut Bindings) -> Result<(), ExpandFailure> {
        cursor.take(".const".len());
        let name = cursor.word("a name after .const")?.to_string();
        cursor.blanks()?;
        if !cursor.rest.starts_with('=') {
            return Err(format!("expected '=' after .const {name}").into());
        }
        cursor.take(1);
        // The expression ends with its line; the line break and a comment stay text.
        let end = cursor.rest.find('\n').unwrap_or(cursor.rest.len());
        let end = ["//", "/*"].iter().filter_map(|c| cursor.rest[..end].find(c)).fold(end, usize::min);
        let value = eval(cursor.take(end), names)?;
        let value = self.given.get(name.as_str()).copied().unwrap_or(value);
        self.used.insert(name.clone());
        match names.insert(name.as_str().into(), Value::Int(value)) {
            Some(_) => Err(format!("'{name}' is defined twice").into()),
            None => Ok(()),
        }
    }
    fn definition(&mut self, here: &Origin, cursor: &mut Cursor, names: &Bindings) -> Result<(), ExpandFailure> {
        cursor.take(".macro".len());
        let name = cursor.word("a name after .macro")?.to_string();
        let parameters = split(cursor.group('(', ')')?.text, ',')?;
        if let Some(bad) = parameters.iter().find(|p| p.is_empty() || word(p) != p.len()) {
            return Err(format!("'{bad}' is not a valid parameter name of {name}!").into());
        }
        let body = cursor.group('{', '}')?;
        let new = Macro {
            file: here.file.clone(),
            line: body.line,
            parameters: parameters.into_iter().map(Rc::from).collect(),
            body: body.text.into(),
            names: names.clone(),
        };
        match self.macros.insert(name.clone(), Rc::new(new)) {
            Some(old) => Err(format!("{name}! is defined twice, first at {}:{}", old.file, old.line).into()),
            None => Ok(()),
        }
    }
    fn unroll(&mut self, here: &Origin, cursor: &mut Cursor, names: &Bindings) -> Result<(), ExpandFailure> {
        cursor.take(".for".len());
        let name: Rc<str> = cursor.word("a name after .for")?.into();
        if cursor.word("'in'")? != "in" {
            return Err(format!("expected 'in' after .for {name}").into());
        }
        let set = head(cursor)?;
        let values: Vec<i64> = match range(set, names)? {
            Some(range) => range.collect(),
            None => split(set, ',')?.iter().map(|e| eval(e, names)).collect::<Result<_, _>>()?,
        };
        let body = cursor.group('{', '}')?;
        for value in values {
            let mut inner = names.clone();
            inner.insert(name.clone(), Value::Int(value));
            self.block(here, body.clone(), &mut inner)?;
        }
        Ok(())
    }
    /// Names defined in a body of .if are local to it. Bodies not taken are not examined.
    fn choose(&mut self, here: &Origin, cursor: &mut Cursor, names: &Bindings) -> Result<(), ExpandFailure> {
        let mut taken = false;
        loop {
            cursor.take(".if".len());
            let condition = head(cursor)?;
            let yes = !taken && eval(condition, names)? != 0;
            let body = cursor.group('{', '}')?;
            if yes {
                taken = true;
                self.block(here, body, &mut names.clone())?;
            }
            let mut ahead = cursor.clone();
            ahead.blanks()?;
            if !ahead.rest.starts_with(".else") {
                return Ok(());
            }
            ahead.take(".else".len());
            ahead.blanks()?;
            *cursor = ahead;
            if cursor.rest.starts_with(".if") {
                continue;
            }
            let body = cursor.group('{', '}')?;
            return if taken { Ok(()) } else { Ok(self.block(here, body, &mut names.clone())?) };
        }
    }
    fn call(&mut self, here: &Origin, cursor: &mut Cursor, names: &Bindings) -> Result<(), ExpandFailure> {
        let line = cursor.line;
        let name = cursor.word("a macro's name")?;
        let found = self.macros.get(name).cloned().ok_or_else(|| format!("unknown macro '{name}!'"))?;
        cursor.take(1);
        let given = split(cursor.group('(', ')')?.text, ',')?;
        let wanted = found.parameters.len();
        if given.len() != wanted {
            let s = if wanted == 1 { "" } else { "s" };
            return Err(format!("{name}! takes {wanted} argument{s}, got {}", given.len()).into());
        }
        let mut inner = found.names.clone();
        for (parameter, argument) in found.parameters.iter().zip(given) {
            inner.insert(parameter.clone(), Value::Text(self.argument(argument, names)?.into()));
        }
        if cursor.rest.starts_with(';') {
            cursor.take(1);
        }
        let call = if here.file == found.file { format!("line {line}") } else { format!("{} line {line}", here.file) };
        let label = format!("{} in {name}! called at {call}", found.file).into();
        let inside = Origin { file: found.file.clone(), label, depth: deeper(here)? };
        self.put(here, line, "{");
        let body = SourceSpan { text: &found.body, line: found.line };
        self.block(&inside, body, &mut inner).map_err(|e| through(e, &format!("{name}! called"), here, line))?;
        self.put(&inside, self.next.1, "}");
        Ok(())
    }
    /// A macro's argument with the caller's names substituted, so that the body needs none of them.
    fn argument(&mut self, text: &str, names: &Bindings) -> Result<String, String> {
        let mut cursor = Cursor::new(SourceSpan { text, line: 1 });
        let mut out = String::new();
        while let Some(c) = cursor.rest.chars().next() {
            let n = c.len_utf8() + word(&cursor.rest[c.len_utf8()..]);
            if c == '$' || c == '%' && cursor.rest[n..].starts_with('[') {
                out += &self.value(&mut cursor, names)?;
            } else if c.is_ascii_alphabetic() || c == '_' {
                // A bare name that is defined: the body could not see it.
                match names.get(&cursor.rest[..n]) {
                    Some(Value::Int(value)) => out += &value.to_string(),
                    Some(Value::Text(text)) => out += text,
                    None => out += &cursor.rest[..n],
                }
                cursor.take(n);
            } else {
                let plain = if c.is_ascii_digit() || matches!(c, '%' | '.') { n } else { c.len_utf8() };
                out += cursor.take(plain);
            }
        }
        Ok(out)
    }
}

/// An error at the current line, or one that already has a position.
enum ExpandFailure {
    Here(String),
    Inside(ExpandError),
}
impl From<String> for ExpandFailure {
    fn from(what: String) -> ExpandFailure {
        ExpandFailure::Here(what)
    }
}
impl From<ExpandError> for ExpandFailure {
    fn from(error: ExpandError) -> ExpandFailure {
        ExpandFailure::Inside(error)
    }
}
fn through(mut error: ExpandError, how: &str, here: &Origin, line: usize) -> ExpandError {
    error.through.push((how.into(), here.file.to_string(), line));
    error
}
fn deeper(here: &Origin) -> Result<usize, String> {
    if here.depth == DEPTH { Err(format!("calls are nested deeper than {DEPTH}")) } else { Ok(here.depth + 1) }
}
/// The text between a directive and its body, excluding the opening brace.
fn head<'a>(cursor: &mut Cursor<'a>) -> Result<&'a str, String> {
    let mut ahead = cursor.clone();
    let text = ahead.until('{')?.text;
    cursor.take(text.len());
    Ok(text)
}
/// `a .. b`, if the text contains `..`.
fn range(text: &str, names: &Bindings) -> Result<Option<std::ops::Range<i64>>, String> {
    match text.split_once("..") {
        Some((a, b)) => Ok(Some(eval(a, names)?..eval(b, names)?)),
        None => Ok(None),
    }
}
