//! An mbarrier: counts of arrivals and bytes, and phases. Never waits: mbarrier_ops.rs does.
use super::clock::{ClockView, Epoch};
use std::collections::HashMap;

/// Maximum arrivals, and bytes either way, that the object can count.
pub const MOST: i64 = (1 << 20) - 1;

pub struct Mbarrier {
    pub count: u64,
    pub pending: u64,
    pub bytes: i64,
    /// Phases completed.
    pub phase: i64,
    /// Views that arrivals have published; and those of the last completed phase.
    pub gathered: ClockView,
    pub opened: ClockView,
    pub init: Epoch,
    /// The same of arrivals from other CTAs that release to the cluster.
    pub gathered_wide: Option<ClockView>,
    pub opened_wide: Option<ClockView>,
    /// Whether a fence has made the initialization visible to bulk copies.
    pub shown: bool,
    /// The last phase that each thread has waited for; -1 is before the first.
    pub seen: HashMap<(usize, usize), i64>,
    /// The last copy that landed here, and its phase, until somebody waits for that.
    pub landed: Option<(i64, usize)>,
    /// The same of arrivals from other CTAs.
    pub visited: Option<(i64, usize)>,
}

impl Mbarrier {
    /// Completes the phase if possible; returns whether it did.
    pub fn settle(&mut self) -> bool {
        let done = self.pending == 0 && self.bytes == 0;
        if done {
            self.phase += 1;
            self.pending = self.count;
            self.opened = self.gathered.clone();
            self.opened_wide = self.gathered_wide.clone();
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
    /// Expects `bytes` more; returns whether the object can count that many.
    pub fn expect(&mut self, bytes: u64) -> bool {
        let bytes = bytes as u32 as i64;
        self.bytes += bytes;
        bytes <= MOST && self.bytes <= MOST
    }
    pub fn state(&self) -> String {
        format!("phase {} lacks {} arrivals and {} bytes", self.phase, self.pending, self.bytes)
    }
}
