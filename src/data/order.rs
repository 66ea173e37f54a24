//! Maps sample n to a row of the data set. Never reads a row; its only state is the last permutation of each source.
use super::blend::Blend;
use super::permutation::Permutation;
use crate::base::rng::Rng;
use std::ops::Range;
use std::sync::Arc;

/// An endless sequence of rows.
///
/// [Note: epochs] Without a blend: epoch 0, epoch 1, ..., where an epoch has every row once, in file order or permuted
/// by (seed, epoch). With a blend, the blend picks the source of each sample, and each source is such a sequence of its
/// own: an exhausted source starts over with a new permutation. An epoch of a mixture is as long as the number of rows
/// of all sources; within it a source may be read less than once, or several times.
pub(super) struct RowOrder {
    sources: Vec<SourceRows>,
    blend: Option<Arc<Blend>>,
    shuffle: bool,
    rows: u64,
}

struct SourceRows {
    /// Row numbers within the data set.
    rows: Range<u64>,
    key: Rng,
    /// The permutation of the epoch last asked for.
    order: (u64, Permutation),
}

impl RowOrder {
    /// One range of rows per source. Without a blend, several sources are concatenated.
    pub fn new(sources: Vec<Range<u64>>, blend: Option<Arc<Blend>>, shuffle: bool, seed: u64) -> RowOrder {
        let source = |(i, rows): (usize, Range<u64>)| {
            let name = if i == 0 { "order of rows".into() } else { format!("order of rows {i}") };
            let key = Rng::named(seed, &name);
            SourceRows { order: (0, permutation(&rows, key, 0)), rows, key }
        };
        let rows = sources.iter().map(|rows| rows.end - rows.start).sum();
        RowOrder { sources: sources.into_iter().enumerate().map(source).collect(), blend, shuffle, rows }
    }
    /// Samples per epoch.
    pub fn rows(&self) -> u64 {
        self.rows
    }
    /// The row of sample `n`.
    pub fn row(&mut self, n: u64) -> u64 {
        let (source, n) = match &self.blend {
            Some(blend) => blend.at(n),
            None if self.sources.len() == 1 => (0, n),
            None => self.one_after_the_other(n % self.rows),
        };
        let SourceRows { rows, key, order } = &mut self.sources[source];
        let len = rows.end - rows.start;
        let (epoch, i) = (n / len, n % len);
        if !self.shuffle {
            return rows.start + i;
        }
        if order.0 != epoch {
            *order = (epoch, permutation(rows, *key, epoch));
        }
        rows.start + order.1.at(i)
    }
    fn one_after_the_other(&self, mut n: u64) -> (usize, u64) {
        for (i, SourceRows { rows, .. }) in self.sources.iter().enumerate() {
            let len = rows.end - rows.start;
            if n < len {
                return (i, n);
            }
            n -= len;
        }
        (0, 0)
    }
    /// For a mixture: samples of each source among the first `n`.
    pub fn counts(&self, n: u64) -> Vec<u64> {
        self.blend.as_ref().map_or(Vec::new(), |blend| blend.counts(n))
    }
}

fn permutation(rows: &Range<u64>, key: Rng, epoch: u64) -> Permutation {
    Permutation::new(rows.end - rows.start, Rng::new(key.key(), epoch))
}
