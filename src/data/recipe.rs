//! Turns a row of a data set into tokens and labels, as OpenRLHF's SFT does. Never reads files: a row comes as the
//! bytes of a JSON object, or as the object.
//!
//! [Note: prompts and responses] A row is a prompt and a response, or a conversation whose last message (or, with
//! `multiturn`, whose every assistant message) is the response. Both are rendered to one text. Trailing newlines are
//! removed, the tokenizer's end of text is appended after a space (unless the text already ends with it), and the whole
//! text is tokenized. Loss applies to the tokens after the first n, where n is the length of the tokenized prompt. A
//! row whose prompt has `max_len - 2` tokens or more is dropped, as is one without a prompt or response. A longer row
//! is truncated, and its last token becomes the end of text.
use super::fields::{JsonRow, RowResult, array, present, string, token_id, whole};
use super::format::{Format, Preferences};
use super::shapes;
use super::tokenizer::Tokenizer;
use crate::device::IGNORE;
use minijinja::Value as Message;
use serde_json::Value;

/// Everything a row's tokens depend on.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub format: Format,
    pub tokenizer: Tokenizer,
    /// Ids are below this.
    pub bound: usize,
    pub max_len: usize,
}

/// Tokens and their labels ([`IGNORE`]: no loss), equally long, not shifted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizedRow {
    pub ids: Vec<u32>,
    pub labels: Vec<i32>,
}

impl TokenizedRow {
    /// Appends the bytes of a number, as ids without labels: every vocabulary has room for them.
    pub(super) fn end_in(&mut self, number: f32) {
        self.ids.extend(number.to_le_bytes().map(u32::from));
        self.labels.resize(self.ids.len(), IGNORE);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Kept,
    /// No room after the prompt, or no prompt or response.
    Dropped,
    /// The row holds text, and there is no tokenizer for it.
    Text,
}

impl Recipe {
    /// Tokenizes one line of JSONL.
    pub fn line(&self, line: &[u8], out: &mut TokenizedRow) -> RowResult<Outcome> {
        let text = std::str::from_utf8(line).map_err(|_| "is not valid UTF-8")?;
        let row: JsonRow = serde_json::from_str(text).map_err(|e| {
            let shown: String = text.trim_end().chars().take(80).collect();
            format!("is not a JSON object ({e}): {shown}")
        })?;
        self.row(&row, out)
    }

    /// Writes the tokens of `row` to `out`, replacing its contents.
    pub fn row(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        out.ids.clear();
        out.labels.clear();
        let format = &self.format;
        match &format.preferences {
            Some(Preferences::Pairs(keys)) => return self.pair(keys, row, out),
            Some(Preferences::Labels(keys)) => return self.labeled(keys, row, out),
            None => {}
        }
        if matches!(self.tokenizer, Tokenizer::None(_)) && (format.reads_text() || shapes::is_text(row)) {
            return Ok(Outcome::Text);
        }
        if format.pretrain_mode {
            let text = string(row, format.input_key.as_deref().unwrap_or("text"))?;
            self.encode(text, &mut out.ids)?;
            out.ids.truncate(self.max_len);
            out.labels.extend(out.ids.iter().map(|&id| id as i32));
            return Ok(if out.ids.is_empty() { Outcome::Dropped } else { Outcome::Kept });
        }
        if format.is_chat() {
            return self.conversation(row, out);
        }
        match (&format.input_key, &format.output_key) {
            (Some(input), Some(output)) => {
                let (prompt, response) = (string(row, input)?, string(row, output)?);
                let template = format.input_template.as_deref().and_then(|t| t.split_once("{}"));
                match template {
                    Some((before, behind)) => self.sample(&format!("{before}{prompt}{behind}"), response, None, out),
                    None => self.sample(prompt, response, None, out),
                }
            }
            _ => self.plain(row, out),
        }
    }

    /// A row identified by its keys: tokens, text, or a conversation.
    fn plain(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let given = |key: &str| present(row, key);
        if let Some(input) = given("input_ids") {
            for id in array(input, "input_ids")? {
                out.ids.push(token_id(whole(id, "input_ids")?, self.bound)?);
            }
            let ids = out.ids.len();
            match given("labels") {
                None => out.labels.extend(out.ids.iter().map(|&id| id as i32)),
                Some(labels) => {
                    for label in array(labels, "labels")? {
                        out.labels.push(self.label(whole(label, "labels")?)?);
                    }
                    if out.labels.len() != ids {
                        let labels = out.labels.len();
                        return Err(format!(
                            "has {labels} labels for {ids} input_ids: each id needs one label, not shifted"
                        ));
                    }
                }
            }
        } else if given("text").is_some() {
            let (before, behind) = self.tokenizer.affixes();
            out.ids.extend_from_slice(before);
            self.encode(string(row, "text")?, &mut out.ids)?;
            out.ids.extend_from_slice(behind);
            let end = self.end()?;
            if out.ids.last() != Some(&end) {
                out.ids.push(end);
            }
            out.labels.extend(out.ids.iter().map(|&id| id as i32));
        } else if given("messages").or(given("conversations")).is_some() {
            return self.conversation(row, out);
        } else if shapes::is_alpaca(row) {
            return self.sample(&shapes::alpaca_prompt(row)?, string(row, "output")?, None, out);
        } else {
            let keys: Vec<&str> = row.keys().map(String::as_str).collect();
            return Err(format!(
                "has none of `input_ids`, `text`, `messages`, `conversations`, `instruction` with `output`; its keys \
                 are: {}. Name the prompt and response fields with `input_key` and `output_key`",
                keys.join(", ")
            ));
        }
        match out.ids.is_empty() {
            true => Err("has no tokens: remove the row".into()),
            false => Ok(Outcome::Kept),
        }
    }

    fn conversation(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let chat = self.format.chat.as_deref().ok_or(
            "has messages, but the tokenizer has no chat template: set `tokenizer_chat_template`, or use a `tokenizer` \
             with one",
        )?;
        let Format { input_key, output_key, .. } = &self.format;
        let turns = shapes::turns(row, (input_key.as_deref(), output_key.as_deref()))?;
        let messages: Vec<Message> = turns.iter().map(Message::from_serialize).collect();
        let by_assistant = |turn: &Value| turn["role"] == "assistant";
        let first = turns.len() - self.responses(row)?;
        if !turns.iter().any(by_assistant) {
            return Err("has no assistant message: there is nothing to train on".into());
        }
        if !self.format.multiturn && !turns[first..].iter().all(by_assistant) {
            return Err(format!(
                "ends with a {} message, not an assistant message: there is no response",
                turns[first]["role"]
            ));
        }
        let (prompt, response) = self.dialog(&turns, first)?;
        if !self.format.multiturn {
            return self.sample(&prompt, &response, None, out);
        }
        let (all, mut ranges) = ([&prompt[..], &response].concat(), Vec::new());
        for turn in (0..turns.len()).filter(|&i| by_assistant(&turns[i])) {
            let before = chat.render(&messages[..turn], true)?;
            let with = chat.render(&messages[..=turn], false)?;
            let answer =
                with.strip_prefix(&before).zip(all.strip_prefix(&before)).and_then(|(a, rest)| surviving_part(a, rest));
            let Some(answer) = answer else {
                return Err(format!(
                    "has an answer (message {turn}) that the chat template renders differently when more messages \
                     follow: train on such conversations without `multiturn`"
                ));
            };
            let start = self.count(&before)?;
            ranges.push((start, start + self.count(answer)?));
        }
        self.sample(&prompt, &response, Some(&ranges), out)
    }

    /// The prompt and the response of a conversation whose messages from `first` on are the response.
    pub(super) fn dialog(&self, turns: &[Value], first: usize) -> RowResult<(String, String)> {
        let chat = self.format.chat.as_deref().ok_or(
            "has messages, but the tokenizer has no chat template: set `tokenizer_chat_template`, or use a `tokenizer` \
             with one",
        )?;
        let messages: Vec<Message> = turns.iter().map(Message::from_serialize).collect();
        let (prompt, all) = (chat.render(&messages[..first], true)?, chat.render(&messages, false)?);
        match all.strip_prefix(&prompt) {
            Some(response) => Ok((prompt, response.to_string())),
            None => Err(
                "is rendered by the chat template in a way that does not start with the prompt, so the start of the \
                 response is unknown. Use another `tokenizer_chat_template`"
                    .into(),
            ),
        }
    }

    /// How many messages at the end of [`shapes::turns`] are the response.
    fn responses(&self, row: &JsonRow) -> RowResult<usize> {
        let list = self.format.output_key.as_ref().and_then(|key| row.get(key)?.as_array());
        Ok(list.filter(|_| !self.format.multiturn).map_or(1, Vec::len))
    }

    /// See [Note: prompts and responses]. `ranges`: byte ranges with loss; none: everything after the prompt.
    fn sample(
        &self,
        prompt: &str,
        response: &str,
        ranges: Option<&[(usize, usize)]>,
        out: &mut TokenizedRow,
    ) -> RowResult<Outcome> {
        let asked = self.count(prompt)?;
        if prompt.is_empty() || response.is_empty() || asked + 2 >= self.max_len {
            return Ok(Outcome::Dropped);
        }
        self.render(prompt, response, &mut out.ids)?;
        if out.ids.len() > self.max_len {
            out.ids.truncate(self.max_len);
            out.ids[self.max_len - 1] = self.end()?;
        }
        let len = out.ids.len();
        out.labels.resize(len, IGNORE);
        for &(start, stop) in ranges.unwrap_or(&[(asked, len)]) {
            for at in start.min(len)..stop.min(len) {
                out.labels[at] = out.ids[at] as i32;
            }
        }
        Ok(Outcome::Kept)
    }

    /// Appends the tokens of prompt, response and end of text.
    pub(super) fn render(&self, prompt: &str, response: &str, out: &mut Vec<u32>) -> RowResult<()> {
        let (_, spelling) = self.tokenizer.spellings();
        let whole = [prompt, response].concat();
        let text = whole.trim_end_matches('\n');
        let end = self.end()?;
        if spelling.is_empty() {
            self.encode(text, out)?; // byte tokenizer: the end of text has no spelling
            out.push(end);
        } else if text.ends_with(spelling) {
            self.encode(text, out)?;
        } else {
            self.encode(&format!("{text} {spelling}"), out)?;
        }
        if let Some(last) = out.last_mut() {
            *last = end;
        }
        Ok(())
    }

    fn label(&self, label: i64) -> RowResult<i32> {
        match label {
            -100 => Ok(IGNORE),
            l if l >= 0 && (l as u64) < self.bound as u64 => Ok(l as i32),
            l => Err(format!(
                "has label {l}: a label must be a token id below vocab_size {}, or -100 for no loss",
                self.bound
            )),
        }
    }
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> RowResult<()> {
        self.tokenizer.encode(text, out).map_err(|e| format!("cannot be tokenized: {e}"))
    }
    pub(super) fn count(&self, text: &str) -> RowResult<usize> {
        let mut ids = Vec::new();
        self.encode(text, &mut ids)?;
        Ok(ids.len())
    }
    fn end(&self) -> RowResult<u32> {
        self.tokenizer.end_of_text().map_err(|e| format!("needs an end-of-text token: {e}"))
    }
}

/// The part of an answer, as rendered when it is the last message, that remains at the start of `rest`: templates of
/// thinking models drop the thoughts of earlier answers, which come first.
fn surviving_part<'a>(answer: &'a str, rest: &str) -> Option<&'a str> {
    let starts = answer.char_indices().map(|(i, _)| &answer[i..]);
    starts.into_iter().find(|part| rest.starts_with(part)).filter(|part| !part.trim().is_empty())
}
