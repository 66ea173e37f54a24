//! Runs a loader on its own thread, a few steps ahead. Never reorders: steps come out in the loader's order.
use super::loader::{Loader, StepData};
use crate::base::timeline::{Lane, Timeline};
use crate::base::{Error, Result};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One buffer per step: the loop holds the current and the next step, and two more are full or being filled.
const BUFFERS: usize = 4;

/// Buffers circulate: the thread fills an empty one; the loop takes a full one and returns it when its step is done.
/// Neither side allocates once all buffers have grown to size.
pub struct Prefetch {
    /// None tells the thread to end.
    empty: Option<SyncSender<StepData>>,
    full: Receiver<StepData>,
    thread: Option<JoinHandle<()>>,
    /// The step after the current one, if it was peeked at.
    ahead: Option<Fetched>,
    /// The step to fetch next.
    number: u64,
    waited: Duration,
    timeline: Timeline,
}

/// One rank's data for one step.
#[derive(Debug)]
pub struct Fetched {
    /// The optimizer step this data is for.
    pub step: u64,
    pub data: StepData,
}

#[derive(Clone, Default)]
pub struct PrefetchOptions {
    /// The optimizer step, from 1, that the loader's next data is for.
    pub first_step: u64,
    /// Rows per micro-batch and tokens per row to pad each micro-batch to, so that all have the same shape.
    pub fill_up: Option<(usize, usize)>,
    /// Records the time the loop waits.
    pub timeline: Timeline,
}

impl Prefetch {
    pub fn start(mut loader: Loader, options: PrefetchOptions) -> Result<Prefetch> {
        let (empty, take) = sync_channel::<StepData>(BUFFERS);
        let (give, full) = sync_channel(BUFFERS);
        for _ in 0..BUFFERS {
            let _ = empty.send(StepData::default()); // never blocks: the channel holds all buffers
        }
        let PrefetchOptions { first_step, fill_up, timeline } = options;
        let work = move || {
            while let Ok(mut step) = take.recv() {
                loader.next(&mut step);
                if let Some((rows, len)) = fill_up {
                    step.batches.iter_mut().for_each(|batch| batch.fill_up(rows * len, len));
                }
                if give.send(step).is_err() {
                    break; // the training loop ended
                }
            }
        };
        let thread = std::thread::Builder::new().name("data".into()).spawn(work);
        let thread = thread.map_err(|e| Error::Run(format!("data: cannot start the prefetch thread: {e}")))?;
        Ok(Prefetch {
            empty: Some(empty),
            full,
            thread: Some(thread),
            ahead: None,
            number: first_step,
            waited: Duration::ZERO,
            timeline,
        })
    }

    /// The next step's data. Blocks until it is ready.
    pub fn next_step(&mut self) -> Result<Fetched> {
        match self.ahead.take() {
            Some(fetched) => Ok(fetched),
            None => self.fetch(),
        }
    }
    /// What [`Prefetch::next_step`] will return next.
    pub fn peek(&mut self) -> Result<&Fetched> {
        let fetched = self.next_step()?;
        Ok(self.ahead.insert(fetched))
    }
    /// How long the loop has waited for data since the last call.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }
    /// Returns the buffers of a finished step.
    pub fn give_back(&self, used: StepData) {
        if let Some(empty) = &self.empty {
            let _ = empty.send(used); // if the thread has ended, the next call reports it
        }
    }

    fn fetch(&mut self) -> Result<Fetched> {
        let (started, step) = (Instant::now(), self.number);
        let wait = || self.full.recv();
        let received = self.timeline.host(Lane::Data, "wait for micro-batches", Some(step), wait);
        let Ok(data) = received else { return Err(self.failure()) };
        self.number += 1;
        self.waited += started.elapsed();
        Ok(Fetched { step, data })
    }

    fn failure(&mut self) -> Error {
        let panic = self.thread.take().and_then(|thread| thread.join().err());
        let words = panic
            .as_ref()
            .and_then(|p| p.downcast_ref::<String>().map(String::as_str).or_else(|| p.downcast_ref::<&str>().copied()));
        Error::Run(format!("data: the prefetch thread ended: {}", words.unwrap_or("no reason given")))
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.empty = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its panic was reported by next_step, or its data is not needed
        }
    }
}
