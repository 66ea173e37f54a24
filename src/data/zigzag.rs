//! Which rows of a micro-batch each rank of a ring works on. Never touches a device.
//!
//! [Note: zigzag] Under a causal mask the last token of a document sees all of it and the first one itself only. So
//! each document is cut in 2R chunks, R the ranks, and rank r takes chunks r and 2R - 1 - r: one with few keys, one
//! with many, the same number of both together on every rank. No length needs to divide: chunks of a document differ by
//! one row at most, and the rows left over go round the ranks, on from document to document, so that ranks differ by
//! one row at most. Of what is then left, the batch is *padded*: fewer than R rows at its end, a document of its own
//! that nobody else sees and that has no loss. So every rank has as many rows as the others.
use super::batch::MicroBatch;
use crate::device::IGNORE;

/// One rank's part of a micro-batch; filled again and again in the same buffers.
pub struct ZigzagCut {
    index: usize,
    of: usize,
    /// Tokens, targets and positions of this rank's rows; documents of the whole batch, padding included.
    pub part: MicroBatch,
    /// (ranks, N): the rows of the whole batch that each rank has, rising.
    pub rows: Vec<u32>,
}

impl ZigzagCut {
    /// For rank `index` of `of` and batches of up to `tokens` tokens.
    pub fn new(index: usize, of: usize, tokens: usize) -> ZigzagCut {
        let n = tokens.div_ceil(of);
        let part = MicroBatch {
            tokens: Vec::with_capacity(n),
            targets: Vec::with_capacity(n),
            positions: Vec::with_capacity(n),
            cu_seqlens: Vec::with_capacity(tokens + 2),
        };
        ZigzagCut { index, of, part, rows: Vec::with_capacity(n * of) }
    }

    /// Replaces what was there. A batch without targets stays without.
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
        deal(&part.cu_seqlens, self.of, rows);

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

/// Assigns `rows` (ranks, N): see [Note: zigzag]. The documents of `cu_seqlens` hold ranks * N rows.
fn deal(cu_seqlens: &[u32], ranks: usize, rows: &mut [u32]) {
    let n = rows.len() / ranks;
    // Rank r has as many rows of earlier documents as their whole chunks give each, `dealt`, and of the rows left over,
    // of which the next one goes to rank `turn`, `extra` as all before it.
    let (mut dealt, mut left) = (0, 0);
    for document in cu_seqlens.windows(2) {
        let (start, len) = (document[0], (document[1] - document[0]) as usize);
        let (chunk, rest) = (len / (2 * ranks), len % (2 * ranks));
        // Of `count` rows left over since the first document, those of `rank`.
        let share = |count: usize, rank: usize| (count + ranks - 1 - rank) / ranks;
        let mut row = start;
        for c in 0..2 * ranks {
            let (rank, late) = (c.min(2 * ranks - 1 - c), c >= ranks);
            let (before, extra) = (share(left, rank), share(left + rest, rank) - share(left, rank));
            // One row left over goes to the late chunk, a second one to the early chunk.
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

    /// A batch whose documents have these lengths; tokens and targets name their rows.
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
    /// Pairs (query, key) that each rank's queries see.
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
                    let mut cut = ZigzagCut::new(index, of, tokens);
                    cut.fill(&self::batch(&[1, 2])); // what was there before is gone
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
        let mut cut = ZigzagCut::new(1, 4, 64);
        cut.fill(&batch(&[32, 32]));
        let chunks = [4..8, 24..28, 36..40, 56..60].map(|rows: std::ops::Range<u32>| rows);
        assert!(cut.rows[16..32].iter().copied().eq(chunks.into_iter().flatten()), "{:?}", cut.rows);
        for of in [2, 4, 8] {
            for lengths in [&[16 * of][..], &[8 * of, 8 * of, 8 * of], &[2 * of, 64 * of]] {
                let mut cut = ZigzagCut::new(0, of, 80 * of);
                cut.fill(&batch(lengths));
                let pairs = pairs(&cut);
                assert!(pairs.iter().all(|&p| p == pairs[0]), "{lengths:?} over {of}: {pairs:?}");
            }
        }
    }

    /// A row more or less at the end of a document is at most its length in pairs, so ranks differ by less than that
    /// and the chunk's own difference for each document; long documents, which are most of the work, balance best.
    #[test]
    fn packed_samples_of_any_length_balance() {
        let lengths = [1237, 501, 63, 8, 911, 29, 1, 777, 350, 219];
        for of in [2, 4, 8] {
            let mut cut = ZigzagCut::new(0, of, 5000);
            cut.fill(&batch(&lengths));
            let pairs = pairs(&cut);
            let (most, mean) = (*pairs.iter().max().unwrap(), pairs.iter().sum::<u64>() as f64 / of as f64);
            assert!(most as f64 / mean < 1.015, "{pairs:?}");
        }
    }

    #[test]
    fn prompts_have_no_targets() {
        let mut cut = ZigzagCut::new(0, 2, 8);
        cut.fill(&MicroBatch { targets: vec![], ..batch(&[7]) });
        assert!(cut.part.targets.is_empty() && cut.part.tokens.len() == 4);
    }
}
