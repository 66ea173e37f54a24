//! Points of streams in time, as events read after the GPU is done: see
//! [`Driver::mark`](crate::gpu::Driver::mark). Waits only in `begin_marks` and `when_marked`. Not yet run on a
//! GPU.
use super::device::{Cuda, MarkRing};
use cudarc::driver::CudaStream;
use flatshard_base::timeline::Mark;
use flatshard_base::{Error, Result};
use std::time::{Duration, Instant};

/// Marks kept per step: two per span.
const KEPT: u64 = 1 << 14;

impl Cuda {
    pub(super) fn begin_marks(&self) -> Result<()> {
        let mut marks = self.marks.lock();
        if marks.is_none() {
            let events = (0..KEPT).map(|_| self.event(true)).collect::<Result<_>>()?;
            *marks = Some(MarkRing { events, made: 0, base: self.event(true)?, at: Instant::now() });
        }
        let Some(ring) = marks.as_mut() else { return Ok(()) };
        let passed = ring.base.record(self.compute()).and_then(|()| self.compute().synchronize());
        passed.map_err(|e| self.failed("record a mark", e))?;
        ring.at = Instant::now();
        Ok(())
    }
    /// Marks this point of a stream; none while marking is off.
    pub fn mark_on(&self, stream: &CudaStream) -> Result<Option<Mark>> {
        let mut marks = self.marks.lock();
        let Some(ring) = marks.as_mut() else { return Ok(None) };
        let event = &ring.events[(ring.made % KEPT) as usize];
        event.record(stream).map_err(|e| self.failed("record a mark", e))?;
        ring.made += 1;
        Ok(Some(Mark::Event(ring.made - 1)))
    }
    pub(super) fn when_marked(&self, mark: Mark) -> Result<Instant> {
        let number = match mark {
            Mark::At(at) => return Ok(at),
            Mark::Event(number) => number,
        };
        let marks = self.marks.lock();
        let Some(ring) = marks.as_ref().filter(|ring| number < ring.made && number + KEPT >= ring.made) else {
            return Err(Error::op("when", format!("a step made more than {KEPT} marks: profile a smaller model")));
        };
        let event = &ring.events[(number % KEPT) as usize];
        // On a group's stream, past what the compute stream has waited for, so it may not have completed.
        event.synchronize().map_err(|e| self.failed("wait for a mark", e))?;
        let seconds = self.seconds(&ring.base, event)?;
        Ok(ring.at + Duration::from_secs_f64(seconds.max(0.0)))
    }
    /// Turns marking off.
    pub(super) fn end_marks(&self) {
        *self.marks.lock() = None;
    }
}
