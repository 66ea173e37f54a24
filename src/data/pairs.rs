//! Turns a row with a prompt and two answers into two sequences. Never knows what is learned from them.
//!
//! [Note: pairs] Each answer is rendered and tokenized after the prompt like a response of fine-tuning (see [Note:
//! prompts and responses]). The fields are text; messages; or token ids in `prompt_input_ids`, `chosen_input_ids` and
//! `rejected_input_ids`, which are used as they are. An answer that is a list of messages from a user's or the system's
//! on is a whole conversation; the prompt field is then not read. What both conversations begin with is the prompt, and
//! what follows it the answer: the last message, or several. So it is with texts that have no prompt, as TRL's
//! `extract_prompt` splits them, unless only whole sequences count, whose prompts may also be two. A pair with a
//! sequence of more than `max_len` tokens is dropped: a truncated answer would be judged by its beginning.
//!
//! A pair is stored as one row: the chosen sequence, then the rejected one, then the bytes of the margin if there is
//! one. Only the tokens of the answers have labels, and a prompt has at least one token, so [`first_sequence`] can tell
//! the two sequences apart.
use super::fields::{JsonRow, RowResult, array, field, kind, present, token_id, whole};
use super::format::PairKeys;
use super::message;
use super::recipe::{AnsweredPrompt, Drop, Outcome, Recipe, TokenizedRow};
use super::shapes::{self, ID_KEYS};
use super::tokenizer::Tokenizer;
use crate::device::IGNORE;
use serde_json::Value;
use std::borrow::Cow;

/// Length of the first sequence of a pair, from the pair's targets: after the answer's, the first position without one
/// is the sequence's last.
pub(super) fn first_sequence(targets: &[i32]) -> usize {
    let answer = targets.iter().position(|&target| target != IGNORE).unwrap_or(0);
    targets[answer..].iter().position(|&target| target == IGNORE).map_or(targets.len(), |len| answer + len + 1)
}

impl Recipe {
    /// See [Note: pairs].
    pub(super) fn pair(&self, keys: &PairKeys, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let tokens = ID_KEYS.iter().any(|key| present(row, key).is_some());
        if !tokens {
            for key in [&keys.chosen, &keys.rejected] {
                let named = "Name the fields of a pair with `prompt_key`, `chosen_key` and `rejected_key`";
                field(row, key).map_err(|what| format!("{what}. {named}"))?;
            }
        }
        let row = &*match keys.prompt == "prompt" {
            true => shapes::with_prompt(
                row,
                self.format.is_chat() || row.get(&keys.chosen).is_some_and(|a| !a.is_string()),
            )?,
            false => Cow::Borrowed(row),
        };
        let row = &*split_texts(keys, row);
        let common = common_turns(keys, row);
        if !tokens && matches!(self.tokenizer, Tokenizer::None(_)) {
            return Ok(Outcome::Text);
        }
        let mut start = 0;
        let mut answers: Vec<Vec<u32>> = Vec::with_capacity(2);
        let mut prompts: Vec<String> = Vec::new();
        for (key, ids) in [&keys.chosen, &keys.rejected].into_iter().zip(&ID_KEYS[1..]) {
            let asked = if tokens {
                self.given(row, ids, keys.scored, out)?
            } else {
                let answered = self.answer(&keys.prompt, key, (keys.scored, common), row)?;
                if answered.prompt.is_empty() && !keys.scored {
                    return Err("has an empty prompt: a pair needs a prompt that both answers follow".into());
                }
                let asked = self.render(&answered, out)?.max(start + 1);
                out.labels.truncate(start);
                prompts.push(answered.prompt);
                asked
            };
            let name = if tokens { *ids } else { key };
            if asked >= out.ids.len() {
                return Err(format!("has an empty answer in `{name}`: remove the row"));
            }
            out.labels.resize(asked, IGNORE);
            out.labels.extend(out.ids[asked..].iter().map(|&id| id as i32));
            answers.push(out.ids[asked..].to_vec());
            if out.ids.len() - start > self.max_len {
                return Ok(Outcome::Dropped(Drop::TooLong));
            }
            start = out.ids.len();
        }
        let alike = prompts.len() < 2 || prompts[0] == prompts[1];
        if !alike && !keys.scored {
            return Err("has different conversations before its two answers: a pair has one prompt".into());
        }
        if alike && answers[0] == answers[1] {
            return Err("has equal answers: neither can be preferred, so remove the row".into());
        }
        if let Some((key, required)) = keys.margin() {
            let margin = match present(row, key) {
                None if !required => 0.0,
                _ => {
                    let value = field(row, key)?;
                    let written = || value.as_str()?.trim().parse().ok();
                    let margin = value.as_f64().or_else(written).map(|margin| margin as f32);
                    let finite = margin.filter(|margin| margin.is_finite());
                    finite.ok_or_else(|| format!("has {value} as {key}; a number is expected"))?
                }
            };
            out.end_in(margin);
        }
        Ok(Outcome::Kept)
    }

    /// Appends the prompt's ids and those of an answer. Returns where the answer starts. `bare`: the first id of an
    /// answer without a prompt is in its place.
    pub(super) fn given(&self, row: &JsonRow, key: &str, bare: bool, out: &mut TokenizedRow) -> RowResult<usize> {
        let start = out.ids.len();
        let mut asked = start;
        for key in [ID_KEYS[0], key] {
            asked = out.ids.len();
            if bare && key == ID_KEYS[0] && present(row, key).is_none() {
                continue;
            }
            for id in array(field(row, key)?, key)? {
                out.ids.push(token_id(whole(id, key)?, self.bound)?);
            }
            if asked == out.ids.len() {
                return Err(format!("has no tokens in `{key}`: a prompt and an answer each need at least one"));
            }
        }
        Ok(if asked == start { start + 1 } else { asked })
    }

    /// The text of the prompt in `asked` and of the answer in `key`. `bare`: a text may have no prompt. `common`: as
    /// many messages of a whole conversation are the prompt; else all but the last.
    pub(super) fn answer(
        &self,
        asked: &str,
        key: &str,
        (bare, common): (bool, Option<usize>),
        row: &JsonRow,
    ) -> RowResult<AnsweredPrompt> {
        let answer = &*match field(row, key)? {
            text if let Some(list) = shapes::written(text) => Cow::Owned(Value::Array(list)),
            given => Cow::Borrowed(given),
        };
        let whole = answer.as_array().and_then(|turns| turns.first()).is_some_and(asks);
        let empty = Value::String(String::new());
        let prompt = match present(row, asked) {
            _ if whole => None,
            None if bare && answer.is_string() => Some(&empty),
            _ => Some(field(row, asked).map_err(|what| format!("{what}. Name it with `prompt_key`"))?),
        };
        let plain = prompt.filter(|prompt| !self.format.is_chat() && shapes::written(prompt).is_none());
        if let (Some(Value::String(prompt)), Value::String(answer)) = (plain, answer) {
            if answer.trim().is_empty() {
                return Err(format!("has an empty answer in `{key}`: remove the row"));
            }
            shapes::without_system(row)?;
            let template = self.format.input_template.as_deref().and_then(|t| t.split_once("{}"));
            let prompt =
                template.map_or_else(|| prompt.clone(), |(before, behind)| format!("{before}{prompt}{behind}"));
            return Ok(AnsweredPrompt::plain(&prompt, answer));
        }
        let answers = match answer {
            Value::Array(turns) if !whole => turns.len(),
            Value::Array(turns) if let Some(common) = common => turns.len() - common,
            Value::Array(_) | Value::Object(_) | Value::String(_) => 1,
            other => return Err(format!("has {} as {key}; text or messages are expected", kind(other))),
        };
        let turns = shapes::turns(row, if whole { (Some(key), None) } else { (Some(asked), Some(key)) })?;
        let turns = shapes::with_system(row, turns)?;
        self.last_answer(row, &turns, turns.len() - answers, key)
    }
    /// [`Recipe::dialog`] of a conversation from field `key` that must end in an answer.
    pub(super) fn last_answer(
        &self,
        row: &JsonRow,
        turns: &[Value],
        first: usize,
        key: &str,
    ) -> RowResult<AnsweredPrompt> {
        let chat = self.chat(row)?;
        if turns[first..].iter().all(|turn| message::is_silent(turn, &|key| chat.mentions(key))) {
            return Err(format!("has an empty answer in `{key}`: remove the row"));
        }
        // Messages of others may be between those of an answer.
        let ends = [&turns[first], &turns[turns.len() - 1]];
        if let Some(other) = ends.into_iter().find(|turn| turn["role"] != "assistant") {
            return Err(format!(
                "has a {} message as the answer in `{key}`; an assistant's is expected",
                other["role"]
            ));
        }
        self.dialog(row, turns, first)
    }
}

/// What answers follow in Anthropic's texts (hh-rlhf).
const HH_ANSWER: &str = "\n\nAssistant:";

/// Two texts without a prompt, with what both begin with as their prompt: trl/data_utils.py, `extract_prompt`.
fn split_texts<'a>(keys: &PairKeys, row: &'a JsonRow) -> Cow<'a, JsonRow> {
    let text = |key: &str| row.get(key).filter(|text| shapes::written(text).is_none())?.as_str();
    let (Some(chosen), Some(rejected)) = (text(&keys.chosen), text(&keys.rejected)) else { return Cow::Borrowed(row) };
    if keys.scored || present(row, &keys.prompt).is_some() {
        return Cow::Borrowed(row);
    }
    let same = chosen.char_indices().zip(rejected.chars()).take_while(|((_, a), b)| a == b);
    let end = same.last().map_or(0, |((at, c), _)| at + c.len_utf8());
    let prompt = chosen[..end].strip_suffix(' ').unwrap_or(&chosen[..end]);
    // Where one text is the beginning of the other, it ends in its answer.
    let prompt = match end == chosen.len() || end == rejected.len() {
        true => prompt.rfind(HH_ANSWER).map_or("", |at| &prompt[..at + HH_ANSWER.len()]),
        false => prompt,
    };
    if prompt.is_empty() {
        return Cow::Borrowed(row);
    }
    let mut row = row.clone();
    for (key, text) in [(&keys.prompt, prompt), (&keys.chosen, &chosen[prompt.len()..])] {
        row.insert(key.clone(), text.into());
    }
    row.insert(keys.rejected.clone(), rejected[prompt.len()..].into());
    Cow::Owned(row)
}

/// The messages that two whole conversations begin with, where more than the last one of either is another.
fn common_turns(keys: &PairKeys, row: &JsonRow) -> Option<usize> {
    let turns = |key: &str| {
        let given = present(row, key)?;
        let turns = shapes::written(given).map(Cow::Owned).or_else(|| Some(Cow::Borrowed(&given.as_array()?[..])))?;
        turns.first().is_some_and(asks).then_some(turns)
    };
    let (chosen, rejected) = (turns(&keys.chosen)?, turns(&keys.rejected)?);
    let same = chosen.iter().zip(rejected.iter()).take_while(|(a, b)| a == b).count();
    let least = chosen.len().min(rejected.len());
    (same > 0 && same < least && (same + 1 < chosen.len() || same + 1 < rejected.len())).then_some(same)
}

/// A message that comes before an answer.
fn asks(turn: &Value) -> bool {
    ["user", "human", "system", "developer"].iter().any(|who| turn["role"] == *who || turn["from"] == *who)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sequence_ends_where_its_answer_does() {
        let targets = |first: &[i32], second: &[i32]| [first, &[IGNORE], second, &[IGNORE]].concat();
        for (prompt, answer, other) in [(1, 1, 1), (3, 2, 4), (1, 5, 1)] {
            let of = |answer: usize| [vec![IGNORE; prompt - 1], vec![7; answer]].concat();
            assert_eq!(first_sequence(&targets(&of(answer), &of(other))), prompt + answer);
        }
        assert_eq!(first_sequence(&[IGNORE; 4]), 1);
    }
}
