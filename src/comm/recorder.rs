//! A group that records every call, so that tests can count operations and see their order. Never changes what a call
//! does.
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Axis, Collective, Tag, Ticket};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One call, or a note of the test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// `None` for a note.
    pub seam: Option<Seam>,
    /// The group's axis; [`Axis::World`] for a note.
    pub axis: Axis,
    /// Tag of the operation that is started or awaited.
    pub tag: Tag,
    /// See [`Started`]; 0 for waits and releases.
    pub bytes: usize,
}

/// The calls of one rank, in order. Clones share it, so the groups of a rank can write to one log.
#[derive(Clone, Default, Debug)]
pub struct Log(Arc<Mutex<Vec<Entry>>>);

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Log {
    /// Records an event that the group does not see, e.g. the use of a unit by compute.
    pub fn note(&self, tag: Tag) {
        lock(&self.0).push(Entry { seam: None, axis: Axis::World, tag, bytes: 0 });
    }
    pub fn entries(&self) -> Vec<Entry> {
        lock(&self.0).clone()
    }
    pub fn clear(&self) {
        lock(&self.0).clear();
    }
    pub fn count(&self, seam: Seam) -> usize {
        lock(&self.0).iter().filter(|e| e.seam == Some(seam)).count()
    }
    /// Index of the first call `seam` of an operation with this tag, from entry `from` on.
    pub fn find(&self, from: usize, seam: Seam, tag: Tag) -> Option<usize> {
        let found = |e: &Entry| e.seam == Some(seam) && e.tag == tag;
        lock(&self.0).iter().skip(from).position(found).map(|i| i + from)
    }
}

pub type Recorder = Hooked<Recording>;

pub struct Recording {
    axis: Axis,
    log: Log,
    tags: Mutex<HashMap<Ticket, Tag>>,
}

impl Recorder {
    pub fn new(inner: Arc<dyn Collective>, log: Log) -> Recorder {
        let hook = Recording { axis: inner.axis(), log, tags: Mutex::default() };
        Hooked::with(inner, hook)
    }
}

impl Recording {
    fn add(&self, seam: Seam, tag: Tag, bytes: usize) {
        lock(&self.log.0).push(Entry { seam: Some(seam), axis: self.axis, tag, bytes });
    }
}
impl Hook for Recording {
    /// Recorded before the call, so that a call that never returns is in the log.
    fn before(&self, seam: Seam, started: Started) {
        self.add(seam, started.tag, started.bytes);
    }
    fn after(&self, _: Seam, started: Started, ticket: Option<Ticket>) {
        if let Some(ticket) = ticket {
            lock(&self.tags).insert(ticket, started.tag);
        }
    }
    fn before_wait(&self, seam: Seam, ticket: Ticket) {
        let tag = lock(&self.tags).get(&ticket).copied();
        self.add(seam, tag.unwrap_or(Tag::new("unknown ticket", ticket.0 as usize)), 0);
    }
    fn after_wait(&self, _: Seam, _: Ticket) {}
}
