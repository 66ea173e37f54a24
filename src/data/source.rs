//! Numbered rows of at most `max_len` tokens, read from a token file or generated. Never knows corpus files.
use super::format::SampleKind;
use super::pairs::first_sequence;
use super::synthetic::Synthetic;
use super::token_file::TokenFile;
use super::words::TokenWords;
use crate::device::IGNORE;

pub(super) enum RowSource {
    /// Row r is tokens `r * max_len..=(r + 1) * max_len`. Adjacent rows share one token: the last target of one, the
    /// first input of the next.
    Stream(TokenFile),
    Rows(TokenFile),
    /// Rows that end in the bytes of a number, as ids without labels.
    Numbered(TokenFile),
    Synthetic(Synthetic),
}

impl RowSource {
    /// Rows are individual samples, not slices of a stream.
    pub fn has_rows(&self) -> bool {
        matches!(self, RowSource::Rows(_) | RowSource::Numbered(_))
    }
    /// Length of `row` in tokens.
    pub fn row_len(&self, row: u64, max_len: usize) -> usize {
        match self {
            RowSource::Rows(file) => file.row_len(row).min(max_len),
            RowSource::Numbered(file) => file.row_len(row) - NUMBER,
            RowSource::Stream(_) | RowSource::Synthetic(_) => max_len,
        }
    }
    /// Length of the longer sequence of `row`, which has one or, of a pair, two.
    pub fn longest_sequence(&self, row: u64, kind: SampleKind, max: usize) -> usize {
        let len = self.row_len(row, max);
        if kind != SampleKind::Pair {
            return len;
        }
        let (mut tokens, mut targets) = (vec![0; len], vec![0; len]);
        self.fill(row, max, &mut tokens, &mut targets);
        let first = first_sequence(&targets);
        first.max(len - first)
    }
    /// The number that `row` ends in, where rows do.
    pub fn number(&self, row: u64) -> Option<f32> {
        let RowSource::Numbered(file) = self else { return None };
        let mut ids = [0u32; NUMBER];
        file.row(row).0.last(NUMBER).ids(&mut ids);
        Some(number(ids))
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
            RowSource::Rows(file) | RowSource::Numbered(file) => {
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

/// Ids that hold a number: its bytes, which every vocabulary's words have room for.
pub(super) const NUMBER: usize = size_of::<f32>();

/// The number that such ids hold.
pub(super) fn number(ids: [u32; NUMBER]) -> f32 {
    f32::from_le_bytes(ids.map(|id| id as u8))
}

/// `targets[t] = tokens[t + 1]`; the last target is `after`.
fn shift(tokens: &[u32], after: u32, targets: &mut [i32]) {
    let next = tokens[1..].iter().copied().chain([after]);
    targets.iter_mut().zip(next).for_each(|(target, next)| *target = next as i32);
}
