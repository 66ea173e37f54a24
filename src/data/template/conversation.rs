//! What a chat template renders, and what comes of it. Never renders.
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
}

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rendered {
    pub text: String,
    /// The bytes of `text` that `{% generation %}` blocks enclose; None if the template has no such blocks.
    pub generated: Option<Vec<Range<usize>>>,
}
