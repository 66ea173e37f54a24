//! Splits a micro-batch over the ranks of sp. Never touches a device.
//!
//! [Note: zigzag] Under a causal mask the last token of a document attends to all of it and the first only to itself.
//! So each document is split into 2R chunks for R ranks, and rank r takes chunks r and 2R - 1 - r: one with few keys
//! and one with many, the same total on every rank. Lengths need not divide: chunks of a document differ by at most one
//! row, and leftover rows go to the ranks round-robin, continuing from document to document, so that ranks differ by at
//! most one row in total. That difference is *padded*: fewer than R rows at the end of the batch, a separate document
//! without loss, so that every rank has the same number of rows.
//!
//! Ranks that exchange heads for tokens (Ulysses) take one place in the ring together: each has the next N of its rows,
//! in order. Without a ring these are the rows of the batch, cut anywhere.
use super::batch::MicroBatch;
use crate::device::IGNORE;

/// One rank's share of a micro-batch. Its buffers are reused.
pub struct ZigzagCut {
    index: usize,
    of: usize,
    /// Consecutive ranks with one place in the ring.
    group: usize,
    /// This rank's tokens, targets and positions; document boundaries of the whole batch, padding included.
    pub part: MicroBatch,
    /// (ranks, N): the rows of the whole batch on each rank, ascending.
    pub rows: Vec<u32>,
}

impl ZigzagCut {
    /// For rank `index` of `of`, of which `group` exchange heads, and batches of up to `tokens` tokens.
    pub fn new(index: usize, of: usize, group: usize, tokens: usize) -> ZigzagCut {
        let n = tokens.div_ceil(of);
        let part = MicroBatch {
            tokens: Vec::with_capacity(n),
            targets: Vec::with_capacity(n),
            positions: Vec::with_capacity(n),
            cu_seqlens: Vec::with_capacity(tokens + 2),
            ..MicroBatch::default()
        };
        ZigzagCut { index, of, group, part, rows: Vec::with_capacity(n * of) }
    }

    /// The rows of the whole batch on this rank.
    pub fn own(&self) -> &[u32] {
        let n = self.rows.len() / self.of;
        &self.rows[self.index * n..][..n]
    }

    /// Replaces the previous contents. If the batch has no targets, neither has the share.
    pub fn fill(&mut self, batch: &MicroBatch) {
        let ZigzagCut { part, rows, .. } = self;
        let (tokens, n) = (batch.tokens.len(), batch.tokens.len().div_ceil(self.of));
        part.cu_seqlens.clear();
        part.cu_seqlens.extend(&batch.cu_seqlens);
        if n * self.of > tokens {
            part.cu_seqlens.push((n * self.of) as u32);
        }
        rows.clear();
        rows.resize(n * self.of, 0);
        deal(&part.cu_seqlens, self.of / self.group, rows);

        let mine = rows[self.index * n..][..n].iter().map(|&row| row as usize);
        part.tokens.clear();
        part.tokens.extend(mine.clone().map(|row| batch.tokens.get(row).copied().unwrap_or(0)));
        part.positions.clear();
        part.positions.extend(mine.clone().map(|row| batch.positions.get(row).copied().unwrap_or(0)));
        part.targets.clear();
        if !batch.targets.is_empty() {
            part.targets.extend(mine.map(|row| batch.targets.get(row).copied().unwrap_or(IGNORE)));
        }
    }
}

/// Fills `rows` (ranks, N): see [Note: zigzag]. The documents of `cu_seqlens` have ranks * N rows in total.
fn deal(cu_seqlens: &[u32], ranks: usize, rows: &mut [u32]) {
    let n = rows.len() / ranks;
    // The whole chunks of earlier documents gave every rank `dealt` rows; their `left` leftover rows went to the ranks
    // round-robin.
    let (mut dealt, mut left) = (0, 0);
    for document in cu_seqlens.windows(2) {
        let (start, len) = (document[0], (document[1] - document[0]) as usize);
        let (chunk, rest) = (len / (2 * ranks), len % (2 * ranks));
        // How many of the first `count` leftover rows are on `rank`.
        let share = |count: usize, rank: usize| (count + ranks - 1 - rank) / ranks;
        let mut row = start;
        for c in 0..2 * ranks {
            let (rank, late) = (c.min(2 * ranks - 1 - c), c >= ranks);
            let (before, extra) = (share(left, rank), share(left + rest, rank) - share(left, rank));
            // The first leftover row extends the late chunk, the second the early chunk.
            let early = chunk + extra / 2;
            let (skip, len) = if late { (early, chunk + extra.min(1)) } else { (0, early) };
            let at = rank * n + dealt + before + skip;
            rows[at..at + len].iter_mut().zip(row..).for_each(|(slot, row)| *slot = row);
            row += len as u32;
        }
        (dealt, left) = (dealt + 2 * chunk, left + rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch with documents of these lengths; tokens and targets encode their row.
    fn batch(lengths: &[usize]) -> MicroBatch {
        let mut batch = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
        for &len in lengths {
            batch.positions.extend(0..len as u32);
            batch.cu_seqlens.push(batch.positions.len() as u32);
        }
        batch.tokens = (100..100 + batch.positions.len() as u32).collect();
        batch.targets = batch.tokens.iter().map(|&t| t as i32 + 1000).collect();
        batch
    }
    /// Number of (query, key) pairs each rank's queries attend to.
    fn pairs(cut: &ZigzagCut) -> Vec<u64> {
        let n = cut.rows.len() / cut.of;
        let document = |row: u32| cut.part.cu_seqlens.partition_point(|&c| c <= row);
        let seen = |&row: &u32| u64::from(row - cut.part.cu_seqlens[document(row) - 1] + 1);
        cut.rows.chunks(n).map(|rows| rows.iter().map(seen).sum()).collect()
    }

    #[test]
    fn every_row_goes_to_one_rank_with_its_token_target_and_position() {
        for of in [1, 2, 3, 4, 8] {
            for lengths in [&[64][..], &[1], &[5, 0, 1, 1, 1, 37, 2], &[16, 16], &[7, 7, 7], &[3, 100]] {
                let (batch, mut seen) = (batch(lengths), vec![]);
                let tokens = batch.tokens.len();
                let n = tokens.div_ceil(of);
                for index in 0..of {
                    let mut cut = ZigzagCut::new(index, of, 1, tokens);
                    cut.fill(&self::batch(&[1, 2])); // previous contents must not leak
                    cut.fill(&batch);
                    let mine = &cut.rows[index * n..][..n];
                    assert!(mine.is_sorted_by(|a, b| a < b), "{lengths:?} over {of}: {:?}", cut.rows);
                    assert_eq!([cut.part.tokens.len(), cut.part.targets.len(), cut.part.positions.len()], [n; 3]);
                    assert_eq!(cut.part.cu_seqlens.last(), Some(&((n * of) as u32)));
                    for (i, row) in mine.iter().map(|&row| row as usize).enumerate() {
                        let part = (cut.part.tokens[i], cut.part.targets[i], cut.part.positions[i]);
                        let whole = match row < tokens {
                            true => (batch.tokens[row], batch.targets[row], batch.positions[row]),
                            false => (0, IGNORE, 0),
                        };
                        assert_eq!(part, whole);
                    }
                    seen.extend_from_slice(mine);
                }
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..(n * of) as u32), "{lengths:?} over {of}");
            }
        }
    }

    #[test]
    fn dense_sequences_are_two_chunks_and_the_same_work_for_each() {
        let mut cut = ZigzagCut::new(1, 4, 1, 64);
        cut.fill(&batch(&[32, 32]));
        let chunks = [4..8, 24..28, 36..40, 56..60].map(|rows: std::ops::Range<u32>| rows);
        assert!(cut.rows[16..32].iter().copied().eq(chunks.into_iter().flatten()), "{:?}", cut.rows);
        for of in [2, 4, 8] {
            for lengths in [&[16 * of][..], &[8 * of, 8 * of, 8 * of], &[2 * of, 64 * of]] {
                let mut cut = ZigzagCut::new(0, of, 1, 80 * of);
                cut.fill(&batch(lengths));
                let pairs = pairs(&cut);
                assert!(pairs.iter().all(|&p| p == pairs[0]), "{lengths:?} over {of}: {pairs:?}");
            }
        }
    }

    /// One row more or less at the end of a document is at most its length in pairs, so per document ranks differ by
    /// less than that plus the chunks' own difference. Long documents, which are most of the work, balance best.
    #[test]
    fn packed_samples_of_any_length_balance() {
        let lengths = [1237, 501, 63, 8, 911, 29, 1, 777, 350, 219];
        for of in [2, 4, 8] {
            let mut cut = ZigzagCut::new(0, of, 1, 5000);
            cut.fill(&batch(&lengths));
            let pairs = pairs(&cut);
            let (most, mean) = (*pairs.iter().max().unwrap(), pairs.iter().sum::<u64>() as f64 / of as f64);
            assert!(most as f64 / mean < 1.015, "{pairs:?}");
        }
    }

    #[test]
    fn prompts_have_no_targets() {
        let mut cut = ZigzagCut::new(0, 2, 1, 8);
        cut.fill(&MicroBatch { targets: vec![], ..batch(&[7]) });
        assert!(cut.part.targets.is_empty() && cut.part.tokens.len() == 4);
    }
}
