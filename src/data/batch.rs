//! One micro-batch of a data-parallel rank. Never pads rows to a common length.
use crate::device::IGNORE;

/// One micro-batch of a data-parallel rank: `batch_size` sequences of at most `max_len` tokens, concatenated (N tokens
/// in total). A sequence is one row, or several with packing; there is no padding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// (N)
    pub tokens: Vec<u32>,
    /// (N) the token each position predicts, already shifted; [`IGNORE`] where there is no loss.
    pub targets: Vec<i32>,
    /// (N) position within the document.
    pub positions: Vec<u32>,
    /// (S + 1) start of each document, then N. A row is a document and does not attend to others: S is `batch_size`, or
    /// the number of rows with packing. A pair is two documents: the chosen sequence and the rejected one.
    pub cu_seqlens: Vec<u32>,
    /// By pair, how much better the chosen answer is; empty where pairs have no margins.
    pub margins: Vec<f32>,
}

impl MicroBatch {
    /// Concatenates rows of token ids, each a document: every token predicts the next one, and the last token of a row
    /// has no target.
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
    /// Number of positions with loss.
    pub fn loss_tokens(&self) -> u64 {
        self.targets.iter().filter(|&&t| t != IGNORE).count() as u64
    }
    /// Pads with loss-free documents of at most `longest` tokens up to `most` tokens, then with empty ones up to `most`
    /// documents, so that every packed batch has the same shape.
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
