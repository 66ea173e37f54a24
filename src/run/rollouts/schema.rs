//! JSON schemas that a text has to follow: the part of JSON Schema (draft 2020-12) that describes objects, lists and
//! values in one piece. A keyword that is not checked is refused by name before a run starts. Never reads a file.
//!
//! [Note: keywords] The crate that knows all of JSON Schema brings dozens of others (formats, references over the
//! network, big numbers). A reward needs the shape of an answer, which these keywords say.
use crate::base::quote;
use regex::Regex;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What a schema says about a reader, not about a text.
const NOTES: [&str; 9] =
    ["$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"];
const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];
/// Levels of a schema.
const DEEPEST: usize = 64;

/// How many of something, if limited.
#[derive(Default, Debug)]
struct Between {
    least: Option<usize>,
    most: Option<usize>,
}

impl Between {
    fn holds(&self, n: usize) -> bool {
        self.least.is_none_or(|least| n >= least) && self.most.is_none_or(|most| n <= most)
    }
}

/// A schema, ready to be compared with.
#[derive(Default, Debug)]
pub struct JsonSchema {
    /// Nothing matches: the schema `false`.
    never: bool,
    types: Option<Vec<&'static str>>,
    /// The values of each `enum` and `const`.
    values: Vec<Vec<Value>>,
    required: Vec<String>,
    properties: BTreeMap<String, JsonSchema>,
    others: Option<Box<JsonSchema>>,
    names: Between,
    items: Option<Box<JsonSchema>>,
    len: Between,
    characters: Between,
    pattern: Option<Regex>,
    /// Bounds of numbers, and whether they are excluded.
    above: Vec<(f64, bool)>,
    below: Vec<(f64, bool)>,
    all: Vec<JsonSchema>,
    any: Option<Vec<JsonSchema>>,
    one: Option<Vec<JsonSchema>>,
    not: Option<Box<JsonSchema>>,
}

impl JsonSchema {
    /// # Errors
    /// What of the schema is wrong or not known, and where it is.
    pub fn new(schema: &Value) -> Result<JsonSchema, String> {
        JsonSchema::at("", schema, 0)
    }
    fn at(place: &str, schema: &Value, depth: usize) -> Result<JsonSchema, String> {
        let here = if place.is_empty() { "/" } else { place };
        let keys = match schema {
            Value::Bool(matches) => return Ok(JsonSchema { never: !matches, ..JsonSchema::default() }),
            Value::Object(keys) if depth < DEEPEST => keys,
            Value::Object(_) => return Err(format!("{here}: is more than {DEEPEST} levels deep")),
            other => return Err(format!("{here}: {} is no schema, which is an object, true or false", quote(other))),
        };
        let mut made = JsonSchema::default();
        for (key, value) in keys {
            let place = format!("{place}/{key}");
            made.take(&place, key, value, depth)?;
        }
        Ok(made)
    }
    /// Takes one keyword.
    fn take(&mut self, place: &str, key: &str, value: &Value, depth: usize) -> Result<(), String> {
        let wrong = |what: &str| Err(format!("{place}: {} is no {what}", quote(value)));
        let below = |value: &Value| JsonSchema::at(place, value, depth + 1);
        let list = || match value {
            Value::Array(all) if !all.is_empty() => {
                all.iter().enumerate().map(|(i, one)| JsonSchema::at(&format!("{place}/{i}"), one, depth + 1)).collect()
            }
            other => Err(format!("{place}: {} is no list of schemas", quote(other))),
        };
        let count = value.as_f64().filter(|n| *n >= 0.0 && n.fract() == 0.0).map(|n| n as usize);
        let limit = match key {
            "minItems" => Some(&mut self.len.least),
            "maxItems" => Some(&mut self.len.most),
            "minLength" => Some(&mut self.characters.least),
            "maxLength" => Some(&mut self.characters.most),
            "minProperties" => Some(&mut self.names.least),
            "maxProperties" => Some(&mut self.names.most),
            _ => None,
        };
        if let Some(limit) = limit {
            *limit = count;
            return if count.is_some() { Ok(()) } else { wrong("number of 0 or more") };
        }
        match (key, value) {
            ("type", value) => {
                let one = |name: &Value| TYPES.into_iter().find(|known| name.as_str() == Some(known));
                let all = if let Value::Array(all) = value {
                    all.iter().map(one).collect()
                } else {
                    one(value).map(|t| vec![t])
                };
                self.types =
                    Some(all.filter(|all| !all.is_empty()).ok_or_else(|| {
                        format!("{place}: {} is no type; known are {}", quote(value), TYPES.join(", "))
                    })?);
            }
            ("enum", Value::Array(all)) if !all.is_empty() => self.values.push(all.clone()),
            ("enum", _) => return wrong("list of values"),
            ("const", value) => self.values.push(vec![value.clone()]),
            ("required", Value::Array(all)) => {
                let names: Option<Vec<String>> = all.iter().map(|name| name.as_str().map(str::to_string)).collect();
                let Some(names) = names else { return wrong("list of names") };
                self.required = names;
            }
            ("required", _) => return wrong("list of names"),
            ("properties", Value::Object(all)) => {
                for (name, schema) in all {
                    let schema = JsonSchema::at(&format!("{place}/{name}"), schema, depth + 1)?;
                    self.properties.insert(name.clone(), schema);
                }
            }
            ("properties", _) => return wrong("object of schemas"),
            ("additionalProperties", value) => self.others = Some(Box::new(below(value)?)),
            ("items", value) => self.items = Some(Box::new(below(value)?)),
            ("not", value) => self.not = Some(Box::new(below(value)?)),
            ("allOf", _) => self.all = list()?,
            ("anyOf", _) => self.any = Some(list()?),
            ("oneOf", _) => self.one = Some(list()?),
            ("minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum", value) => {
                let Some(bound) = value.as_f64() else { return wrong("number") };
                let bounds = if key.ends_with("inimum") { &mut self.above } else { &mut self.below };
                bounds.push((bound, key.starts_with("exclusive")));
            }
            ("pattern", Value::String(pattern)) => {
                self.pattern =
                    Some(Regex::new(pattern).map_err(|e| format!("{place}: is no regular expression ({e})"))?);
            }
            ("pattern", _) => return wrong("regular expression"),
            (key, _) if NOTES.contains(&key) => {}
            _ => return Err(format!("{place}: this keyword is not checked here; describe the answer without it")),
        }
        Ok(())
    }

    /// Whether the text is JSON that the schema describes.
    pub fn describes(&self, text: &str) -> bool {
        serde_json::from_str(text).is_ok_and(|value| self.holds(&value))
    }
    fn holds(&self, value: &Value) -> bool {
        let kind = match value {
            Value::Object(fields) => self.holds_fields(fields),
            Value::Array(all) => {
                self.len.holds(all.len()) && self.items.as_ref().is_none_or(|items| all.iter().all(|x| items.holds(x)))
            }
            Value::String(text) => {
                let limits = &self.characters;
                limits.holds(text.chars().count()) && self.pattern.as_ref().is_none_or(|of| of.is_match(text))
            }
            Value::Number(number) => number.as_f64().is_some_and(|x| {
                let above = self.above.iter().all(|&(bound, excluded)| x > bound || x == bound && !excluded);
                above && self.below.iter().all(|&(bound, excluded)| x < bound || x == bound && !excluded)
            }),
            Value::Null | Value::Bool(_) => true,
        };
        kind && !self.never
            && self.types.as_ref().is_none_or(|types| types.iter().any(|of| is_of(value, of)))
            && self.values.iter().all(|values| values.iter().any(|of| same(of, value)))
            && self.all.iter().all(|of| of.holds(value))
            && self.any.as_ref().is_none_or(|any| any.iter().any(|of| of.holds(value)))
            && self.one.as_ref().is_none_or(|one| one.iter().filter(|of| of.holds(value)).count() == 1)
            && self.not.as_ref().is_none_or(|not| !not.holds(value))
    }
    fn holds_fields(&self, fields: &Map<String, Value>) -> bool {
        let field = |(name, value): (&String, &Value)| match (self.properties.get(name), &self.others) {
            (Some(of), _) => of.holds(value),
            (None, Some(others)) => others.holds(value),
            (None, None) => true,
        };
        let has_all = self.required.iter().all(|name| fields.contains_key(name));
        self.names.holds(fields.len()) && has_all && fields.iter().all(field)
    }
}

/// A number without a fraction is an integer, however it is written.
fn is_of(value: &Value, of: &str) -> bool {
    match value {
        Value::Null => of == "null",
        Value::Bool(_) => of == "boolean",
        Value::Number(number) => of == "number" || of == "integer" && number.as_f64().is_some_and(|x| x.fract() == 0.0),
        Value::String(_) => of == "string",
        Value::Array(_) => of == "array",
        Value::Object(_) => of == "object",
    }
}

/// Whether two values are equal: 1 and 1.0 are.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) if x.is_f64() == y.is_f64() => x == y,
        (Value::Number(x), Value::Number(y)) => x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(name, x)| y.get(name).is_some_and(|y| same(x, y)))
        }
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn person() -> Value {
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a person", "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 4, "pattern": "^[a-zé]+$"},
                "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
                "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "minItems": 1, "maxItems": 2},
                "more": {"anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 1}]},
            },
            "required": ["name", "age"], "additionalProperties": false,
        })
    }

    #[test]
    fn texts_follow_a_schema_or_not() {
        let schema = JsonSchema::new(&person()).unwrap();
        for text in [
            r#"{"name": "ann", "age": 3}"#,
            r#" {"age": 3.0, "name": "éé", "tags": ["b"], "more": null} "#,
            r#"{"name": "a", "age": 0, "tags": ["a", 1.0], "more": {"x": 1}}"#,
        ] {
            assert!(schema.describes(text), "{text}");
        }
        for text in [
            "",
            "{",
            "ann",
            "[]",
            "3",
            r#"{"name": "ann"}"#,
            r#"{"name": "", "age": 3}"#,
            r#"{"name": "annas", "age": 3}"#,
            r#"{"name": "Ann", "age": 3}"#,
            r#"{"name": "ann", "age": -1}"#,
            r#"{"name": "ann", "age": 150}"#,
            r#"{"name": "ann", "age": 1.5}"#,
            r#"{"name": "ann", "age": "3"}"#,
            r#"{"name": 3, "age": 3}"#,
            r#"{"name": "ann", "age": 3, "other": 1}"#,
            r#"{"name": "ann", "age": 3, "tags": []}"#,
            r#"{"name": "ann", "age": 3, "tags": ["a", "a", "a"]}"#,
            r#"{"name": "ann", "age": 3, "tags": ["c"]}"#,
            r#"{"name": "ann", "age": 3, "more": {"x": 1, "y": 2}}"#,
            r#"{"name": "ann", "age": 3} and more"#,
        ] {
            assert!(!schema.describes(text), "{text}");
        }
        let of = |schema: Value, text: &str| JsonSchema::new(&schema).unwrap().describes(text);
        assert!(of(json!(true), "1") && !of(json!(false), "1") && of(json!({}), "null"));
        assert!(of(json!({"const": {"a": [1]}}), r#"{"a": [1.0]}"#) && !of(json!({"const": {"a": [1]}}), "{}"));
        let both = json!({"const": 1, "enum": [1, 2]});
        assert!(of(both.clone(), "1") && !of(both, "2"));
        let either = json!({"oneOf": [{"type": "integer"}, {"minimum": 2}]});
        assert!(of(either.clone(), "1") && of(either.clone(), "2.5") && !of(either, "3"));
        assert!(of(json!({"not": {"type": "string"}, "allOf": [{"minimum": 1}]}), "1"));
        assert!(
            of(json!({"type": ["string", "null"]}), "null")
                && !of(json!({"additionalProperties": {"type": "null"}}), r#"{"a": 1}"#)
        );
    }

    #[test]
    fn what_is_not_checked_is_refused_with_its_place() {
        for (schema, says) in [
            (json!({"properties": {"a": {"format": "date"}}}), "/properties/a/format: this keyword is not checked"),
            (json!({"$ref": "#/$defs/a"}), "/$ref"),
            (json!({"type": "text"}), "/type: \"text\" is no type; known are null, boolean"),
            (json!({"type": []}), "is no type"),
            (json!({"required": "a"}), "/required: \"a\" is no list of names"),
            (json!({"enum": []}), "is no list of values"),
            (json!({"items": 3}), "/items: 3 is no schema"),
            (json!({"minItems": -1}), "/minItems: -1 is no number of 0 or more"),
            (json!({"maximum": "3"}), "is no number"),
            (json!({"pattern": "("}), "is no regular expression"),
            (json!({"anyOf": [{"typ": "null"}]}), "/anyOf/0/typ"),
            (json!({"properties": []}), "is no object of schemas"),
            (json!([]), "/: [] is no schema"),
        ] {
            let error = JsonSchema::new(&schema).unwrap_err();
            assert!(error.contains(says), "{schema}: {error}");
        }
    }
}
