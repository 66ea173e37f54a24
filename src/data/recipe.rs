//! Turns a row of a data set into tokens and labels. Never reads files: a row comes as the bytes of a JSON object, or
//! as the object.
//!
//! [Note: prompts and responses] A row is a prompt and a response, or a conversation. It is rendered once, and its text
//! tokenized once. The tokenizer's end of text is appended, unless the text already ends with it: in place of trailing
//! newlines and after a space, as OpenRLHF does; or at once, with what the tokenizer adds before a text, as TRL does
//! (`special_tokens`, where no chat template renders). What has a loss is a set of byte ranges of the text: the
//! response, the last answer of a conversation or with `multiturn` each one, or what `{% generation %}` blocks enclose;
//! switches of messages come first. A token has a loss if it overlaps one of them. A row without a token with loss is
//! dropped, as is one whose prompt has `max_len - 2` tokens or more. A longer row is cut, and does not end in the end
//! of text.
use super::answers;
use super::fields::{JsonRow, RowResult, present, string, truth, truth_in};
use super::format::{Format, InputLoss, Preferences, SampleKind};
use super::json;
use super::message;
use super::pair_shapes;
use super::shapes::{self, Shape};
use super::talk::{known_roles, left_out, talk};
use super::template::{ChatTemplate, Conversation, Rendered};
use super::tokenizer::Tokenizer;
use crate::device::IGNORE;
use serde_json::Value;
use std::borrow::Cow;
use std::ops::Range;

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
    /// Tokens beyond `max_len` were removed.
    pub cut: bool,
    /// A part of a stream, not a row.
    pub joined: bool,
    /// What the row holds and nothing reads.
    pub unread: Vec<String>,
    /// The other answer of a pair, as a row of its own.
    pub other: Option<Box<TokenizedRow>>,
}

impl TokenizedRow {
    /// Appends the bytes of a number, as ids without labels: every vocabulary has room for them.
    pub(super) fn end_in(&mut self, number: f32) {
        self.end_in_bytes(number.to_le_bytes());
    }
    pub(super) fn end_in_bytes(&mut self, bytes: [u8; 4]) {
        self.ids.extend(bytes.map(u32::from));
        self.labels.resize(self.ids.len(), IGNORE);
    }
    fn clear(&mut self) {
        self.ids.clear();
        self.labels.clear();
        self.unread.clear();
        self.cut = false;
        self.joined = false;
        self.other = None;
    }
}

/// Where a text to learn comes from.
#[derive(Clone, Copy, PartialEq)]
enum TextKind {
    /// From the row itself.
    Plain,
    /// From a template; `marked`: whose blocks say what has a loss.
    Rendered { marked: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Kept,
    Dropped(Drop),
    /// The row holds text, and there is no tokenizer for it.
    Text,
}

/// Why a row is not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    NoRoom,
    NoAnswer,
    NoLoss,
    TooLong,
}

impl Drop {
    pub const ALL: [Drop; 4] = [Drop::NoRoom, Drop::NoAnswer, Drop::NoLoss, Drop::TooLong];
}

impl std::fmt::Display for Drop {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Drop::NoRoom => "the prompt leaves no room for a response within max_len",
            Drop::NoAnswer => "the prompt or the answer is empty",
            Drop::NoLoss => "no token has a loss",
            Drop::TooLong => "an answer does not fit within max_len",
        })
    }
}

/// A prompt and a response, as text.
pub(super) struct AnsweredPrompt {
    pub prompt: String,
    pub response: String,
    /// No chat template has rendered it.
    pub plain: bool,
}

impl AnsweredPrompt {
    pub fn plain(prompt: &str, response: &str) -> AnsweredPrompt {
        AnsweredPrompt { prompt: prompt.into(), response: response.into(), plain: true }
    }
}

impl Recipe {
    /// Tokenizes a row of JSON. If something is wrong with it, numbers that JSON does not have are named.
    pub fn line(&self, line: &[u8], out: &mut TokenizedRow) -> RowResult<Outcome> {
        let (row, number) = json::object(line)?;
        self.row(&row, out).map_err(|fault| match number {
            Some(number) if self.format.preferences != Some(Preferences::Rollouts) => {
                format!("{fault} (it holds {number}, which is not a number of JSON: write null)")
            }
            _ => fault, // a rollout's fault shows the number
        })
    }

    /// Writes the tokens of `row` to `out`, replacing its contents.
    pub fn row(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        out.clear();
        let row = &*self.format.renames.apply(row)?;
        let row = &*self.format.with_system(row);
        let (row, others) = match self.format.shape {
            Some(shape) => shape.alone(row)?,
            None => (Cow::Borrowed(row), Vec::new()),
        };
        let row = &*match &self.format.preferences {
            Some(Preferences::Pairs(keys)) => pair_shapes::renamed(keys, &row)?,
            _ => Cow::Borrowed(&*row),
        };
        if self.format.input_key.is_none() && !self.format.pretrain_mode {
            shapes::without_media(row)?;
        }
        let outcome = match &self.format.preferences {
            Some(Preferences::Pairs(keys)) => self.pair(keys, row, out),
            Some(Preferences::Labels(keys)) => self.labeled(keys, row, out),
            Some(Preferences::Rollouts) => self.group(row, out),
            Some(Preferences::Prompts(room)) => self.prompt(row, room, out),
            None => self.sample(row, out),
        }?;
        if outcome == Outcome::Kept && self.format.sample() == SampleKind::Tokens && !out.joined {
            out.cut = out.ids.len() > self.max_len;
            out.ids.truncate(self.max_len);
            out.labels.truncate(self.max_len);
            // The first token is predicted by none.
            if out.labels.iter().skip(1).all(|&label| label == IGNORE) {
                return Ok(Outcome::Dropped(Drop::NoLoss));
            }
        }
        self.unread(row, out);
        out.unread.extend(others.iter().map(|key| format!("`{key}`")));
        Ok(outcome)
    }

    /// A row that is learned as it is.
    fn sample(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let format = &self.format;
        let shape = Shape::of(row, format.is_chat());
        let text = format.reads_text() || shape.is_some_and(|shape| shape != Shape::Tokens);
        if text && matches!(self.tokenizer, Tokenizer::None(_)) {
            return Ok(Outcome::Text);
        }
        if format.pretrain_mode {
            let text = string(row, format.input_key.as_deref().unwrap_or("text"))?;
            if format.join_rows {
                return self.join(text, out);
            }
            self.encode(text, &mut out.ids)?;
            out.labels.extend(out.ids.iter().map(|&id| id as i32));
            return Ok(Outcome::Kept);
        }
        // LLaMA-Factory's rows have a `kto_tag`.
        let label = ["label", "kto_tag"].iter().find_map(|key| present(row, key).map(|label| (*key, label)));
        let label = label.and_then(|(key, label)| Some((key, truth(label).or_else(|| truth_in(label.as_str()?))?)));
        let labeled = match shape {
            Some(Shape::Completion) => label,
            Some(Shape::Messages | Shape::Conversations | Shape::Instruction) => label.filter(|(_, on)| !on),
            _ => None,
        };
        if let Some((key, _)) = labeled {
            return Err(format!(
                "has a `{key}`, true or false, next to its answer: the undesirable ones would be learned. Use \
                 `objective: kto`, or remove it"
            ));
        }
        let keys = (format.input_key.as_deref(), format.output_key.as_deref());
        match (keys, shape) {
            _ if format.is_chat() => self.conversation(row, keys, out),
            ((Some(input), Some(output)), _) if !shapes::is_written(row, [input, output]) => {
                if format.system_key.is_some() {
                    shapes::without_system(row)?;
                }
                self.asked(string(row, input)?, string(row, output)?, out)
            }
            ((Some(_), Some(_)), _) => self.conversation(row, keys, out),
            (_, Some(Shape::Tokens)) => self.tokens(row, out),
            (_, Some(Shape::Text)) => self.text(string(row, "text")?, out),
            (_, Some(Shape::Completion)) if shapes::is_text(row, ["prompt", "completion"]) => {
                shapes::without_system(row)?;
                self.asked(string(row, "prompt")?, string(row, "completion")?, out)
            }
            (_, Some(Shape::Instruction)) => self.response(&shapes::alpaca_prompt(row)?, string(row, "output")?, out),
            (_, Some(Shape::Messages | Shape::Conversations | Shape::Completion)) => {
                self.conversation(row, (None, None), out)
            }
            (_, None) => {
                let keys: Vec<&str> = row.keys().map(String::as_str).collect();
                let instead: String = match (shapes::both(row, shapes::PAIR), shapes::misplaced(row)) {
                    (true, _) => "It is a pair: use `objective: dpo` or `rm`".into(),
                    (false, Some(what)) => what,
                    _ => "Name the prompt and response fields with `input_key` and `output_key`".into(),
                };
                Err(format!(
                    "has none of `input_ids`, `text`, `messages`, `conversations`, `instruction` with `output`, \
                     `prompt` with `completion`; its keys are: {}. {instead}",
                    keys.join(", ")
                ))
            }
        }
    }

    /// A text of a stream, as a text file is: in what the tokenizer adds, and with an end of text.
    fn join(&self, text: &str, out: &mut TokenizedRow) -> RowResult<Outcome> {
        if text.is_empty() {
            return Ok(Outcome::Dropped(Drop::NoLoss));
        }
        out.joined = true;
        self.text(text, out)
    }

    /// Text that is learned as a whole, with the special tokens that transformers adds.
    fn text(&self, text: &str, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let special = self.format.begins_texts();
        out.ids.extend_from_slice(if special { self.tokenizer.before(text) } else { &[] });
        self.encode(text, &mut out.ids)?;
        out.ids.extend_from_slice(if special { self.tokenizer.affixes().1 } else { &[] });
        let end = self.end()?;
        if out.ids.last() != Some(&end) {
            out.ids.push(end);
        }
        out.labels.extend(out.ids.iter().map(|&id| id as i32));
        Ok(Outcome::Kept)
    }

    /// A prompt in the template of the settings, and its response.
    fn asked(&self, prompt: &str, response: &str, out: &mut TokenizedRow) -> RowResult<Outcome> {
        match self.format.input_template.as_deref().and_then(|template| template.split_once("{}")) {
            Some((before, behind)) => self.response(&format!("{before}{prompt}{behind}"), response, out),
            None => self.response(prompt, response, out),
        }
    }

    fn response(&self, prompt: &str, response: &str, out: &mut TokenizedRow) -> RowResult<Outcome> {
        if prompt.is_empty() || response.trim().is_empty() {
            return Ok(Outcome::Dropped(Drop::NoAnswer));
        }
        let first = self.render(&AnsweredPrompt::plain(prompt, response), out)?;
        if self.format.input_loss == InputLoss::All {
            out.labels.iter_mut().zip(&out.ids).for_each(|(label, &id)| *label = id as i32);
            return Ok(Outcome::Kept);
        }
        Ok(if first + 2 >= self.max_len { Outcome::Dropped(Drop::NoRoom) } else { Outcome::Kept })
    }

    fn conversation(
        &self,
        row: &JsonRow,
        keys: (Option<&str>, Option<&str>),
        out: &mut TokenizedRow,
    ) -> RowResult<Outcome> {
        let (chat, multiturn) = (self.chat(row)?, self.format.multiturn);
        let mut turns = shapes::turns(row, keys)?;
        if self.format.system_key.is_some() {
            turns = shapes::with_system(row, turns)?;
        }
        known_roles(&turns, chat)?;
        let by_assistant = |turn: &Value| turn["role"] == "assistant";
        // All messages of TRL's `completion` are the response.
        let completion = Shape::of(row, true).filter(|shape| keys.0.is_none() && *shape == Shape::Completion);
        let listed = keys.1.or(completion.map(|_| "completion")).filter(|_| !multiturn);
        let response = listed.and_then(|key| row.get(key)).map_or(1, shapes::messages_in);
        let first = turns.len().saturating_sub(response.max(1));
        let answers: Vec<usize> = (0..turns.len()).filter(|&i| by_assistant(&turns[i])).collect();
        let switches = (0..turns.len()).map(|i| message::switch(i, &turns[i])).collect::<RowResult<Vec<_>>>()?;
        let switched = answers.iter().any(|&i| switches[i].is_some());
        let whole = match self.format.input_loss {
            InputLoss::None => false,
            InputLoss::Conversations => keys.1.is_none() && completion.is_none(),
            InputLoss::All => true,
        };
        if whole && !switched {
            // The text as it is rendered.
            let text = self.talked(row, &turns, chat, out)?.1.text;
            self.encode(&text, &mut out.ids)?;
            out.labels.extend(out.ids.iter().map(|&id| id as i32));
            return Ok(Outcome::Kept);
        }
        if answers.is_empty() {
            return Err("has no assistant message: there is nothing to train on".into());
        }
        let all_last = !multiturn && !switched;
        if let Some(other) = turns.last().filter(|turn| all_last && !by_assistant(turn)) {
            return Err(format!(
                "ends with a {} message, not an assistant message: there is no response",
                other["role"]
            ));
        }
        let is_silent = |i: usize| message::is_silent(&turns[i], &|key| chat.mentions(key));
        let wanted = |i: usize| switches[i].unwrap_or(multiturn || i >= first);
        let learned: Vec<usize> = answers.iter().copied().filter(|&i| wanted(i) && !is_silent(i)).collect();
        if learned.is_empty() {
            let silent = answers.iter().any(|&i| wanted(i));
            return Ok(Outcome::Dropped(if silent { Drop::NoAnswer } else { Drop::NoLoss }));
        }
        if all_last && answers.iter().any(|&i| i < first && !is_silent(i)) {
            out.unread.push("answers before the last one (--multiturn trains on them)".into());
        }
        let (talk, all) = self.talked(row, &turns, chat, out)?;
        let places = || -> RowResult<Vec<Range<usize>>> {
            if all_last {
                let start = self.start(chat, &talk, &turns, first, &all.text)?;
                return Ok(std::iter::once(start..all.text.len()).collect());
            }
            let found = answers::find(chat, &turns, &all.text);
            let found = match found {
                Some(found) => found,
                None => match answers::by_prefixes(chat, &talk, &answers, &all.text) {
                    Ok(found) => found,
                    Err(fault) => answers::find_endless(chat, &turns, &all.text).ok_or(fault)?,
                },
            };
            Ok(answers.iter().zip(found).filter(|(i, _)| learned.contains(i)).map(|(_, place)| place).collect())
        };
        let spans = match &all.generated {
            None => places()?,
            Some(generated) if multiturn && !switched => generated.clone(),
            Some(generated) => match places() {
                Ok(places) => {
                    // A block may begin with the answer's header, and a prompt with the beginning of a thought.
                    let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
                    let within = |span: &&Range<usize>| places.iter().any(|place| overlap(span, place));
                    generated.iter().filter(within).cloned().collect()
                }
                // Answers that the messages before the response do not have.
                Err(fault) if all_last => {
                    let earlier = chat.rendered(&talk.upto(first), false).map_err(|_| fault)?.generated;
                    generated[earlier.map_or(0, |earlier| earlier.len()).min(generated.len())..].to_vec()
                }
                Err(fault) => return Err(fault),
            },
        };
        let rendered = TextKind::Rendered { marked: all.generated.is_some() };
        let first = self.learn(&all.text, &spans, rendered, out)?;
        Ok(if all_last && first + 2 >= self.max_len { Outcome::Dropped(Drop::NoRoom) } else { Outcome::Kept })
    }

    /// A conversation and what the chat template makes of it; names the messages that it leaves out.
    fn talked(
        &self,
        row: &JsonRow,
        turns: &[Value],
        chat: &ChatTemplate,
        out: &mut TokenizedRow,
    ) -> RowResult<(Conversation, Rendered)> {
        let talk = talk(row, turns, chat)?;
        let answered = turns.last().is_some_and(|turn| turn["role"] == "assistant");
        let all = if answered { chat.answered(&talk)? } else { chat.rendered(&talk, false)? };
        out.unread.extend(left_out(chat, row, turns, &all.text));
        Ok((talk, all))
    }

    /// The prompt and the response of a conversation whose messages from `first` on are the response.
    pub(super) fn dialog(&self, row: &JsonRow, turns: &[Value], first: usize) -> RowResult<AnsweredPrompt> {
        let chat = self.chat(row)?;
        known_roles(turns, chat)?;
        let talk = talk(row, turns, chat)?;
        let mut prompt = chat.answered(&talk)?.text;
        let response = prompt.split_off(self.start(chat, &talk, turns, first, &prompt)?);
        Ok(AnsweredPrompt { prompt, response, plain: false })
    }

    /// Where the messages from `first` on begin in the rendered conversation.
    fn start(
        &self,
        chat: &ChatTemplate,
        talk: &Conversation,
        turns: &[Value],
        first: usize,
        text: &str,
    ) -> RowResult<usize> {
        let prompt = chat.rendered(&talk.upto(first), true)?.text;
        if text.starts_with(&prompt) {
            return Ok(prompt.len());
        }
        let earlier = turns[..first].iter().filter(|turn| turn["role"] == "assistant").count();
        let found = answers::find(chat, turns, text).or_else(|| answers::find_endless(chat, turns, text));
        let found =
            found.map_or_else(|| answers::begins(chat, talk, first, text), |found| Ok(Some(found[earlier].start)))?;
        found.ok_or_else(|| {
            let calls = |turn: &Value| turn["tool_calls"].as_array().is_some_and(Vec::is_empty);
            let instead = match turns.iter().position(calls) {
                Some(i) => format!(
                    "Message {i} has `tool_calls`, which templates may take for a call even if it is an empty list: \
                     remove it"
                ),
                None => "Use another `tokenizer_chat_template`".into(),
            };
            format!(
                "is rendered by the chat template in a way that does not start with the prompt, so the start of the \
                 response is unknown. {instead}"
            )
        })
    }

    pub(super) fn chat(&self, row: &JsonRow) -> RowResult<&ChatTemplate> {
        self.format.template_of(row).ok_or_else(|| {
            "has messages, but the tokenizer has no chat template: set `tokenizer_chat_template`, or use a `tokenizer` \
             with one"
                .into()
        })
    }

    /// Appends the tokens of prompt, response and end of text, with a loss on the response and the end. Returns where
    /// the response begins.
    pub(super) fn render(&self, asked: &AnsweredPrompt, out: &mut TokenizedRow) -> RowResult<usize> {
        let whole = [&asked.prompt[..], &asked.response].concat();
        let kind = if asked.plain { TextKind::Plain } else { TextKind::Rendered { marked: false } };
        self.learn(&whole, std::slice::from_ref(&(asked.prompt.len()..whole.len())), kind, out)
    }

    /// Appends the tokens of `text` and of the end of text; those that overlap `spans` (of bytes, ascending) have a
    /// loss. A span that reaches the end of `text` includes the end of text. Newlines at the end are dropped, unless a
    /// template marks them. Returns where the first loss is.
    fn learn(&self, text: &str, spans: &[Range<usize>], kind: TextKind, out: &mut TokenizedRow) -> RowResult<usize> {
        let special = kind == TextKind::Plain && self.format.begins_prompts();
        let (_, spelling) = self.tokenizer.spellings();
        let trimmed = text.trim_end_matches('\n');
        let marked = kind == (TextKind::Rendered { marked: true });
        let marked = marked && spans.last().is_some_and(|span| span.end > trimmed.len());
        let text = if special || marked { text } else { trimmed };
        let end = self.end()?;
        let spelled = match text.ends_with(spelling) || marked && trimmed.ends_with(spelling) {
            true => Cow::Borrowed(text),
            false => Cow::Owned([text, if special || marked { "" } else { " " }, spelling].concat()),
        };
        let ends = spelled.ends_with(spelling);
        if special {
            out.ids.extend_from_slice(self.tokenizer.before(text));
            out.labels.resize(out.ids.len(), IGNORE);
        }
        let (first, mut places) = (out.ids.len(), Vec::new());
        self.tokenizer
            .encode_with_places(&spelled, &mut out.ids, &mut places)
            .map_err(|e| format!("cannot be tokenized: {e}"))?;
        if spelling.is_empty() {
            out.ids.push(end); // byte tokenizer: the end of text has no spelling
            places.push(text.len()..text.len() + 1);
        } else if let Some(last) = out.ids.last_mut().filter(|_| ends) {
            *last = end;
        }
        let mut spans = spans.iter().map(|span| span.start..if span.end >= text.len() { usize::MAX } else { span.end });
        let mut span = spans.next();
        for (&id, place) in out.ids[first..].iter().zip(&places) {
            while span.as_ref().is_some_and(|span| span.end <= place.start) {
                span = spans.next();
            }
            let within = span.as_ref().is_some_and(|span| place.end.max(place.start + 1) > span.start);
            out.labels.push(if within { id as i32 } else { IGNORE });
        }
        let loss = out.labels[first..].iter().position(|&label| label != IGNORE);
        Ok(loss.map_or(out.ids.len(), |at| first + at))
    }

    fn encode(&self, text: &str, out: &mut Vec<u32>) -> RowResult<()> {
        self.tokenizer.encode(text, out).map_err(|e| format!("cannot be tokenized: {e}"))
    }
    fn end(&self) -> RowResult<u32> {
        self.tokenizer.end_of_text().map_err(|e| format!("needs an end-of-text token: {e}"))
    }
}
