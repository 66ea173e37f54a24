//! The flight recorder: a fixed ring of the last operations that a rank started, always on; and a hash of all of them,
//! with which ranks detect early that they run different programs. Never allocates while recording, never changes what
//! a call does.
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Axis, Collective, Mesh, Tag, Ticket};
use crate::base::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Instant, SystemTime};

/// Operations kept, as in PyTorch's recorder by default (TORCH_NCCL_TRACE_BUFFER_SIZE).
pub const KEPT: usize = 2000;

/// A started operation.
#[derive(Clone, Copy, Debug)]
struct FlightEntry {
    /// Counts from 1, over all groups of the rank.
    seq: u64,
    seam: Seam,
    axis: Axis,
    tag: Tag,
    bytes: usize,
    ticket: Option<Ticket>,
    /// Seconds since the recorder was created; when the call returned; when a wait for it returned.
    started: f64,
    returned: Option<f64>,
    waited: Option<f64>,
}

struct FlightRing {
    entries: Vec<FlightEntry>,
    /// Operations started so far: entry `seq` is at `(seq - 1) % KEPT`.
    count: u64,
    /// FNV-1a over axis, operation, tag and bytes of each, except along sp and tp: ranks with other samples have other
    /// numbers of rows there, and of logit chunks. Ranks of an all_to_all receive different numbers of bytes.
    hash: u64,
}

/// Groups, as long as something else keeps them alive.
type RecordedGroups = Vec<(Axis, Weak<dyn Collective>)>;

/// One rank's recorder. Clones share the ring.
#[derive(Clone)]
pub struct Flight {
    ring: Arc<Mutex<FlightRing>>,
    /// Recorded groups, queried for the state of an operation.
    groups: Arc<Mutex<RecordedGroups>>,
    origin: Instant,
}

impl Default for Flight {
    fn default() -> Flight {
        let ring = FlightRing { entries: Vec::with_capacity(KEPT), count: 0, hash: 0xcbf2_9ce4_8422_2325 };
        Flight { ring: Arc::new(Mutex::new(ring)), groups: Arc::default(), origin: Instant::now() }
    }
}

/// An operation as written to a file.
#[derive(Serialize, serde::Deserialize, Clone, PartialEq, Debug)]
pub struct FlightOp {
    pub seq: u64,
    pub op: String,
    pub axis: String,
    pub what: String,
    pub unit: usize,
    pub bytes: usize,
    pub started_s: f64,
    /// None: the call had not returned.
    pub returned_s: Option<f64>,
    /// None: no wait for it had returned.
    pub waited_s: Option<f64>,
    /// The launch of the CUDA graph that contained it: the calls above requested it, and that launch enqueued it. Known
    /// only for a group's last operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<u64>,
}

impl FlightOp {
    fn same(&self, other: &FlightOp) -> bool {
        (self.seq, &self.op, &self.axis, &self.what, self.unit)
            == (other.seq, &other.op, &other.axis, &other.what, other.unit)
    }
}
impl std::fmt::Display for FlightOp {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "operation {}, {} on {} ({} {})", self.seq, self.op, self.axis, self.what, self.unit)
    }
}

/// The file of one rank.
#[derive(Serialize, serde::Deserialize, Clone, PartialEq, Debug)]
pub struct Dump {
    pub rank: usize,
    /// The error that ended the run on this rank.
    pub error: String,
    pub ops: Vec<FlightOp>,
}

impl Flight {
    /// Records every group of the mesh.
    pub fn watch(&self, mesh: Mesh) -> Mesh {
        let ep = mesh.sizes.ep;
        mesh.wrap(|group| {
            // Ranks of ep may have different numbers of experts, in shards that these axes communicate.
            let even = ep == 1 || !matches!(group.axis(), Axis::ExpertFsdp | Axis::DpReplicate);
            let hook = FlightHook { axis: group.axis(), even, flight: self.clone() };
            self.groups.lock().unwrap_or_else(PoisonError::into_inner).push((group.axis(), Arc::downgrade(&group)));
            Arc::new(Hooked::with(group, hook)) as Arc<dyn Collective>
        })
    }
    /// Hash of all operations started so far, except along sp and tp.
    pub fn schedule(&self) -> u64 {
        self.lock().hash
    }
    /// The recorded operations, oldest first.
    pub fn ops(&self) -> Vec<FlightOp> {
        let ring = self.lock();
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let graph = |e: &FlightEntry| {
            let group = groups.iter().find(|(axis, _)| *axis == e.axis)?.1.upgrade()?;
            group.times(e.ticket?).graph
        };
        let (new, old) = ring.entries.split_at(ring.oldest());
        let op = |e: &FlightEntry| FlightOp {
            seq: e.seq,
            op: e.seam.name().into(),
            axis: e.axis.name().into(),
            what: e.tag.what.into(),
            unit: e.tag.unit,
            bytes: e.bytes,
            started_s: e.started,
            returned_s: e.returned,
            waited_s: e.waited,
            graph: graph(e),
        };
        old.iter().chain(new).map(op).collect()
    }
    /// Writes the ring to `dir/rank-3.json`.
    pub fn dump(&self, dir: &Path, rank: usize, error: &Error) -> Result<PathBuf> {
        let path = path(dir, rank);
        let dump = Dump { rank, error: error.to_string(), ops: self.ops() };
        let text = serde_json::to_string(&dump).map_err(|e| Error::op("flight recorder", e.to_string()))?;
        std::fs::create_dir_all(dir)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|e| Error::io("write", &path, e))?;
        Ok(path)
    }

    fn lock(&self) -> MutexGuard<'_, FlightRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }
}

fn path(dir: &Path, rank: usize) -> PathBuf {
    dir.join(format!("rank-{rank}.json"))
}

impl FlightRing {
    /// `even`: all ranks of the run communicate equal numbers of bytes.
    fn push(&mut self, entry: FlightEntry, even: bool) {
        let bytes = if even { entry.bytes as u64 } else { 0 };
        let words = [entry.axis as u64, entry.seam as u64, entry.tag.unit as u64, bytes];
        let bytes = words.iter().flat_map(|w| w.to_le_bytes()).chain(entry.tag.what.bytes());
        let bytes = bytes.filter(|_| !matches!(entry.axis, Axis::Sp | Axis::Tp | Axis::Ep));
        self.hash = bytes.fold(self.hash, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3));
        match self.entries.len() {
            KEPT => self.entries[self.count as usize % KEPT] = entry,
            _ => self.entries.push(entry),
        }
        self.count += 1;
    }
    /// Index of the oldest entry. Once the ring has wrapped, newer entries precede it.
    fn oldest(&self) -> usize {
        self.count as usize % self.entries.len().max(1)
    }
    /// The newest entry that satisfies `is`.
    fn newest(&mut self, is: impl Fn(&FlightEntry) -> bool) -> Option<&mut FlightEntry> {
        let oldest = self.oldest();
        let (new, old) = self.entries.split_at_mut(oldest);
        new.iter_mut().rev().chain(old.iter_mut().rev()).find(|e| is(e))
    }
}

/// Records the operations of one group.
pub struct FlightHook {
    axis: Axis,
    /// Whether all ranks of the run communicate equal numbers of bytes.
    even: bool,
    flight: Flight,
}

impl Hook for FlightHook {
    /// Runs before the call, so that a call that never returns is recorded.
    fn before(&self, seam: Seam, Started { tag, bytes }: Started) {
        let started = self.flight.now();
        let mut ring = self.flight.lock();
        let (seq, axis) = (ring.count + 1, self.axis);
        let entry = FlightEntry { seq, seam, axis, tag, bytes, ticket: None, started, returned: None, waited: None };
        ring.push(entry, self.even && seam != Seam::AllToAll);
    }
    fn after(&self, seam: Seam, started: Started, ticket: Option<Ticket>) {
        let now = self.flight.now();
        let axis = self.axis;
        let mut ring = self.flight.lock();
        if let Some(entry) = ring.newest(|e| (e.axis, e.seam, e.tag) == (axis, seam, started.tag)) {
            (entry.ticket, entry.returned) = (ticket, Some(now));
        }
    }
    fn before_wait(&self, seam: Seam, ticket: Ticket) {
        self.waited(seam, ticket, None);
    }
    fn after_wait(&self, seam: Seam, ticket: Ticket) {
        self.waited(seam, ticket, Some(self.flight.now()));
    }
}

impl FlightHook {
    /// An operation that is waited for twice (its input sent) is finished only after the second wait.
    fn waited(&self, seam: Seam, ticket: Ticket, at: Option<f64>) {
        if matches!(seam, Seam::Wait | Seam::WaitSent)
            && let Some(entry) = self.flight.lock().newest(|e| e.axis == self.axis && e.ticket == Some(ticket))
        {
            entry.waited = at;
        }
    }
}

/// Summarizes the files of a failed run's ranks: which are missing, which rank is behind, and where ranks first differ.
/// Ignores files from before `since`, which belong to another run.
pub fn verdict(dir: &Path, world: usize, since: SystemTime) -> Option<String> {
    let read = |rank| {
        let path = path(dir, rank);
        let fresh = std::fs::metadata(&path).and_then(|m| m.modified()).is_ok_and(|at| at >= since);
        fresh.then(|| std::fs::read(&path).ok()).flatten().and_then(|text| serde_json::from_slice::<Dump>(&text).ok())
    };
    let dumps: BTreeMap<usize, Dump> = (0..world).filter_map(|rank| Some((rank, read(rank)?))).collect();
    let (&first, reference) = dumps.iter().max_by_key(|(_, dump)| dump.ops.last().map(|op| op.seq))?;
    let mut parts = Vec::new();
    let silent: Vec<String> = (0..world).filter(|rank| !dumps.contains_key(rank)).map(|r| r.to_string()).collect();
    if !silent.is_empty() {
        parts.push(format!("no record of rank {}", silent.join(", ")));
    }
    for (rank, dump) in dumps.iter().filter(|(rank, _)| **rank != first) {
        let pair = |op: &FlightOp| {
            reference.ops.iter().find(|other| other.seq == op.seq).map(|other| (op.clone(), other.clone()))
        };
        let differs = dump.ops.iter().filter_map(pair).find(|(mine, theirs)| !mine.same(theirs));
        match (differs, dump.ops.last(), reference.ops.last()) {
            (Some((mine, theirs)), ..) => {
                parts.push(format!("rank {rank} first differs at {mine}, where rank {first} has {theirs}"))
            }
            (None, Some(last), Some(furthest)) if last.seq < furthest.seq => {
                parts.push(format!("rank {rank} is behind: its last is {last}, rank {first} is at {furthest}"))
            }
            _ => {}
        }
    }
    let at = reference.ops.last().map(|op| format!("rank {first} got furthest, to {op}"))?;
    Some(std::iter::once(at).chain(parts).collect::<Vec<_>>().join("; "))
}
