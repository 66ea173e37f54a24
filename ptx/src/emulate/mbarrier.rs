//! An mbarrier: counts of arrivals and of bytes, and phases. Never waits: mbarrier_ops.rs does.
use super::clock::{ClockView, Epoch};
use std::collections::HashMap;

/// Most arrivals, and bytes either way, that the object can count.
pub const MOST: i64 = (1 << 20) - 1;

pub struct Mbarrier {
    pub count: u64,
    pub pending: u64,
    pub bytes: i64,
    /// Phases completed.
    pub phase: i64,
    /// What arrivals have told; and what those told that the last completed phase had.
    pub gathered: ClockView,
    pub opened: ClockView,
    pub init: Epoch,
    /// A fence has made the initialization visible to bulk copies.
    pub shown: bool,
    /// The last phase that each thread has waited for; -1 is the one before the first.
    pub seen: HashMap<(usize, usize), i64>,
    /// The last copy that landed here, and the phase it counts for, until somebody waits for that.
    pub landed: Option<(i64, usize)>,
}

impl Mbarrier {
    /// Whether a phase completes.
    pub fn settle(&mut self) -> bool {
        let done = self.pending == 0 && self.bytes == 0;
        if done {
            self.phase += 1;
            self.pending = self.count;
            self.opened = self.gathered.clone();
        }
        done
    }
    pub fn has_passed(&self, phase: u64, parity: bool) -> bool {
        if parity { (self.phase - 1) & 1 == phase as i64 & 1 } else { phase as i64 != self.phase }
    }
    /// The instruction of a copy that nobody has waited for.
    pub fn unwaited(&self) -> Option<usize> {
        self.landed.map(|(_, pc)| pc)
    }
    /// `bytes` more are to come; whether the object can count so many.
    pub fn expect(&mut self, bytes: u64) -> bool {
        let bytes = bytes as u32 as i64;
        self.bytes += bytes;
        bytes <= MOST && self.bytes <= MOST
    }
    pub fn state(&self) -> String {
        format!("phase {} lacks {} arrivals and {} bytes", self.phase, self.pending, self.bytes)
    }
}
