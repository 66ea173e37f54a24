//! A loader on a thread of its own, some steps ahead. Never reorders: what comes out is what the loader gives.
use super::loader::{Loader, StepData};
use crate::base::{Error, Result};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Steps that are filled ahead of the one in use.
const AHEAD: usize = 2;

/// Buffers go round: the thread fills an empty one, the loop swaps it for the one that it has used. Neither side
/// allocates once all are at their size.
pub struct Prefetch {
    /// None once the thread is to end.
    empty: Option<SyncSender<StepData>>,
    full: Receiver<StepData>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    pub fn start(mut loader: Loader) -> Result<Prefetch> {
        let (empty, take) = sync_channel::<StepData>(AHEAD + 1);
        let (give, full) = sync_channel(AHEAD + 1);
        for _ in 0..AHEAD {
            let _ = empty.send(StepData::default()); // there is room
        }
        let work = move || {
            while let Ok(mut step) = take.recv() {
                loader.next(&mut step);
                if give.send(step).is_err() {
                    break; // nobody wants it any more
                }
            }
        };
        let thread = std::thread::Builder::new().name("data".into()).spawn(work);
        let thread = thread.map_err(|e| Error::Run(format!("data: no thread to prefetch with: {e}")))?;
        Ok(Prefetch { empty: Some(empty), full, thread: Some(thread) })
    }

    /// The next step in place of `step`, as soon as it is there.
    pub fn next(&mut self, step: &mut StepData) -> Result<()> {
        let Ok(next) = self.full.recv() else { return Err(self.failure()) };
        let used = std::mem::replace(step, next);
        if let Some(empty) = &self.empty {
            let _ = empty.send(used); // where the thread has ended, the next call says so
        }
        Ok(())
    }

    fn failure(&mut self) -> Error {
        let panic = self.thread.take().and_then(|thread| thread.join().err());
        let words = panic
            .as_ref()
            .and_then(|p| p.downcast_ref::<String>().map(String::as_str).or_else(|| p.downcast_ref::<&str>().copied()));
        Error::Run(format!("data: the thread that fills micro-batches ended: {}", words.unwrap_or("it was stopped")))
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.empty = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic of it was reported, or nobody asked for what it made
        }
    }
}
