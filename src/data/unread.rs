//! Names what a row holds and nothing reads, for the `data` line. Never tokenizes.
use super::fields::{JsonRow, list, present, truth};
use super::format::{Preferences, SampleKind};
use super::message::{self, SWITCHES};
use super::recipe::{Recipe, TokenizedRow};
use super::shapes::{self, GROUP_KEYS, Shape, VARIABLES};
use super::talk::talk;
use super::template::{ChatTemplate, THOUGHTS};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeSet;

impl Recipe {
    /// Names what `row` holds and nothing reads.
    pub(super) fn unread(&self, row: &JsonRow, out: &mut TokenizedRow) {
        let reads = self.reads(row);
        let unread = row.iter().filter(|(key, value)| !value.is_null() && !reads.contains(&key.as_str()));
        let named = |key: &str| match key {
            "system_prompt" | "system_message" if self.format.is_chat() => format!("`{key}` (`system_key` names it)"),
            _ => format!("`{key}`"),
        };
        out.unread.extend(unread.map(|(key, _)| named(key)));
        let absent = self.format.system_key.iter().filter(|key| !row.contains_key(*key));
        out.unread.extend(absent.map(|key| format!("`system_key` (there is no `{key}`)")));
        let Some(chat) = self.format.template_of(row).filter(|_| reads.contains(&VARIABLES[0])) else { return };
        let deaf = |name: &str| !chat.mentions(name);
        let empty = |value: &Value| value == "" || value.as_array().is_some_and(Vec::is_empty);
        for name in VARIABLES[..2].iter().filter(|name| present(row, name).is_some_and(|v| !empty(v)) && deaf(name)) {
            out.unread.push(format!("`{name}` (not in the chat template)"));
        }
        let passed = present(row, VARIABLES[2]).map(|value| match value.as_str() {
            Some(text) => Cow::Owned(serde_json::from_str(text).unwrap_or_default()),
            None => Cow::Borrowed(value),
        });
        out.unread.extend(
            passed
                .iter()
                .filter_map(|value| value.as_object())
                .flatten()
                .filter(|(key, _)| deaf(key))
                .map(|(key, _)| format!("`{key}` of {} (not in the chat template)", VARIABLES[2])),
        );
        if shapes::has_second_system(row) {
            out.unread.push("`system` (the messages begin with another)".into());
        }
        let messages = |key: &str| match row.get(key)? {
            message @ Value::Object(_) => Some(Cow::Borrowed(std::slice::from_ref(message))),
            text @ Value::String(_) => shapes::written(text).map(Cow::Owned),
            value => list(value, key).ok().map(|turns| shapes::with_roles(&turns).map_or(turns, Cow::Owned)),
        };
        let lists = reads.iter().filter(|key| !VARIABLES.contains(key) && !GROUP_KEYS.contains(key));
        let lists: Vec<_> = lists.filter_map(|key| Some((*key, messages(key)?))).collect();
        let judged = self.format.preferences.is_some();
        let mut unread = BTreeSet::new();
        let mut look = |message: &Value| {
            let extra = extra(message).filter(|key| deaf(key));
            unread.extend(extra.map(|key| format!("`{key}` of messages (not in the chat template)")));
            let parts = other_parts(message).filter(|kind| deaf(kind));
            unread.extend(parts.map(|kind| format!("parts of type `{kind}` (not in the chat template)")));
            unread.extend(idle_switches(message, judged).map(|key| match judged {
                true => format!("`{key}` of messages (each answer is learned as a whole)"),
                false => format!("`{key}` of messages that are not an assistant's (they have no loss)"),
            }));
        };
        lists.iter().for_each(|(_, list)| list.iter().for_each(&mut look));
        for (key, list) in &lists {
            let lead = messages("prompt").filter(|_| ["completion", "chosen", "rejected"].contains(key));
            unread.extend(ignored(chat, row, &lead.unwrap_or_default(), list));
        }
        out.unread.extend(unread);
    }

    /// The fields of `row` that are read.
    pub(super) fn reads<'a>(&'a self, row: &JsonRow) -> Vec<&'a str> {
        let format = &self.format;
        let shape = Shape::of(row, format.is_chat());
        let by_shape = match &format.preferences {
            None => format.input_key.is_none() && !format.pretrain_mode,
            Some(Preferences::Labels(_)) => true,
            Some(Preferences::Pairs(_) | Preferences::Rollouts | Preferences::Prompts(_)) => false,
        };
        let shaped: &[&str] = shape.filter(|_| by_shape).map_or(&[], Shape::reads);
        let mut reads = [&format.named(), shaped].concat();
        let groups = format.sample() == SampleKind::Group;
        let judged = format.preferences.is_some() && !groups;
        // Text that no template renders has no place for what a template gets.
        let text = ["prompt", "completion", "chosen", "rejected"];
        if !format.is_chat() && shapes::is_text(row, text) {
            reads.retain(|key| !VARIABLES.contains(key));
        } else if format.is_chat() && !groups || judged {
            reads.extend(VARIABLES);
        }
        if judged && !shapes::is_judged_ids(row) || format.system_key.is_some() {
            reads.push("system");
        }
        reads.extend(format.system_key.as_deref());
        let prompt = match &format.preferences {
            Some(Preferences::Pairs(keys)) => Some(&keys.prompt),
            Some(Preferences::Labels(keys)) if present(row, &keys.label).is_none() => {
                reads.extend(shapes::PAIR.iter().chain(&shapes::ID_KEYS[1..]));
                Some(&keys.prompt)
            }
            _ => None,
        };
        if prompt.is_some_and(|key| present(row, key).is_none()) {
            reads.extend(shapes::QUESTION);
        }
        reads
    }
}

/// Fields of messages whose names the template holds, but whose values do not change its text: of a message's role
/// or not at all. The messages of `lead` come before those of `list`.
fn ignored(chat: &ChatTemplate, row: &JsonRow, lead: &[Value], list: &[Value]) -> Vec<String> {
    let role = |message: &Value| message["role"].as_str().or(message["from"].as_str()).map(String::from);
    let fields: BTreeSet<(String, &String)> = list
        .iter()
        .filter_map(|message| Some((role(message)?, message)))
        .flat_map(|(role, message)| extra(message).map(move |key| (role.clone(), key)))
        .filter(|(_, key)| !OBVIOUS.contains(&key.as_str()) && chat.mentions(key))
        .collect();
    let text = |without: Option<&(String, &String)>| {
        let mut turns = [lead, list].concat();
        for (i, turn) in turns.iter_mut().enumerate() {
            let without = without.filter(|(of, _)| i >= lead.len() && role(turn).as_ref() == Some(of));
            if let (Some((_, key)), Value::Object(fields)) = (without, &mut *turn) {
                fields.shift_remove(*key);
            }
            message::message(i, turn).ok()?;
        }
        chat.rendered(&talk(row, &turns, chat).ok()?, false).ok().map(|rendered| rendered.text)
    };
    if fields.is_empty() {
        return Vec::new();
    }
    // What cannot be rendered alone is not known to be unread.
    let Some(whole) = text(None) else { return Vec::new() };
    let unread = fields.iter().filter(|field| text(Some(field)).is_some_and(|text| text == whole));
    unread.map(|(role, key)| format!("`{key}` of {role} messages (not read by the chat template)")).collect()
}

/// Fields that a template with their names reads, in some of its messages.
const OBVIOUS: [&str; 4] = ["tool_calls", THOUGHTS[0], THOUGHTS[1], THOUGHTS[2]];

/// Fields of a message that mean something to every trainer, whether or not a template reads them.
const KNOWN: [&str; 4] = ["role", "content", "from", "value"];

/// Fields of a message that may be of use to a template only.
fn extra(message: &Value) -> impl Iterator<Item = &String> {
    let fields = message.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    fields.map(|(key, _)| key).filter(|key| !KNOWN.contains(&key.as_str()) && !SWITCHES.contains(&key.as_str()))
}

/// The switches of a message that is not switched by them: of any but an assistant's those that are on, and all of an
/// answer that is `judged`, which is learned as a whole.
fn idle_switches(message: &Value, judged: bool) -> impl Iterator<Item = &'static str> {
    let answer = message["role"] == "assistant" || message["from"] == "gpt";
    SWITCHES.into_iter().filter(move |key| {
        let value = &message[*key];
        if answer { judged && !value.is_null() } else { truth(value) == Some(true) }
    })
}

/// Types of a message's parts that are neither text nor refused.
fn other_parts(message: &Value) -> impl Iterator<Item = &str> {
    let parts = message["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    parts.iter().filter_map(|part| part["type"].as_str()).filter(|kind| !kind.contains("text"))
}
