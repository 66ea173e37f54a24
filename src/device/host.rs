//! The optimizer's update in host memory, on its own threads, while the device copies. For offloaded state: masters and
//! moments are on the host, the gradient and the compute-dtype weights there or on the device. Never allocates after it
//! is created.
//!
//! [Note: turns] A range is updated in chunks, which alternate between two staging slots:
//!
//! ```text
//! device   g0 down   g1 down   w0 up, g2 down   w1 up, g3 down   ...   w up
//! host               update 0  update 1         update 2         ...
//! ```
//!
//! So one chunk is copied while another is updated by all threads together, each handling part of it. Chunks and parts
//! start at multiples of [`ALIGN`], between blocks of state, so the bits are those of a single pass.
#[cfg(test)]
mod tests;

use super::ops::{AdamW, AdamWScalars, Sgd, TensorPart};
use super::{ALIGN, Buf, Device, Place, View, ViewMut};
use flatshard_base::dynamic8::BLOCK;
use flatshard_base::{DType, Error, Result};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

const OP: &str = "host update";
/// Maximum elements per chunk: 1 MiB of gradient, which a bus of 25 GB/s transfers in 40 us, several times the cost of
/// starting the copy.
const CHUNK: usize = 1 << 18;
/// Minimum chunks for all that a rank owns, to limit the share of the first and last, which do not overlap.
const CHUNKS: usize = 8;
/// More threads would only wait for memory: an element takes 28 bytes and a dozen operations.
const THREADS: usize = 16;

/// Which operands of an update are on the device and must be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Staged {
    /// Elements that a rank owns.
    pub owned: usize,
    pub grads: bool,
    /// The compute dtype of the weights.
    pub weights: Option<DType>,
}

impl Staged {
    fn chunk(&self) -> usize {
        self.owned.div_ceil(CHUNKS).next_multiple_of(ALIGN).clamp(ALIGN, CHUNK)
    }
}

/// Between a call and [`HostUpdate::finish`] nobody else may access the operands, as with a device's stream.
pub struct HostUpdate {
    workers: Workers,
    chunk: usize,
    places: [StagingSlot; 2],
    /// Chunks submitted so far; chunk i uses slot i % 2.
    given: usize,
    /// f32 (1): the clip scale.
    scale: Buf,
    begun: bool,
    /// The scale is not finite: skip until [`HostUpdate::finish`].
    skips: bool,
}

/// A staging slot, and the chunk in it.
struct StagingSlot {
    /// f32: constants that all elements share.
    constants: Buf,
    grad: Option<Buf>,
    weights: Option<Buf>,
    pending: Option<Pending>,
}
/// A chunk that the threads are updating.
struct Pending {
    /// Destination on the device of the updated weights.
    to: Option<Buf>,
}

impl HostUpdate {
    /// Uses up to `threads` threads, at least one.
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
            workers: Workers::start(dev, threads.clamp(1, THREADS))?,
            chunk,
            places: [place()?, place()?],
            given: 0,
            scale: dev.alloc_host(DType::F32, 1)?,
            begun: false,
            skips: false,
        })
    }

    /// Like [`Device::adamw`], with the operands where they are and the constants in host memory `h`.
    pub fn adamw(&mut self, dev: &dyn Device, h: &[f32], op: AdamW) -> Result<()> {
        op.check()?;
        let AdamW { scale, g, m, v, p, out, absmax, at, .. } = op;
        let (state, out) = ([Some(alias_mut(&m)), Some(alias_mut(&v))], out.as_ref().map(alias_mut));
        let absmax = absmax.as_ref().map(|of| of.each_ref().map(alias_mut));
        let chunk = Chunk { rule: UpdateRule::AdamW(at), g: alias(g), state, absmax, p: alias_mut(&p), out };
        self.update(dev, h, scale, &chunk)
    }
    /// Like [`Device::sgd`].
    pub fn sgd(&mut self, dev: &dyn Device, h: &[f32], op: Sgd) -> Result<()> {
        op.check()?;
        let Sgd { scale, g, m, p, out, .. } = op;
        let (state, out) = ([m.as_ref().map(alias_mut), None], out.as_ref().map(alias_mut));
        let chunk = Chunk { rule: UpdateRule::Sgd, g: alias(g), state, absmax: None, p: alias_mut(&p), out };
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

    /// Processes one chunk: downloads its gradient, passes it to the threads, and uploads the previous chunk's weights.
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
        // The gradient has arrived, and this slot's previous contents are on the device.
        dev.synchronize()?;
        constants.view_mut().slice(0..h.len()).host::<f32>(OP)?.copy_from_slice(h);
        let (h, scale) = (alias(constants.view().slice(0..h.len())), alias(self.scale.view()));
        self.workers.give(place, &Task { h, scale, chunk });
        *pending = Some(Pending { to });
        self.given += 1;
        self.take(dev, 1 - place)
    }

    /// Waits for the chunk in `place` and uploads its weights.
    fn take(&mut self, dev: &dyn Device, place: usize) -> Result<()> {
        let StagingSlot { weights, pending, .. } = &mut self.places[place];
        let Some(Pending { to }) = pending.take() else { return Ok(()) };
        self.workers.wait(place)?;
        match (to, weights) {
            (Some(mut to), Some(weights)) => dev.copy(weights.view().slice(0..to.len()), to.view_mut()),
            _ => Ok(()),
        }
    }

    /// Waits until everything is updated. On a GPU the last weights are still being uploaded, in stream order.
    pub fn finish(&mut self, dev: &dyn Device) -> Result<()> {
        self.begun = false;
        let next = self.given % 2;
        self.take(dev, next)?;
        self.take(dev, 1 - next)
    }
}

/// A range that a thread uses.
fn alias(view: View) -> Buf {
    // SAFETY: an operand of a call, which nobody else accesses before `finish`; or this module's own staging memory,
    // used alternately.
    unsafe { view.alias() }
}
fn alias_mut(view: &ViewMut) -> Buf {
    alias(view.as_view())
}

#[derive(Clone, Copy)]
enum UpdateRule {
    AdamW(TensorPart),
    Sgd,
}

/// The per-element operands of an update.
struct Chunk {
    rule: UpdateRule,
    g: Buf,
    /// AdamW's moments; SGD's momentum, if any.
    state: [Option<Buf>; 2],
    /// The largest magnitudes of moments in blocks.
    absmax: Option<[Buf; 2]>,
    p: Buf,
    out: Option<Buf>,
}

impl Chunk {
    /// The operands of a subrange.
    fn part(&self, range: Range<usize>) -> Chunk {
        let cut = |x: &Buf| alias(x.view().slice(range.clone()));
        let state = self.state.each_ref().map(|s| s.as_ref().map(cut));
        let rule = match self.rule {
            UpdateRule::AdamW(at) => UpdateRule::AdamW(at.from(range.start)),
            UpdateRule::Sgd => UpdateRule::Sgd,
        };
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let absmax = self.absmax.as_ref();
        let absmax = absmax.map(|of| of.each_ref().map(|x| alias(x.view().slice(blocks.clone()))));
        Chunk { rule, g: cut(&self.g), state, absmax, p: cut(&self.p), out: self.out.as_ref().map(cut) }
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
    fn run(mut self, cpu: &dyn Device) -> Result<()> {
        let Chunk { rule, g, state: [m, v], absmax, p, out } = &mut self.chunk;
        let (h, scale, g, p) = (self.h.view(), self.scale.view(), g.view(), p.view_mut());
        let [m, v, out] = [m, v, out].map(|buf| buf.as_mut().map(Buf::view_mut));
        match (rule, m, v) {
            (UpdateRule::AdamW(at), Some(m), Some(v)) => {
                let absmax = absmax.as_mut().map(|of| of.each_mut().map(Buf::view_mut));
                cpu.adamw(AdamW { h, scale, g, m, v, p, out, absmax, at: *at })
            }
            (UpdateRule::AdamW(_), ..) => Err(Error::op(OP, "AdamW needs two moments")),
            (UpdateRule::Sgd, m, _) => cpu.sgd(Sgd { h, scale, g, m, p, out }),
        }
    }
}

/// The threads and their task queue.
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
    /// Parts of chunks, each with its slot.
    tasks: VecDeque<(usize, Task)>,
    /// Unfinished parts of the chunk in each slot.
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
    /// A thread's main loop.
    fn work(&self, cpu: &dyn Device) {
        let mut state = self.lock();
        loop {
            if let Some((place, task)) = state.tasks.pop_front() {
                drop(state);
                let run = catch_unwind(AssertUnwindSafe(|| task.run(cpu)));
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
    fn start(dev: &dyn Device, threads: usize) -> Result<Workers> {
        let tasks = VecDeque::with_capacity(2 * threads); // a chunk in each slot
        let shared = Arc::new(UpdateQueue {
            state: Mutex::new(QueueState { tasks, ..QueueState::default() }),
            ..UpdateQueue::default()
        });
        let mut workers = Workers { shared, threads: Vec::with_capacity(threads) };
        for _ in 0..threads {
            let (own, cpu) = (workers.shared.clone(), dev.on_host());
            let thread = std::thread::Builder::new().name("update".into()).spawn(move || own.work(&*cpu));
            workers.threads.push(thread.map_err(|e| Error::op(OP, format!("cannot start a thread: {e}")))?);
        }
        Ok(workers)
    }
    /// Submits the chunk in `place`, which must be free: an equal part to each thread.
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
    /// Waits until the chunk in `place` is done.
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
            let _ = thread.join(); // panics of tasks are caught
        }
    }
}
