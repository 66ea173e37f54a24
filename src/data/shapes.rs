//! Rows that are recognized by their keys: OpenAI and ShareGPT conversations, and Alpaca instructions. Never renders
//! and never tokenizes.
//!
//! [Note: ShareGPT and Alpaca] `conversations` is a list of `{"from", "value"}`: human and user map to user, gpt and
//! assistant to assistant, observation and tool to tool; function_call becomes assistant text, verbatim. A `system`
//! field comes first. In `{"instruction", "input", "output"}` the user message is the instruction, then the input on
//! its own line if it is not empty; the assistant message is the output. `system` comes first, and the pairs of
//! `history` before the instruction, as in LLaMA-Factory. Without a chat template the prompt is Stanford Alpaca's
//! ([`alpaca_prompt`]), which has no place for `system` and `history`.
use super::fields::{JsonRow, RowResult, array, field, kind, present, string};
use serde_json::{Value, json};

/// Keys that identify a row when no setting names its fields.
pub(super) const KEYS: [&str; 10] =
    ["input_ids", "labels", "text", "messages", "conversations", "system", "instruction", "input", "output", "history"];

/// Fields of a pair given as token ids.
pub(super) const ID_KEYS: [&str; 3] = ["prompt_input_ids", "chosen_input_ids", "rejected_input_ids"];

/// Roles a message may have. Templates support fewer; a role that no template knows is a mistake in the data.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];
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

/// A string that is not empty.
fn present_text<'a>(row: &'a JsonRow, key: &str) -> Option<&'a str> {
    present(row, key)?.as_str().filter(|text| !text.is_empty())
}

pub(super) fn is_alpaca(row: &JsonRow) -> bool {
    present(row, "instruction").is_some() && present(row, "output").is_some()
}

/// The row's keys mark it as text.
pub(super) fn is_text(row: &JsonRow) -> bool {
    let given = |key: &str| present(row, key).is_some();
    !given("input_ids") && (["text", "messages", "conversations"].into_iter().any(given) || is_alpaca(row))
}

/// The row's keys mark it as training data, and as hardly anything else.
pub(super) fn is_known(row: &JsonRow) -> bool {
    let named = ["input_ids", "messages", "conversations"].iter().any(|key| present(row, key).is_some());
    named || is_alpaca(row) || is_pair(row) || both(row, ["completion", "label"])
}

fn both(row: &JsonRow, keys: [&str; 2]) -> bool {
    keys.iter().all(|key| present(row, key).is_some())
}

/// The row's keys mark it as a prompt with two answers.
fn is_pair(row: &JsonRow) -> bool {
    both(row, ["chosen", "rejected"]) || both(row, [ID_KEYS[1], ID_KEYS[2]])
}

/// The messages of a row whose fields no setting names.
pub(super) fn conversation(row: &JsonRow) -> RowResult<Vec<Value>> {
    let system = present_text(row, "system").map(|text| json!({"role": "system", "content": text}));
    if let Some(list) = present(row, "messages") {
        return Ok(array(list, "messages")?.to_vec());
    }
    if let Some(list) = present(row, "conversations") {
        let list = array(list, "conversations")?;
        let own = list.first().is_some_and(|first| first["from"] == "system" || first["role"] == "system");
        return Ok(system.filter(|_| !own).into_iter().chain(list.iter().cloned()).collect());
    }
    if !is_alpaca(row) {
        let keys: Vec<&str> = row.keys().map(String::as_str).collect();
        return Err(format!(
            "has none of `messages`, `conversations`, `instruction` with `output`; its keys are: {}",
            keys.join(", ")
        ));
    }
    let mut turns: Vec<Value> = system.into_iter().collect();
    let pair = |prompt: &str, answer: &str| {
        [json!({"role": "user", "content": prompt}), json!({"role": "assistant", "content": answer})]
    };
    for earlier in present(row, "history").map(|list| array(list, "history")).transpose()?.into_iter().flatten() {
        match earlier.as_array().map(Vec::as_slice) {
            Some([Value::String(prompt), Value::String(answer)]) => turns.extend(pair(prompt, answer)),
            _ => return Err(format!("has {} in its history; each entry must be [prompt, answer]", kind(earlier))),
        }
    }
    let (instruction, output) = (string(row, "instruction")?, string(row, "output")?);
    let query = match input(row)? {
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction.to_string(),
    };
    turns.extend(pair(&query, output));
    Ok(turns)
}

fn input(row: &JsonRow) -> RowResult<Option<&str>> {
    match present(row, "input") {
        Some(_) => string(row, "input").map(|text| Some(text).filter(|text| !text.is_empty())),
        None => Ok(None),
    }
}

/// Stanford Alpaca's prompt (PROMPT_DICT of its train.py); the output follows without a space.
pub(super) fn alpaca_prompt(row: &JsonRow) -> RowResult<String> {
    let listed = present(row, "history").is_some_and(|list| list.as_array().is_none_or(|list| !list.is_empty()));
    for (key, given) in [("system", present_text(row, "system").is_some()), ("history", listed)] {
        if given {
            return Err(format!(
                "has a {key}, which the Alpaca prompt cannot express: set `apply_chat_template` or remove the {key}"
            ));
        }
    }
    let (instruction, input) = (string(row, "instruction")?, input(row)?);
    let task = "Below is an instruction that describes a task";
    let answer = "Write a response that appropriately completes the request.";
    Ok(match input {
        Some(input) => format!(
            "{task}, paired with an input that provides further context. {answer}\n\n### Instruction:\n{instruction}\n\n\
             ### Input:\n{input}\n\n### Response:"
        ),
        None => format!("{task}. {answer}\n\n### Instruction:\n{instruction}\n\n### Response:"),
    })
}

/// All messages of a row, checked: at least one before the response. `(input, output)` are the fields of the prompt or
/// conversation and of the response; if neither is given, the row's own keys decide.
pub(super) fn turns(row: &JsonRow, (input, output): (Option<&str>, Option<&str>)) -> RowResult<Vec<Value>> {
    let mut turns = match input {
        None => conversation(row)?,
        Some(key) => match (field(row, key)?, output) {
            (Value::String(text), Some(_)) => vec![json!({"role": "user", "content": text})],
            (Value::String(_), None) => {
                return Err(format!(
                    "has a string as {key}; a list of messages is expected. If the prompt is a string, name the \
                     response field with `output_key`"
                ));
            }
            (list, _) => array(list, key)?.to_vec(),
        },
    };
    if let Some(output) = output {
        match field(row, output)? {
            Value::String(text) => turns.push(json!({"role": "assistant", "content": text})),
            message @ Value::Object(_) => turns.push(message.clone()),
            list => turns.extend(array(list, output)?.iter().cloned()),
        }
    }
    for (i, turn) in turns.iter_mut().enumerate() {
        message(i, turn)?;
    }
    match turns.len() {
        0 => Err("has no messages".into()),
        1 => Err("has only one message: a prompt must precede the response".into()),
        _ => Ok(turns),
    }
}

/// Checks message `i`, and converts a ShareGPT message to one with a role.
fn message(i: usize, turn: &mut Value) -> RowResult<()> {
    let Value::Object(fields) = turn else {
        return Err(format!("has a message {i} that is not an object: a message is {{\"role\": .., \"content\": ..}}"));
    };
    if let (None, Some(from)) = (present(fields, "role"), present(fields, "from")) {
        let role = SPEAKERS.iter().find(|(name, _)| from == name).map(|(_, role)| *role).ok_or_else(|| {
            let known: Vec<&str> = SPEAKERS.iter().map(|(name, _)| *name).collect();
            format!("has a message {i} from {from}; ShareGPT knows: {}", known.join(", "))
        })?;
        let content = string(fields, "value").map_err(|what| format!("has a message {i} that {what}"))?;
        *turn = json!({"role": role, "content": content});
        return Ok(());
    }
    let keys = || fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    match fields.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => {}
        Some(role) => return Err(format!("has a message {i} with role {role}; known roles: {}", ROLES.join(", "))),
        None => return Err(format!("has a message {i} without `role`; its keys are: {}", keys())),
    }
    match fields.get("content") {
        Some(Value::String(_) | Value::Array(_)) => Ok(()),
        // An assistant message may consist of tool calls only.
        None | Some(Value::Null) if fields.contains_key("tool_calls") => Ok(()),
        None => Err(format!("has a message {i} without `content`; its keys are: {}", keys())),
        Some(other) => Err(format!("has a message {i} whose content is {}; a string is expected", kind(other))),
    }
}
