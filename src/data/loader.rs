//! Assigns rows to ranks, micro-batches and steps. Never communicates: everything is computed from one number, the
//! samples consumed so far by all ranks together.
use super::batch::MicroBatch;
use super::dataset::Dataset;
use super::format::SampleKind;
use super::groups;
use super::order::RowOrder;
use super::packing::{self, WINDOW, Window};
use crate::base::rng::Rng;
use crate::base::{Error, Result};
use crate::device::IGNORE;
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub struct LoaderOptions {
    /// Rows per micro-batch and rank.
    pub batch_size: usize,
    /// Micro-batches per optimizer step.
    pub grad_accum: usize,
    /// Index among the ranks that see different samples.
    pub dp_rank: usize,
    pub dp_size: usize,
    /// A new pseudorandom order each epoch. Otherwise rows come in file order.
    pub shuffle: bool,
    pub seed: u64,
    /// Pack several whole samples into each sequence.
    pub packing: bool,
    /// Balance the lengths of a step's samples across ranks. Ignored with packing or without shuffle.
    pub by_length: bool,
    /// Steps in a row that consume the same rows.
    pub passes: usize,
    /// Rows at the end of each source that are not trained on, as fixed when the run first started. None: computed by
    /// [`held_out`].
    pub held_out: Option<Vec<u64>>,
}

/// One rank's share of an optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepData {
    /// `grad_accum` micro-batches.
    pub batches: Vec<MicroBatch>,
    /// Samples in this step, and below tokens, on all ranks.
    pub samples: u64,
    pub tokens: u64,
    /// Sequences of these samples.
    pub sequences: u64,
    /// Samples consumed by all ranks after this step.
    pub position: u64,
    /// For a mixture: `position` by source.
    pub by_source: Vec<u64>,
}

impl StepData {
    /// This rank's positions with loss.
    pub fn loss_tokens(&self) -> u64 {
        self.batches.iter().map(MicroBatch::loss_tokens).sum()
    }
}

/// Fills micro-batches with one rank's rows.
///
/// [Note: which row goes where] `RowOrder` maps sample n to a row. An optimizer step consumes the next G = batch_size *
/// grad_accum * dp samples: sample `n + (micro * dp + rank) * batch_size + b` is row b of that rank's micro-batch. So a
/// step has the same set of rows however G is split, and a step that crosses the end of an epoch continues into the
/// next. With `by_length` (and shuffle, and rows of different lengths) `packing::deal` distributes the samples of a
/// step over its micro-batches: the same set, in other places.
///
/// [Note: packing] Samples are packed in windows: an epoch is divided into the fewest of equal length (give or take one
/// sample) that is at most `WINDOW`, so that no window has samples of two epochs, and each epoch is whole. Window w is
/// packed and ordered by `Window::pack` from (seed, w), in sequences of at most `max_len` tokens. A step takes the next
/// G sequences and places them like rows without packing. So neither which samples share a sequence nor which are in a
/// step depends on how G is split, and the number of samples consumed still determines the position: whole windows,
/// then whole sequences in the window's order.
///
/// [Note: held-out rows] The last rows of the dataset are reserved for evaluation and never trained on: 1 %, at least 8
/// and at most 256. None of rollouts, which were drawn to be trained on; none if that would exceed a tenth of the
/// dataset, and none of the rows of a JSONL file without shuffle: listing rows in order means that each one counts. A
/// fine-tune holds out a tenth of a small dataset. Each source of a mixture holds out its own. Batch size and mesh have
/// no influence, and checkpoints store the number, so that a resumed run neither trains on held-out rows nor changes
/// the order of an epoch.
pub struct Loader {
    source: Arc<Dataset>,
    options: LoaderOptions,
    order: RowOrder,
    /// The rows of each source that this loader does not use.
    held: Vec<Range<u64>>,
    /// Reads each row once and pads its last step with loss-free rows.
    evaluates: bool,
    position: u64,
    /// For a mixture: samples of each source so far.
    by_source: Vec<u64>,
    /// With packing: the current window, and how many of its sequences are consumed.
    window: Window,
    taken: usize,
    lengths: Vec<u32>,
    /// The rows of the current step by sequence, and where each sequence ends.
    dealt: Vec<u64>,
    ends: Vec<usize>,
    /// By row: of its two sequences, or of its own answer and its mismatched one.
    reference: Option<Arc<[[f64; 2]]>>,
    /// Rows that count; the rest pad the last batch of an evaluation and have no loss.
    count: usize,
}

impl Loader {
    /// A loader over the rows that are not held out.
    pub fn new(source: Arc<Dataset>, options: LoaderOptions) -> Result<Loader> {
        let LoaderOptions { batch_size, grad_accum, dp_rank, dp_size, .. } = options;
        let sizes =
            [("batch_size", batch_size), ("grad_accum", grad_accum), ("dp_size", dp_size), ("passes", options.passes)];
        if let Some((name, _)) = sizes.into_iter().find(|(_, n)| *n == 0) {
            return Err(Error::input(format!("{name} is 0: it must be at least 1")));
        }
        if dp_rank >= dp_size {
            return Err(Error::op("loader", format!("dp_rank {dp_rank} of {dp_size}")));
        }
        let (rows, global) = (source.rows(), options.global_batch());
        // With one sample per rank a step cannot be smaller: it goes on with rows that it already has.
        let least = batch_size * grad_accum == 1;
        if source.draws_samples() && rows < dp_size as u64 {
            return Err(Error::input(format!(
                "the dataset has {rows} prompt{}, fewer than the {dp_size} data-parallel ranks, which would draw the same \
                 samples of it: add prompts, or use fewer ranks",
                if rows == 1 { "" } else { "s" }
            )));
        }
        if rows < global && !least && !options.packing {
            return Err(Error::input(format!(
                "the dataset has {rows} rows of {} tokens, but a step takes {global} = batch_size {batch_size} * \
                 grad_accum {grad_accum} * data-parallel ranks {dp_size}. Add data, or reduce `batch_size`, \
                 `grad_accum` or `max_len`; with the first two at 1, a step repeats rows",
                source.max_len()
            )));
        }
        let held = options.held_out.clone().unwrap_or_else(|| held_out(&source, options.shuffle, false));
        if held.len() != source.numbers().count() {
            return Err(Error::op("loader", "held_out needs one number per source"));
        }
        let (mut train, mut kept) = (Vec::new(), Vec::new());
        for ((numbers, _), held) in source.numbers().zip(&held) {
            let rows = numbers.end - numbers.start;
            if *held >= rows {
                return Err(Error::input(format!(
                    "the dataset has {rows} rows, and all of them are held out ({held})"
                )));
            }
            train.push(numbers.start..numbers.end - held);
            kept.push(numbers.end - held..numbers.end);
        }
        let order = RowOrder::new(train, source.blend().cloned(), options.shuffle, options.seed);
        let mut loader = Loader::over(source, options, order);
        loader.held = kept;
        if loader.options.packing && loader.rows_per_epoch() <= WINDOW {
            loader.seek(0);
            let sequences = loader.window.sequences();
            if (sequences as u64) < global && !least {
                return Err(Error::input(format!(
                    "the dataset has {} rows to train on, which pack into {sequences} sequences of {} tokens, but a \
                     step takes {global} = batch_size {batch_size} * grad_accum {grad_accum} * data-parallel ranks \
                     {dp_size}. Add data, reduce `batch_size`, `grad_accum` or `max_len`, or disable `packing_samples`",
                    loader.rows_per_epoch(),
                    loader.source.max_len()
                )));
            }
        }
        Ok(loader)
    }
    /// A loader over the held-out rows, in order; `None` if there are none. The last global batch is padded with
    /// loss-free rows.
    pub fn held_out(&self) -> Option<Loader> {
        let held: Vec<Range<u64>> = self.held.iter().filter(|rows| !rows.is_empty()).cloned().collect();
        let loader = |held| Loader::in_order(self.source.clone(), &self.options, held).compare(self.reference.clone());
        (!held.is_empty()).then(|| loader(held))
    }
    /// A loader over all rows of a data set, in order, padded like the held-out ones.
    pub fn evaluating(source: Arc<Dataset>, options: &LoaderOptions) -> Loader {
        let rows = source.numbers().map(|(numbers, _)| numbers).collect();
        Loader::in_order(source, options, rows)
    }
    fn in_order(source: Arc<Dataset>, options: &LoaderOptions, rows: Vec<Range<u64>>) -> Loader {
        let options = LoaderOptions { shuffle: false, packing: false, by_length: false, passes: 1, ..options.clone() };
        let order = RowOrder::new(rows, None, false, options.seed);
        Loader { evaluates: true, ..Loader::over(source, options, order) }
    }
    fn over(source: Arc<Dataset>, options: LoaderOptions, order: RowOrder) -> Loader {
        let by_length = options.by_length && options.shuffle && source.has_rows_of_its_own();
        Loader {
            source,
            options: LoaderOptions { by_length, ..options },
            held: Vec::new(),
            evaluates: false,
            position: 0,
            by_source: order.counts(0),
            order,
            window: Window::default(),
            taken: 0,
            lengths: Vec::new(),
            dealt: Vec::new(),
            ends: Vec::new(),
            reference: None,
            count: 0,
        }
    }

    /// Micro-batches come with the reference's summed token losses, which are two per row of the data set: of a pair's
    /// sequences, or of an answer and its mismatched one.
    pub fn compare(self, reference: Option<Arc<[[f64; 2]]>>) -> Loader {
        Loader { reference, ..self }
    }
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.source
    }
    pub fn rows_per_epoch(&self) -> u64 {
        self.order.rows()
    }
    /// Samples consumed by all ranks so far: the loader's whole state.
    pub fn position(&self) -> u64 {
        self.position
    }
    /// Moves to any position: a resumed run may use another batch size or number of ranks.
    ///
    /// With packing, a position between sequences is kept. A position inside a sequence, which only a run with another
    /// `max_len` or seed can have left, moves to the end of that sequence.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
        if self.options.packing {
            let window = self.window_at(position);
            self.pack(window);
            self.position = self.window_start(window);
        }
        self.by_source = self.order.counts(self.position);
        while self.position < position {
            self.dealt.clear();
            self.ends.clear();
            self.take_sequence();
        }
    }
    /// Where passes over its rows end.
    pub fn epochs(&self) -> Epochs {
        let LoaderOptions { passes, .. } = self.options;
        Epochs { rows: self.rows_per_epoch(), global_batch: self.options.global_batch(), passes: passes as u64 }
    }
    /// Optimizer steps from here until `position` samples are consumed, in all their passes, but at most `most`.
    pub fn steps_until(&mut self, position: u64, most: u64) -> u64 {
        let mut steps = 0;
        if !self.options.packing {
            let once = position.saturating_sub(self.position).div_ceil(self.options.global_batch());
            return once.saturating_mul(self.options.passes as u64).min(most);
        }
        while self.position < position && steps < most {
            self.take_packed();
            steps += 1;
        }
        steps
    }
    /// The row number of sample `n` of all ranks.
    pub fn row(&mut self, n: u64) -> u64 {
        self.order.row(n)
    }

    /// Writes this rank's next step to `out`, whose buffers grow to size on first use. All ranks' positions advance
    /// together.
    pub fn next(&mut self, out: &mut StepData) {
        match self.options.packing {
            true => self.take_packed(),
            false => self.take_rows(),
        }
        let LoaderOptions { batch_size, grad_accum, dp_rank, dp_size, .. } = self.options;
        out.batches.resize_with(grad_accum, MicroBatch::default);
        for (micro, batch) in out.batches.iter_mut().enumerate() {
            let sequence = (micro * dp_size + dp_rank) * batch_size;
            let start = if sequence == 0 { 0 } else { self.ends[sequence - 1] };
            let samples = start..self.ends[sequence + batch_size - 1];
            self.fill(samples.clone(), batch);
            if self.source.kind() == SampleKind::Labeled {
                self.fill_mismatched(samples, batch.mismatched.get_or_insert_default());
            }
        }
        out.samples = self.count as u64;
        out.sequences = self.dealt[..self.count].iter().map(|&row| self.source.sequences(row) as u64).sum();
        out.tokens = self.dealt[..self.count].iter().map(|&row| self.source.row_len(row) as u64).sum();
        out.position = self.position;
        out.by_source.clone_from(&self.by_source);
    }

    /// The next G samples, one per sequence.
    fn take_rows(&mut self) {
        let global = self.options.global_batch();
        self.dealt.clear();
        for n in self.position..self.position + global {
            let row = self.row(self.options.sample(n));
            self.dealt.push(row);
        }
        self.ends.clear();
        self.ends.extend(1..=global as usize);
        let left = if self.evaluates { self.rows_per_epoch().saturating_sub(self.position) } else { global };
        self.count = left.min(global) as usize;
        self.position += global;
        self.tally(0);
        if self.options.by_length {
            let LoaderOptions { batch_size, dp_size, .. } = self.options;
            let length = |row| self.source.row_len(row);
            self.dealt.sort_by_key(|&row| std::cmp::Reverse(length(row)));
            packing::deal(&mut self.dealt, length, batch_size, dp_size);
        }
    }

    /// The samples of the next G sequences.
    fn take_packed(&mut self) {
        self.dealt.clear();
        self.ends.clear();
        for _ in 0..self.options.global_batch() {
            while self.window.number.is_none() || self.taken == self.window.sequences() {
                let next = self.window.number.map_or(0, |n| n + 1);
                self.pack(next);
            }
            self.take_sequence();
        }
        self.count = self.dealt.len();
    }
    /// The samples of the window's next sequence.
    fn take_sequence(&mut self) {
        let first = self.window_start(self.window.number.unwrap_or(0));
        let before = self.dealt.len();
        for i in 0..self.window.sequence(self.taken).len() {
            let row = self.row(first + self.window.sequence(self.taken)[i] as u64);
            self.dealt.push(row);
        }
        self.tally(before);
        self.position += (self.dealt.len() - before) as u64;
        self.ends.push(self.dealt.len());
        self.taken += 1;
    }
    /// For a mixture, counts the rows of `dealt` from index `from` on by source.
    fn tally(&mut self, from: usize) {
        if !self.by_source.is_empty() {
            self.dealt[from..].iter().for_each(|&row| self.by_source[self.source.source_of(row)] += 1);
        }
    }

    /// The first sample of a window. See [Note: packing].
    fn window_start(&self, window: u64) -> u64 {
        let rows = self.rows_per_epoch();
        let windows = rows.div_ceil(WINDOW);
        window / windows * rows + window % windows * rows / windows
    }
    /// The window of a sample.
    fn window_at(&self, sample: u64) -> u64 {
        let rows = self.rows_per_epoch();
        let windows = rows.div_ceil(WINDOW);
        sample / rows * windows + ((sample % rows + 1) * windows).div_ceil(rows) - 1
    }
    fn pack(&mut self, window: u64) {
        self.taken = 0;
        if self.window.number == Some(window) {
            return;
        }
        self.lengths.clear();
        for n in self.window_start(window)..self.window_start(window + 1) {
            let row = self.row(n);
            self.lengths.push(self.source.row_room(row) as u32);
        }
        let shuffle = self.options.shuffle.then(|| Rng::named(self.options.seed, "order of sequences"));
        self.window.pack(window, &self.lengths, self.source.max_len() as u32, shuffle);
    }

    /// Concatenates the rows `dealt[range]`.
    fn fill(&self, range: Range<usize>, out: &mut MicroBatch) {
        out.begin(self.options.batch_size * self.source.max_len());
        let (mut at, mut lengths) = (0, Vec::new());
        for i in range {
            let row = self.dealt[i];
            let len = self.source.row_len(row);
            let targets = &mut out.targets[at..at + len];
            self.source.fill(row, &mut out.tokens[at..at + len], targets);
            lengths.clear();
            match self.source.kind() {
                SampleKind::Pair | SampleKind::Group => lengths.extend(groups::sequences(targets).map(<[i32]>::len)),
                SampleKind::Tokens | SampleKind::Labeled => lengths.push(len),
            }
            self.source.record(row, targets, &mut out.recorded);
            out.numbers.extend(self.source.number(row));
            if let Some(reference) = &self.reference {
                out.reference.extend(&reference[row as usize][..self.source.kind().sequences()]);
            }
            if i >= self.count {
                targets.fill(IGNORE);
            }
            for &len in &lengths {
                at = out.end_document(len);
            }
        }
        out.tokens.truncate(at);
        out.targets.truncate(at);
    }
    /// Concatenates the prompts of the rows `dealt[range]`, each with another row's answer.
    fn fill_mismatched(&self, range: Range<usize>, out: &mut MicroBatch) {
        out.begin(self.options.batch_size * self.source.max_len());
        let mut at = 0;
        for i in range {
            let Some(mismatched) = self.source.mismatched(self.dealt[i]) else { continue };
            let own = at..at + mismatched.len;
            mismatched.fill(&mut out.tokens[own.clone()], &mut out.targets[own.clone()]);
            if i >= self.count {
                out.targets[own].fill(IGNORE);
            }
            out.reference.extend(self.reference.iter().map(|reference| reference[self.dealt[i] as usize][1]));
            at = out.end_document(mismatched.len);
        }
        out.tokens.truncate(at);
        out.targets.truncate(at);
    }
}

impl LoaderOptions {
    /// Sequences per optimizer step.
    pub fn global_batch(&self) -> u64 {
        (self.batch_size * self.grad_accum * self.dp_size) as u64
    }
    /// The sample that is consumed as number `n`.
    fn sample(&self, n: u64) -> u64 {
        let (global, passes) = (self.global_batch(), self.passes as u64);
        n / (global * passes) * global + n % global
    }
}

/// Where passes over the rows of a run end among its samples.
#[derive(Clone, Copy, Debug)]
pub struct Epochs {
    rows: u64,
    global_batch: u64,
    /// Updates on the same samples.
    passes: u64,
}

impl Epochs {
    /// Whether one of `parts` equal parts of a pass ends in the step that consumes these samples.
    pub fn end(&self, parts: u64, samples: Range<u64>) -> bool {
        let rows = |samples: u64| match self.passes {
            1 => samples,
            passes => samples / (self.global_batch * passes) * self.global_batch,
        };
        let done = |samples: u64| u128::from(rows(samples)) * u128::from(parts) / u128::from(self.rows.max(1));
        done(samples.end) > done(samples.start)
    }
}

/// Rows of each source that a run on `source` holds out; see [Note: held-out rows]. `small`: also of small data sets.
pub fn held_out(source: &Dataset, shuffle: bool, small: bool) -> Vec<u64> {
    let of = |(numbers, own): (Range<u64>, bool)| {
        let rows = numbers.end - numbers.start;
        let (held, tenth) = ((rows / 100).clamp(8, 256), rows / 10);
        match (own && !shuffle || source.kind() == SampleKind::Group, held > tenth) {
            (true, _) => 0,
            (_, true) => {
                if small {
                    tenth
                } else {
                    0
                }
            }
            (_, false) => held,
        }
    };
    source.numbers().map(of).collect()
}

/// Rows of each source to hold out, by the user's choice: a fraction below 1, rounded up, or a number.
pub fn held_out_share(source: &Dataset, share: f64) -> Vec<u64> {
    let of = |rows: u64| (if share < 1.0 { (rows as f64 * share).ceil() } else { share } as u64).min(rows);
    source.numbers().map(|(numbers, _)| of(numbers.end - numbers.start)).collect()
}

/// Rows held out by runs started with an earlier version of this program: 1 %, rounded to whole steps of `global`
/// sequences.
pub fn held_out_by_steps(source: &Dataset, shuffle: bool, global: u64) -> u64 {
    let batches = (source.rows() / 100).min(256) / global.max(1);
    let held = batches.max(1) * global;
    if held > source.rows() / 10 || (source.has_rows_of_its_own() && !shuffle) { 0 } else { held }
}
