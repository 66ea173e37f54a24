//! Helpers of setting declarations: required values, ranges, the forms a file may use, overlaying trees. Never names a
//! setting.
use crate::base::{Error, Result, limits};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::Value;
use std::str::FromStr;

/// The value of a setting that has a default.
pub fn set<T: Clone>(value: &Option<T>, name: &str) -> Result<T> {
    value.clone().ok_or_else(|| Error::input(format!("{name} is null: set a value, or remove the key")))
}

pub fn at_least_one<T: Default + PartialEq>(name: &str, value: Option<T>) -> Result<()> {
    match value.is_some_and(|n| n == T::default()) {
        true => Err(Error::input(format!("{name} is 0: it must be at least 1"))),
        false => Ok(()),
    }
}

/// Up to its limit in [`limits`].
pub fn size(name: &str, value: Option<usize>) -> Result<()> {
    value.map_or(Ok(()), |n| limits::check(name, name, n as u64))
}

/// From 1 up to its limit.
pub fn count(name: &str, value: Option<usize>) -> Result<()> {
    size(name, value).and_then(|()| at_least_one(name, value))
}

pub fn number(name: &str, value: Option<f64>, fits: impl Fn(f64) -> bool, range: &str) -> Result<()> {
    match value.filter(|&x| !(x.is_finite() && fits(x))) {
        Some(x) => Err(Error::input(format!("{name} is {x}: it must be {range}"))),
        None => Ok(()),
    }
}

/// The same of a number that is computed with in float32, where it must fit too. What is not 0 stays so: 0 turns
/// things off.
pub fn number32(name: &str, value: Option<f64>, fits: impl Fn(f64) -> bool, range: &str) -> Result<()> {
    number(name, value, &fits, range)?;
    let rounded = |x: f64| f64::from(x as f32);
    match value.filter(|&x| !(rounded(x).is_finite() && fits(rounded(x))) || (rounded(x) == 0.0) != (x == 0.0)) {
        Some(x) => {
            Err(Error::input(format!("{name} is {x:?}, which is {} in float32: it must be {range}", rounded(x))))
        }
        None => Ok(()),
    }
}

/// A size as transformers writes it: "5GB", "200MB", "1GiB", or bytes.
pub fn bytes(name: &str, text: &str) -> Result<u64> {
    const UNITS: [(&str, u64); 7] = [
        ("KIB", 1 << 10),
        ("MIB", 1 << 20),
        ("GIB", 1 << 30),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("", 1),
    ];
    let upper = text.trim().to_uppercase();
    let split = UNITS.iter().find_map(|(unit, size)| Some((upper.strip_suffix(unit)?, *size)));
    let size = split.and_then(|(number, unit)| number.trim().parse::<u64>().ok()?.checked_mul(unit)).filter(|&n| n > 0);
    size.ok_or_else(|| Error::input(format!("{name} is {text:?}: it must be a size such as 10GB, 200MB or 1GiB")))
}

/// When something is done that is not done at each step; after 0 steps: never.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum StepInterval {
    /// This part of a pass over the training split (1: all of it): after the step that it ends in.
    Epoch(u64),
    /// This share of all steps, below 1; the plan turns it into a number.
    Share(f64),
    Steps(u64),
}

const INTERVALS: &str =
    "expected a whole number, 0 or more, a share of all steps below 1, or epoch (epoch/4: four times an epoch)";

impl FromStr for StepInterval {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<StepInterval, String> {
        let parts = match text.strip_prefix("epoch") {
            Some("") => Some(1),
            Some(parts) => parts.strip_prefix('/').and_then(|n| n.parse().ok()).filter(|&n| n > 0),
            None => {
                let share = || text.parse().ok().filter(|&share| share > 0.0 && share < 1.0).map(StepInterval::Share);
                return text.parse().ok().map(StepInterval::Steps).or_else(share).ok_or_else(|| INTERVALS.into());
            }
        };
        parts.map(StepInterval::Epoch).ok_or_else(|| INTERVALS.into())
    }
}
impl Serialize for StepInterval {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            StepInterval::Epoch(1) => s.serialize_str("epoch"),
            StepInterval::Epoch(parts) => s.serialize_str(&format!("epoch/{parts}")),
            StepInterval::Share(share) => s.serialize_f64(*share),
            StepInterval::Steps(n) => s.serialize_u64(*n),
        }
    }
}
impl<'de> Deserialize<'de> for StepInterval {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<StepInterval, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a whole number of steps, or epoch")]
        enum StepText {
            Steps(u64),
            Share(f64),
            Name(String),
        }
        match StepText::deserialize(d)? {
            StepText::Steps(n) => Ok(StepInterval::Steps(n)),
            StepText::Share(share) => share.to_string().parse().map_err(serde::de::Error::custom),
            StepText::Name(name) => name.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// The strings of a value that is one, or a list of them.
pub fn strings(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(items) => items.iter().map(|item| item.as_str().map(String::from)).collect(),
        _ => None,
    }
}

/// `dataset: x` is `dataset: [x]`.
pub fn one_or_many<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a string or a list of strings")]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(Option::<OneOrMany>::deserialize(d)?.map(|x| match x {
        OneOrMany::One(text) => vec![text],
        OneOrMany::Many(texts) => texts,
    }))
}

/// `weights: 0.7` and `weights: "0.7"` are `weights: [0.7]`; a string of several has commas.
pub fn numbers<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<f64>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a number or a list of numbers")]
    enum OneOrMore {
        One(f64),
        More(Vec<f64>),
        Text(String),
    }
    Ok(match Option::<OneOrMore>::deserialize(d)? {
        None => None,
        Some(OneOrMore::One(number)) => Some(vec![number]),
        Some(OneOrMore::More(numbers)) => Some(numbers),
        Some(OneOrMore::Text(text)) => {
            let number =
                |word: &str| word.trim().parse().map_err(|_| D::Error::custom(format!("{word} is not a number")));
            Some(text.split(',').map(number).collect::<std::result::Result<_, _>>()?)
        }
    })
}

/// Values of `upper` that are not null replace those of `lower`.
pub fn overlay(lower: &mut Value, upper: Value) {
    match (lower, upper) {
        (Value::Object(lower), Value::Object(upper)) => {
            for (key, value) in upper {
                overlay(lower.entry(key).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (lower, value) => *lower = value,
    }
}
