//! Operators of values as Python has them, where minijinja has others. Never makes a text that it does not charge.
use super::budget::spend;
use super::filters::escaped;
use super::order::{compare, plain};
use super::python::{type_error, type_name, whole};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};

/// `a + b`: safe text escapes the other, as that of markupsafe does.
pub(super) fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    use ValueKind as K;
    let number = |kind| matches!(kind, K::Number | K::Bool);
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
        (x, y) if number(x) && number(y) => match (whole(a), whole(b)) {
            (Ok(a), Ok(b)) => {
                a.checked_add(b).map(Value::from).ok_or_else(|| type_error("the sum is too large".into()))
            }
            _ => Ok(Value::from(float(a)? + float(b)?)),
        },
        _ => Err(type_error(format!("unsupported operand type(s) for +: '{}' and '{}'", type_name(a), type_name(b)))),
    }
}

fn float(value: &Value) -> Result<f64, Error> {
    whole(value).map(|n| n as f64).or_else(|_| f64::try_from(value.clone()))
}

/// Both operands of `a < b`, which minijinja compares as Python does, if Python has an answer.
pub(super) fn ordered(a: &Value, b: &Value) -> Result<Value, Error> {
    compare(a, b).map(|_| Value::from(vec![plain(a), plain(b)]))
}
