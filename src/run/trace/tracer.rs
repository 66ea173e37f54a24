//! One rank's tracer: takes over what the timeline recorded, step by step, and writes it. Never changes what a step
//! does; off, it costs a branch where something would be recorded.
use super::chrome::{self, Distributed, Head};
use super::memory::MemoryTimeline;
use super::span::TracedSpan;
use super::summary::Summary;
use crate::base::timeline::{Lane, Mark, Span, Timeline};
use crate::base::{Error, Meter, Result};
use crate::ckpt::Checkpointer;
use crate::comm::{Mesh, Tag, timed};
use crate::device::Device;
use crate::engine::Engine;
use crate::run::plan::Plan;
use crate::run::plan::profile::Profile;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

/// Spans of a step that there is room for: some 20 of a layer and micro-batch, and as many of its collectives.
const OF_A_STEP: usize = 1 << 16;
/// Spans that are kept, of all steps: 100 MB, and a file that a browser still opens.
const KEPT: usize = 1 << 20;
/// A verb of the store that takes less did nothing.
const NOTHING_NS: i64 = 1000;

/// What came of a profile, on rank 0.
pub struct ProfileReport {
    pub path: PathBuf,
    pub steps: RangeInclusive<u64>,
    /// Of the ranks whose files were in reach.
    pub ranks: Vec<Summary>,
}

/// One rank's.
pub struct Tracer {
    profile: Option<Profile>,
    memory: Option<MemoryTimeline>,
    /// Those to profile, also when they are over.
    steps: Option<RangeInclusive<u64>>,
    timeline: Timeline,
    rank: usize,
    world: usize,
    /// Where [`TracedSpan`] counts from, by both clocks.
    origin: Instant,
    since_1970: i64,
    raw: Vec<Span>,
    spans: Vec<TracedSpan>,
    lost: u64,
    /// The step at hand began.
    began: Instant,
}

impl Tracer {
    pub fn new(profile: Option<Profile>, rank: usize, world: usize) -> Tracer {
        let (origin, wall) = (Instant::now(), SystemTime::now());
        let (timeline, room) = match &profile {
            Some(_) => (Timeline::with_room(OF_A_STEP), OF_A_STEP),
            None => (Timeline::default(), 0),
        };
        let since_1970 = wall.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64);
        Tracer {
            steps: profile.as_ref().map(|profile| profile.steps.clone()),
            profile,
            memory: None,
            timeline,
            rank,
            world,
            origin,
            since_1970,
            raw: Vec::with_capacity(room),
            spans: Vec::new(),
            lost: 0,
            began: origin,
        }
    }
    /// What the plan of a run asks for.
    pub fn of(plan: &Plan, rank: usize) -> Tracer {
        let memory = plan.settings.trace.memory_timeline.as_ref().map(|path| MemoryTimeline::new(path, rank));
        Tracer { memory, ..Tracer::new(plan.profile.clone(), rank, plan.ranks.mesh.world()) }
    }
    /// Of the rank, with its history where that is asked for.
    pub fn meter(&self) -> Meter {
        let meter = Meter::default();
        if let Some(memory) = &self.memory {
            meter.keep(memory.history());
        }
        meter
    }
    /// They tell what they do.
    pub fn attach(&self, engine: &mut Engine, checkpointer: &mut Checkpointer) -> Result<()> {
        engine.on_timeline(self.timeline.clone());
        checkpointer.on_timeline(self.timeline.clone());
        self.memory.as_ref().map_or(Ok(()), |memory| engine.on_history(memory.history()))
    }
    /// Between steps, the run does something else now.
    pub fn phase(&self, step: u64, phase: &'static str) {
        if let Some(memory) = &self.memory {
            memory.history().phase(step, phase);
        }
    }
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }
    /// The groups of the mesh, on the timeline where there is one.
    pub fn watch(&self, mesh: Mesh) -> Mesh {
        match self.profile {
            Some(_) => timed::watch(mesh, &self.timeline),
            None => mesh,
        }
    }

    /// Whether anything is still to be profiled, or is being.
    pub fn is_waiting(&self) -> bool {
        self.profile.is_some() || self.memory.is_some()
    }
    /// Before each step, and before the end of the run with the number of the step that would be next: takes over what
    /// was recorded since the last time. All ranks do the same: after the last step of a profile they write its files,
    /// and meet.
    pub fn next(&mut self, step: u64, mesh: &Mesh, dev: &dyn Device) -> Result<Option<ProfileReport>> {
        if let Some(memory) = &mut self.memory {
            memory.step(step, self.steps.as_ref().map(|steps| steps.contains(&step)));
        }
        let Some(profile) = &self.profile else { return Ok(None) };
        let (over, due) = (step > *profile.steps.end(), profile.steps.contains(&step));
        let mut report = None;
        if self.timeline.is_on() {
            self.drain(dev)?;
        }
        if over {
            if self.timeline.is_on() {
                self.timeline.switch(false);
                dev.end_marks();
                report = self.finish(mesh)?;
            }
            self.profile = None; // also where the run was resumed behind it
        } else if due {
            dev.begin_marks()?;
            self.timeline.switch(true);
        }
        self.began = Instant::now();
        Ok(report)
    }
    /// The step at hand is done.
    pub fn done(&mut self, step: u64) {
        let (lane, start) = (Lane::Steps, Mark::At(self.began));
        self.timeline.record(Span { lane, what: "step", number: Some(step), start, end: Mark::now(), flow: None });
    }

    /// Takes over what was recorded since the last time.
    pub fn drain(&mut self, dev: &dyn Device) -> Result<()> {
        self.raw.clear();
        self.lost += self.timeline.drain(&mut self.raw);
        let since = |mark| -> Result<i64> {
            let at = dev.when(mark)?;
            Ok(match at.checked_duration_since(self.origin) {
                Some(after) => after.as_nanos() as i64,
                None => -((self.origin - at).as_nanos() as i64),
            })
        };
        for &Span { lane, what, number, start, end, flow } in &self.raw {
            let done = TracedSpan { lane, what, number, start: since(start)?, end: since(end)?, flow };
            let short = lane == Lane::Store && done.end - done.start < NOTHING_NS;
            match self.spans.len() < KEPT {
                _ if short => {}
                true => self.spans.push(done),
                false => self.lost += 1,
            }
        }
        Ok(())
    }

    /// What was recorded, and how many spans were lost.
    pub fn spans(&self) -> (&[TracedSpan], u64) {
        (&self.spans, self.lost)
    }

    fn write(&self, profile: &Profile) -> Result<()> {
        std::fs::create_dir_all(&profile.folder)
            .map_err(|e| Error::io("make a folder of traces", &profile.folder, e))?;
        let head = Head {
            display_time_unit: "ms".into(),
            base_time_nanoseconds: self.since_1970,
            distributed_info: Distributed { rank: Some(self.rank), world_size: self.world },
            summary: vec![Summary::of(self.rank, &self.spans, self.lost)],
        };
        chrome::write(&profile.path(Some(self.rank)), &head, self.rank, &self.spans)
    }

    fn finish(&mut self, mesh: &Mesh) -> Result<Option<ProfileReport>> {
        let Some(profile) = &self.profile else { return Ok(None) };
        let stale = profile.path(Some(self.rank));
        let written = match std::fs::remove_file(&stale) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("replace a trace", &stale, e)),
            _ => self.write(profile),
        };
        mesh.world.barrier(Tag::new("traces", 0))?;
        written?;
        if self.rank != 0 {
            return Ok(None);
        }
        let files: Vec<PathBuf> = (0..self.world).map(|rank| profile.path(Some(rank))).filter(|p| p.exists()).collect();
        let path = profile.path(None);
        let ranks = chrome::merge(&files, self.world, &path)?;
        Ok(Some(ProfileReport { path, steps: profile.steps.clone(), ranks }))
    }

    /// At the end of a run, of all ranks.
    pub fn end(&self, mesh: &Mesh) -> Result<()> {
        self.memory.as_ref().map_or(Ok(()), |memory| memory.finish(mesh))
    }
    /// A run that fails or is ended within a profile: what there is of it, by each rank for itself.
    pub fn salvage(&self) {
        if let Some(memory) = &self.memory {
            let _ = memory.salvage(); // the run's own error is what is told
        }
        if let Some(profile) = self.profile.as_ref().filter(|_| !self.spans.is_empty()) {
            let _ = self.write(profile);
        }
    }
}
