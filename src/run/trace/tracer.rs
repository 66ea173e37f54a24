//! One rank's tracer: drains the timeline after each step and writes trace files. Never changes what a step does; when
//! off, it costs one branch per recording site.
use super::chrome::{self, Distributed, Head};
use super::memory::MemoryTimeline;
use super::span::TracedSpan;
use super::summary::Summary;
use crate::base::timeline::{Lane, Mark, Span, Timeline};
use crate::base::{Error, Meter, Result};
use crate::ckpt::Checkpointer;
use crate::comm::{Axis, Mesh, Tag, timed};
use crate::device::Device;
use crate::engine::Engine;
use crate::run::plan::Plan;
use crate::run::plan::profile::Profile;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

/// Capacity for the spans of one step: about 20 per layer and micro-batch, and as many for its collectives.
const OF_A_STEP: usize = 1 << 16;
/// Maximum spans of all steps: 100 MB, and a file that a browser can still open.
const KEPT: usize = 1 << 20;
/// Store calls shorter than this did nothing.
const NOTHING_NS: i64 = 1000;

/// The result of a profile, on rank 0.
pub struct ProfileReport {
    pub path: PathBuf,
    pub steps: RangeInclusive<u64>,
    /// Ranks whose files rank 0 could see.
    pub ranks: Vec<Summary>,
}

pub struct Tracer {
    profile: Option<Profile>,
    memory: Option<MemoryTimeline>,
    /// The steps to profile; kept after they are over.
    steps: Option<RangeInclusive<u64>>,
    timeline: Timeline,
    rank: usize,
    world: usize,
    /// The zero of [`TracedSpan`] times, in both clocks.
    origin: Instant,
    since_1970: i64,
    raw: Vec<Span>,
    spans: Vec<TracedSpan>,
    lost: u64,
    /// When the current step began.
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
    /// The tracer of a plan.
    pub fn of(plan: &Plan, rank: usize) -> Tracer {
        let memory = plan.settings.trace.memory_timeline.as_ref().map(|path| MemoryTimeline::new(path, rank));
        Tracer { memory, ..Tracer::new(plan.profile.clone(), rank, plan.ranks.mesh.world()) }
    }
    /// The rank's meter, with its history if the memory timeline is on.
    pub fn meter(&self) -> Meter {
        let meter = Meter::default();
        if let Some(memory) = &self.memory {
            meter.keep(memory.history());
        }
        meter
    }
    /// Connects the engine and the checkpointer to the timeline and the history.
    pub fn attach(&self, engine: &mut Engine, checkpointer: &mut Checkpointer) -> Result<()> {
        engine.on_timeline(self.timeline.clone());
        checkpointer.on_timeline(self.timeline.clone());
        self.memory.as_ref().map_or(Ok(()), |memory| engine.on_history(memory.history()))
    }
    /// The run enters `phase`, between steps.
    pub fn phase(&self, step: u64, phase: &'static str) {
        if let Some(memory) = &self.memory {
            memory.history().phase(step, phase);
        }
    }
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }
    /// The mesh, with its groups recorded on the timeline if there is a profile.
    pub fn watch(&self, mesh: Mesh) -> Mesh {
        match self.profile {
            Some(_) => timed::watch(mesh, &self.timeline),
            None => mesh,
        }
    }

    /// Whether anything is still being recorded or will be.
    pub fn is_waiting(&self) -> bool {
        self.profile.is_some() || self.memory.is_some()
    }
    /// Drains what was recorded since the last call. Called before each step, and at the end of the run with the number
    /// of the step that would be next. Collective: after the last profiled step all ranks write their files and
    /// synchronize.
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
            self.profile = None; // also if the run was resumed after it
        } else if due {
            dev.begin_marks()?;
            self.timeline.switch(true);
        }
        self.began = Instant::now();
        Ok(report)
    }
    /// The current step is done.
    pub fn done(&mut self, step: u64) {
        let (lane, start) = (Lane::Steps, Mark::At(self.began));
        self.timeline.record(Span { lane, what: "step", number: Some(step), start, end: Mark::now(), flow: None });
    }

    /// Collects what was recorded since the last call.
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

    /// Recorded spans, and the number of lost ones.
    pub fn spans(&self) -> (&[TracedSpan], u64) {
        (&self.spans, self.lost)
    }

    fn write(&self, profile: &Profile) -> Result<()> {
        std::fs::create_dir_all(&profile.folder)
            .map_err(|e| Error::io("create the trace folder", &profile.folder, e))?;
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
        mesh.group(Axis::World).barrier(Tag::new("traces", 0))?;
        written?;
        if self.rank != 0 {
            return Ok(None);
        }
        let files: Vec<PathBuf> = (0..self.world).map(|rank| profile.path(Some(rank))).filter(|p| p.exists()).collect();
        let path = profile.path(None);
        let ranks = chrome::merge(&files, self.world, &path)?;
        Ok(Some(ProfileReport { path, steps: profile.steps.clone(), ranks }))
    }

    /// Finishes the memory timeline at the end of a run. Collective.
    pub fn end(&self, mesh: &Mesh) -> Result<()> {
        self.memory.as_ref().map_or(Ok(()), |memory| memory.finish(mesh))
    }
    /// Writes what this rank has recorded when a run fails or stops during a profile.
    pub fn salvage(&self) {
        if let Some(memory) = &self.memory {
            let _ = memory.salvage(); // the run's own error is reported
        }
        if let Some(profile) = self.profile.as_ref().filter(|_| !self.spans.is_empty()) {
            let _ = self.write(profile);
        }
    }
}
