//! How rows become prompts and responses, as configured, and which settings combine. Never reads a row.
use super::row_names::RowNames;
use super::shapes::{ANSWER_IDS, GROUP_KEYS, ID_KEYS, PROMPT_KEYS, Shape};
use super::template::ChatTemplate;
use crate::base::{Error, Result};
use std::sync::Arc;

/// What a row of a data set is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SampleKind {
    /// Tokens, each with a loss or none.
    #[default]
    Tokens,
    /// Two sequences: a chosen and a rejected answer to the same prompt.
    Pair,
    /// A prompt with an answer that is desirable or not.
    Labeled,
    /// A prompt with samples, each of which has a reward.
    Group,
}

impl SampleKind {
    /// Sequences of a row; the least of a group.
    pub fn sequences(self) -> usize {
        if self == SampleKind::Pair { 2 } else { 1 }
    }
    /// The loss is that of whole rows.
    pub fn is_judged(self) -> bool {
        self != SampleKind::Tokens
    }
}

/// The fields of a pair: two answers to one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PairKeys {
    pub prompt: String,
    pub chosen: String,
    pub rejected: String,
    /// A number: how much better the chosen answer is. Not named, it is `margin` where a row of scored pairs has it, as
    /// in TRL.
    pub margin: Option<String>,
    /// Whole sequences are scored: a row may have no prompt, and its two texts are whole.
    pub scored: bool,
}

/// Whether tokens that are no answer have a loss.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InputLoss {
    #[default]
    None,
    /// Only of rows with messages, which TRL's SFT learns as they are rendered.
    Conversations,
    All,
}

impl PairKeys {
    /// The field of the margin, if pairs have one, and whether every row must have it.
    pub(super) fn margin(&self) -> Option<(&str, bool)> {
        let usual = self.scored.then_some(("margin", false));
        self.margin.as_deref().map(|key| (key, true)).or(usual)
    }
}

impl Default for PairKeys {
    fn default() -> PairKeys {
        let [prompt, chosen, rejected] = ["prompt", "chosen", "rejected"].map(String::from);
        PairKeys { prompt, chosen, rejected, margin: None, scored: false }
    }
}

/// The fields of an answer that is labeled desirable or not.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelKeys {
    pub prompt: String,
    pub completion: String,
    /// True or false, or 1 or 0.
    pub label: String,
}

impl Default for LabelKeys {
    fn default() -> LabelKeys {
        let [prompt, completion, label] = ["prompt", "completion", "label"].map(String::from);
        LabelKeys { prompt, completion, label }
    }
}

/// What a row of preferences holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Preferences {
    /// Two answers, each of which becomes a sequence.
    Pairs(PairKeys),
    /// One answer, and whether it is desirable.
    Labels(LabelKeys),
    /// Samples of a prompt, with the log-probabilities of their tokens and with rewards.
    Rollouts,
    /// A prompt that is sampled before it is trained on.
    Prompts(SampleRoom),
}

/// The samples that a prompt will have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRoom {
    pub samples: usize,
    /// The most tokens of each.
    pub longest: usize,
}

/// The settings that describe rows.
#[derive(Clone, Debug, Default)]
pub struct Format {
    /// Rows are judged answers; None: they are learned as they are.
    pub preferences: Option<Preferences>,
    /// What rows are, where they have the fields of several shapes.
    pub shape: Option<Shape>,
    /// Applied before anything else is read of a row.
    pub renames: RowNames,
    /// Field of the prompt or the conversation.
    pub input_key: Option<String>,
    /// Field of the response; None: the last message of the conversation.
    pub output_key: Option<String>,
    /// Field of the system prompt, in place of `system`.
    pub system_key: Option<String>,
    /// Template applied to the prompt, with `{}` in its place.
    pub input_template: Option<String>,
    /// Texts begin with what the tokenizer adds before them, so prompts that no template renders, whose responses then
    /// end with the end of text at once, as in TRL and Axolotl. Without it, as in OpenRLHF: nothing, and a space. Not
    /// given: unless `input_key` names the prompts.
    pub special_tokens: Option<bool>,
    /// Rows are conversations, or a prompt and a response that form one.
    pub apply_chat_template: bool,
    /// Loss on every assistant message, not only the last.
    pub multiturn: bool,
    /// Loss on prompts too.
    pub input_loss: InputLoss,
    /// Loss on the whole `input_key` field, with no end-of-text token.
    pub pretrain_mode: bool,
    /// The texts of `pretrain_mode` are one stream, each with an end of text.
    pub join_rows: bool,
    pub skip_bad_rows: bool,
    /// Also applies to rows with `messages` when no setting names a field.
    pub chat: Option<Arc<ChatTemplate>>,
    /// The template of rows with tools, if they have one of their own.
    pub tool_use: Option<Arc<ChatTemplate>>,
}

impl Format {
    /// Settings that conflict are [`Error::Input`].
    pub fn check(&self) -> Result<()> {
        let chat = self.apply_chat_template || self.multiturn;
        if let Some(wrong) = self.preferences.as_ref().and_then(|rows| self.wrong_for(rows)) {
            return Err(Error::input(wrong));
        }
        let wrong = match self {
            Format { preferences: Some(_), .. } if self.input_template.is_none() => return Ok(()),
            Format { pretrain_mode: false, join_rows: true, .. } => {
                "`join_rows` joins texts that are learned as they are: add `pretrain_mode`"
            }
            Format { pretrain_mode: true, output_key: Some(_), .. } => {
                "`pretrain_mode` trains on the whole `input_key` field: remove `output_key`"
            }
            Format { pretrain_mode: true, .. } if chat => {
                "`pretrain_mode` uses the text verbatim: remove `apply_chat_template` and `multiturn`"
            }
            Format { pretrain_mode: true, input_template: Some(_), .. } => {
                "`pretrain_mode` uses the text verbatim: remove `input_template`"
            }
            Format { pretrain_mode: true, shape: Some(_), .. } => {
                "`pretrain_mode` uses the text verbatim: remove `row_format`"
            }
            Format { shape: Some(_), input_key: Some(_), .. } => {
                "`input_key` and `row_format` both say which fields are read: remove one"
            }
            Format { pretrain_mode: true, system_key: Some(_), .. } => {
                "`pretrain_mode` uses the text verbatim: remove `system_key`"
            }
            Format { pretrain_mode: true, join_rows: false, special_tokens: Some(_), .. } => {
                "`pretrain_mode` uses the text verbatim: remove `add_special_tokens`"
            }
            Format { pretrain_mode: true, .. } => return Ok(()),
            Format { special_tokens: Some(_), .. } if chat => {
                "`add_special_tokens` is for text that no chat template renders, which writes its own: remove one"
            }
            Format { input_template: Some(_), .. } if chat => {
                "`input_template` and a chat template exclude each other: remove one"
            }
            Format { input_template: Some(t), .. } if t.matches("{}").count() != 1 => {
                "`input_template` must contain exactly one {}, which is replaced by the prompt"
            }
            Format { input_key: None, output_key: Some(_), .. } => {
                "`output_key` needs `input_key`, which names the prompt field"
            }
            Format { input_key: None, preferences: None, input_template: Some(_), .. } => {
                "`input_template` needs `input_key`, which names the prompt field"
            }
            Format { input_key: Some(_), output_key: None, .. } if !chat => {
                "`input_key` alone names no response to train on: add `output_key`, or `apply_chat_template` if the \
                 field is a conversation, or `pretrain_mode` to train on the whole field"
            }
            _ => return Ok(()),
        };
        Err(Error::input(wrong))
    }
    /// A setting that judged answers do not have.
    fn wrong_for(&self, rows: &Preferences) -> Option<&'static str> {
        match (self, rows) {
            (Format { input_key: Some(_), .. } | Format { output_key: Some(_), .. }, Preferences::Pairs(_)) => Some(
                "`input_key` and `output_key` name the fields of a single answer: use `prompt_key`, `chosen_key` and \
                 `rejected_key`",
            ),
            (Format { input_key: Some(_), .. } | Format { output_key: Some(_), .. }, Preferences::Labels(_)) => {
                Some("`input_key` names what is learned as it is: use `prompt_key`")
            }
            (
                Format { input_key: Some(_), .. } | Format { output_key: Some(_), .. },
                Preferences::Rollouts | Preferences::Prompts(_),
            ) => Some("`input_key` and `output_key` name text, and rollouts are token ids: remove them"),
            (Format { shape: Some(_), .. }, Preferences::Pairs(_)) => Some(
                "`row_format` has no place in pairs, whose fields are `prompt_key`, `chosen_key` and `rejected_key`",
            ),
            (Format { input_loss: InputLoss::All, .. }, _) => {
                Some("`train_on_inputs` has no place in preferences, which are about answers")
            }
            (Format { multiturn: true, .. }, _) => {
                Some("`multiturn` has no place in preferences, which are about the last answer")
            }
            (Format { pretrain_mode: true, .. }, _) => {
                Some("`pretrain_mode` trains on text without answers, and preferences are about answers")
            }
            _ => None,
        }
    }
    /// Rows end in a number.
    pub(super) fn has_numbers(&self) -> bool {
        match &self.preferences {
            Some(Preferences::Pairs(keys)) => keys.margin().is_some(),
            Some(Preferences::Labels(_)) => true,
            Some(Preferences::Rollouts | Preferences::Prompts(_)) | None => false,
        }
    }
    /// What a row is.
    pub fn sample(&self) -> SampleKind {
        match &self.preferences {
            Some(Preferences::Pairs(_)) => SampleKind::Pair,
            Some(Preferences::Labels(_)) => SampleKind::Labeled,
            Some(Preferences::Rollouts | Preferences::Prompts(_)) => SampleKind::Group,
            None => SampleKind::Tokens,
        }
    }
    /// The rendered prompt, up to where the response starts, after a system prompt; `None` if text is used verbatim.
    pub fn asked(&self, system: Option<&str>, prompt: &str) -> Result<Option<String>> {
        match (&self.chat, &self.input_template) {
            (Some(chat), _) if self.is_chat() => {
                let system = system.map(|text| ("system", text));
                let messages: Vec<(&str, &str)> = system.into_iter().chain([("user", prompt)]).collect();
                chat.asked(&messages).map(Some).map_err(|what| Error::input(format!("the chat template: {what}")))
            }
            _ if system.is_some() => {
                Err(Error::input("`system_prompt` is for a chat template: add `apply_chat_template`, or remove it"))
            }
            (_, Some(template)) => Ok(Some(template.replacen("{}", prompt, 1))),
            _ => Ok(None),
        }
    }
    /// The settings that apply only to rows, and whether each is given.
    pub fn row_settings(&self) -> [(&'static str, bool); 13] {
        [
            ("row_format", self.shape.is_some()),
            (self.renames.setting(), !self.renames.is_empty()),
            ("train_on_inputs", self.input_loss == InputLoss::All),
            ("input_key", self.input_key.is_some()),
            ("output_key", self.output_key.is_some()),
            ("system_key", self.system_key.is_some()),
            ("input_template", self.input_template.is_some()),
            ("add_special_tokens", self.special_tokens.is_some()),
            ("apply_chat_template", self.apply_chat_template),
            ("multiturn", self.multiturn),
            ("pretrain_mode", self.pretrain_mode),
            ("join_rows", self.join_rows),
            ("skip_bad_rows", self.skip_bad_rows),
        ]
    }
    /// Texts begin with what the tokenizer adds before them.
    pub fn begins_texts(&self) -> bool {
        self.special_tokens != Some(false)
    }
    /// The same for prompts that no template renders.
    pub(super) fn begins_prompts(&self) -> bool {
        self.special_tokens.unwrap_or(self.input_key.is_none())
    }
    /// Rows are prompts and responses, which end with an end-of-text token.
    pub fn learns_responses(&self) -> bool {
        !self.pretrain_mode && (self.input_key.is_some() || self.is_chat())
    }
    /// The fields that settings name, and those of judged answers given as token ids.
    pub(super) fn named(&self) -> Vec<&str> {
        let own = match &self.preferences {
            Some(Preferences::Pairs(keys)) => vec![&keys.prompt, &keys.chosen, &keys.rejected],
            Some(Preferences::Labels(keys)) => vec![&keys.prompt, &keys.completion, &keys.label],
            Some(Preferences::Rollouts) => return GROUP_KEYS.to_vec(),
            Some(Preferences::Prompts(_)) => return PROMPT_KEYS.to_vec(),
            None if self.pretrain_mode && self.input_key.is_none() => return vec!["text"],
            None => vec![],
        };
        let margin = match &self.preferences {
            Some(Preferences::Pairs(keys)) => keys.margin(),
            _ => None,
        };
        let own = own.into_iter().chain(&self.input_key).chain(&self.output_key).map(String::as_str);
        let own = own.chain(margin.map(|(key, _)| key));
        let ids: &[&str] = match &self.preferences {
            Some(Preferences::Pairs(_)) => &ID_KEYS,
            Some(Preferences::Labels(_)) => &[ID_KEYS[0], ANSWER_IDS],
            Some(Preferences::Rollouts | Preferences::Prompts(_)) | None => &[],
        };
        own.chain(ids.iter().copied()).collect()
    }
    /// The settings read text from rows.
    pub(super) fn reads_text(&self) -> bool {
        self.pretrain_mode || self.input_key.is_some() || self.is_chat()
    }
    /// Rows are conversations.
    pub(super) fn is_chat(&self) -> bool {
        self.apply_chat_template || self.multiturn
    }
}
