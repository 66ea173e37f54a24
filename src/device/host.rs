//! The optimizer's update in host memory, by threads of its own, while the device copies. For what is offloaded:
//! masters and moments are there, the gradient and the weights in the compute dtype there too or on the device. Never
//! allocates after it is made.
//!
//! [Note: turns] A range is updated in chunks, which take turns in two places of staging memory:
//!
//! ```text
//! device   g0 down   g1 down   w0 up, g2 down   w1 up, g3 down   ...   w up
//! host               update 0  update 1         update 2         ...
//! ```
//!
//! So the copies of one chunk run while another is updated, by all threads together, each a part of it. An update is
//! element by element: its bits are those of one pass.
#[cfg(test)]
mod tests;

use super::cpu::CpuDevice;
use super::ops::{AdamW, AdamWScalars, Sgd};
use super::{ALIGN, Buf, Device, Place, View, ViewMut};
use crate::base::{DType, Error, Meter, Result};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

const OP: &str = "host update";
/// Elements of a chunk at most: 1 MiB of gradient, which a bus of 25 GB/s brings in 40 us, several times what starting
/// the copy takes.
const CHUNK: usize = 1 << 18;
/// So many chunks at least to all that a rank owns, so that little of it is at the ends, where nothing overlaps.
const CHUNKS: usize = 8;
/// More threads than this wait for memory, not for each other: an element takes 28 bytes and a dozen operations.
const THREADS: usize = 16;

/// What of an update's operands is on the device and has to be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Staged {
    /// Elements that a rank owns.
    pub owned: usize,
    pub grads: bool,
    /// The dtype of the weights that are computed with.
    pub weights: Option<DType>,
}

impl Staged {
    fn chunk(&self) -> usize {
        self.owned.div_ceil(CHUNKS).next_multiple_of(ALIGN).clamp(ALIGN, CHUNK)
    }
}

/// Between a call and [`HostUpdate::finish`] nobody else touches the operands: as with a device's stream, they are in
/// use.
pub struct HostUpdate {
    workers: Workers,
    chunk: usize,
    places: [StagingSlot; 2],
    /// Chunks given so far; chunk i uses place i % 2.
    given: usize,
    /// f32 (1): the clip scale.
    scale: Buf,
    begun: bool,
    /// The scale is not finite: nothing changes until [`HostUpdate::finish`].
    skips: bool,
}

/// A place of staging memory, and the chunk that has it.
struct StagingSlot {
    /// f32: what the update shares between elements.
    constants: Buf,
    grad: Option<Buf>,
    weights: Option<Buf>,
    pending: Option<Pending>,
}
/// A chunk that is with the threads.
struct Pending {
    /// Where on the device the weights go that the update makes.
    to: Option<Buf>,
}

impl HostUpdate {
    /// On up to `threads` threads, one at least.
    pub fn new(dev: &dyn Device, staged: &Staged, threads: usize) -> Result<HostUpdate> {
        let chunk = staged.chunk();
        let place = || {
            Ok(StagingSlot {
                constants: dev.alloc_host(DType::F32, AdamWScalars::LEN)?,
                grad: staged.grads.then(|| dev.alloc_host(DType::F32, chunk)).transpose()?,
                weights: staged.weights.map(|dtype| dev.alloc_host(dtype, chunk)).transpose()?,
                pending: None,
            })
        };
        Ok(HostUpdate {
            workers: Workers::start(threads.clamp(1, THREADS))?,
            chunk,
            places: [place()?, place()?],
            given: 0,
            scale: dev.alloc_host(DType::F32, 1)?,
            begun: false,
            skips: false,
        })
    }

    /// As [`Device::adamw`], with the operands where they are and its constants in the host's `h`.
    pub fn adamw(&mut self, dev: &dyn Device, h: &[f32], op: AdamW) -> Result<()> {
        op.check()?;
        let AdamW { scale, g, m, v, p, out, .. } = op;
        let state = [Some(alias_mut(&m)), Some(alias_mut(&v))];
        let chunk =
            Chunk { rule: UpdateRule::AdamW, g: alias(g), state, p: alias_mut(&p), out: out.as_ref().map(alias_mut) };
        self.update(dev, h, scale, &chunk)
    }
    /// As [`Device::sgd`].
    pub fn sgd(&mut self, dev: &dyn Device, h: &[f32], op: Sgd) -> Result<()> {
        op.check()?;
        let Sgd { scale, g, m, p, out, .. } = op;
        let state = [m.as_ref().map(alias_mut), None];
        let chunk =
            Chunk { rule: UpdateRule::Sgd, g: alias(g), state, p: alias_mut(&p), out: out.as_ref().map(alias_mut) };
        self.update(dev, h, scale, &chunk)
    }

    fn update(&mut self, dev: &dyn Device, h: &[f32], scale: View, whole: &Chunk) -> Result<()> {
        if !self.begun {
            self.begun = true;
            dev.copy(scale.slice(0..1), self.scale.view_mut())?;
            dev.synchronize()?;
            self.skips = !self.scale.view().host::<f32>(OP)?[0].is_finite();
        }
        let n = if self.skips { 0 } else { whole.g.len() };
        (0..n).step_by(self.chunk).try_for_each(|from| self.give(dev, h, whole.part(from..n.min(from + self.chunk))))
    }

    /// One chunk: its gradient comes down, the threads have it, and the weights of the chunk before it go up.
    fn give(&mut self, dev: &dyn Device, h: &[f32], mut chunk: Chunk) -> Result<()> {
        let (place, n) = (self.given % 2, chunk.g.len());
        let StagingSlot { constants, grad, weights, pending } = &mut self.places[place];
        if let Some(grad) = grad.as_mut().filter(|_| chunk.g.view().place() != Place::Mapped) {
            dev.copy(chunk.g.view(), grad.view_mut().slice(0..n))?;
            chunk.g = alias(grad.view().slice(0..n));
        }
        let mut to = None;
        if let (Some(out), Some(weights)) = (&mut chunk.out, weights)
            && out.view().place() != Place::Mapped
        {
            to = Some(std::mem::replace(out, alias(weights.view().slice(0..n))));
        }
        // The gradient is there, and what this place held before is on the device.
        dev.synchronize()?;
        constants.view_mut().slice(0..h.len()).host::<f32>(OP)?.copy_from_slice(h);
        let (h, scale) = (alias(constants.view().slice(0..h.len())), alias(self.scale.view()));
        self.workers.give(place, &Task { h, scale, chunk });
        *pending = Some(Pending { to });
        self.given += 1;
        self.take(dev, 1 - place)
    }

    /// Waits for the chunk that has `place` and sends its weights up.
    fn take(&mut self, dev: &dyn Device, place: usize) -> Result<()> {
        let StagingSlot { weights, pending, .. } = &mut self.places[place];
        let Some(Pending { to }) = pending.take() else { return Ok(()) };
        self.workers.wait(place)?;
        match (to, weights) {
            (Some(mut to), Some(weights)) => dev.copy(weights.view().slice(0..to.len()), to.view_mut()),
            _ => Ok(()),
        }
    }

    /// Everything is updated; on a GPU the last weights are on their way, in the order of its stream.
    pub fn finish(&mut self, dev: &dyn Device) -> Result<()> {
        self.begun = false;
        let next = self.given % 2;
        self.take(dev, next)?;
        self.take(dev, 1 - next)
    }
}

/// A range in use by a thread.
fn alias(view: View) -> Buf {
    // SAFETY: an operand of a call, which nobody else touches before `finish`; or this module's own staging memory, in
    // turns.
    unsafe { view.alias() }
}
fn alias_mut(view: &ViewMut) -> Buf {
    alias(view.as_view())
}

#[derive(Clone, Copy)]
enum UpdateRule {
    AdamW,
    Sgd,
}

/// The operands of an update that have an element for each weight.
struct Chunk {
    rule: UpdateRule,
    g: Buf,
    /// The moments of AdamW; the momentum of SGD, if it has one.
    state: [Option<Buf>; 2],
    p: Buf,
    out: Option<Buf>,
}

impl Chunk {
    /// The same of some elements.
    fn part(&self, range: Range<usize>) -> Chunk {
        let cut = |x: &Buf| alias(x.view().slice(range.clone()));
        let state = self.state.each_ref().map(|s| s.as_ref().map(cut));
        Chunk { rule: self.rule, g: cut(&self.g), state, p: cut(&self.p), out: self.out.as_ref().map(cut) }
    }
}

struct Task {
    h: Buf,
    scale: Buf,
    chunk: Chunk,
}

impl Task {
    fn part(&self, range: Range<usize>) -> Task {
        Task { h: alias(self.h.view()), scale: alias(self.scale.view()), chunk: self.chunk.part(range) }
    }
    fn run(mut self, cpu: &CpuDevice) -> Result<()> {
        let Chunk { rule, g, state: [m, v], p, out } = &mut self.chunk;
        let (h, scale, g, p) = (self.h.view(), self.scale.view(), g.view(), p.view_mut());
        let [m, v, out] = [m, v, out].map(|buf| buf.as_mut().map(Buf::view_mut));
        match (rule, m, v) {
            (UpdateRule::AdamW, Some(m), Some(v)) => cpu.adamw(AdamW { h, scale, g, m, v, p, out }),
            (UpdateRule::AdamW, ..) => Err(Error::op(OP, "two moments are needed")),
            (UpdateRule::Sgd, m, _) => cpu.sgd(Sgd { h, scale, g, m, p, out }),
        }
    }
}

/// The threads and what they have to do, in order.
struct Workers {
    shared: Arc<UpdateQueue>,
    threads: Vec<JoinHandle<()>>,
}
#[derive(Default)]
struct UpdateQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}
#[derive(Default)]
struct QueueState {
    /// Parts of chunks, with the places that these have.
    tasks: VecDeque<(usize, Task)>,
    /// Parts of the chunk at each place that are not done.
    left: [usize; 2],
    failed: Option<Error>,
    over: bool,
}

impl UpdateQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn wait<'a>(&self, state: MutexGuard<'a, QueueState>) -> MutexGuard<'a, QueueState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
    /// A thread's life.
    fn work(&self) {
        let cpu = CpuDevice::new(Meter::default());
        let mut state = self.lock();
        loop {
            if let Some((place, task)) = state.tasks.pop_front() {
                drop(state);
                let run = catch_unwind(AssertUnwindSafe(|| task.run(&cpu)));
                state = self.lock();
                if let Err(e) = run.unwrap_or_else(|_| Err(Error::op(OP, "panicked"))) {
                    state.failed.get_or_insert(e);
                }
                state.left[place] -= 1;
                if state.left[place] == 0 {
                    self.changed.notify_all();
                }
            } else if state.over {
                return;
            } else {
                state = self.wait(state);
            }
        }
    }
}

impl Workers {
    fn start(threads: usize) -> Result<Workers> {
        let tasks = VecDeque::with_capacity(2 * threads); // a chunk at each place
        let shared = Arc::new(UpdateQueue {
            state: Mutex::new(QueueState { tasks, ..QueueState::default() }),
            ..UpdateQueue::default()
        });
        let mut workers = Workers { shared, threads: Vec::with_capacity(threads) };
        for _ in 0..threads {
            let own = workers.shared.clone();
            let thread = std::thread::Builder::new().name("update".into()).spawn(move || own.work());
            workers.threads.push(thread.map_err(|e| Error::op(OP, format!("cannot start a thread: {e}")))?);
        }
        Ok(workers)
    }
    /// The chunk at `place`, which is free: an equal part to each thread.
    fn give(&self, place: usize, task: &Task) {
        let n = task.chunk.g.len();
        let each = n.div_ceil(self.threads.len()).next_multiple_of(ALIGN);
        let mut state = self.shared.lock();
        for from in (0..n).step_by(each) {
            state.tasks.push_back((place, task.part(from..n.min(from + each))));
            state.left[place] += 1;
        }
        self.shared.changed.notify_all();
    }
    /// Until the chunk at `place` is done.
    fn wait(&self, place: usize) -> Result<()> {
        let mut state = self.shared.lock();
        while state.left[place] > 0 {
            state = self.shared.wait(state);
        }
        state.failed.take().map_or(Ok(()), Err)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // it cannot panic: a task that does is caught
        }
    }
}
