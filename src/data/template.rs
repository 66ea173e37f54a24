//! Renders Jinja chat templates as transformers does. Never tokenizes, never reads files.
//!
//! The interpreter is minijinja; [`ChatTemplate::new`] adds what transformers adds to Jinja: the Python methods of
//! strings, lists and dicts, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, and `{%
//! generation %}` blocks, whose places in the text are returned. Values print as in Python.
mod bounds;
mod budget;
mod checks;
mod conversation;
mod filters;
mod format;
mod frame;
mod generation;
mod json;
mod methods;
mod more;
mod operators;
mod order;
mod python;
mod source;

pub use conversation::{Conversation, Rendered};
pub(super) use frame::TurnFrame;
pub(super) use python::WideInteger;

use crate::base::quote;
use minijinja::machinery::Instructions;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_64;

pub struct ChatTemplate {
    env: Environment<'static>,
    instructions: Instructions<'static>,
    source: String,
    /// Names of special tokens, such as `bos_token`, and how they are spelled.
    tokens: Vec<(String, String)>,
    /// It has `{% generation %}` blocks.
    generation: bool,
    /// What it puts around an answer, found when first asked for.
    frame: OnceLock<Option<TurnFrame>>,
    fingerprint: u64,
}

const NAME: &str = "chat template";
/// What rows call the thoughts of an answer. Templates read the first, or the second.
pub(super) const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl ChatTemplate {
    /// From Jinja text and the spellings of the tokenizer's special tokens. An error describes the problem and names
    /// the line.
    pub fn new(text: &str, (bos, eos): (&str, &str)) -> Result<ChatTemplate, String> {
        // Jinja has one kind of line end.
        let text = &text.replace("\r\n", "\n").replace('\r', "\n");
        let mut env = Environment::new();
        bounds::install(&mut env);
        filters::install(&mut env);
        more::install(&mut env);
        checks::install(&mut env);
        order::install(&mut env);
        env.set_formatter(as_python_prints);
        env.add_function("raise_exception", |state: &State, message: Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, python::text(state, &message)?.into_owned()))
        });
        env.add_function("strftime_now", |format: String| strftime(&format, now()));
        let (marked, generation) = generation::marked(text);
        generation::install(&mut env);
        let instructions = bounds::compile(NAME, marked).map_err(|e| {
            let (place, detail) = what(&e);
            format!("{place}: {detail}")
        })?;
        let fingerprint = xxh3_64(format!("{bos}\0{eos}\0{text}").as_bytes());
        // As in transformers, one that the tokenizer lacks is not defined.
        let tokens = [("bos_token", bos), ("eos_token", eos)].into_iter().filter(|(_, spelling)| !spelling.is_empty());
        let tokens = tokens.map(|(name, spelling)| (name.into(), spelling.into())).collect();
        let source = text.clone();
        Ok(ChatTemplate { env, instructions, source, tokens, generation, frame: OnceLock::new(), fingerprint })
    }
    /// The template for a tokenizer that also has these special tokens, by name, which it reads as variables.
    pub fn with_tokens(mut self, tokens: &[(String, String)]) -> ChatTemplate {
        self.fingerprint = xxh3_64(format!("{:016x}{tokens:?}", self.fingerprint).as_bytes());
        self.tokens.extend(tokens.iter().cloned());
        self
    }

    /// Equal for templates that render the same.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Whether the template's source holds this name, without which it cannot read a variable or field of that name; or
    /// for thoughts, any of their names.
    pub fn mentions(&self, name: &str) -> bool {
        match THOUGHTS.contains(&name) {
            true => THOUGHTS.iter().any(|name| self.holds(name)),
            false => self.holds(name),
        }
    }
    fn holds(&self, name: &str) -> bool {
        let part = |c: char| c.is_alphanumeric() || c == '_';
        self.source.match_indices(name).any(|(at, _)| {
            let (before, after) = (&self.source[..at], &self.source[at + name.len()..]);
            !before.ends_with(part) && !after.starts_with(part)
        })
    }

    /// The text of messages, each with a role and its text, and the start of the assistant's answer.
    pub fn asked(&self, messages: &[(&str, &str)]) -> Result<String, String> {
        let message =
            |(role, text): &(&str, &str)| Value::from_iter([("role", Value::from(*role)), ("content", (*text).into())]);
        self.render(&messages.iter().map(message).collect::<Vec<_>>(), true)
    }

    /// What ends an answer, such as `<|im_end|>`, if that can be known.
    pub fn end_of_turn(&self) -> Option<&str> {
        self.frame().map(|frame| frame.end.trim()).filter(|end| !end.is_empty())
    }

    /// What the template puts around an answer; None if that cannot be known.
    pub(super) fn frame(&self) -> Option<&TurnFrame> {
        self.frame.get_or_init(|| TurnFrame::of(|messages, prompt| self.render(messages, prompt).ok())).as_ref()
    }

    /// The text of a conversation without variables; with `prompt`, followed by the start of the assistant's answer.
    pub fn render(&self, messages: &[Value], prompt: bool) -> Result<String, String> {
        let conversation = Conversation { messages: messages.to_vec(), variables: BTreeMap::new() };
        self.rendered(&conversation, prompt).map(|rendered| rendered.text)
    }

    /// Renders a conversation that ends in an answer, without the start of another one, which some templates always
    /// add.
    pub(super) fn answered(&self, conversation: &Conversation) -> Result<Rendered, String> {
        let mut whole = self.rendered(conversation, false)?;
        if let Some(frame) = self.frame().filter(|frame| frame.always)
            && let Some(text) = whole.text.strip_suffix(&frame.header)
        {
            whole.text.truncate(text.len());
        }
        Ok(whole)
    }

    /// Renders a conversation; with `prompt`, followed by the start of the assistant's next answer.
    pub fn rendered(&self, conversation: &Conversation, prompt: bool) -> Result<Rendered, String> {
        // As in transformers, `tools` and `documents` are defined as None when absent.
        let mut context: BTreeMap<&str, Value> = [("tools", Value::from(())), ("documents", Value::from(()))].into();
        context.extend(self.tokens.iter().map(|(name, spelling)| (name.as_str(), Value::from(spelling.as_str()))));
        context.extend(conversation.variables.iter().map(|(name, value)| (name.as_str(), value.clone())));
        context.insert("messages", conversation.messages.iter().map(as_passed).collect());
        context.insert("add_generation_prompt", Value::from(prompt));
        let text = bounds::run(&self.env, &self.instructions, Value::from_iter(context)).map_err(|e| {
            // Completes "line 7 is rejected by line 3 of the chat template: no such role".
            let (place, detail) = what(&e);
            format!("is rejected by {place}: {detail}")
        })?;
        match self.generation {
            true => generation::unmarked(&text),
            false => Ok(Rendered { text, generated: None }),
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "ChatTemplate({:016x})", self.fingerprint)
    }
}

impl Conversation {
    /// Without the thoughts that are not in `text`; None if there are none such.
    pub fn with_thoughts_in(&self, text: &str) -> Option<Conversation> {
        let lacks = |thoughts: Value| thoughts.as_str().is_some_and(|thoughts| !text.contains(thoughts.trim()));
        let has_lost = |message: &Value| THOUGHTS.iter().any(|name| message.get_attr(name).is_ok_and(lacks));
        let is_thought = |name: &Value| name.as_str().is_some_and(|name| THOUGHTS.contains(&name));
        let kept = |message: &Value| match has_lost(message) {
            true => python::pairs(message).filter(|(name, _)| !is_thought(name)).collect(),
            false => message.clone(),
        };
        let messages = self.messages.iter().map(kept).collect();
        self.messages.iter().any(has_lost).then(|| Conversation { messages, variables: self.variables.clone() })
    }
}

/// The message as transformers passes it: without fields that are null, and with its thoughts, if it has any, under the
/// names that templates read.
fn as_passed(message: &Value) -> Value {
    let given = |name: &&str| message.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none());
    let thoughts = THOUGHTS.iter().find_map(given);
    if thoughts.is_none() && python::pairs(message).all(|(_, value)| !value.is_none()) {
        return message.clone();
    }
    let [content, thinking, _] = THOUGHTS;
    let mut fields: Vec<_> = thoughts.iter().map(|thoughts| (Value::from(thinking), thoughts.clone())).collect();
    let named = thoughts.map(|thoughts| (Value::from(content), thoughts));
    for (name, value) in python::pairs(message).filter(|(_, value)| !value.is_none()).chain(named) {
        match fields.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => fields.push((name, value)),
        }
    }
    fields.into_iter().collect()
}

/// Such as ("line 3 of the chat template", "only user and assistant roles are supported").
fn what(e: &Error) -> (String, String) {
    // The innermost error is the one the template raised; if it has no line, use the caller's.
    let mut inner = e;
    while let Some(deeper) = std::error::Error::source(inner).and_then(|s| s.downcast_ref::<Error>()) {
        inner = deeper;
    }
    let line = inner.line().or(e.line()).map_or(String::new(), |line| format!("line {line} of "));
    let detail = match inner.kind() {
        ErrorKind::OutOfFuel => bounds::OUT_OF_FUEL.to_string(),
        kind => inner.detail().map_or_else(|| kind.to_string(), str::to_string),
    };
    (format!("{line}the {NAME}"), quote(detail).to_string())
}

/// Prints values as Python's `str()`.
fn as_python_prints(out: &mut Output, state: &State, value: &Value) -> Result<(), Error> {
    let text = python::text(state, value)?;
    if matches!(state.auto_escape(), AutoEscape::None) || value.is_safe() {
        budget::spend(state, text.len() as u64)?;
        return out.write_str(&text).map_err(Error::from);
    }
    out.write_str(&filters::escaped(state, &text)?).map_err(Error::from)
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// Python's `datetime.strftime` in the C locale, for `seconds` since 1970 in UTC. A time without a zone prints none,
/// and unknown conversions stay as they are.
fn strftime(format: &str, seconds: i64) -> String {
    let time = chrono::DateTime::from_timestamp(seconds, 0).unwrap_or_default().naive_utc();
    let (mut out, mut rest) = (String::new(), format);
    while let Some((before, conversion)) = rest.split_once('%') {
        out += before;
        let padding = conversion.starts_with(['-', '_', '0']) as usize;
        let len = conversion[padding..].chars().next().map_or(0, |c| padding + c.len_utf8());
        match &conversion[..len] {
            "Z" | "z" => {}
            "f" => out += "000000",
            one => {
                let one = format!("%{one}");
                let items: Vec<_> = chrono::format::StrftimeItems::new(&one).collect();
                match items.contains(&chrono::format::Item::Error) {
                    true => out += &one,
                    false => out += &time.format_with_items(items.iter()).to_string(),
                }
            }
        }
        rest = &conversion[len..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_strftime() {
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %j %y %I %p %e|%F %T %% %Q";
        assert_eq!(strftime("%-d %k %P %D %R %u %w %s%n%f[%Z%z]%", 0), "1  0 am 01/01/70 00:00 4 4 0\n000000[]%");
        assert_eq!(strftime("%c %x %X %é", 951_782_400), "Tue Feb 29 00:00:00 2000 02/29/00 00:00:00 %é");
        // From Python: datetime.fromtimestamp(t, UTC).strftime(..)
        for (t, expected) in [
            (0, "1970-01-01 00:00:00 Thu Thursday Jan January 001 70 12 AM  1|1970-01-01 00:00:00 % %Q"),
            (951_782_399, "2000-02-28 23:59:59 Mon Monday Feb February 059 00 11 PM 28|2000-02-28 23:59:59 % %Q"),
            (951_782_400, "2000-02-29 00:00:00 Tue Tuesday Feb February 060 00 12 AM 29|2000-02-29 00:00:00 % %Q"),
            (1_735_646_400, "2024-12-31 12:00:00 Tue Tuesday Dec December 366 24 12 PM 31|2024-12-31 12:00:00 % %Q"),
            (4_107_542_400, "2100-03-01 00:00:00 Mon Monday Mar March 060 00 12 AM  1|2100-03-01 00:00:00 % %Q"),
        ] {
            assert_eq!(strftime(all, t), expected);
        }
    }
}
