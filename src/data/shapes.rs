//! Rows that are recognized by their keys: OpenAI and ShareGPT conversations, and Alpaca instructions. Never renders
//! and never tokenizes.
//!
//! [Note: ShareGPT and Alpaca] `conversations` is a list of `{"from", "value"}`: human and user map to user, gpt and
//! assistant to assistant, observation and tool to tool; function_call becomes assistant text, verbatim. A `system`
//! field comes first. In `{"instruction", "input", "output"}` the user message is the instruction, then the input on
//! its own line if it is not empty; the assistant message is the output. `system` comes first, and the pairs of
//! `history` before the instruction, as in LLaMA-Factory. Without a chat template the prompt is Stanford Alpaca's
//! ([`alpaca_prompt`]), which has no place for `system` and `history`. `{"prompt", "completion"}` is TRL's. A list of
//! texts (LIMA, UltraChat) is of user and assistant in turn, and one of `{"system", "input", "output"}` (XTuner,
//! Capybara) has both in each.
use super::fields::{FOREIGN, JsonRow, RowResult, field, kind, list, number_in, present, string};
use super::message::message;
use serde_json::{Value, json};
use std::borrow::Cow;

/// How a row is read whose fields no setting names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    Tokens,
    /// TRL's prompt with a completion: texts, or messages. Before messages, as in TRL.
    Completion,
    Messages,
    Conversations,
    Instruction,
    /// Last, as in TRL: next to any other, it is often a rendering of it.
    Text,
}

/// Masks of token ids that other trainers write next to them: 0 means no loss.
pub(super) const MASKS: [&str; 5] =
    ["completion_mask", "assistant_masks", "assistant_mask", "response_mask", "loss_mask"];
/// What a chat template gets from a row besides its messages.
pub(super) const VARIABLES: [&str; 3] = ["tools", "documents", "chat_template_kwargs"];

impl Shape {
    const ALL: [(Shape, &[&str]); 6] = [
        (Shape::Tokens, &["input_ids", "labels", "attention_mask", MASKS[0], MASKS[1], MASKS[2], MASKS[3], MASKS[4]]),
        (Shape::Completion, &["prompt", "completion", "system", VARIABLES[0], VARIABLES[1], VARIABLES[2]]),
        (Shape::Messages, &["messages", "system", VARIABLES[0], VARIABLES[1], VARIABLES[2]]),
        (Shape::Conversations, &["conversations", "system", VARIABLES[0], VARIABLES[1], VARIABLES[2]]),
        (Shape::Instruction, &["instruction", "output", "input", "system", "history"]),
        (Shape::Text, &["text"]),
    ];

    /// The first one that the keys of `row` fit. `chat`: a setting says that rows are conversations.
    pub(super) fn of(row: &JsonRow, chat: bool) -> Option<Shape> {
        let known = |shape: Shape| !(chat && shape.is_flat(row)) && shape.fits(row);
        Shape::ALL.into_iter().map(|(shape, _)| shape).find(|&shape| known(shape))
    }
    /// It is no conversation, or next to messages a part of them as text.
    fn is_flat(self, row: &JsonRow) -> bool {
        match self {
            Shape::Tokens | Shape::Text => true,
            Shape::Completion => Shape::Messages.fits(row) && is_text(row, ["prompt", "completion"]),
            _ => false,
        }
    }
    /// The fields that it is recognized by.
    fn keys(self) -> &'static [&'static str] {
        let count = if matches!(self, Shape::Instruction | Shape::Completion) { 2 } else { 1 };
        &self.reads()[..count]
    }
    fn fits(self, row: &JsonRow) -> bool {
        self.keys().iter().all(|key| present(row, key).is_some())
    }
    /// The row without the fields that other shapes are recognized by, and their names.
    pub(super) fn alone(self, row: &JsonRow) -> RowResult<(Cow<'_, JsonRow>, Vec<&'static str>)> {
        if !self.fits(row) {
            return Err(format!("has no `{}`, which `row_format` says", self.keys().join("` with `")));
        }
        let others = Shape::ALL.into_iter().filter(|(shape, _)| *shape != self && shape.fits(row));
        let others = others.flat_map(|(shape, _)| shape.keys()).filter(|key| !self.reads().contains(key));
        let others: Vec<&str> = others.copied().collect();
        if others.is_empty() {
            return Ok((Cow::Borrowed(row), others));
        }
        let mut row = row.clone();
        row.retain(|key, _| !others.contains(&key.as_str()));
        Ok((Cow::Owned(row), others))
    }
    /// The fields it reads, those it is recognized by first.
    pub(super) fn reads(self) -> &'static [&'static str] {
        Shape::ALL.iter().find(|(shape, _)| *shape == self).map_or(&[], |(_, keys)| keys)
    }
}

/// The two answers of a pair.
pub(super) const PAIR: [&str; 2] = ["chosen", "rejected"];
/// Fields of a pair given as token ids.
pub(super) const ID_KEYS: [&str; 3] = ["prompt_input_ids", "chosen_input_ids", "rejected_input_ids"];

/// The same in TRL (`trl/trainer/reward_trainer.py`).
pub(super) const TRL_IDS: [&str; 3] = ["prompt_ids", "chosen_ids", "rejected_ids"];

/// OpenAI's answers (platform.openai.com/docs/guides/direct-preference-optimization).
pub(super) const OPENAI: [&str; 2] = ["preferred_output", "non_preferred_output"];

/// Fields of a group of rollouts.
pub(super) const GROUP_KEYS: [&str; 2] = ["prompt_ids", "samples"];

/// Fields of a prompt that is sampled before it is trained on.
pub(super) const PROMPT_KEYS: [&str; 2] = ["prompt_ids", "row"];

/// Field of a labeled answer given as token ids.
pub(super) const ANSWER_IDS: &str = "completion_input_ids";

/// The row's keys mark it as training data, and as hardly anything else.
pub(super) fn is_known(row: &JsonRow) -> bool {
    let named = ["input_ids", "messages", "conversations"].iter().any(|key| present(row, key).is_some());
    let answered = is_pair(row) || both(row, ["completion", "label"]) || both(row, GROUP_KEYS);
    named || both(row, ["instruction", "output"]) || answered
}

/// The row has some of these fields, and all it has are text.
pub(super) fn is_text<const N: usize>(row: &JsonRow, keys: [&str; N]) -> bool {
    let mut given = keys.iter().filter_map(|key| present(row, key)).peekable();
    given.peek().is_some() && given.all(|value| value.is_string() && written(value).is_none())
}

pub(super) fn both(row: &JsonRow, keys: [&str; 2]) -> bool {
    keys.iter().all(|key| present(row, key).is_some())
}

/// A judged row of token ids.
pub(super) fn is_judged_ids(row: &JsonRow) -> bool {
    ID_KEYS.iter().chain([&ANSWER_IDS]).any(|key| present(row, key).is_some())
}

/// The row's keys mark it as a prompt with two answers.
fn is_pair(row: &JsonRow) -> bool {
    let keys = [PAIR, [ID_KEYS[1], ID_KEYS[2]], OPENAI, [TRL_IDS[1], TRL_IDS[2]]];
    keys.into_iter().any(|keys| both(row, keys))
}

/// The messages of a row whose fields no setting names.
pub(super) fn conversation(row: &JsonRow) -> RowResult<Vec<Value>> {
    let turns = match Shape::of(row, true) {
        Some(Shape::Messages) => list(field(row, "messages")?, "messages")?.into_owned(),
        Some(Shape::Conversations) => list(field(row, "conversations")?, "conversations")?.into_owned(),
        Some(Shape::Completion) => [spoken(row, "prompt", "user")?, spoken(row, "completion", "assistant")?].concat(),
        Some(Shape::Instruction) => instruction(row)?,
        _ => {
            let keys: Vec<&str> = row.keys().map(String::as_str).collect();
            let instead = misplaced(row).map_or(String::new(), |what| format!(". {what}"));
            return Err(format!(
                "has none of `messages`, `conversations`, `instruction` with `output`, `prompt` with `completion`; its \
                 keys are: {}{instead}",
                keys.join(", ")
            ));
        }
    };
    with_system(row, turns)
}

/// The messages after the row's `system` field, unless they begin with a system message.
pub(super) fn with_system(row: &JsonRow, turns: Vec<Value>) -> RowResult<Vec<Value>> {
    let system = system(row)?.filter(|_| !has_own_system(&turns));
    let system = system.map(|text| json!({"role": "system", "content": text}));
    Ok(system.into_iter().chain(turns).collect())
}

/// The `system` field, unless it is empty.
fn system(row: &JsonRow) -> RowResult<Option<&str>> {
    let text = present(row, "system").map(|_| string(row, "system")).transpose()?;
    Ok(text.filter(|text| !text.is_empty()))
}

/// Text without a chat template has no place for a `system` field.
pub(super) fn without_system(row: &JsonRow) -> RowResult<()> {
    match system(row)? {
        None => Ok(()),
        Some(_) => Err("has a system, which text without a chat template cannot express: set `apply_chat_template`, \
                        or remove the system"
            .into()),
    }
}

/// The conversation begins with a system message.
pub(super) fn has_own_system(list: &[Value]) -> bool {
    let role =
        |first: &Value| ["system", "developer"].iter().any(|role| first["from"] == *role || first["role"] == *role);
    list.first().is_some_and(role)
}

/// A `system` field that the conversation has no place for, since it begins with another system message.
pub(super) fn has_second_system(row: &JsonRow) -> bool {
    let Ok(Some(text)) = system(row) else { return false };
    let given =
        ["messages", "conversations", "prompt", "chosen"].iter().find_map(|key| list(present(row, key)?, key).ok());
    given.is_some_and(|list| has_own_system(&list) && list[0]["content"] != text && list[0]["value"] != text)
}

/// The messages that a text holds as JSON, as columns of CSV files do.
pub(super) fn written(value: &Value) -> Option<Vec<Value>> {
    let text = value.as_str().filter(|text| text.trim_start().starts_with('['))?;
    let list: Vec<Value> = serde_json::from_str(text).ok()?;
    are_messages(&list).then_some(list)
}
fn are_messages(list: &[Value]) -> bool {
    let is_message = |one: &Value| one.get("role").or(one.get("from")).is_some_and(Value::is_string);
    !list.is_empty() && list.iter().all(is_message)
}

/// One of these fields is text that holds messages.
pub(super) fn is_written<const N: usize>(row: &JsonRow, keys: [&str; N]) -> bool {
    keys.iter().any(|key| present(row, key).is_some_and(|value| written(value).is_some()))
}

/// The number of messages that a field holds, as [`spoken`] reads it.
pub(super) fn messages_in(value: &Value) -> usize {
    written(value).map_or_else(|| value.as_array().map_or(1, Vec::len), |list| list.len())
}

/// The messages of a field: text is one, by `role`, unless it is JSON of a list of them.
fn spoken(row: &JsonRow, key: &str, role: &str) -> RowResult<Vec<Value>> {
    let said = |text: &Value| vec![json!({"role": role, "content": text})];
    Ok(match field(row, key)? {
        text if let Some(list) = written(text) => list,
        text @ Value::String(_) => said(text),
        message @ Value::Object(fields) if number_in(fields).is_none() && !fields.contains_key(FOREIGN) => {
            vec![message.clone()]
        }
        Value::Array(list) => match &list[..] {
            // What follows a prompt does not begin with the user's turn.
            texts if role == "assistant" && texts.iter().any(Value::is_string) => match texts {
                [text] => said(text),
                _ => {
                    let count = texts.len();
                    return Err(format!("has {count} texts as {key}, and a row has one answer: write a row for each"));
                }
            },
            messages => messages.to_vec(),
        },
        other => return Err(format!("has {} as {key}; a string or a list of messages is expected", kind(other))),
    })
}

/// A field with messages that no shape reads: what to do, for the error.
pub(super) fn misplaced(row: &JsonRow) -> Option<String> {
    let talks = |value: &Value| match value {
        Value::Array(list) => are_messages(list),
        text => written(text).is_some(),
    };
    let (key, _) = row.iter().find(|(_, value)| talks(value))?;
    Some(format!("`{key}` holds messages: `input_key: {key}` with `apply_chat_template` reads them"))
}

/// The messages of an Alpaca row.
fn instruction(row: &JsonRow) -> RowResult<Vec<Value>> {
    let mut turns = question(row)?;
    turns.push(json!({"role": "assistant", "content": string(row, "output")?}));
    Ok(turns)
}

/// Its messages before the answer.
fn question(row: &JsonRow) -> RowResult<Vec<Value>> {
    let mut turns = Vec::new();
    let pair = |prompt: &str, answer: &str| {
        [json!({"role": "user", "content": prompt}), json!({"role": "assistant", "content": answer})]
    };
    for earlier in
        present(row, "history").map(|given| list(given, "history")).transpose()?.iter().flat_map(|l| l.iter())
    {
        match earlier.as_array().map(Vec::as_slice) {
            Some([Value::String(prompt), Value::String(answer)]) => turns.extend(pair(prompt, answer)),
            _ => return Err(format!("has {} in its history; each entry must be [prompt, answer]", kind(earlier))),
        }
    }
    let instruction = string(row, "instruction")?;
    let query = match input(row)? {
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction.to_string(),
    };
    turns.push(json!({"role": "user", "content": query}));
    Ok(turns)
}

/// Fields that hold the prompt of a pair without one, as LLaMA-Factory's rows have it.
pub(super) const QUESTION: [&str; 5] = ["messages", "conversations", "instruction", "input", "history"];

/// The row with a prompt, which [`QUESTION`] has.
pub(super) fn with_prompt(row: &JsonRow, chat: bool) -> RowResult<Cow<'_, JsonRow>> {
    let prompt = match QUESTION.iter().find_map(|key| present(row, key).map(|value| (*key, value))) {
        _ if present(row, "prompt").is_some() => return Ok(Cow::Borrowed(row)),
        Some((key @ ("messages" | "conversations"), value)) => Value::Array(list(value, key)?.into_owned()),
        Some(_) if present(row, "instruction").is_some() && chat => Value::Array(question(row)?),
        Some(_) if present(row, "instruction").is_some() => Value::String(alpaca_prompt(row)?),
        _ => return Ok(Cow::Borrowed(row)),
    };
    let mut row = row.clone();
    row.insert("prompt".into(), prompt);
    Ok(Cow::Owned(row))
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
    without_system(row)?;
    if listed {
        return Err(
            "has a history, which the Alpaca prompt cannot express: set `apply_chat_template` or remove the history"
                .into(),
        );
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
            (Value::String(_), Some(_)) => spoken(row, key, "user")?,
            (Value::String(text), None) if !text.trim_start().starts_with('[') => {
                return Err(format!(
                    "has a string as {key}; a list of messages is expected. If the prompt is a string, name the \
                     response field with `output_key`"
                ));
            }
            (given, _) => list(given, key)?.into_owned(),
        },
    };
    if let Some(output) = output {
        turns.extend(spoken(row, output, "assistant")?);
    }
    if let Some(made) = with_roles(&turns) {
        turns = made;
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

/// The messages of a list that names no roles, but has an order. None: it is no such list.
pub(super) fn with_roles(turns: &[Value]) -> Option<Vec<Value>> {
    let said = |role: &str, content: &Value| json!({"role": role, "content": content});
    if turns.iter().all(Value::is_string) {
        let roles = ["user", "assistant"].into_iter().cycle();
        return Some(turns.iter().zip(roles).map(|(text, role)| said(role, text)).collect());
    }
    let texts = |turn: &Value| ["input", "output"].iter().all(|key| turn[*key].is_string());
    if !turns.iter().all(|turn| texts(turn) && ["role", "from"].iter().all(|key| turn[*key].is_null())) {
        return None;
    }
    let each = turns.iter().flat_map(|turn| {
        let system = turn["system"].as_str().is_some_and(|text| !text.is_empty());
        let mut answer = said("assistant", &turn["output"]);
        answer["loss"] = turn["output_with_loss"].clone();
        [system.then(|| said("system", &turn["system"])), Some(said("user", &turn["input"])), Some(answer)]
    });
    Some(each.flatten().collect())
}

/// The messages of a prompt in field `key`, checked, after the row's `system` field; text is the user's. The answer
/// that ends a conversation is left out, and then the second is true.
pub(super) fn prompt(row: &JsonRow, key: &str) -> RowResult<(Vec<Value>, bool)> {
    let mut turns = spoken(row, key, "user")?;
    for (i, turn) in turns.iter_mut().enumerate() {
        message(i, turn)?;
    }
    let answer = turns.pop_if(|last| last["role"] == "assistant");
    if answer.is_some() && key == "prompt" {
        return Err(
            "has a prompt that ends with an assistant message, and messages are not continued: remove it".into()
        );
    }
    if turns.is_empty() {
        return Err("has no messages that ask for an answer".into());
    }
    Ok((with_system(row, turns)?, answer.is_some()))
}

/// Fields of what a message shows besides its text.
const MEDIA: [&str; 6] = ["images", "image", "videos", "video", "audios", "audio"];

/// Refuses a conversation, or a prompt with answers, about more than text.
pub(super) fn without_media(row: &JsonRow) -> RowResult<()> {
    let talks = ["prompt", "chosen"].iter().any(|key| present(row, key).is_some()) || Shape::of(row, true).is_some();
    // One schema of all rows may hold nulls in place of a picture.
    let shown = |value: &Value| match value {
        Value::String(text) => !text.is_empty() && text != "[]",
        Value::Array(list) => list.iter().any(|one| !one.is_null()),
        other => other.as_object().is_some_and(|fields| fields.values().any(|value| !value.is_null())),
    };
    match MEDIA.iter().find(|key| row.get(**key).is_some_and(shown)).filter(|_| talks) {
        Some(key) => Err(format!("has `{key}`, and only text is trained on: remove the row, or the field")),
        None => Ok(()),
    }
}

/// A column of lists of token ids, or of numbers beside them.
pub(super) fn is_of_tokens(name: &str) -> bool {
    Shape::Tokens.reads().contains(&name) || ID_KEYS.contains(&name) || [ANSWER_IDS, GROUP_KEYS[0]].contains(&name)
}
