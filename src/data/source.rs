//! Numbered rows of at most `max_len` tokens, read from a token file or generated. Never knows corpus files.
use super::synthetic::Synthetic;
use super::token_file::TokenFile;
use crate::device::IGNORE;

pub(super) enum RowSource {
    /// Row r is tokens `r * max_len..=(r + 1) * max_len`. Adjacent rows share one token: the last target of one, the
    /// first input of the next.
    Stream(TokenFile),
    Rows(TokenFile),
    /// Rows that end in the bytes of a margin, as ids without labels.
    Margins(TokenFile),
    Synthetic(Synthetic),
}

impl RowSource {
    /// Rows are individual samples, not slices of a stream.
    pub fn has_rows(&self) -> bool {
        matches!(self, RowSource::Rows(_) | RowSource::Margins(_))
    }
    /// Length of `row` in tokens.
    pub fn row_len(&self, row: u64, max_len: usize) -> usize {
        match self {
            RowSource::Rows(file) => file.row_len(row).min(max_len),
            RowSource::Margins(file) => file.row_len(row) - MARGIN,
            RowSource::Stream(_) | RowSource::Synthetic(_) => max_len,
        }
    }
    /// How much better a pair's chosen answer is, where that is known.
    pub fn margin(&self, row: u64) -> Option<f32> {
        let RowSource::Margins(file) = self else { return None };
        let mut ids = [0u32; MARGIN];
        file.row(row).0.last(MARGIN).ids(&mut ids);
        Some(f32::from_le_bytes(ids.map(|id| id as u8)))
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
            RowSource::Rows(file) | RowSource::Margins(file) => {
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

/// Ids that hold a margin: its bytes, which every vocabulary's words have room for.
pub(super) const MARGIN: usize = size_of::<f32>();

/// `targets[t] = tokens[t + 1]`; the last target is `after`.
fn shift(tokens: &[u32], after: u32, targets: &mut [i32]) {
    let next = tokens[1..].iter().copied().chain([after]);
    targets.iter_mut().zip(next).for_each(|(target, next)| *target = next as i32);
}
