//! Turns a row with a prompt and its samples into a sequence for each sample. Never knows what is learned from them.
//!
//! [Note: rollouts] A row is a group: `prompt_ids`, and `samples` of it, each with its `ids`, the `logprobs` that these
//! were sampled with, and a `reward`. Ids are used as they are. A group with a sequence of more than `max_len` tokens
//! is dropped: a sample that is cut is not what the reward was given for, and without it the group's mean is another. A
//! log-probability above 0 by at most [`ROUNDING`] is read as 0.
//!
//! A group is stored as one row: a sequence per sample, then the bytes of numbers (f32): of each sample the reward and
//! the log-probabilities of its ids; then (u32) how many samples there are, and how many numbers, these two among them.
//! `groups.rs` reads it. Only the samples' tokens have labels, and a prompt has at least one token, so that sequences
//! can be told apart.
//!
//! [Note: prompts] A prompt whose samples are not drawn yet is stored as its ids, then the bytes of the number of its
//! row, by which its sampler knows it. A micro-batch has [`SampleRoom::longest`] tokens in place of each of its
//! samples: buffers, the split over ranks and the order of rows are those of groups.
use super::fields::{JsonRow, RowResult, array, field, finite, kind, printed, token_id, whole};
use super::format::SampleRoom;
use super::recipe::{Drop, Outcome, Recipe, TokenizedRow};
use super::shapes::{GROUP_KEYS, PROMPT_KEYS};
use crate::device::IGNORE;
use serde_json::Value;
use std::collections::BTreeSet;

/// Fields of a sample.
const SAMPLE_KEYS: [&str; 3] = ["ids", "logprobs", "reward"];
/// How far samplers' log-probabilities exceed 0 when they round.
const ROUNDING: f64 = 1e-4;

/// A mask of tokens without loss, as samples with tools have them; a group may hold those of all its samples.
fn mask(fields: &JsonRow) -> Option<String> {
    fn leaves_out(mask: &Value) -> bool {
        let out = |value: &Value| *value == Value::Bool(false) || value.as_f64() == Some(0.0);
        mask.as_array().is_some_and(|mask| mask.iter().any(|value| out(value) || leaves_out(value)))
    }
    let (key, _) = fields.iter().find(|(key, value)| key.ends_with("mask") && leaves_out(value))?;
    let why = "that leaves out tokens, but all of `ids` are trained on: remove what the model did not write";
    Some(format!("has a `{key}` {why}"))
}

impl Recipe {
    /// See [Note: rollouts].
    pub(super) fn group(&self, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let prompt = self.ids(row, GROUP_KEYS[0])?;
        if prompt.is_empty() {
            return Err("has no prompt_ids: the first sampled token is predicted from the prompt's last one".into());
        }
        let samples = array(field(row, GROUP_KEYS[1])?, GROUP_KEYS[1])?;
        if samples.is_empty() {
            return Err("has no samples: a group needs at least one, so remove the row".into());
        }
        if let Some(fault) = mask(row) {
            return Err(fault);
        }
        let (mut numbers, mut unread) = (Vec::new(), BTreeSet::new());
        for (i, sample) in samples.iter().enumerate() {
            let of_sample = |fault: String| format!("has a sample {i} that {fault}");
            let Value::Object(sample) = sample else {
                return Err(of_sample(format!("is {}; an object is expected", kind(sample))));
            };
            let ids = self.sample_numbers(sample, &mut numbers).map_err(of_sample)?;
            if let Some(fault) = mask(sample) {
                return Err(of_sample(fault));
            }
            if prompt.len() + ids.len() > self.max_len {
                return Ok(Outcome::Dropped(Drop::TooLong));
            }
            out.ids.extend(prompt.iter().chain(&ids));
            out.labels.resize(out.labels.len() + prompt.len(), IGNORE);
            out.labels.extend(ids.iter().map(|&id| id as i32));
            let others = sample.iter().filter(|(key, value)| !value.is_null() && !SAMPLE_KEYS.contains(&key.as_str()));
            unread.extend(others.map(|(key, _)| key));
        }
        out.unread.extend(unread.into_iter().map(|key| format!("`{key}` of samples")));
        let count = numbers.len() + 2;
        numbers.into_iter().for_each(|number| out.end_in(number));
        [samples.len(), count].into_iter().for_each(|count| out.end_in_bytes((count as u32).to_le_bytes()));
        Ok(Outcome::Kept)
    }

    /// See [Note: prompts].
    pub(super) fn prompt(&self, row: &JsonRow, room: &SampleRoom, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let (ids, number) = (self.ids(row, PROMPT_KEYS[0])?, whole(field(row, PROMPT_KEYS[1])?, PROMPT_KEYS[1])?);
        if ids.len() + room.longest > self.max_len {
            return Ok(Outcome::Dropped(Drop::NoRoom));
        }
        out.labels.resize(ids.len(), IGNORE);
        out.ids.extend(ids);
        let halves = [number as u32, (number >> 32) as u32];
        halves.into_iter().for_each(|half| out.end_in_bytes(half.to_le_bytes()));
        Ok(Outcome::Kept)
    }

    /// The ids of a sample, whose reward and log-probabilities are appended to `numbers`.
    fn sample_numbers(&self, sample: &JsonRow, numbers: &mut Vec<f32>) -> RowResult<Vec<u32>> {
        let [ids_key, logprobs_key, reward_key] = SAMPLE_KEYS;
        let ids = self.ids(sample, ids_key)?;
        if ids.is_empty() {
            return Err(
                "has no ids: a text that ends at once has the id of its end, which some servers leave out. Add it with its \
                 log-probability"
                    .into(),
            );
        }
        let reward = field(sample, reward_key)?;
        let number = finite(reward).map(|reward| reward as f32).filter(|reward| reward.is_finite());
        numbers.push(number.ok_or_else(|| format!("has {} as reward; a finite number is expected", printed(reward)))?);
        let logprobs = array(field(sample, logprobs_key)?, logprobs_key)?;
        if logprobs.len() != ids.len() {
            return Err(format!(
                "has {} logprobs for {} ids: each id needs the log-probability that it was sampled with",
                logprobs.len(),
                ids.len()
            ));
        }
        for logprob in logprobs {
            let number = finite(logprob).filter(|&x| x <= ROUNDING && (x as f32).is_finite());
            let number = number.ok_or_else(|| {
                format!(
                    "has {} in its logprobs, which must be finite numbers of at most 0: record natural logarithms",
                    printed(logprob)
                )
            })?;
            numbers.push(number.min(0.0) as f32);
        }
        Ok(ids)
    }

    fn ids(&self, row: &JsonRow, key: &str) -> RowResult<Vec<u32>> {
        array(field(row, key)?, key)?.iter().map(|id| token_id(whole(id, key)?, self.bound)).collect()
    }
}
