//! State shared by a rank's groups: its place in its host's memory, its wire, and which rank has failed. Never moves
//! data.
use super::wire::{Lost, Wire};
use crate::comm::shm;
use std::sync::{Mutex, PoisonError};

pub(super) struct Link {
    /// World rank.
    pub rank: usize,
    pub wire: Box<dyn Wire>,
    /// The host's ranks, by local rank.
    pub local: shm::ShmWorld,
    lost: Mutex<Option<Lost>>,
}

impl Link {
    pub fn new(rank: usize, wire: Box<dyn Wire>, local: shm::ShmWorld) -> Link {
        Link { rank, wire, local, lost: Mutex::default() }
    }
    /// The local rank of a rank on this host.
    pub fn seat(&self, rank: usize) -> usize {
        rank - (self.rank - self.local.rank())
    }
    /// The wire reported a lost rank: waits on this host end.
    pub fn learn(&self, lost: Lost) {
        let rank = lost.rank;
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(lost);
        self.local.blame(rank);
    }
    /// Reports that this rank has lost another one.
    pub fn blame(&self, lost: &Lost) -> String {
        self.wire.report(lost);
        self.learn(lost.clone());
        self.describe(lost.rank)
    }
    /// Reports that this rank failed. If another rank failed first, reports that one.
    pub fn abort(&self) {
        self.local.abort();
        let known = self.lost.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if let Some(rank) = self.local.failed().filter(|_| !known) {
            self.wire.report(&Lost { rank, why: "failed".into() });
        }
    }
    /// "rank 2 on node7 failed", "rank 2 on node7: connection closed".
    pub fn describe(&self, rank: usize) -> String {
        let name = self.wire.roster().name(rank);
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        match lost.as_ref().filter(|lost| lost.rank == rank && lost.why != "failed") {
            Some(lost) => format!("{name}: {}", lost.why),
            None => format!("{name} failed"),
        }
    }
}
