//! What a chat template renders, and what comes of it. Never renders.
use super::{THOUGHTS, python};
use minijinja::Value;
use std::collections::BTreeMap;
use std::ops::Range;

/// What a template renders.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    pub messages: Vec<Value>,
    /// `tools`, `documents`, and whatever else a row passes to the template.
    pub variables: BTreeMap<String, Value>,
}

impl Conversation {
    /// Its first `turns` messages.
    pub fn upto(&self, turns: usize) -> Conversation {
        Conversation { messages: self.messages[..turns].to_vec(), variables: self.variables.clone() }
    }
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

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rendered {
    pub text: String,
    /// The bytes of `text` that `{% generation %}` blocks enclose; None if the template has no such blocks.
    pub generated: Option<Vec<Range<usize>>>,
}
