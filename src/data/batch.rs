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
    /// One number per row, where rows have one: how much better a pair's chosen answer is, or 1 for a desirable answer
    /// and 0 for another.
    pub numbers: Vec<f32>,
    /// The reference's summed token losses by document, if they were computed before ([`super::Loader::compare`]).
    pub reference: Vec<f64>,
    /// What rollouts have besides.
    pub recorded: Recorded,
    /// For labeled answers: the same prompts, each with the answer of another row of the data set.
    pub mismatched: Option<Box<MicroBatch>>,
}

/// What was recorded with the samples of rollouts, each of which is a document.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recorded {
    /// (N) log-probability that each position's target was sampled with; 0 where there is no loss.
    pub logprobs: Vec<f32>,
    /// One per document.
    pub rewards: Vec<f32>,
    /// The number of documents up to the end of each group.
    pub groups: Vec<u32>,
    /// The number of each group's row, of prompts that are not sampled yet.
    pub rows: Vec<u64>,
}

impl Recorded {
    fn clear(&mut self) {
        self.logprobs.clear();
        self.rewards.clear();
        self.groups.clear();
        self.rows.clear();
    }
}

/// A sample of a prompt, with what was recorded of it.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    pub prompt: &'a [u32],
    pub ids: &'a [u32],
    /// One per id.
    pub logprobs: &'a [f32],
    pub reward: f32,
}

impl MicroBatch {
    /// Groups of samples, each sample a document, of which only the sampled tokens have loss.
    pub fn from_groups<'a>(groups: impl IntoIterator<Item = Vec<SampleRow<'a>>>) -> MicroBatch {
        let mut batch = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
        for group in groups {
            for SampleRow { prompt, ids, logprobs, reward } in group {
                let (len, before) = (prompt.len() + ids.len(), prompt.len().saturating_sub(1));
                batch.tokens.extend(prompt.iter().chain(ids));
                let (targets, recorded) = (&mut batch.targets, &mut batch.recorded.logprobs);
                targets.resize(targets.len() + before, IGNORE);
                targets.extend(ids.iter().map(|&id| id as i32));
                targets.resize(batch.tokens.len(), IGNORE);
                recorded.resize(recorded.len() + before, 0.0);
                recorded.extend(logprobs);
                recorded.resize(batch.tokens.len(), 0.0);
                batch.recorded.rewards.push(reward);
                batch.positions.extend(0..len as u32);
                batch.cu_seqlens.push(batch.tokens.len() as u32);
            }
            batch.recorded.groups.push(batch.recorded.rewards.len() as u32);
        }
        batch
    }
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
    /// Removes all documents and makes room for `most` tokens, to be written before [`MicroBatch::end_document`].
    pub(super) fn begin(&mut self, most: usize) {
        self.cu_seqlens.clear();
        self.cu_seqlens.reserve(most + 1);
        self.cu_seqlens.push(0);
        self.numbers.clear();
        self.reference.clear();
        self.recorded.clear();
        self.positions.clear();
        self.positions.reserve(most);
        self.tokens.resize(most, 0);
        self.targets.resize(most, 0);
    }
    /// The next `len` tokens are a document. Returns the number of tokens so far.
    pub(super) fn end_document(&mut self, len: usize) -> usize {
        self.positions.extend(0..len as u32);
        self.cu_seqlens.push(self.positions.len() as u32);
        self.positions.len()
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
