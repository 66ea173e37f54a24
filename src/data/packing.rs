//! Assigns samples to sequences. Never reads tokens, only lengths.
use super::permutation::Permutation;
use crate::base::rng::Rng;

/// Samples packed together: enough to make the few underfull sequences at the end of a window negligible, and few
/// enough to pack in milliseconds.
pub(super) const WINDOW: u64 = 4096;

/// One window of samples packed into sequences. All vectors keep their capacity.
#[derive(Default)]
pub(super) struct Window {
    /// The window's number; None before the first.
    pub number: Option<u64>,
    /// The window's samples grouped by sequence, ascending within each.
    members: Vec<u32>,
    /// Start of each sequence in `members`, then the number of samples.
    starts: Vec<u32>,
    /// The order of the sequences.
    order: Vec<u32>,
    /// Scratch: samples by falling length; the sequence of each sample; the space left in each sequence.
    longest_first: Vec<u32>,
    sequence: Vec<u32>,
    room: Vec<u32>,
}

impl Window {
    /// First-fit decreasing (Johnson 1974: at most 11/9 of the optimum plus 4 sequences): longest samples first, each
    /// goes into the first sequence with room for all of it. No length exceeds `capacity`. Sequences are then ordered
    /// by `shuffle`, or by their first sample: in packing order all long samples would precede the short ones.
    pub fn pack(&mut self, number: u64, lengths: &[u32], capacity: u32, shuffle: Option<Rng>) {
        let n = lengths.len();
        self.number = Some(number);
        self.longest_first.clear();
        self.longest_first.extend(0..n as u32);
        self.longest_first.sort_unstable_by_key(|&i| (std::cmp::Reverse(lengths[i as usize]), i));
        let shortest = lengths.iter().copied().min().unwrap_or(0);
        self.sequence.clear();
        self.sequence.resize(n, 0);
        self.room.clear();
        let mut full = 0; // leading sequences with no room for any sample
        for &i in &self.longest_first {
            let len = lengths[i as usize];
            let fits = self.room[full..].iter().position(|&room| room >= len).map(|at| full + at);
            let at = fits.unwrap_or(self.room.len());
            if fits.is_none() {
                self.room.push(capacity);
            }
            self.room[at] -= len;
            self.sequence[i as usize] = at as u32;
            while self.room.get(full).is_some_and(|&room| room < shortest) {
                full += 1;
            }
        }
        self.gather();
        let sequences = self.room.len();
        self.order.clear();
        match shuffle {
            Some(rng) => {
                let permutation = Permutation::new(sequences as u64, Rng::new(rng.key(), number));
                self.order.extend((0..sequences as u64).map(|i| permutation.at(i) as u32));
            }
            None => {
                self.order.extend(0..sequences as u32);
                self.order.sort_unstable_by_key(|&s| self.members[self.starts[s as usize] as usize]);
            }
        }
    }

    /// `members` and `starts` from `sequence`: a counting sort.
    fn gather(&mut self) {
        self.starts.clear();
        self.starts.resize(self.room.len() + 1, 0);
        self.sequence.iter().for_each(|&s| self.starts[s as usize + 1] += 1);
        for s in 0..self.room.len() {
            self.starts[s + 1] += self.starts[s];
        }
        self.members.clear();
        self.members.resize(self.sequence.len(), 0);
        // From here on `room` is the next free slot of each sequence.
        let sequences = self.room.len();
        self.room.copy_from_slice(&self.starts[..sequences]);
        for (i, &s) in self.sequence.iter().enumerate() {
            self.members[self.room[s as usize] as usize] = i as u32;
            self.room[s as usize] += 1;
        }
    }

    pub fn sequences(&self) -> usize {
        self.order.len()
    }
    /// Samples of the `at`-th sequence, numbered within the window.
    pub fn sequence(&self, at: usize) -> &[u32] {
        let s = self.order[at] as usize;
        &self.members[self.starts[s] as usize..self.starts[s + 1] as usize]
    }
}

/// Balances lengths: distributes samples over micro-batches of `batch` samples, `ranks` of which run at the same time.
/// `order` holds samples by falling length, and is rewritten as the samples of micro-batch 0 of rank 0, of rank 1, and
/// so on.
///
/// Ranks wait for each other in every micro-batch, so the slowest rank counts. Each round takes samples of similar
/// length, and each sample goes to the rank with the fewest tokens among those with a free slot.
pub(super) fn deal(order: &mut [u64], lengths: impl Fn(u64) -> usize, batch: usize, ranks: usize) {
    let mut dealt = vec![0; batch * ranks];
    let mut hands = vec![(0usize, 0usize); ranks]; // (tokens, samples)
    for together in order.chunks_mut(batch * ranks) {
        hands.fill((0, 0));
        for &mut sample in together.iter_mut() {
            let free = (0..ranks).filter(|&r| hands[r].1 < batch);
            let Some(rank) = free.min_by_key(|&r| hands[r].0) else { break };
            dealt[rank * batch + hands[rank].1] = sample;
            hands[rank].0 += lengths(sample);
            hands[rank].1 += 1;
        }
        together.copy_from_slice(&dealt[..together.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(lengths: &[u32], capacity: u32, shuffle: Option<Rng>) -> Vec<Vec<u32>> {
        let mut window = Window::default();
        window.pack(3, &[1; 50], 7, None); // a reused window keeps nothing
        window.pack(0, lengths, capacity, shuffle);
        (0..window.sequences()).map(|s| window.sequence(s).to_vec()).collect()
    }

    #[test]
    fn longest_samples_go_first_into_the_first_sequence_with_room() {
        let sequences = packed(&[5, 7, 5, 2, 4, 2, 5, 1], 10, None);
        assert_eq!(sequences, [vec![0, 2], vec![1, 3, 7], vec![4, 6], vec![5]]);
        assert!(packed(&[], 10, None).is_empty());
    }

    #[test]
    fn packing_keeps_every_sample_whole_and_wastes_little_space() {
        let rng = Rng::new(1, 2);
        for (n, most) in [(4096, 512), (4096, 64), (7, 512)] {
            // Skewed: most samples are short.
            let lengths: Vec<u32> = (0..n).map(|i| (1.0 + rng.uniform(i).powi(4) * (most - 1) as f64) as u32).collect();
            for shuffle in [None, Some(rng)] {
                let sequences = packed(&lengths, 512, shuffle);
                let mut seen: Vec<u32> = sequences.concat();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..n as u32));
                let sum = |s: &Vec<u32>| s.iter().map(|&i| lengths[i as usize]).sum::<u32>();
                assert!(sequences.iter().all(|s| s.is_sorted() && (1..=512).contains(&sum(s))));
                let total: u32 = lengths.iter().sum();
                assert!(sequences.len() as u32 <= total.div_ceil(512) + 1, "{} for {total} tokens", sequences.len());
            }
        }
    }

    #[test]
    fn ranks_get_similar_token_counts() {
        let lengths: Vec<usize> = (0..24).map(|i| [500, 10, 20, 300, 40, 80][i % 6] + i).collect();
        let mut order: Vec<u64> = (0..24).collect();
        order.sort_by_key(|&s| std::cmp::Reverse(lengths[s as usize]));
        deal(&mut order, |s| lengths[s as usize], 3, 4);
        let mut all = order.clone();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..24));
        for micro in order.chunks(12) {
            let ranks: Vec<usize> = micro.chunks(3).map(|r| r.iter().map(|&s| lengths[s as usize]).sum()).collect();
            let (least, most) = (ranks.iter().min().unwrap(), ranks.iter().max().unwrap());
            assert!(*most as f64 <= 1.35 * *least as f64, "{ranks:?}");
        }
    }
}
