//! JSON in which no object has a key twice: readers differ in which one they take. Never knows what a key means.
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use std::fmt;

/// A value whose objects have each key once.
pub struct KeysOnce(pub Value);

impl<'de> Deserialize<'de> for KeysOnce {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<KeysOnce, D::Error> {
        from.deserialize_any(AnyValue).map(KeysOnce)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E: Error>(self, x: bool) -> Result<Value, E> {
        Ok(x.into())
    }
    fn visit_i64<E: Error>(self, x: i64) -> Result<Value, E> {
        Ok(x.into())
    }
    fn visit_u64<E: Error>(self, x: u64) -> Result<Value, E> {
        Ok(x.into())
    }
    fn visit_f64<E: Error>(self, x: f64) -> Result<Value, E> {
        Ok(x.into())
    }
    fn visit_str<E: Error>(self, x: &str) -> Result<Value, E> {
        Ok(x.into())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(KeysOnce(value)) = from.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            let KeysOnce(value) = from.next_value()?;
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{key} occurs twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_may_be_there_once() {
        let text = r#"{"a": [1, -2, 0.5, null, true, "x"], "b": {"a": {}}}"#;
        let read = |text: &str| serde_json::from_str(text).map(|KeysOnce(value)| value);
        assert_eq!(read(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for twice in [r#"{"a": 1, "a": 1}"#, r#"{"b": [{"a": 1, "c": 2, "a": 3}]}"#] {
            let fault = read(twice).unwrap_err().to_string();
            assert!(fault.starts_with("a occurs twice at line 1"), "{fault}");
        }
    }
}
