//! The duration of a collective, from latency and bandwidth of the links within and between nodes. Never knows what is
//! sent, nor when.
//!
//! The formula is that of NCCL's own tuning model (NVIDIA/nccl, src/graph/tuning.cc, `ncclTopoTuneModel`), by which it
//! selects an algorithm. A ring of n ranks on k nodes takes n - 1 steps for an all-gather or a reduce-scatter and 2 (n
//! - 1) for an all-reduce; of each n - 1, k - 1 are between nodes:
//!
//! ```text
//! volume  = (n-1)/n of the bytes, or twice that
//! seconds = base + inside * alpha + between * beta + volume / bandwidth
//! ```
//!
//! An all-reduce can also use a tree, whose latency grows with the logarithm of k. As in NCCL, the fastest protocol
//! (Simple, or LL128 with less latency and 8 % less bandwidth) and algorithm are chosen.
use super::clock::Seconds;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Collected {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
    SendRecv,
    AllToAll,
    Barrier,
}

impl Collected {
    pub fn name(self) -> &'static str {
        match self {
            Collected::AllGather => "all-gather",
            Collected::ReduceScatter => "reduce-scatter",
            Collected::AllReduce => "all-reduce",
            Collected::Broadcast => "broadcast",
            Collected::SendRecv => "send-recv",
            Collected::AllToAll => "all-to-all",
            Collected::Barrier => "barrier",
        }
    }
    /// Bytes received by each of `n` ranks, given the `bytes` of the full buffer (for send-recv and all-to-all:
    /// received), as counted by `CommStats`.
    pub fn received(self, bytes: u64, n: usize) -> u64 {
        let (n, others) = (n.max(1) as u64, n.saturating_sub(1) as u64);
        match self {
            Collected::AllGather | Collected::ReduceScatter => bytes / n * others,
            Collected::AllReduce => 2 * bytes * others / n,
            Collected::Broadcast | Collected::SendRecv | Collected::AllToAll => bytes,
            Collected::Barrier => 0,
        }
    }
}

/// Where the ranks of a group are: the same number on each node, consecutively.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    pub ranks: usize,
    pub nodes: usize,
}

impl Placement {
    /// `ranks`: world ranks, of which `per_node` consecutive ones share a node.
    pub fn of(ranks: &[usize], per_node: usize) -> Placement {
        let mut nodes: Vec<usize> = ranks.iter().map(|rank| rank / per_node.max(1)).collect();
        nodes.dedup(); // ranks are ascending
        Placement { ranks: ranks.len(), nodes: nodes.len().max(1) }
    }
    pub fn per_node(&self) -> usize {
        self.ranks.div_ceil(self.nodes)
    }
}

/// Link bandwidths of a kind of machine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Links {
    /// Bytes per second that a rank receives in a ring within a node.
    pub inside: f64,
    /// The same for an all-reduce summed in the switch (NVLink SHARP): bus bandwidth as defined by nccl-tests.
    pub inside_summed: f64,
    /// The bandwidth of one rank's network card; a ring uses the cards of all its members on a node.
    pub between: f64,
}

/// NCCL's latencies in seconds (`baseLat` and `hwLat` of that file, ring): per collective, per step within a node and
/// between nodes; and the usable fraction of the bandwidth.
struct Protocol {
    base: Seconds,
    inside: Seconds,
    between: Seconds,
    share: f64,
}
const PROTOCOLS: [Protocol; 2] = [
    Protocol { base: 8.4e-6, inside: 3.4e-6, between: 9.6e-6, share: 1.0 }, // Simple
    Protocol { base: 10.0e-6, inside: 1.9e-6, between: 4.0e-6, share: 0.92 }, // LL128
];
/// Usable fraction of the bandwidth in a tree.
const TREE: f64 = 0.9;

impl Links {
    /// `bytes`: size of the full buffer, as in [`Collected::received`].
    pub fn seconds(&self, what: Collected, bytes: u64, placement: Placement) -> Seconds {
        let Placement { ranks: n, nodes: k } = placement;
        if n <= 1 {
            return 0.0;
        }
        let volume = what.received(bytes, n) as f64;
        let inside = if what == Collected::AllReduce { self.inside_summed } else { self.inside };
        let bandwidth = match what {
            _ if k == 1 => inside,
            // No ring: what comes from other nodes comes by the rank's own card.
            Collected::AllToAll => self.inside.min(self.between * (n - 1) as f64 / (n - placement.per_node()) as f64),
            _ => self.inside.min(self.between * placement.per_node() as f64),
        };
        let rounds = match what {
            Collected::AllReduce | Collected::Barrier => 2.0,
            _ => 1.0,
        };
        let steps = match what {
            Collected::SendRecv | Collected::AllToAll => (1.0, if k > 1 { 1.0 } else { 0.0 }),
            _ => (rounds * (n - 1) as f64, rounds * (k - 1) as f64),
        };
        let ring = |p: &Protocol| {
            let latency = p.base + (steps.0 - steps.1) * p.inside + steps.1 * p.between;
            latency + volume / (bandwidth * p.share)
        };
        let tree = |p: &Protocol| {
            let up = (placement.per_node() - 1) as f64 * p.inside + (k as f64).log2().ceil() * p.between;
            p.base + 2.0 * up + volume / (bandwidth * p.share * TREE)
        };
        let sums = matches!(what, Collected::AllReduce | Collected::Barrier);
        let times = PROTOCOLS.iter().flat_map(|p| [Some(ring(p)), sums.then(|| tree(p))]);
        times.flatten().fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINKS: Links = Links { inside: 100e9, inside_summed: 150e9, between: 10e9 };

    #[test]
    fn long_messages_are_bound_by_the_slowest_link() {
        let gib = 1u64 << 30;
        let s = |what, ranks, nodes| LINKS.seconds(what, gib, Placement { ranks, nodes });
        let near = |x: f64, y: f64| assert!((x / y - 1.0).abs() < 0.01, "{x} and {y}");
        near(s(Collected::AllGather, 8, 1), 7.0 / 8.0 * gib as f64 / 100e9);
        near(s(Collected::AllReduce, 8, 1), 2.0 * 7.0 / 8.0 * gib as f64 / 150e9);
        // The ring uses eight cards of 10 GB/s; a rank alone on its node has one.
        near(s(Collected::ReduceScatter, 16, 2), 15.0 / 16.0 * gib as f64 / 80e9);
        near(s(Collected::ReduceScatter, 2, 2), 0.5 * gib as f64 / 10e9);
        // Eight of the fifteen other ranks are on the other node, and a rank receives from them by its own card.
        near(s(Collected::AllToAll, 16, 2), gib as f64 / (10e9 * 15.0 / 8.0));
        near(s(Collected::AllToAll, 8, 1), gib as f64 / 100e9);
        assert_eq!(s(Collected::AllGather, 1, 1), 0.0);
    }

    #[test]
    fn short_messages_are_bound_by_latency() {
        let s = |what, ranks, nodes| LINKS.seconds(what, 8, Placement { ranks, nodes });
        let close = |x: f64, y: f64| assert!((x - y).abs() < 1e-9, "{x} and {y}");
        close(s(Collected::AllGather, 8, 1), 10.0e-6 + 7.0 * 1.9e-6);
        close(s(Collected::AllGather, 16, 2), 10.0e-6 + 14.0 * 1.9e-6 + 4.0e-6);
        // A tree over 2,048 nodes has 11 levels where the ring has 2,047 steps.
        close(s(Collected::AllReduce, 16384, 2048), 10.0e-6 + 2.0 * (7.0 * 1.9e-6 + 11.0 * 4.0e-6));
    }

    #[test]
    fn ranks_are_counted_by_node() {
        let ranks: Vec<usize> = (0..16).collect();
        assert_eq!(Placement::of(&ranks, 8), Placement { ranks: 16, nodes: 2 });
        let strided: Vec<usize> = (0..16).map(|i| i * 8).collect();
        assert_eq!(Placement::of(&strided, 8), Placement { ranks: 16, nodes: 16 });
        assert_eq!(Placement::of(&[3], 8), Placement { ranks: 1, nodes: 1 });
    }

    #[test]
    fn received_bytes_match_what_the_groups_count() {
        assert_eq!(Collected::AllGather.received(1024, 4), 768);
        assert_eq!(Collected::AllReduce.received(1024, 4), 1536);
        assert_eq!(Collected::AllReduce.received(1024, 1), 0);
        assert_eq!(Collected::SendRecv.received(1024, 4), 1024);
    }
}
