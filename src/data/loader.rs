//! Which rank trains on which rows, and when. Never communicates: all is computed from one number, the samples that all
//! ranks together have consumed.
use super::MicroBatch;
use super::dataset::Dataset;
use super::permutation::Permutation;
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub struct LoaderOptions {
    /// Rows of a micro-batch of one rank.
    pub batch_size: usize,
    /// Micro-batches of an optimizer step.
    pub grad_accum: usize,
    /// Among the ranks that see different samples.
    pub dp_rank: usize,
    pub dp_size: usize,
    /// Another pseudo-random order each epoch. Without it rows come as they are numbered.
    pub shuffle: bool,
    pub seed: u64,
}

/// Fills micro-batches with the rows of one rank.
///
/// [Note: which row goes where] Sample n is row n of the endless sequence epoch 0, epoch 1, ... where an epoch has every row
/// once, in order or permuted by (seed, epoch). An optimizer step consumes the next G = batch_size * grad_accum * dp samples:
/// sample `n + (micro * dp + rank) * batch_size + b` is row b of that rank's micro-batch. So a step's rows are the same set
/// however G is split; a step that crosses the end of an epoch goes on in the next.
///
/// [Note: held-out rows] The last rows of the dataset are kept for evaluation and never trained on: 1 % of them, at least G
/// and at most 256 (or G), in whole global batches. None where that would be more than a tenth of the dataset, and none of
/// the rows of a JSONL file without shuffle: who lists rows in order means each of them.
pub struct Loader {
    source: Arc<Dataset>,
    options: LoaderOptions,
    /// Rows `first..first + rows` are this loader's.
    first: u64,
    rows: u64,
    position: u64,
    /// Of the epoch of the row that was last looked up.
    order: (u64, Permutation),
}

impl Loader {
    /// Over the rows that are not held out.
    pub fn new(source: Arc<Dataset>, options: LoaderOptions) -> Result<Loader> {
        let LoaderOptions { batch_size, grad_accum, dp_rank, dp_size, .. } = options;
        let sizes = [("batch_size", batch_size), ("grad_accum", grad_accum), ("dp_size", dp_size)];
        if let Some((name, _)) = sizes.into_iter().find(|(_, n)| *n == 0) {
            return Err(Error::input(format!("{name} is 0: it must be at least 1")));
        }
        if dp_rank >= dp_size {
            return Err(Error::op("loader", format!("dp_rank {dp_rank} of {dp_size}")));
        }
        let (rows, global) = (source.rows(), options.global_batch());
        if rows < global {
            return Err(Error::input(format!(
                "the dataset has {rows} rows of {} tokens, but a step takes {global} = batch_size {batch_size} * grad_accum \
                 {grad_accum} * data-parallel ranks {dp_size}. Pass more data, or make a batch or --max-len smaller",
                source.max_len()
            )));
        }
        let ordered = source.has_rows_of_its_own() && !options.shuffle;
        let held = if ordered { 0 } else { held_out(rows, global) };
        Ok(Loader::over(source, options, 0, rows - held))
    }
    /// Over the held-out rows, in order; `None` where none are. Its epoch is whole global batches.
    pub fn held_out(&self) -> Option<Loader> {
        let options = LoaderOptions { shuffle: false, ..self.options.clone() };
        let rows = self.source.rows() - self.rows;
        (self.first == 0 && rows > 0).then(|| Loader::over(self.source.clone(), options, self.rows, rows))
    }
    fn over(source: Arc<Dataset>, options: LoaderOptions, first: u64, rows: u64) -> Loader {
        let order = (0, order(rows, options.seed, 0));
        Loader { source, options, first, rows, position: 0, order }
    }

    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.source
    }
    pub fn rows_per_epoch(&self) -> u64 {
        self.rows
    }
    /// Samples consumed by all ranks so far: the whole state.
    pub fn position(&self) -> u64 {
        self.position
    }
    /// Any number: a run may go on with another batch or on another number of ranks.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
    }
    /// The number in the dataset of sample `n` of all ranks.
    pub fn row(&mut self, n: u64) -> u64 {
        let (epoch, i) = (n / self.rows, n % self.rows);
        if !self.options.shuffle {
            return self.first + i;
        }
        if self.order.0 != epoch {
            self.order = (epoch, order(self.rows, self.options.seed, epoch));
        }
        self.first + self.order.1.at(i)
    }

    /// This rank's next micro-batch into `out`, which grows to its size the first time; all ranks' positions advance alike.
    pub fn next(&mut self, out: &mut MicroBatch) {
        let (batch, len) = (self.options.batch_size, self.source.max_len());
        out.tokens.resize(batch * len, 0);
        out.targets.resize(batch * len, 0);
        out.positions.resize(batch * len, 0);
        out.cu_seqlens.clear();
        out.cu_seqlens.reserve(2 * batch + 1);
        out.cu_seqlens.push(0);
        let first = self.position + (self.options.dp_rank * batch) as u64;
        for b in 0..batch {
            let row = self.row(first + b as u64);
            let all = b * len..(b + 1) * len;
            let used = self.source.fill(row, &mut out.tokens[all.clone()], &mut out.targets[all.clone()]);
            let (document, padding) = out.positions[all].split_at_mut(used);
            for part in [document, padding] {
                part.iter_mut().zip(0..).for_each(|(position, i)| *position = i);
                if !part.is_empty() {
                    out.cu_seqlens.push(out.cu_seqlens[out.cu_seqlens.len() - 1] + part.len() as u32);
                }
            }
        }
        self.position += (batch * self.options.dp_size) as u64;
    }
}

impl LoaderOptions {
    /// Rows of an optimizer step.
    pub fn global_batch(&self) -> u64 {
        (self.batch_size * self.grad_accum * self.dp_size) as u64
    }
}

fn order(rows: u64, seed: u64, epoch: u64) -> Permutation {
    Permutation::new(rows, Rng::new(Rng::named(seed, "order of rows").key(), epoch))
}

/// Rows to hold out of `rows`; see [Note: held-out rows].
fn held_out(rows: u64, global: u64) -> u64 {
    let batches = (rows / 100).min(256) / global;
    let held = batches.max(1) * global;
    if held > rows / 10 { 0 } else { held }
}
