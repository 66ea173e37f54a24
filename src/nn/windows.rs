//! Which routed rows go to which rank of ep, in which round and which part of it, and where they arrive. Never
//! communicates, and never allocates after its creation.
//!
//! Rows are counted in [`super::dispatch`], which moves them.
use super::split::Slice;
use crate::device::View;
use std::ops::Range;

/// Rows on this rank, and the first row of each of its experts.
pub(super) type Held<'a> = (usize, View<'a>);

/// Most parts of a window.
pub(super) const HALVES: usize = 2;

/// Rows that a rank holds at once, when it routes `rows`: a quarter more than if experts are used evenly, so that most
/// steps take one round; never more than there can be.
pub fn capacity(rows: usize, ep: Slice) -> usize {
    if ep.of == 1 { rows } else { (rows + rows / 4).min(ep.of * rows) }
}

/// Rows of offsets: of a window; and of each of its parts, unless it has one.
pub(super) fn offset_rows(parts: usize) -> usize {
    if parts == 1 { 1 } else { 1 + parts }
}

/// Runs of rows of a window: in each part, those of each expert of this rank from each rank.
pub(super) fn run_rows(parts: usize, experts: usize, ep: Slice) -> usize {
    parts * ep.share(experts).len() * ep.of
}

/// Who sends which rows to whom. Only `parts` and what follows differ between the ranks of ep.
#[derive(Clone)]
pub(super) struct RowWindows {
    ep: Slice,
    experts: usize,
    capacity: usize,
    /// (ep, experts + 1): the first routed row of each expert on each rank.
    pub offsets: Vec<u32>,
    /// The round's window, or its halves.
    pub parts: Vec<WindowPart>,
    /// See [`super::dispatch::DispatchBuffers`].
    pub own: Vec<u32>,
    pub runs: Vec<u32>,
}

/// The rows of a round that travel at once.
#[derive(Clone)]
pub(super) struct WindowPart {
    /// Rows that this rank holds, and their places in `wire`.
    pub held: Range<usize>,
    /// Per peer: which of this rank's rows it gets, which of its rows this rank gets, and where those arrive.
    pub sends: Vec<Range<usize>>,
    comes: Vec<Range<usize>>,
    pub arrivals: Vec<Range<usize>>,
}

impl RowWindows {
    /// For `rows` routed rows of a rank, in `parts`.
    pub fn new(ep: Slice, experts: usize, rows: usize, parts: usize) -> RowWindows {
        let capacity = capacity(rows, ep);
        let there = |len: usize| vec![0; if ep.of > 1 { len } else { 0 }];
        let peers = || vec![0..0; ep.of];
        let part = || WindowPart { held: 0..0, sends: peers(), comes: peers(), arrivals: peers() };
        RowWindows {
            ep,
            experts,
            capacity,
            offsets: there(ep.of * (experts + 1)),
            parts: (0..parts).map(|_| part()).collect(),
            own: there(offset_rows(parts) * (ep.share(experts).len() + 1)),
            runs: there(3 * run_rows(parts, experts, ep)),
        }
    }

    /// If this rank's offsets end before its `rows`, because a device that only plans has counted nothing: all experts
    /// are used alike.
    pub fn assume(&mut self, rows: usize) {
        if self.first(self.ep.index, self.experts) < rows {
            let alike = |i: usize| (i % (self.experts + 1) * rows / self.experts) as u32;
            self.offsets.iter_mut().enumerate().for_each(|(i, at)| *at = alike(i));
        }
    }
    /// Rows that this rank holds in the round.
    pub fn held(&self) -> usize {
        self.parts.last().map_or(0, |part| part.held.end)
    }

    /// The first routed row of `expert` on a rank.
    fn first(&self, rank: usize, expert: usize) -> usize {
        self.offsets[rank * (self.experts + 1) + expert] as usize
    }
    /// The experts of a rank.
    fn experts_of(&self, rank: usize) -> Range<usize> {
        Slice { index: rank, of: self.ep.of }.share(self.experts)
    }
    /// Rows that a rank gets, in all rounds.
    fn incoming(&self, to: usize) -> usize {
        let own = self.experts_of(to);
        (0..self.ep.of).map(|from| self.first(from, own.end) - self.first(from, own.start)).sum()
    }
    /// At least 1, and the same on all ranks.
    pub fn rounds(&self) -> usize {
        (0..self.ep.of).map(|to| self.incoming(to)).max().unwrap_or(0).div_ceil(self.capacity).max(1)
    }
    /// The rows of part `index` of `round` among those that `to` gets, sorted by expert.
    fn window(&self, round: usize, index: usize, to: usize) -> Range<usize> {
        let all = self.incoming(to);
        let [start, end] = [round, round + 1].map(|round| (round * self.capacity).min(all));
        let cut = |index: usize| start + (end - start) * index / self.parts.len();
        cut(index)..cut(index + 1)
    }
    /// The rows of `from` in a window of `to`: adjacent, since they are sorted alike.
    fn rows_in(&self, window: &Range<usize>, from: usize, to: usize) -> Range<usize> {
        let own = self.experts_of(to);
        let (mut place, mut rows) = (0, [self.first(from, own.start); 2]);
        for expert in own {
            for rank in 0..self.ep.of {
                let count = self.first(rank, expert + 1) - self.first(rank, expert);
                if rank == from {
                    let before = |end: usize| end.saturating_sub(place).min(count);
                    (rows[0], rows[1]) = (rows[0] + before(window.start), rows[1] + before(window.end));
                }
                place += count;
            }
        }
        rows[0]..rows[1]
    }

    /// Prepares `round`.
    pub fn arrange(&mut self, round: usize) {
        let (me, own, mut held) = (self.ep.index, self.experts_of(self.ep.index), 0);
        let stride = own.len() + 1;
        self.own.fill(0);
        for index in 0..self.parts.len() {
            let start = held;
            for peer in 0..self.ep.of {
                let sends = self.rows_in(&self.window(round, index, peer), me, peer);
                let comes = self.rows_in(&self.window(round, index, me), peer, me);
                let part = &mut self.parts[index];
                part.arrivals[peer] = held..held + comes.len();
                held += comes.len();
                (part.sends[peer], part.comes[peer]) = (sends, comes);
            }
            self.parts[index].held = start..held;
            let (mut row, part) = (0, &self.parts[index]);
            for (expert, of) in own.clone().enumerate() {
                for (from, (comes, arrival)) in part.comes.iter().zip(&part.arrivals).enumerate() {
                    let [first, end] = [of, of + 1].map(|e| self.first(from, e).clamp(comes.start, comes.end));
                    let (run, place) = ((index * own.len() + expert) * self.ep.of + from, arrival.start - start);
                    let words = [row, place + first - comes.start, end - first].map(|n| n as u32);
                    self.runs[3 * run..][..3].copy_from_slice(&words);
                    row += end - first;
                }
                self.own[expert + 1] += row as u32;
                if self.parts.len() > 1 {
                    self.own[(1 + index) * stride + expert + 1] = row as u32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of 3 ranks for 5 experts, which 2, 2 and 1 ranks hold; and a rank to which most rows go.
    fn exchange(index: usize, overlap: bool, capacity: usize, counts: [[u32; 5]; 3]) -> RowWindows {
        let mut offsets = Vec::new();
        for of_rank in counts {
            let mut at = 0;
            offsets.push(at);
            offsets.extend(of_rank.iter().map(|count| {
                at += count;
                at
            }));
        }
        let windows = RowWindows::new(Slice { index, of: 3 }, 5, 60, if overlap { HALVES } else { 1 });
        RowWindows { offsets, capacity, ..windows }
    }

    #[test]
    fn every_row_arrives_once_in_as_many_rounds_as_the_fullest_rank_needs() {
        let even = [[2, 2, 2, 2, 2]; 3];
        let skewed = [[0, 10, 0, 0, 0], [1, 2, 3, 4, 0], [9, 0, 0, 0, 1]];
        for (counts, capacity, rounds) in
            [(even, 12, 1), (even, 11, 2), (skewed, 22, 1), (skewed, 12, 2), (skewed, 5, 5), (skewed, 1, 22)]
        {
            for overlap in [false, true] {
                let mut all = [0, 1, 2].map(|rank| exchange(rank, overlap, capacity, counts));
                let mut held: [Vec<(usize, usize)>; 3] = Default::default();
                for round in 0..rounds {
                    all.iter_mut().for_each(|exchange| exchange.arrange(round));
                    for (to, exchange) in all.iter().enumerate() {
                        assert_eq!(exchange.rounds(), rounds, "{counts:?} {capacity}");
                        let (lens, first): (Vec<_>, _) =
                            (exchange.parts.iter().map(|part| part.held.len()).collect(), held[to].len());
                        assert!(
                            lens.iter().sum::<usize>() <= capacity && lens.iter().all(|len| len.abs_diff(lens[0]) <= 1)
                        );
                        for part in 0..exchange.parts.len() {
                            let mut wire = Vec::new();
                            for (from, sender) in all.iter().enumerate() {
                                // Both ends agree, and nothing lies on something else.
                                let (rows, arrival) =
                                    (&sender.parts[part].sends[to], &exchange.parts[part].arrivals[from]);
                                assert_eq!((rows, rows.len()), (&exchange.parts[part].comes[from], arrival.len()));
                                assert_eq!(arrival.start, exchange.parts[part].held.start + wire.len());
                                wire.extend(rows.clone().map(|row| (from, row)));
                            }
                            // Each row and each place is in one run.
                            let runs = run_rows(1, 5, exchange.ep);
                            let runs = exchange.runs[3 * part * runs..][..3 * runs].chunks_exact(3);
                            let mut pairs: Vec<_> =
                                runs.flat_map(|run| (0..run[2]).map(move |i| (run[0] + i, run[1] + i))).collect();
                            let mut places: Vec<_> = pairs.iter().map(|pair| pair.1).collect();
                            pairs.sort_unstable();
                            places.sort_unstable();
                            assert!(pairs.iter().map(|pair| pair.0).eq(0..wire.len() as u32));
                            assert!(places.into_iter().eq(0..wire.len() as u32));
                            held[to].extend(pairs.iter().map(|pair| wire[pair.1 as usize]));
                        }
                        // The offsets of the window, and those within its parts.
                        let own = exchange.experts_of(to);
                        let expert = |&(from, row): &(usize, usize)| {
                            own.clone()
                                .position(|e| (exchange.first(from, e)..exchange.first(from, e + 1)).contains(&row))
                        };
                        let expect = |rows: &[(usize, usize)]| -> Vec<u32> {
                            let before = |e| rows.iter().filter(|row| expert(row) < Some(e)).count() as u32;
                            (0..=own.len()).map(before).collect()
                        };
                        let mut expected = expect(&held[to][first..]);
                        if overlap {
                            expected.extend(expect(&held[to][first..first + lens[0]]));
                            expected.extend(expect(&held[to][first + lens[0]..]));
                        }
                        assert_eq!(exchange.own, expected, "to {to} with {capacity} in round {round}");
                    }
                }
                // By expert, sender and row: the order of all tokens.
                for (to, held) in held.into_iter().enumerate() {
                    let of = |e: usize, from: usize| {
                        (all[to].first(from, e)..all[to].first(from, e + 1)).map(move |row| (from, row))
                    };
                    let all: Vec<_> =
                        all[to].experts_of(to).flat_map(|e| (0..3).flat_map(move |from| of(e, from))).collect();
                    assert_eq!(held, all, "to {to} with {capacity}");
                }
            }
        }
    }
}
