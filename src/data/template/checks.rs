//! Jinja's tests (`is iterable`, `is sequence`) of values that minijinja tells apart in another way than Python. Never
//! makes a text of a value.
use super::python::{self, type_error, type_name};
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, State};
use regex::Regex;

pub(super) fn install(env: &mut Environment) {
    env.add_test("iterable", |value: Value| python::iterable(&value).is_ok());
    // What has a length and items: texts and dicts too.
    env.add_test("sequence", |value: Value| {
        matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    // Python's booleans are integers.
    env.add_test("number", |value: Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("callable", |value: Value| value.kind() == ValueKind::Plain);
    env.add_test("lower", |state: &State, value: Value| Ok::<_, Error>(in_case(&python::text(state, &value)?, false)));
    env.add_test("upper", |state: &State, value: Value| Ok::<_, Error>(in_case(&python::text(state, &value)?, true)));
    env.add_test("odd", |value: Value| remainder(&value).map(|rest| rest == 1.0));
    env.add_test("even", |value: Value| remainder(&value).map(|rest| rest == 0.0));
}

/// Whether some letters of a text are of this case, and none of the other: `islower()`, `isupper()`.
pub(super) fn in_case(text: &str, upper: bool) -> bool {
    let [has_lower, has_upper] = [text.chars().any(char::is_lowercase), text.chars().any(char::is_uppercase)];
    if upper { has_upper && !has_lower } else { has_lower && !has_upper }
}

/// `str.isdecimal`: digits of decimal numbers, of any script.
pub(super) fn is_decimal(text: &str) -> bool {
    match text.is_ascii() {
        true => !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()),
        false => Regex::new(r"^\d+$").is_ok_and(|digits| digits.is_match(text)),
    }
}

/// `str.istitle`: letters with a case begin with an upper one after every other character, and go on with lower ones.
pub(super) fn is_title(text: &str) -> bool {
    let (mut cased, mut any) = (false, false);
    for c in text.chars() {
        let (upper, lower) = (c.is_uppercase() || is_titlecase(c), c.is_lowercase());
        if upper && cased || lower && !cased {
            return false;
        }
        cased = upper || lower;
        any |= cased;
    }
    any
}

/// Whether a character is a letter with an upper and a lower case.
pub(super) fn is_cased(c: char) -> bool {
    c.is_uppercase() || c.is_lowercase() || is_titlecase(c)
}

/// Letters such as \u{1c5}, which are neither upper nor lower.
fn is_titlecase(c: char) -> bool {
    !c.is_uppercase() && !c.is_lowercase() && c.to_lowercase().next() != Some(c)
}

/// `value % 2`
fn remainder(value: &Value) -> Result<f64, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(f64::from(value.is_true() as u8)),
        ValueKind::Number => match i128::try_from(value.clone()) {
            Ok(whole) => Ok(whole.rem_euclid(2) as f64),
            Err(_) => f64::try_from(value.clone()).map(|x| x.rem_euclid(2.0)),
        },
        _ => Err(type_error(format!("unsupported operand type(s) for %: '{}' and 'int'", type_name(value)))),
    }
}
