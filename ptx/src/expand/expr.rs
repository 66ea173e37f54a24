//! Integer expressions of the expander: C's operators and precedence on i64. Knows names, but never text or lines.
use std::rc::Rc;

/// A name's value: a number, or the text of a macro argument.
#[derive(Clone, Debug)]
pub enum Value {
    Int(i64),
    Text(Rc<str>),
}

/// Names and their values. Some dozens, of which a call and an iteration have a copy: a list is copied faster than a
/// table.
#[derive(Clone, Default)]
pub struct Bindings(Vec<(Rc<str>, Value)>);

impl Bindings {
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().rev().find(|(known, _)| **known == *name).map(|(_, value)| value)
    }
    /// Hides an earlier value, which is returned.
    pub fn insert(&mut self, name: Rc<str>, value: Value) -> Option<Value> {
        let old = self.get(&name).cloned();
        self.0.push((name, value));
        old
    }
}

/// Binary operators by length, then precedence: `<<` must be matched before `<`.
const OPERATORS: [(&str, u8); 18] = [
    ("||", 1),
    ("&&", 2),
    ("==", 6),
    ("!=", 6),
    ("<=", 7),
    (">=", 7),
    ("<<", 8),
    (">>", 8),
    ("|", 3),
    ("^", 4),
    ("&", 5),
    ("<", 7),
    (">", 7),
    ("+", 9),
    ("-", 9),
    ("*", 10),
    ("/", 10),
    ("%", 10),
];

pub fn eval(text: &str, names: &Bindings) -> Result<i64, String> {
    let mut parser = Parser { rest: text, names };
    let value = parser.ternary()?;
    match parser.rest.trim() {
        "" => Ok(value),
        rest => Err(format!("'{}': unexpected '{rest}'", text.trim())),
    }
}

struct Parser<'a> {
    rest: &'a str,
    names: &'a Bindings,
}

impl Parser<'_> {
    fn eat(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let found = self.rest.starts_with(token);
        if found {
            self.rest = &self.rest[token.len()..];
        }
        found
    }
    fn want(&mut self, token: &str) -> Result<(), String> {
        if self.eat(token) { Ok(()) } else { Err(format!("missing '{token}'")) }
    }
    /// `a ? b : c`. Both sides are evaluated.
    fn ternary(&mut self) -> Result<i64, String> {
        let condition = self.binary(1)?;
        if !self.eat("?") {
            return Ok(condition);
        }
        let yes = self.ternary()?;
        self.want(":")?;
        let no = self.ternary()?;
        Ok(if condition != 0 { yes } else { no })
    }
    fn binary(&mut self, least: u8) -> Result<i64, String> {
        let mut a = self.atom()?;
        loop {
            self.rest = self.rest.trim_start();
            let found = OPERATORS.iter().find(|(o, _)| self.rest.starts_with(o));
            let Some(&(operator, precedence)) = found.filter(|(_, p)| *p >= least) else { return Ok(a) };
            self.rest = &self.rest[operator.len()..];
            let b = self.binary(precedence + 1)?;
            a = apply(operator, a, b).ok_or_else(|| format!("{a} {operator} {b} has no value"))?;
        }
    }
    fn atom(&mut self) -> Result<i64, String> {
        if self.eat("(") {
            let value = self.ternary()?;
            self.want(")")?;
            return Ok(value);
        }
        if self.eat("-") {
            return self.atom()?.checked_neg().ok_or_else(|| "negation overflows".into());
        }
        if self.eat("!") {
            return Ok((self.atom()? == 0) as i64);
        }
        self.eat("$"); // `$N` and `N` are the same within an expression
        let end = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        let Some(first) = word.chars().next() else {
            return Err(match rest.chars().next() {
                None => "unexpected end of an expression".into(),
                Some(c) => format!("unexpected '{c}' in an expression"),
            });
        };
        self.rest = rest;
        if first.is_ascii_digit() {
            let hex = word.strip_prefix("0x").map(|h| i64::from_str_radix(h, 16));
            return hex.unwrap_or_else(|| word.parse()).map_err(|_| format!("bad number '{word}'"));
        }
        match self.names.get(word) {
            Some(Value::Int(value)) => Ok(*value),
            Some(Value::Text(text)) => eval(text, self.names),
            None => Err(format!("unknown name '{word}'")),
        }
    }
}

fn apply(operator: &str, a: i64, b: i64) -> Option<i64> {
    Some(match operator {
        "||" => (a != 0 || b != 0) as i64,
        "&&" => (a != 0 && b != 0) as i64,
        "==" => (a == b) as i64,
        "!=" => (a != b) as i64,
        "<=" => (a <= b) as i64,
        ">=" => (a >= b) as i64,
        "<" => (a < b) as i64,
        ">" => (a > b) as i64,
        "|" => a | b,
        "^" => a ^ b,
        "&" => a & b,
        "<<" => a.checked_shl(b.try_into().ok()?).filter(|v| v >> b == a)?,
        ">>" => a.checked_shr(b.try_into().ok()?)?,
        "+" => a.checked_add(b)?,
        "-" => a.checked_sub(b)?,
        "*" => a.checked_mul(b)?,
        "/" => a.checked_div(b)?,
        _ => a.checked_rem(b)?,
    })
}
