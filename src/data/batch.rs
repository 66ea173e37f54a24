//! What one data-parallel rank trains on at once. Never pads.
use crate::device::IGNORE;

/// What one data-parallel rank trains on at once: `batch_size` sequences of at most `max_len` tokens one after the
/// other (N in all). A sequence is a row, or with packing several; there is no padding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// (N)
    pub tokens: Vec<u32>,
    /// (N) what each position predicts, already shifted; [`IGNORE`] where there is no loss.
    pub targets: Vec<i32>,
    /// (N) counted from the start of the document.
    pub positions: Vec<u32>,
    /// (S + 1) where documents start, then N. A row is a document, which sees no other: S is `batch_size`, or with
    /// packing as many as there are rows.
    pub cu_seqlens: Vec<u32>,
}

impl MicroBatch {
    /// Rows of token ids one after the other, each a document: a token predicts the next one, and the last of a row
    /// nothing.
    pub fn from_rows<'a>(rows: impl IntoIterator<Item = &'a [u32]>) -> MicroBatch {
        let mut batch = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
        for row in rows {
            batch.tokens.extend(row);
            batch.targets.extend(row.iter().skip(1).map(|&token| token as i32));
            batch.targets.resize(batch.tokens.len(), IGNORE);
            batch.positions.extend(0..row.len() as u32);
            batch.cu_seqlens.push(batch.tokens.len() as u32);
        }
        batch
    }
    /// Positions that carry loss.
    pub fn loss_tokens(&self) -> u64 {
        self.targets.iter().filter(|&&t| t != IGNORE).count() as u64
    }
    /// Adds documents without loss, of at most `longest` tokens, up to `most` tokens, and empty ones up to `most`
    /// documents: whatever was packed, the shape is the same.
    pub fn fill_up(&mut self, most: usize, longest: usize) {
        let mut at = self.tokens.len();
        while at < most {
            let len = longest.clamp(1, most - at);
            self.positions.extend(0..len as u32);
            at += len;
            self.cu_seqlens.push(at as u32);
        }
        self.tokens.resize(at, 0);
        self.targets.resize(at, IGNORE);
        self.cu_seqlens.resize(self.cu_seqlens.len().max(at + 1), at as u32);
    }
}
