//! Groups and prompts as they are stored: see [Note: rollouts] and [Note: prompts]. Never reads a row of a file.
use super::batch::Recorded;
use super::format::SampleRoom;
use super::pairs::first_sequence;
use super::words::{NUMBER, NumberWords, number};
use crate::device::IGNORE;

/// What a stored group says about itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupEnd {
    pub samples: usize,
    /// Ids at the end of the row that are no tokens.
    pub words: usize,
}

impl GroupEnd {
    /// Ids that [`GroupEnd::read`] needs.
    pub const WORDS: usize = 2 * NUMBER;

    /// From the row's last ids.
    pub fn read(ids: [u32; GroupEnd::WORDS]) -> GroupEnd {
        let (samples, numbers) = ids.split_at(NUMBER);
        GroupEnd { samples: whole(samples) as usize, words: whole(numbers) as usize * NUMBER }
    }
}

/// Appends a group, of which `targets` are given, to what was recorded with those before it. `numbers`: the ids after
/// its tokens.
pub(super) fn record(targets: &[i32], numbers: &[u32], out: &mut Recorded) {
    let mut numbers = numbers.as_chunks().0.iter().map(|&ids: &NumberWords| number(ids));
    let mut next = || numbers.next().unwrap_or(0.0);
    for sequence in sequences(targets) {
        out.rewards.push(next());
        let each = sequence.iter().map(|&target| if target == IGNORE { 0.0 } else { next() });
        out.logprobs.extend(each);
    }
    out.groups.push(out.rewards.len() as u32);
}

/// Ids at the end of a stored prompt that are no tokens: the number of its row.
pub(super) const ROW_NUMBER: usize = 2 * NUMBER;

/// Writes a prompt with room for its samples, as a group of them would be.
pub(super) fn make_room(prompt: &[u32], room: &SampleRoom, tokens: &mut [u32], targets: &mut [i32]) {
    let len = prompt.len() + room.longest;
    for (tokens, targets) in tokens.chunks_mut(len).zip(targets.chunks_mut(len)) {
        let (before, after) = tokens.split_at_mut(prompt.len());
        before.copy_from_slice(prompt);
        after.fill(0);
        targets.fill(IGNORE);
        targets[prompt.len() - 1..len - 1].fill(0);
    }
}

/// Appends what is known of a prompt before it is sampled; `number`: the ids after its tokens.
pub(super) fn record_prompt(room: &SampleRoom, tokens: usize, number: [u32; ROW_NUMBER], out: &mut Recorded) {
    out.rewards.resize(out.rewards.len() + room.samples, 0.0);
    out.logprobs.resize(out.logprobs.len() + tokens, 0.0);
    out.groups.push(out.rewards.len() as u32);
    out.rows.push(whole(&number));
}

/// The whole number whose bytes these ids are, such as that of a prompt's row.
pub(super) fn whole(ids: &[u32]) -> u64 {
    ids.iter().rev().fold(0, |number, &byte| number << 8 | byte as u64)
}

/// The sequences of a row of several, by its targets.
pub(super) fn sequences(mut targets: &[i32]) -> impl Iterator<Item = &[i32]> {
    std::iter::from_fn(move || {
        let (first, rest) = targets.split_at_checked(first_sequence(targets)).filter(|(first, _)| !first.is_empty())?;
        targets = rest;
        Some(first)
    })
}
