//! Operators of values as Python has them, where minijinja has others. Never makes a text that it does not charge.
use super::budget::{PARTS, spend};
use super::filters::escaped;
use super::format;
use super::order::{compare, plain};
use super::python::{type_error, type_name, whole};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};

/// Computes `a op b`.
pub(super) type Operator = fn(&State, &Value, &Value) -> Result<Value, Error>;

/// `a + b`: safe text escapes the other, as that of markupsafe does.
pub(super) fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    use ValueKind as K;
    match (a.kind(), b.kind()) {
        (K::String, K::String) => {
            let safe = a.is_safe() || b.is_safe();
            let part = |value: &Value| match safe && !value.is_safe() {
                true => escaped(state, value.as_str().unwrap_or_default()),
                false => Ok(value.as_str().unwrap_or_default().to_string()),
            };
            let (a, b) = (part(a)?, part(b)?);
            spend(state, (a.len() + b.len()) as u64)?;
            Ok(if safe { Value::from_safe_string(a + &b) } else { Value::from(a + &b) })
        }
        (K::Seq | K::Iterable, K::Seq | K::Iterable) => Ok(a.try_iter()?.chain(b.try_iter()?).collect()),
        _ => match numbers("+", a, b)? {
            NumberPair::Whole(a, b) => small(a.checked_add(b)),
            NumberPair::Float(a, b) => Ok(Value::from(a + b)),
        },
    }
}

/// `a - b`
pub(super) fn subtract(_: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    match numbers("-", a, b)? {
        NumberPair::Whole(a, b) => small(a.checked_sub(b)),
        NumberPair::Float(a, b) => Ok(Value::from(a - b)),
    }
}

/// `a * b`: a text or a list is repeated, and not at all by a negative number.
pub(super) fn multiply(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    let (what, times) = if repeats(b) { (b, a) } else { (a, b) };
    if let (true, Ok(times)) = (repeats(what), whole(times)) {
        let times = u64::try_from(times.max(0)).unwrap_or(u64::MAX);
        if let Some(text) = what.as_str() {
            spend(state, times.saturating_mul(text.len() as u64))?;
            return Ok(Value::from(text.repeat(times as usize)));
        }
        let items: Vec<Value> = what.try_iter()?.collect();
        let times = if items.is_empty() { 0 } else { times };
        // One beyond the limit, which is refused when the list is weighed.
        let repeated = (0..times).flat_map(|_| &items).take(PARTS as usize + 1);
        return Ok(Value::from(repeated.cloned().collect::<Vec<_>>()));
    }
    match numbers("*", a, b)? {
        NumberPair::Whole(a, b) => small(a.checked_mul(b)),
        NumberPair::Float(a, b) => Ok(Value::from(a * b)),
    }
}

fn repeats(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable)
}

/// `a / b`, always a float.
pub(super) fn divide(_: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    let (a, b) = numbers("/", a, b)?.floats();
    nonzero(b, "division by zero").map(|b| Value::from(a / b))
}

/// `a // b`: the quotient is rounded down.
pub(super) fn divide_down(_: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    match numbers("//", a, b)? {
        NumberPair::Whole(_, 0) => Err(type_error("integer division or modulo by zero".into())),
        NumberPair::Whole(a, b) => {
            small(a.checked_div(b).map(|quotient| quotient - i128::from(a % b != 0 && (a < 0) != (b < 0))))
        }
        NumberPair::Float(a, b) => {
            let quotient = (a - remainder(a, nonzero(b, "float floor division by zero")?)) / b;
            Ok(Value::from(if quotient == 0.0 { 0f64.copysign(a / b) } else { quotient.round() }))
        }
    }
}

/// `a % b`: a formatted text, or the remainder with the sign of the divisor.
pub(super) fn modulo(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(text) = a.as_str() {
        return format::percent(state, text, std::slice::from_ref(b), Some(b)).map(Value::from);
    }
    match numbers("%", a, b)? {
        NumberPair::Whole(_, 0) => Err(type_error("integer modulo by zero".into())),
        NumberPair::Whole(a, b) => {
            small(a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
        }
        NumberPair::Float(a, b) => Ok(Value::from(remainder(a, nonzero(b, "float modulo")?))),
    }
}

/// `a % b`, where `b` is spelled out as a list: a text formatted by each of its items.
pub(super) fn modulo_by_items(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    match a.as_str() {
        Some(text) => {
            let items: Vec<Value> = b.try_iter()?.collect();
            format::percent(state, text, &items, None).map(Value::from)
        }
        None => modulo(state, a, b),
    }
}

fn remainder(a: f64, b: f64) -> f64 {
    let rest = a % b;
    match rest == 0.0 {
        true => 0f64.copysign(b),
        false if (rest < 0.0) != (b < 0.0) => rest + b,
        false => rest,
    }
}

/// `a ** b`: a float where the exponent is negative.
pub(super) fn power(_: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    let both = numbers("**", a, b)?;
    if let NumberPair::Whole(a, b @ 0..) = both {
        return small(u32::try_from(b).ok().and_then(|b| a.checked_pow(b)));
    }
    let (a, b) = both.floats();
    match a.powf(b) {
        _ if a == 0.0 && b < 0.0 => Err(type_error("zero to a negative power".into())),
        result if result.is_nan() && !a.is_nan() && !b.is_nan() => {
            Err(type_error(format!("{a} ** {b} is a complex number")))
        }
        result if result.is_infinite() && a.is_finite() && b.is_finite() => {
            Err(type_error("Numerical result out of range".into()))
        }
        result => Ok(Value::from(result)),
    }
}

/// Two numbers: booleans are 0 and 1, and a float makes the other one a float.
enum NumberPair {
    Whole(i128, i128),
    Float(f64, f64),
}

impl NumberPair {
    fn floats(self) -> (f64, f64) {
        match self {
            NumberPair::Whole(a, b) => (a as f64, b as f64),
            NumberPair::Float(a, b) => (a, b),
        }
    }
}

fn numbers(operator: &str, a: &Value, b: &Value) -> Result<NumberPair, Error> {
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !number(a) || !number(b) {
        let (a, b) = (type_name(a), type_name(b));
        return Err(type_error(format!("unsupported operand type(s) for {operator}: '{a}' and '{b}'")));
    }
    let float = |value: &Value| whole(value).map(|n| n as f64).or_else(|_| f64::try_from(value.clone()));
    Ok(match (whole(a), whole(b)) {
        (Ok(a), Ok(b)) => NumberPair::Whole(a, b),
        _ => NumberPair::Float(float(a)?, float(b)?),
    })
}

fn nonzero(b: f64, fault: &str) -> Result<f64, Error> {
    if b == 0.0 { Err(type_error(fault.into())) } else { Ok(b) }
}

/// An integer as minijinja holds one that it read.
fn small(result: Option<i128>) -> Result<Value, Error> {
    let result = result.ok_or_else(|| type_error("the result has more than 127 bits".into()))?;
    Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from))
}

/// Both operands of `a < b`, which minijinja compares as Python does, if Python has an answer.
pub(super) fn ordered(a: &Value, b: &Value) -> Result<Value, Error> {
    compare(a, b).map(|_| Value::from(vec![plain(a), plain(b)]))
}
