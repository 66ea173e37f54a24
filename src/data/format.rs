//! What the flags say of rows of prompts and responses, and which of them go together. Never looks at a row.
use super::template::ChatTemplate;
use crate::base::{Error, Result};
use serde_json::json;
use std::sync::Arc;

/// What the flags say of rows.
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
    /// Also of rows with `messages` that no flag speaks of.
    pub chat: Option<Arc<ChatTemplate>>,
}

impl Format {
    /// Flags that do not go together are [`Error::Input`].
    pub fn check(&self) -> Result<()> {
        let chat = self.apply_chat_template || self.multiturn;
        let wrong = match self {
            Format { pretrain_mode: true, output_key: Some(_), .. } => {
                "--pretrain-mode trains on all of --input-key: leave out --output-key"
            }
            Format { pretrain_mode: true, .. } if chat => {
                "--pretrain-mode takes the text as it stands: leave out --apply-chat-template and --multiturn"
            }
            Format { pretrain_mode: true, input_template: Some(_), .. } => {
                "--pretrain-mode takes the text as it stands: leave out --input-template"
            }
            Format { pretrain_mode: true, .. } => return Ok(()),
            Format { input_template: Some(_), .. } if chat => {
                "--input-template and a chat template do not go together: leave one out"
            }
            Format { input_template: Some(t), .. } if t.matches("{}").count() != 1 => {
                "--input-template must have one {} in it, where the prompt goes"
            }
            Format { input_key: None, output_key: Some(_), .. } => {
                "--output-key needs --input-key, the field of the prompt"
            }
            Format { input_key: None, input_template: Some(_), .. } => {
                "--input-template needs --input-key, the field of the prompt"
            }
            Format { input_key: Some(_), output_key: None, .. } if !chat => {
                "--input-key alone has no response to learn: add --output-key, or --apply-chat-template where it holds a \
                 conversation, or --pretrain-mode to learn all of it"
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
    /// The first of the flags given that speak of rows.
    pub fn speaks_of_rows(&self) -> Option<&'static str> {
        let flags = [
            ("--input-key", self.input_key.is_some()),
            ("--output-key", self.output_key.is_some()),
            ("--input-template", self.input_template.is_some()),
            ("--apply-chat-template", self.apply_chat_template),
            ("--multiturn", self.multiturn),
            ("--pretrain-mode", self.pretrain_mode),
            ("--skip-bad-rows", self.skip_bad_rows),
        ];
        flags.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }
    /// Rows are said to be prompts and responses, which end with an end of text.
    pub fn learns_responses(&self) -> bool {
        !self.pretrain_mode && (self.input_key.is_some() || self.is_chat())
    }
    /// Rows are conversations.
    pub(super) fn is_chat(&self) -> bool {
        self.apply_chat_template || self.multiturn
    }
}
