//! What settings say of rows of prompts and responses, and which of them go together. Never looks at a row.
use super::template::ChatTemplate;
use crate::base::{Error, Result};
use serde_json::json;
use std::sync::Arc;

/// What settings say of rows.
#[derive(Clone, Debug, Default)]
pub struct Format {
    /// Field of the prompt, or of the conversation.
    pub input_key: Option<String>,
    /// Field of the response; none: the conversation's last message is it.
    pub output_key: Option<String>,
    /// Text around the prompt, `{}` in its place.
    pub input_template: Option<String>,
    /// Rows are conversations, or a prompt and a response that make one.
    pub apply_chat_template: bool,
    /// Loss on every message of the assistant.
    pub multiturn: bool,
    /// Loss on the whole of the field `input_key`, and no end of text.
    pub pretrain_mode: bool,
    pub skip_bad_rows: bool,
    /// Also of rows with `messages` that no setting speaks of.
    pub chat: Option<Arc<ChatTemplate>>,
}

impl Format {
    /// Settings that do not go together are [`Error::Input`].
    pub fn check(&self) -> Result<()> {
        let chat = self.apply_chat_template || self.multiturn;
        let wrong = match self {
            Format { pretrain_mode: true, output_key: Some(_), .. } => {
                "`pretrain_mode` trains on all of `input_key`: leave out `output_key`"
            }
            Format { pretrain_mode: true, .. } if chat => {
                "`pretrain_mode` takes the text as it stands: leave out `apply_chat_template` and `multiturn`"
            }
            Format { pretrain_mode: true, input_template: Some(_), .. } => {
                "`pretrain_mode` takes the text as it stands: leave out `input_template`"
            }
            Format { pretrain_mode: true, .. } => return Ok(()),
            Format { input_template: Some(_), .. } if chat => {
                "`input_template` and a chat template do not go together: leave one out"
            }
            Format { input_template: Some(t), .. } if t.matches("{}").count() != 1 => {
                "`input_template` must have one {} in it, where the prompt goes"
            }
            Format { input_key: None, output_key: Some(_), .. } => {
                "`output_key` needs `input_key`, the field of the prompt"
            }
            Format { input_key: None, input_template: Some(_), .. } => {
                "`input_template` needs `input_key`, the field of the prompt"
            }
            Format { input_key: Some(_), output_key: None, .. } if !chat => {
                "`input_key` alone has no response to learn: add `output_key`, or `apply_chat_template` where it holds a \
                 conversation, or `pretrain_mode` to learn all of it"
            }
            _ => return Ok(()),
        };
        Err(Error::input(wrong))
    }
    /// What a row with this prompt begins with, up to where its response would; `None` where a text stands as it is.
    pub fn asked(&self, prompt: &str) -> Result<Option<String>> {
        match (&self.chat, &self.input_template) {
            (Some(chat), _) if self.is_chat() => {
                let message = minijinja::Value::from_serialize(json!({"role": "user", "content": prompt}));
                chat.render(&[message], true)
                    .map(Some)
                    .map_err(|what| Error::input(format!("the chat template: {what}")))
            }
            (_, Some(template)) => Ok(Some(template.replacen("{}", prompt, 1))),
            _ => Ok(None),
        }
    }
    /// The settings that have an effect on rows alone, and whether they are given.
    pub fn row_settings(&self) -> [(&'static str, bool); 7] {
        [
            ("input_key", self.input_key.is_some()),
            ("output_key", self.output_key.is_some()),
            ("input_template", self.input_template.is_some()),
            ("apply_chat_template", self.apply_chat_template),
            ("multiturn", self.multiturn),
            ("pretrain_mode", self.pretrain_mode),
            ("skip_bad_rows", self.skip_bad_rows),
        ]
    }
    /// Rows are said to be prompts and responses, which end with an end of text.
    pub fn learns_responses(&self) -> bool {
        !self.pretrain_mode && (self.input_key.is_some() || self.is_chat())
    }
    /// What settings say of rows makes text of each.
    pub(super) fn reads_text(&self) -> bool {
        self.pretrain_mode || self.input_key.is_some() || self.is_chat()
    }
    /// Rows are conversations.
    pub(super) fn is_chat(&self) -> bool {
        self.apply_chat_template || self.multiturn
    }
}
