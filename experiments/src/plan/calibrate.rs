//! Measures this CPU with the engine itself: a few steps of a shallow model of the same width, on a device and groups
//! that time each call. Also times whole steps, to check predictions. Never predicts.
//!
//! Times are CPU times of the calling thread, so that other programs on the machine, and waiting for ranks they delay,
//! do not count as computation.
use super::clock::Seconds;
use super::links::Collected;
use super::measured::{CollectiveCall, Measured, Timings, median};
use super::simulate::BatchShape;
use cpu_time::ThreadTime;
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::comm::seam::{Hook, Hooked, Seam, Started};
use flatshard::comm::{Collective, Mesh, MeshSizes, Ticket, shm};
use flatshard::device::cost::OpCost;
use flatshard::device::counted::{OpDevice, OpExecutor};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::{Buf, Device, View, ViewMut};
use flatshard::engine::{Engine, EngineOptions, Step};
use flatshard::run::plan::memory;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// CPU seconds of this thread.
fn now() -> Seconds {
    ThreadTime::now().as_duration().as_secs_f64()
}

/// Blocks of the measured model: deeper ones repeat the same work.
const LAYERS: usize = 2;
/// Measured steps, after one warm-up step.
const STEPS: u64 = 5;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Times each operation of a CPU device.
struct Timed {
    device: CpuDevice,
    timings: Arc<Mutex<Timings>>,
}

impl OpExecutor for Timed {
    fn name(&self) -> String {
        self.device.name()
    }
    fn meter(&self) -> &Meter {
        self.device.meter()
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        self.device.alloc(dtype, len, category)
    }
    fn on_host(&self) -> Box<dyn Device> {
        self.device.on_host()
    }
    fn is_unbacked(&self) -> bool {
        false
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        self.device.upload(src, dst)
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        self.device.download(src, dst)
    }
    fn op(&self, op: OpCost, run: impl FnOnce(&dyn Device) -> Result<()>) -> Result<()> {
        let started = now();
        run(&self.device)?;
        lock(&self.timings).op(op, now() - started);
        Ok(())
    }
}

/// Collectives in flight, with the bytes of their full buffer.
type PendingTickets = HashMap<Ticket, (Collected, u64)>;

/// Times each call of a group. Only one thread calls, one call at a time.
struct Stopwatch {
    timings: Arc<Mutex<Timings>>,
    started: Mutex<(Seconds, PendingTickets)>,
}

fn collected(seam: Seam) -> Option<Collected> {
    Some(match seam {
        Seam::AllGather => Collected::AllGather,
        Seam::ReduceScatter => Collected::ReduceScatter,
        Seam::AllReduce => Collected::AllReduce,
        Seam::Broadcast => Collected::Broadcast,
        Seam::SendRecv => Collected::SendRecv,
        Seam::AllToAll => Collected::AllToAll,
        Seam::Barrier => Collected::Barrier,
        Seam::Alloc | Seam::Wait | Seam::Release | Seam::WaitSent => return None,
    })
}

impl Hook for Stopwatch {
    fn before(&self, _: Seam, _: Started) {
        lock(&self.started).0 = now();
    }
    fn after(&self, seam: Seam, started: Started, ticket: Option<Ticket>) {
        let mut mine = lock(&self.started);
        let Some(what) = collected(seam) else { return };
        let bytes = started.bytes as u64;
        lock(&self.timings).call(CollectiveCall { what, waits: false, bytes }, now() - mine.0);
        if let Some(ticket) = ticket {
            mine.1.insert(ticket, (what, bytes));
        }
    }
    fn before_wait(&self, _: Seam, _: Ticket) {
        lock(&self.started).0 = now();
    }
    /// Only waits for results count: waiting for free buffers takes little, and depends on the peers.
    fn after_wait(&self, seam: Seam, ticket: Ticket) {
        let mine = lock(&self.started);
        if let (Seam::Wait, Some(&(what, bytes))) = (seam, mine.1.get(&ticket)) {
            lock(&self.timings).call(CollectiveCall { what, waits: true, bytes }, now() - mine.0);
        }
    }
}

/// Runs `f` on each rank of a world of threads, one per core.
fn ranks<T: Send>(sizes: MeshSizes, f: impl Fn(Mesh, Meter) -> Result<T> + Sync) -> Result<Vec<T>> {
    let meters: Vec<Meter> = (0..sizes.world()).map(|_| Meter::default()).collect();
    let meshes = shm::threads(sizes, &meters)?;
    let start = |(mesh, meter): (Mesh, Meter)| {
        let member = mesh.member.clone();
        f(mesh, meter).inspect_err(|_| member.abort())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = meshes.into_iter().zip(meters).map(|rank| scope.spawn(|| start(rank))).collect();
        let end = |thread: std::thread::ScopedJoinHandle<Result<T>>| {
            thread.join().unwrap_or_else(|_| Err(Error::Run("calibrate: a rank panicked".into())))
        };
        threads.into_iter().map(end).collect()
    })
}

/// Seconds of each of `steps` steps after a warm-up step: CPU time of this thread, and wall-clock time.
fn train(mut engine: Engine, options: &EngineOptions, work: &BatchShape, steps: u64) -> Result<[Vec<Seconds>; 2]> {
    let batches = vec![work.batch(options.spec.vocab); work.grad_accum];
    let mut seconds = [Vec::new(), Vec::new()];
    for number in 1..=steps + 1 {
        let (started, on_the_wall) = (now(), Instant::now());
        let tokens = engine.global_count(work.tokens() as u64)?;
        engine.train_step(&batches, &Step { number, lr: 1e-4, tokens })?;
        if number > 1 {
            seconds[0].push(now() - started);
            seconds[1].push(on_the_wall.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// The times of rank 0's calls, in a model with the width of `options` and few blocks.
pub fn timings(options: &EngineOptions, sizes: MeshSizes, work: &BatchShape) -> Result<Timings> {
    let mut shallow = options.clone();
    shallow.spec.layers = shallow.spec.layers.min(LAYERS);
    shallow.spec.windowed.truncate(shallow.spec.layers);
    let mut timings = ranks(sizes, |mesh, meter| {
        let timings = Arc::new(Mutex::new(Timings::default()));
        let timed = Timed { device: CpuDevice::new(meter), timings: timings.clone() };
        let watched = |inner| -> Arc<dyn Collective> {
            let stopwatch = Stopwatch { timings: timings.clone(), started: Mutex::new((0.0, HashMap::new())) };
            Arc::new(Hooked::with(inner, stopwatch))
        };
        let engine = Engine::new(Arc::new(OpDevice::new(timed)), &mesh.wrap(watched), &shallow)?;
        train(engine, &shallow, work, STEPS)?;
        Ok(std::mem::take(&mut *lock(&timings)))
    })?;
    Ok(timings.swap_remove(0))
}

/// Medians over the steps of the whole model on rank 0: CPU time of the thread, and wall-clock time.
pub fn measure(options: &EngineOptions, sizes: MeshSizes, work: &BatchShape) -> Result<[Seconds; 2]> {
    let mut seconds = ranks(sizes, |mesh, meter| {
        let engine = Engine::new(Arc::new(CpuDevice::new(meter)), &mesh, options)?;
        train(engine, options, work, STEPS)
    })?;
    Ok(seconds.swap_remove(0).map(|mut seen| median(&mut seen)))
}

/// This machine, from the timings of one or more strategies.
pub fn machine(timings: Vec<Timings>, ranks: usize) -> Measured {
    let mut all = Timings::default();
    timings.into_iter().for_each(|timings| all.merge(timings));
    let cpu = CpuDevice::new(Meter::default()).name();
    Measured::new(cpu, all, memory::available().map(|bytes| bytes / ranks))
}
