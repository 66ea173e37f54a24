//! Messages of rows: their roles, the switches of their loss, and what is text. Never renders and never tokenizes.
use super::fields::{RowResult, kind, list, present, string, truth};
use serde_json::Value;

/// Roles that templates know; each supports fewer, and some have others.
pub(super) const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];
/// ShareGPT's `from` values and the roles they map to.
const SPEAKERS: [(&str, &str); 9] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("system", "system"),
    ("user", "user"),
    ("assistant", "assistant"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", "assistant"),
];

/// Types of message parts that are not text contain one of these, or their keys do.
const PICTURES: [&str; 3] = ["image", "video", "audio"];
/// What tools return may be any value, but parts of these types are not text either.
const RETURNED: [&str; 8] =
    ["image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio"];
/// Fields of a message, besides its content, that are an answer.
const SPOKEN: [&str; 6] =
    ["tool_calls", "function_call", "function_calls", "reasoning_content", "thinking", "reasoning"];
/// Fields of a message that switch its loss on or off: OpenAI's and Mistral's, Axolotl's, ms-swift's.
pub(super) const SWITCHES: [&str; 4] = ["weight", "train", "training", "loss"];
/// Whether message `i` has a loss, if it says so.
pub(super) fn switch(i: usize, message: &Value) -> RowResult<Option<bool>> {
    let mut found: Option<(&str, bool)> = None;
    for (key, value) in SWITCHES.iter().filter_map(|key| Some((*key, present(message.as_object()?, key)?))) {
        let wrong = || format!("has a message {i} with {key} {value}; only 0 and 1, false and true are supported");
        let on = truth(value).ok_or_else(wrong)?;
        match found {
            Some((other, before)) if before != on => {
                return Err(format!("has a message {i} whose {other} and {key} contradict each other: remove one"));
            }
            _ => found = Some((key, on)),
        }
    }
    Ok(found.map(|(_, on)| on))
}

/// The message is an answer without a word in what its template `reads`: a call that it does not know is none.
pub(super) fn is_silent(message: &Value, reads: &dyn Fn(&str) -> bool) -> bool {
    let blank = |value: &Value| value.as_str().is_some_and(|text| text.trim().is_empty());
    let empty = |value: &Value| {
        value.is_null()
            || blank(value)
            || value.as_array().is_some_and(|list| list.iter().all(|part| blank(&part["text"])))
    };
    empty(&message["content"]) && SPOKEN.iter().all(|key| empty(&message[*key]) || !reads(key))
}

/// Checks message `i`, and converts a ShareGPT message to one with a role.
pub(super) fn message(i: usize, turn: &mut Value) -> RowResult<()> {
    let Value::Object(fields) = turn else {
        return Err(format!("has a message {i} that is not an object: a message is {{\"role\": .., \"content\": ..}}"));
    };
    if let (None, Some(from)) = (present(fields, "role"), present(fields, "from")) {
        let is = |name: &str| from.as_str().is_some_and(|from| from.eq_ignore_ascii_case(name));
        let role = SPEAKERS.iter().find(|(name, _)| is(name)).map(|(_, role)| *role).ok_or_else(|| {
            let known: Vec<&str> = SPEAKERS.iter().map(|(name, _)| *name).collect();
            format!("has a message {i} from {from}; ShareGPT knows: {}", known.join(", "))
        })?;
        string(fields, "value").map_err(|what| format!("has a message {i} that {what}"))?;
        let renamed =
            fields.iter().filter(|(key, _)| !["role", "content"].contains(&key.as_str())).map(|(key, value)| match key
                .as_str()
            {
                "from" => ("role".to_string(), role.into()),
                "value" => ("content".to_string(), value.clone()),
                _ => (key.clone(), value.clone()),
            });
        *fields = renamed.collect();
        return Ok(());
    }
    if let Some(text @ Value::String(_)) = present(fields, "tool_calls") {
        let calls = list(text, "tool_calls").map_err(|what| format!("has a message {i} that {what}"))?.into_owned();
        fields.insert("tool_calls".into(), Value::Array(calls));
    }
    let keys = || fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    // What a tool returned, under one of many names.
    let result = !ROLES[..4].iter().any(|role| fields.get("role").is_some_and(|r| r == role));
    match fields.get("role") {
        Some(Value::String(_)) => {}
        Some(role) => return Err(format!("has a message {i} whose role is {}; a string is expected", kind(role))),
        None => return Err(format!("has a message {i} without `role`; its keys are: {}", keys())),
    }
    match fields.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) => match parts.iter().find_map(|part| picture(part, result)) {
            Some(kind) => Err(format!(
                "has a message {i} with a part of type \"{kind}\": only text is trained on. Remove the part or the row"
            )),
            None => Ok(()),
        },
        // What a tool returns may be any value.
        Some(value) if result && !value.is_null() => Ok(()),
        // An assistant message may consist of thoughts or tool calls only.
        None | Some(Value::Null) if SPOKEN.iter().any(|key| present(fields, key).is_some()) => Ok(()),
        None => Err(format!("has a message {i} without `content`; its keys are: {}", keys())),
        Some(other) => Err(format!("has a message {i} whose content is {}; a string is expected", kind(other))),
    }
}

/// The type of a part that is not text, or the key that holds it.
fn picture(part: &Value, returned: bool) -> Option<&str> {
    let kind = part["type"].as_str();
    if returned {
        return kind.filter(|kind| RETURNED.contains(kind));
    }
    let is_picture = |name: &str| PICTURES.iter().any(|media| name.contains(media));
    let keys =
        part.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str());
    kind.into_iter().chain(keys).find(|name| is_picture(name))
}
