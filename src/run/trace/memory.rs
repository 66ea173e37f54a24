//! `--memory-timeline`: bytes of all ranks over time, as CSV: by category at every allocation, and in some steps the
//! bytes in use. Never counts (the meter's `History` does).
//!
//! Buffers are allocated once, so the category columns change only while a run starts, and match the plan of
//! `--print-config` afterwards. Within a step, the last columns show which bytes are in use, layer by layer;
//! `saved_in_use` corresponds to activations in PyTorch's memory timelines.
use crate::base::CATEGORIES;
use crate::base::history::{History, MemoryRow};
use crate::base::{Category, Error, Result};
use crate::comm::{Axis, Mesh, Tag};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Detailed steps if none are profiled: the first allocates lazily created buffers, the second is like all others.
const DETAILED: u64 = 2;

/// What a file begins with.
pub const TIMELINE: &str = "rank,time_s";

pub struct MemoryTimeline {
    history: History,
    path: PathBuf,
    rank: usize,
    /// The last detailed step if none are profiled.
    until: Option<u64>,
}

/// A rank's file, until rank 0 merges them.
fn part(path: &Path, rank: usize) -> PathBuf {
    PathBuf::from(format!("{}.rank-{rank}", path.display()))
}

impl MemoryTimeline {
    pub fn new(path: &Path, rank: usize) -> MemoryTimeline {
        MemoryTimeline { history: History::default(), path: path.into(), rank, until: None }
    }
    pub fn history(&self) -> &History {
        &self.history
    }
    /// A step starts. `profiled`: whether it is profiled, if any steps are.
    pub fn step(&mut self, number: u64, profiled: Option<bool>) {
        let until = *self.until.get_or_insert(number + DETAILED - 1);
        let (was, is) = (self.history.is_detailed(), profiled.unwrap_or(number <= until));
        self.history.set_detailed(is);
        // Other steps have no rows: a run may have millions.
        if is || was {
            self.history.phase(number, "step");
        }
    }

    /// Writes this rank's rows alone, for a run that fails.
    pub fn salvage(&self) -> Result<()> {
        self.write(&part(&self.path, self.rank))
    }
    /// Writes one file of all ranks whose files rank 0 can see. Collective.
    pub fn finish(&self, mesh: &Mesh) -> Result<()> {
        let written = self.salvage();
        mesh.group(Axis::World).barrier(Tag::new("memory timeline", 0))?;
        written?;
        if self.rank > 0 {
            return Ok(());
        }
        let failed = |e| Error::io("write the memory timeline", &self.path, e);
        let parts = (0..mesh.group(Axis::World).size()).map(|rank| part(&self.path, rank)).filter(|part| part.exists());
        let mut all = String::new();
        for part in parts {
            let text = std::fs::read_to_string(&part).map_err(failed)?;
            let rows = text.split_once('\n').map_or("", |(_, rows)| rows);
            all += if all.is_empty() { &text } else { rows };
            std::fs::remove_file(&part).map_err(failed)?;
        }
        std::fs::write(&self.path, all).map_err(failed)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let failed = |e| Error::io("write the memory timeline", path, e);
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(failed)?;
        }
        let names: Vec<&str> = CATEGORIES.iter().map(|(_, name)| *name).collect();
        let mut text =
            format!("{TIMELINE},step,phase,layer,{},total,weights_in_use,grads_in_use,saved_in_use\n", names.join(","));
        let (origin, rows) = self.history.all();
        rows.iter().for_each(|row| self.line(&mut text, origin, row));
        std::fs::write(path, text).map_err(failed)
    }
    fn line(&self, text: &mut String, origin: Instant, row: &MemoryRow) {
        let MemoryRow { at, step, phase, layer, live, in_use } = row;
        let (seconds, layer) = ((*at - origin).as_secs_f64(), layer.map_or(String::new(), |layer| layer.to_string()));
        let bytes: Vec<String> = live.iter().map(usize::to_string).collect();
        let on_device = CATEGORIES.iter().zip(live).filter(|((category, _), _)| *category != Category::Host);
        let total: usize = on_device.map(|(_, bytes)| bytes).sum();
        let _ = writeln!(
            text,
            "{},{seconds:.6},{step},{phase},{layer},{},{total},{},{},{}",
            self.rank,
            bytes.join(","),
            in_use.weights,
            in_use.grads,
            in_use.saved
        ); // writing to a String does not fail
    }
}
