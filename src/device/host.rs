//! The optimizer's update in host memory, by threads of its own, while the device copies. For what is offloaded: masters and
//! moments are there, the gradient and the weights in the compute dtype there too or on the device. Never allocates after it is
//! made.
//!
//! [Note: turns] A range is updated in chunks, which take turns in two places of staging memory:
//!
//! ```text
//! device   g0 down   g1 down   w0 up, g2 down   w1 up, g3 down   ...   w up
//! host               update 0  update 1         update 2         ...
//! ```
//!
//! So the copies of one chunk run while another is updated, by all threads together, each a part of it. An update is element by
//! element: its bits are those of one pass.
#[cfg(test)]
mod tests;

use super::cpu::CpuDevice;
use super::{ALIGN, AdamWScalars, Buf, Device, Place, View, ViewMut};
use crate::base::{DType, Error, Meter, Result};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

const OP: &str = "host update";
/// Elements of a chunk at most: 1 MiB of gradient, which a bus of 25 GB/s brings in 40 us, several times what starting the copy
/// takes.
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

/// Between a call and [`HostUpdate::finish`] nobody else touches the operands: as with a device's stream, they are in use.
pub struct HostUpdate {
    workers: Workers,
    chunk: usize,
    places: [Turn; 2],
    /// Chunks given so far; chunk i uses place i % 2.
    given: usize,
    /// f32 (1): the clip scale.
    scale: Buf,
    begun: bool,
    /// The scale is not finite: nothing changes until [`HostUpdate::finish`].
    skips: bool,
}

/// A place of staging memory, and the chunk that has it.
struct Turn {
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
            Ok(Turn {
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

    /// As [`Device::adamw`], with the operands where they are and its constants in the host's.
    #[allow(clippy::too_many_arguments)]
    pub fn adamw(
        &mut self,
        dev: &dyn Device,
        h: &[f32],
        scale: View,
        g: View,
        m: ViewMut,
        v: ViewMut,
        p: ViewMut,
        out: Option<ViewMut>,
    ) -> Result<()> {
        self.update(dev, HostRule::AdamW, h, scale, g, [Some(m), Some(v)], p, out)
    }
    /// As [`Device::sgd`].
    #[allow(clippy::too_many_arguments)]
    pub fn sgd(
        &mut self,
        dev: &dyn Device,
        h: &[f32],
        scale: View,
        g: View,
        m: Option<ViewMut>,
        p: ViewMut,
        out: Option<ViewMut>,
    ) -> Result<()> {
        self.update(dev, HostRule::Sgd, h, scale, g, [m, None], p, out)
    }

    #[allow(clippy::too_many_arguments)] // an operation's operands
    fn update(
        &mut self,
        dev: &dyn Device,
        rule: HostRule,
        h: &[f32],
        scale: View,
        g: View,
        mut state: [Option<ViewMut>; 2],
        mut p: ViewMut,
        mut out: Option<ViewMut>,
    ) -> Result<()> {
        if !self.begun {
            self.begun = true;
            dev.copy(scale.slice(0..1), self.scale.view_mut())?;
            dev.synchronize()?;
            self.skips = !self.scale.view().host::<f32>(OP)?[0].is_finite();
        }
        let n = if self.skips { 0 } else { g.len() };
        for from in (0..n).step_by(self.chunk) {
            let range = from..n.min(from + self.chunk);
            let cut = |x: &mut ViewMut| alias(x.reborrow().slice(range.clone()).as_view());
            let state = state.each_mut().map(|s| s.as_mut().map(cut));
            self.give(dev, rule, h, g.slice(range.clone()), state, cut(&mut p), out.as_mut().map(cut))?;
        }
        Ok(())
    }

    /// One chunk: its gradient comes down, the thread has it, and the weights of the chunk before it go up.
    #[allow(clippy::too_many_arguments)]
    fn give(
        &mut self,
        dev: &dyn Device,
        rule: HostRule,
        h: &[f32],
        g: View,
        state: [Option<Buf>; 2],
        p: Buf,
        out: Option<Buf>,
    ) -> Result<()> {
        let (place, n) = (self.given % 2, g.len());
        let Turn { constants, grad, weights, pending } = &mut self.places[place];
        let g = match grad {
            Some(grad) if g.place() != Place::Mapped => {
                dev.copy(g, grad.view_mut().slice(0..n))?;
                alias(grad.view().slice(0..n))
            }
            _ => alias(g),
        };
        let (out, to) = match (out, weights) {
            (Some(out), Some(weights)) if out.view().place() != Place::Mapped => {
                (Some(alias(weights.view().slice(0..n))), Some(out))
            }
            (out, _) => (out, None),
        };
        // The gradient is there, and what this place held before is on the device.
        dev.synchronize()?;
        constants.view_mut().slice(0..h.len()).host::<f32>(OP)?.copy_from_slice(h);
        let (h, scale) = (alias(constants.view().slice(0..h.len())), alias(self.scale.view()));
        self.workers.give(place, &Task { rule, h, scale, g, state, p, out });
        *pending = Some(Pending { to });
        self.given += 1;
        self.take(dev, 1 - place)
    }

    /// Waits for the chunk that has `place` and sends its weights up.
    fn take(&mut self, dev: &dyn Device, place: usize) -> Result<()> {
        let Turn { weights, pending, .. } = &mut self.places[place];
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
    // SAFETY: an operand of a call, which nobody else touches before `finish`; or this module's own staging memory, in turns.
    unsafe { view.alias() }
}

#[derive(Clone, Copy)]
enum HostRule {
    AdamW,
    Sgd,
}

struct Task {
    rule: HostRule,
    h: Buf,
    scale: Buf,
    g: Buf,
    state: [Option<Buf>; 2],
    p: Buf,
    out: Option<Buf>,
}

impl Task {
    /// The same of some elements.
    fn part(&self, range: Range<usize>) -> Task {
        let cut = |x: &Buf| alias(x.view().slice(range.clone()));
        let [m, v] = &self.state;
        let state = [m.as_ref().map(cut), v.as_ref().map(cut)];
        let (h, scale) = (alias(self.h.view()), alias(self.scale.view()));
        Task { rule: self.rule, h, scale, g: cut(&self.g), state, p: cut(&self.p), out: self.out.as_ref().map(cut) }
    }
    fn run(mut self, cpu: &CpuDevice) -> Result<()> {
        let (h, scale, g, p) = (self.h.view(), self.scale.view(), self.g.view(), self.p.view_mut());
        let (out, [m, v]) = (self.out.as_mut().map(Buf::view_mut), self.state.each_mut());
        let (m, v) = (m.as_mut().map(Buf::view_mut), v.as_mut().map(Buf::view_mut));
        match (self.rule, m, v) {
            (HostRule::AdamW, Some(m), Some(v)) => cpu.adamw(h, scale, g, m, v, p, out),
            (HostRule::AdamW, ..) => Err(Error::op(OP, "two moments are needed")),
            (HostRule::Sgd, m, _) => cpu.sgd(h, scale, g, m, p, out),
        }
    }
}

/// The threads and what they have to do, in order.
struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}
#[derive(Default)]
struct State {
    /// Parts of chunks, with the places that these have.
    tasks: VecDeque<(usize, Task)>,
    /// Parts of the chunk at each place that are not done.
    left: [usize; 2],
    failed: Option<Error>,
    over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
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
        let shared = Arc::new(Shared { state: Mutex::new(State { tasks, ..State::default() }), ..Shared::default() });
        let mut workers = Workers { shared, threads: Vec::with_capacity(threads) };
        for _ in 0..threads {
            let own = workers.shared.clone();
            let thread = std::thread::Builder::new().name("update".into()).spawn(move || own.work());
            workers.threads.push(thread.map_err(|e| Error::op(OP, format!("cannot start a thread: {e}")))?);
        }
        Ok(workers)
    }
    /// The chunk at `place`, which is free: an equal part to each thread.
    fn give(&self, place: usize, chunk: &Task) {
        let n = chunk.g.len();
        let each = n.div_ceil(self.threads.len()).next_multiple_of(ALIGN);
        let mut state = self.shared.lock();
        for from in (0..n).step_by(each) {
            state.tasks.push_back((place, chunk.part(from..n.min(from + each))));
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
