//! What a group's operations can access: its members, their records, their bells. Never waits.
use super::buffer::ShmBuffer;
use super::record::{Lanes, Phase};
use super::seat::Seat;
use crate::base::Error;
use crate::comm::{Axis, Tag, Waiting};
use crate::device::cpu::simd::Level;
use std::sync::Arc;

/// What a group's operations can access.
pub(super) struct Hub {
    pub lanes: Lanes,
    /// Seats of the members.
    pub ranks: Vec<usize>,
    /// This rank's index among them.
    pub me: usize,
    pub axis: Axis,
    /// Region of the arena: distinguishes this rank's groups.
    pub id: u64,
    pub level: Level,
    pub seat: Arc<Seat>,
    /// Set if a thread uses the group for its rank.
    pub waiting: Option<Arc<Waiting>>,
}

impl Hub {
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
    /// World rank of a member.
    pub fn name(&self, member: usize) -> usize {
        self.seat.name(self.ranks[member])
    }
    pub fn publish(&self, seq: u64, phase: Phase) {
        self.lanes.record(self.me, seq).publish(seq, phase);
    }
    pub fn reached(&self, rank: usize, seq: u64, phase: Phase) -> bool {
        self.lanes.record(rank, seq).reached(seq, phase)
    }
    pub fn vacant(&self, buffer: &ShmBuffer, content: u64) -> bool {
        (0..self.size()).all(|r| buffer.free_of(r, content))
    }
    pub fn all_reached(&self, seq: u64, phase: Phase) -> bool {
        (0..self.size()).all(|r| self.reached(r, seq, phase))
    }
    pub fn ring(&self) {
        for (r, &rank) in self.ranks.iter().enumerate() {
            if r != self.me {
                self.seat.ring(rank);
            }
        }
    }
    pub fn error(&self, op: &'static str, tag: Tag, what: String) -> Error {
        Error::Comm { rank: self.name(self.me), op, group: self.axis.name().into(), unit: tag.to_string(), what }
    }
}
