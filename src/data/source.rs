//! Numbered rows of at most `max_len` tokens, read from a token file or generated. Never knows corpus files.
use super::batch::Recorded;
use super::format::{SampleKind, SampleRoom};
use super::groups::{self, GroupEnd, ROW_NUMBER};
use super::synthetic::Synthetic;
use super::token_file::TokenFile;
use super::words::{NUMBER, TokenWords, number};
use crate::device::IGNORE;

pub(super) enum RowSource {
    /// Row r is tokens `r * max_len..=(r + 1) * max_len`. Adjacent rows share one token: the last target of one, the
    /// first input of the next.
    Stream(TokenFile),
    Rows(TokenFile),
    /// Rows that end in the bytes of a number, as ids without labels.
    Numbered(TokenFile),
    /// Rows that end in numbers, as ids without labels; see [Note: rollouts].
    Groups(TokenFile),
    /// Prompts without samples; see [Note: prompts].
    Prompts(TokenFile, SampleRoom),
    Synthetic(Synthetic),
}

impl RowSource {
    /// Rows are individual samples, not slices of a stream.
    pub fn has_rows(&self) -> bool {
        matches!(self, RowSource::Rows(_) | RowSource::Numbered(_) | RowSource::Groups(_) | RowSource::Prompts(..))
    }
    /// Length of `row` in tokens.
    pub fn row_len(&self, row: u64, max_len: usize) -> usize {
        match self {
            RowSource::Rows(file) => file.row_len(row).min(max_len),
            RowSource::Numbered(file) => file.row_len(row) - NUMBER,
            RowSource::Groups(file) => file.row_len(row) - group_end(file, row).words,
            RowSource::Prompts(file, room) => room.samples * (prompt_len(file, row) + room.longest),
            RowSource::Stream(_) | RowSource::Synthetic(_) => max_len,
        }
    }
    /// Tokens of `row` that are read from a file: a prompt without its samples.
    pub fn stored_len(&self, row: u64) -> usize {
        if let RowSource::Prompts(file, _) = self { prompt_len(file, row) } else { self.row_len(row, usize::MAX) }
    }
    /// Sequences of `row`.
    pub fn sequences(&self, row: u64, kind: SampleKind) -> usize {
        match self {
            RowSource::Groups(file) => group_end(file, row).samples,
            RowSource::Prompts(_, room) => room.samples,
            _ => kind.sequences(),
        }
    }
    /// Length of the longest sequence of `row`.
    pub fn longest_sequence(&self, row: u64, kind: SampleKind, max: usize) -> usize {
        if let RowSource::Prompts(file, room) = self {
            return prompt_len(file, row) + room.longest;
        }
        let len = self.row_len(row, max);
        if !matches!(kind, SampleKind::Pair | SampleKind::Group) {
            return len;
        }
        let (mut tokens, mut targets) = (vec![0; len], vec![0; len]);
        self.fill(row, max, &mut tokens, &mut targets);
        groups::sequences(&targets).map(<[i32]>::len).max().unwrap_or(len)
    }
    /// The number that `row` ends in, where rows do.
    pub fn number(&self, row: u64) -> Option<f32> {
        let RowSource::Numbered(file) = self else { return None };
        let mut ids = [0u32; NUMBER];
        file.row(row).0.last(NUMBER).ids(&mut ids);
        Some(number(ids))
    }
    /// Appends what was recorded with the group of `row`, whose `targets` are given.
    pub fn record(&self, row: u64, targets: &[i32], out: &mut Recorded) {
        match self {
            RowSource::Groups(file) => {
                let mut numbers = vec![0; group_end(file, row).words];
                file.row(row).0.last(numbers.len()).ids(&mut numbers);
                groups::record(targets, &numbers, out);
            }
            RowSource::Prompts(file, room) => {
                let mut number = [0; ROW_NUMBER];
                file.row(row).0.last(ROW_NUMBER).ids(&mut number);
                groups::record_prompt(room, targets.len(), number, out);
            }
            _ => {}
        }
    }
    /// The tokens of `row`, and how many of them are the prompt's; of numbered rows.
    pub fn answered(&self, row: u64) -> Option<(TokenWords<'_>, usize)> {
        let RowSource::Numbered(file) = self else { return None };
        let ((ids, labels), len) = (file.row(row), file.row_len(row) - NUMBER);
        Some((ids.first(len), labels.first_target().unwrap_or(len)))
    }
    /// Writes `row` into `tokens` and `targets`, both as long as the row.
    pub fn fill(&self, row: u64, max: usize, tokens: &mut [u32], targets: &mut [i32]) {
        match self {
            RowSource::Stream(file) => {
                let start = row * max as u64;
                file.range(start, max).ids(tokens);
                file.range(start + 1, max).targets(targets);
            }
            RowSource::Synthetic(task) => {
                let after = task.fill(row, tokens);
                shift(tokens, after, targets);
            }
            RowSource::Prompts(file, room) => {
                let mut prompt = vec![0; prompt_len(file, row)];
                file.row(row).0.first(prompt.len()).ids(&mut prompt);
                groups::make_room(&prompt, room, tokens, targets);
            }
            RowSource::Rows(file) | RowSource::Numbered(file) | RowSource::Groups(file) => {
                let len = tokens.len();
                let (ids, labels) = file.row(row);
                ids.first(len).ids(tokens);
                let labels = labels.after_first(len);
                labels.targets(&mut targets[..labels.len()]);
                targets[labels.len()..].fill(IGNORE);
            }
        }
    }
}

/// Tokens of a stored prompt.
fn prompt_len(file: &TokenFile, row: u64) -> usize {
    file.row_len(row) - ROW_NUMBER
}

fn group_end(file: &TokenFile, row: u64) -> GroupEnd {
    let mut ids = [0; GroupEnd::WORDS];
    file.row(row).0.last(ids.len()).ids(&mut ids);
    GroupEnd::read(ids)
}

/// `targets[t] = tokens[t + 1]`; the last target is `after`.
fn shift(tokens: &[u32], after: u32, targets: &mut [i32]) {
    let next = tokens[1..].iter().copied().chain([after]);
    targets.iter_mut().zip(next).for_each(|(target, next)| *target = next as i32);
}
