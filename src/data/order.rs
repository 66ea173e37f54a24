//! Which row of a data set sample n is. Never reads a row, and keeps no state but the last permutation of each source.
use super::blend::Blend;
use super::permutation::Permutation;
use crate::base::rng::Rng;
use std::ops::Range;
use std::sync::Arc;

/// An endless sequence of rows.
///
/// [Note: epochs] Without a blend: epoch 0, epoch 1, ... where an epoch has every row once, as they are numbered or
/// permuted by (seed, epoch). With one, the blend says which source a sample comes from, and each source is such a
/// sequence of its own: one that ends starts over, permuted anew. As many samples as there are rows are an epoch of the
/// mixture, in which a source may have been read less than once, or several times.
pub(super) struct RowOrder {
    sources: Vec<SourceRows>,
    blend: Option<Arc<Blend>>,
    shuffle: bool,
    rows: u64,
}

struct SourceRows {
    /// Numbers in the data set.
    rows: Range<u64>,
    key: Rng,
    /// Of the epoch that was last asked for.
    order: (u64, Permutation),
}

impl RowOrder {
    /// Of these rows of each source; of several without a blend, one after the other.
    pub fn new(sources: Vec<Range<u64>>, blend: Option<Arc<Blend>>, shuffle: bool, seed: u64) -> RowOrder {
        let source = |(i, rows): (usize, Range<u64>)| {
            let name = if i == 0 { "order of rows".into() } else { format!("order of rows {i}") };
            let key = Rng::named(seed, &name);
            SourceRows { order: (0, permutation(&rows, key, 0)), rows, key }
        };
        let rows = sources.iter().map(|rows| rows.end - rows.start).sum();
        RowOrder { sources: sources.into_iter().enumerate().map(source).collect(), blend, shuffle, rows }
    }
    /// Samples of an epoch.
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
    /// Of a mixture: samples of each source among the first `n`.
    pub fn counts(&self, n: u64) -> Vec<u64> {
        self.blend.as_ref().map_or(Vec::new(), |blend| blend.counts(n))
    }
}

fn permutation(rows: &Range<u64>, key: Rng, epoch: u64) -> Permutation {
    Permutation::new(rows.end - rows.start, Rng::new(key.key(), epoch))
}
