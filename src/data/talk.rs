//! What a chat template makes of a row: its messages with tools and other variables, and prompts without an answer.
//! Never tokenizes.
use super::fields::{FOREIGN, JsonRow, RowResult, kind, number_in, present};
use super::format::Format;
use super::message;
use super::shapes::{self, VARIABLES};
use super::template::{ChatTemplate, Conversation, WideInteger};
use minijinja::Value as Message;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

impl Format {
    /// The row with its system prompt in the field `system`.
    pub(super) fn with_system<'a>(&self, row: &'a JsonRow) -> Cow<'a, JsonRow> {
        let Some(key) = self.system_key.as_ref().filter(|key| *key != "system") else { return Cow::Borrowed(row) };
        let mut row = row.clone();
        row.remove("system");
        if let Some(system) = row.get(key).cloned() {
            row.insert("system".into(), system);
        }
        Cow::Owned(row)
    }
    /// The chat template of a row.
    pub(super) fn template_of(&self, row: &JsonRow) -> Option<&ChatTemplate> {
        // As transformers chooses, which tells no tools from an empty list.
        let tools = present(row, VARIABLES[0]).is_some_and(|tools| *tools != "" && *tools != "null");
        self.tool_use.as_deref().filter(|_| tools).or(self.chat.as_deref())
    }
    /// The prompt in field `key` of a row, text or messages, up to where the answer starts, and whether the row has
    /// that answer; `None` if it is text that is used verbatim. `system` precedes conversations that have no system
    /// message.
    pub fn asked_by(&self, row: &JsonRow, key: &str, system: Option<&str>) -> RowResult<Option<(String, bool)>> {
        let row = &*self.with_system(row);
        let plain = |value: &Value| value.is_string() && shapes::written(value).is_none();
        if present(row, key).is_some_and(plain) && !(self.is_chat() && self.chat.is_some()) {
            shapes::without_system(row)?;
            if let Some(name) = VARIABLES.iter().find(|name| present(row, name).is_some()) {
                return Err(format!(
                    "has {name}, which text without a chat template cannot express: set `apply_chat_template`"
                ));
            }
            return Ok(None);
        }
        let (mut turns, answered) = shapes::prompt(row, key)?;
        if let Some(text) = system.filter(|_| !shapes::has_own_system(&turns)) {
            turns.insert(0, json!({"role": "system", "content": text}));
        }
        let chat = self.template_of(row).ok_or_else(|| {
            "has messages, and the model's tokenizer has no chat template: set `tokenizer_chat_template`".to_string()
        })?;
        known_roles(&turns, chat)?;
        chat.rendered(&talk(row, &turns, chat)?, true).map(|rendered| Some((rendered.text, answered)))
    }
}

/// A role that the template does not name is a mistake in the data, unless it is a common one.
pub(super) fn known_roles(turns: &[Value], chat: &ChatTemplate) -> RowResult<()> {
    for (i, role) in turns.iter().enumerate().filter_map(|(i, turn)| Some((i, turn["role"].as_str()?))) {
        // Granite's documents: `document {"document_id": "1"}`.
        let named = role.split(' ').next().unwrap_or_default();
        if !message::ROLES.contains(&role) && (named.is_empty() || !chat.mentions(named)) {
            let known = message::ROLES.join(", ");
            return Err(format!(
                "has a message {i} with role \"{role}\"; the chat template does not name it, and known are: {known}"
            ));
        }
    }
    Ok(())
}

/// The messages, and what the row passes to the template besides them.
pub(super) fn talk(row: &JsonRow, turns: &[Value], chat: &ChatTemplate) -> RowResult<Conversation> {
    let mut variables = BTreeMap::new();
    for name in VARIABLES {
        let Some(value) = present(row, name) else { continue };
        // Columns of Parquet files hold such values as JSON text.
        let value = match value.as_str() {
            Some("") => continue,
            Some(text) => Cow::Owned(
                serde_json::from_str(text).map_err(|e| format!("has {name} that are text, but not JSON ({e})"))?,
            ),
            None => Cow::Borrowed(value),
        };
        match (name, &*value) {
            (_, Value::Null) => {}
            ("chat_template_kwargs", Value::Object(all)) => {
                if let Some(key) = ["messages", "add_generation_prompt"].iter().find(|key| all.contains_key(**key)) {
                    return Err(format!("has `{key}` in its {name}: the rows decide it, so remove it there"));
                }
                for (key, value) in all {
                    variables.insert(key.clone(), passed(value)?);
                }
            }
            ("tools" | "documents", Value::Array(list)) => {
                let each = list.iter().map(|one| element(name, one)).collect::<RowResult<Vec<_>>>()?;
                variables.insert(name.to_string(), each.iter().map(|one| passed(one)).collect::<RowResult<Message>>()?);
            }
            (_, other) => {
                let expected = if name == "chat_template_kwargs" { "an object" } else { "a list" };
                return Err(format!("has {} as {name}; {expected} is expected, or JSON text of one", kind(other)));
            }
        }
    }
    Ok(Conversation { messages: turns.iter().map(|turn| turn_of(turn, chat)).collect::<RowResult<_>>()?, variables })
}

/// Names the roles whose messages a template leaves out of `text`, what it made of all `turns`.
pub(super) fn left_out(chat: &ChatTemplate, row: &JsonRow, turns: &[Value], text: &str) -> Vec<String> {
    // A template may show a text in other words: only what it renders the same without is left out.
    let is_same_with = |kept: &dyn Fn(usize) -> bool| {
        let kept: Vec<Value> = (0..turns.len()).filter(|&i| kept(i)).map(|i| turns[i].clone()).collect();
        let rendered = talk(row, &kept, chat).ok().and_then(|talk| chat.answered(&talk).ok());
        rendered.is_some_and(|rendered| rendered.text == text)
    };
    let is_left_out = |role: &&str| is_same_with(&|i| turns[i]["role"] != **role);
    let of_talk = |role: &&str| ["user", "assistant"].contains(role);
    let roles: BTreeSet<&str> = turns.iter().filter_map(|turn| turn["role"].as_str()).collect();
    // Many results of tools may be long: to render a row without them costs less than to count each.
    let several = |role: &&str| turns.iter().filter(|turn| turn["role"] == **role).nth(1).is_some();
    let there = |role: &&str| !of_talk(role) && several(role) && !is_left_out(role);
    let there: BTreeSet<&str> = roles.into_iter().filter(there).collect();
    let mut at = 0;
    let mut is_missing = |turn: &&Value| {
        let Some(said) = turn["content"].as_str().map(str::trim).filter(|said| !said.is_empty()) else {
            return false;
        };
        // What a tool says is often repeated by an answer, so it stands in the text as often as turns say it.
        if turn["role"].as_str().is_some_and(|role| !of_talk(&role) && !there.contains(role)) {
            let texts = turns.iter().filter_map(|turn| turn["content"].as_str());
            if text.matches(said).count() < texts.map(|text| text.matches(said).count()).sum() {
                return true;
            }
        }
        // Texts follow one another, but for those that a template moves.
        match text[at..].find(said) {
            Some(found) => at += found + said.len(),
            None => return turn["role"] != "assistant" && !text.contains(said),
        }
        false
    };
    let missing = turns.iter().enumerate().filter(|(_, turn)| is_missing(turn));
    let missing: Vec<(usize, &str)> = missing.filter_map(|(i, turn)| Some((i, turn["role"].as_str()?))).collect();
    let whole: BTreeSet<&str> = missing.iter().map(|(_, role)| *role).filter(|role| !there.contains(role)).collect();
    let whole =
        whole.into_iter().filter(is_left_out).map(|role| format!("{role} messages (left out by the chat template)"));
    // A template may show the first of several instructions alone.
    let instructs = |role: &str| ["system", "developer"].contains(&role) && there.contains(role);
    let is_idle = |message: usize| is_same_with(&|i| i != message);
    let some = missing.iter().filter(|(i, role)| instructs(role) && is_idle(*i));
    let some: BTreeSet<&str> = some.map(|(_, role)| *role).collect();
    whole.chain(some.into_iter().map(|role| format!("some {role} messages (left out by the chat template)"))).collect()
}

/// A message, without fields that the template does not mention and whose values JSON does not have, such as the time
/// that it was written.
fn turn_of(turn: &Value, chat: &ChatTemplate) -> RowResult<Message> {
    match turn.as_object().filter(|fields| fields.values().any(holds_foreign)) {
        Some(fields) => {
            let kept = fields.iter().filter(|(key, value)| !holds_foreign(value) || chat.mentions(key));
            kept.map(|(key, value)| Ok((Message::from(key.as_str()), passed(value)?))).collect()
        }
        None => passed(turn),
    }
}

fn holds_foreign(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.iter().any(holds_foreign),
        Value::Object(map) => map.contains_key(FOREIGN) || map.values().any(holds_foreign),
        _ => false,
    }
}

/// A value as a template sees it, with all digits of its numbers.
fn passed(value: &Value) -> RowResult<Message> {
    match value {
        Value::Array(list) => list.iter().map(passed).collect(),
        Value::Object(map) => match (number_in(map), map.get(FOREIGN)) {
            (Some(number), _) => Ok(number_of(number)),
            (None, Some(what)) => Err(format!(
                "holds {} in what its chat template reads: write it as text or as a number",
                what.as_str().unwrap_or_default()
            )),
            _ => map.iter().map(|(key, value)| Ok((Message::from(key.as_str()), passed(value)?))).collect(),
        },
        other => Ok(Message::from_serialize(other)),
    }
}

/// What Python reads a number as.
fn number_of(text: &str) -> Message {
    match (text.parse::<i128>(), text.to_lowercase().parse::<f64>()) {
        (Ok(integer), _) => Message::from(integer),
        (Err(_), Ok(float)) if text.contains(['e', 'E', '.', 'N', 'I']) => Message::from(float),
        _ => Message::from_object(WideInteger(text.into())),
    }
}

/// A tool or a document: an object, or JSON text of one.
fn element<'a>(name: &str, value: &'a Value) -> RowResult<Cow<'a, Value>> {
    let parsed = value.as_str().and_then(|text| serde_json::from_str(text).ok());
    match parsed.map_or(Cow::Borrowed(value), Cow::Owned) {
        object if object.is_object() => Ok(object),
        _ => Err(format!("has {} in its {name}; an object is expected, or JSON text of one", kind(value))),
    }
}
