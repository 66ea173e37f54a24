//! `--memory-timeline`: the bytes of all ranks over time, as CSV: by category whenever a buffer came or went, and in
//! some steps what of them is in use. Never counts by itself (`History` is the meter's).
//!
//! Buffers are allocated once, so the first columns move while a run starts and stand still in its steps: that is the
//! plan that `--print-config` prints. What moves in a step is what is read of them, layer by layer: the last columns.
//! `saved_in_use` is what PyTorch's memory timelines call activations.
use crate::base::CATEGORIES;
use crate::base::history::{History, MemoryRow};
use crate::base::{Category, Error, Result};
use crate::comm::{Mesh, Tag};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Steps of a run that are looked at closely where none are profiled: the first allocates what is made when it is first
/// needed, the second is like all others.
const CLOSELY: u64 = 2;

pub struct MemoryTimeline {
    history: History,
    path: PathBuf,
    rank: usize,
    /// The last step that is looked at closely where none are profiled.
    until: Option<u64>,
}

/// A rank's part, until rank 0 has made one file of all.
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
    /// A step follows. `profiled`: whether it is, where some are.
    pub fn step(&mut self, number: u64, profiled: Option<bool>) {
        let until = *self.until.get_or_insert(number + CLOSELY - 1);
        let (was, is) = (self.history.is_detailed(), profiled.unwrap_or(number <= until));
        self.history.set_detailed(is);
        // Steps that nobody looks at make no rows: a run may have millions.
        if is || was {
            self.history.phase(number, "step");
        }
    }

    /// This rank's rows, on its own: of a run that ends otherwise than it should.
    pub fn salvage(&self) -> Result<()> {
        self.write(&part(&self.path, self.rank))
    }
    /// All ranks together: one file, with the ranks whose parts are in reach of rank 0.
    pub fn finish(&self, mesh: &Mesh) -> Result<()> {
        let written = self.salvage();
        mesh.world.barrier(Tag::new("memory timeline", 0))?;
        written?;
        if self.rank > 0 {
            return Ok(());
        }
        let failed = |e| Error::io("write the memory timeline", &self.path, e);
        let parts = (0..mesh.world.size()).map(|rank| part(&self.path, rank)).filter(|part| part.exists());
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
        let mut text = format!(
            "rank,time_s,step,phase,layer,{},total,weights_in_use,grads_in_use,saved_in_use\n",
            names.join(",")
        );
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
