//! What declarations of settings share: the value of one that has a default, the ranges of single values, the forms
//! that a file may write. Never knows a setting.
use crate::base::{Error, Result, limits};
use serde::{Deserialize, Deserializer, de::Error as _};

/// The value of a setting that has a default.
pub fn set<T: Clone>(value: &Option<T>, name: &str) -> Result<T> {
    value.clone().ok_or_else(|| Error::input(format!("{name} has no value: give it one, or remove its null")))
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

/// `dataset: x` is `dataset: [x]`.
pub fn one_or_many<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "text or a list of texts")]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(Option::<OneOrMany>::deserialize(d)?.map(|x| match x {
        OneOrMany::One(text) => vec![text],
        OneOrMany::Many(texts) => texts,
    }))
}

/// `weights: 0.7` is `weights: [0.7]`, and so is `weights: "0.7"`; of several, a text has commas between them.
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
            let number = |word: &str| word.trim().parse().map_err(|_| D::Error::custom(format!("{word}: no number")));
            Some(text.split(',').map(number).collect::<std::result::Result<_, _>>()?)
        }
    })
}
