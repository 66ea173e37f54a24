//! The work of a rank's step: FLOPs, bytes moved and bytes received, summed over the calls that the engine makes on a
//! device without memory. Never computes, and never knows how fast a machine is.
use super::{Engine, EngineOptions, Step};
use crate::base::{DType, Meter, Result};
use crate::comm::seam::{Hook, Hooked, Seam, Started};
use crate::comm::unbacked::UnbackedMember;
use crate::comm::{Collective, Mesh, MeshSizes, Ticket};
use crate::data::MicroBatch;
use crate::device::Device;
use crate::device::cost::{OpCost, Rate};
use crate::device::counted::{OpDevice, OpExecutor};
use crate::nn::Checkpointing;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of an operation from which on it belongs to the next class of [`StepWork::moved`]: memory is faster where
/// operands fit a cache.
pub const WORKING_SETS: [u64; 4] = [0, 2 << 20, 16 << 20, 64 << 20];

/// What a step has to do on one rank, however it is done.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct StepWork {
    /// FLOPs of matrix products and of attention, by the dtype of their inputs. Attention counts the (query, key) pairs
    /// that are not masked: 2 products forward and 4 backward.
    pub flops: BTreeMap<DType, u64>,
    /// The operations of attention.
    pub attention: u64,
    /// FLOPs of backward that repeat forward's, not in `flops`: of activation checkpointing, and the scores that
    /// attention does not save. With checkpointing, an adapter's input times A is repeated too, but is too small to be
    /// told apart.
    pub recomputed: u64,
    /// Bytes read and written by all other operations, by size of the operation: see [`WORKING_SETS`].
    pub moved: [u64; WORKING_SETS.len()],
    /// Bytes received in gathers, broadcasts and sends, and in reductions. An all-reduce is one of each.
    pub gathered: u64,
    pub reduced: u64,
}

impl StepWork {
    pub fn all_flops(&self) -> u64 {
        self.flops.values().sum()
    }
    fn op(&mut self, op: &OpCost) {
        let (model, again) = match op.rate {
            Rate::Memory => {
                let class = WORKING_SETS.partition_point(|&set| set <= op.bytes) - 1;
                self.moved[class] += op.bytes;
                return;
            }
            Rate::AttentionBackward => (op.flops / 5 * 4, op.flops / 5),
            Rate::Product | Rate::Attention => (op.flops, 0),
        };
        *self.flops.entry(op.dtype).or_default() += model;
        self.recomputed += again;
        if op.rate != Rate::Product {
            self.attention += model;
        }
    }
}

type WorkTally = Arc<Mutex<StepWork>>;

fn lock(tally: &WorkTally) -> MutexGuard<'_, StepWork> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has addresses but no memory.
struct Sum(WorkTally, Meter);

impl OpExecutor for Sum {
    fn meter(&self) -> &Meter {
        &self.1
    }
    fn fuses(&self) -> bool {
        true
    }
    fn op(&self, op: OpCost, _: impl FnOnce(&dyn Device) -> Result<()>) -> Result<()> {
        lock(&self.0).op(&op);
        Ok(())
    }
}

/// Counts what a group of so many ranks receives.
struct ReceivedBytes(WorkTally, u64);

impl Hook for ReceivedBytes {
    fn before(&self, _: Seam, _: Started) {}
    fn after(&self, seam: Seam, started: Started, _: Option<Ticket>) {
        let (bytes, mut work) = (started.bytes as u64, lock(&self.0));
        let others = bytes * (self.1 - 1) / self.1;
        match seam {
            Seam::AllGather => work.gathered += others,
            Seam::ReduceScatter => work.reduced += others,
            Seam::AllReduce => {
                work.gathered += others;
                work.reduced += others;
            }
            Seam::Broadcast | Seam::SendRecv | Seam::AllToAll => work.gathered += bytes,
            Seam::Alloc | Seam::Barrier | Seam::Wait | Seam::Release | Seam::WaitSent => {}
        }
    }
    fn before_wait(&self, _: Seam, _: Ticket) {}
    fn after_wait(&self, _: Seam, _: Ticket) {}
}

/// An engine that only counts.
struct Counting {
    engine: Engine,
    tally: WorkTally,
    steps: u64,
}

impl Counting {
    fn new(options: &EngineOptions, mesh: MeshSizes, rank: usize) -> Result<Counting> {
        let (tally, meter) = (WorkTally::default(), Meter::default());
        let member = UnbackedMember::new(&meter, (rank, mesh.world()), 1, 0);
        let mesh = Mesh::new(member, mesh)?.wrap(|group| -> Arc<dyn Collective> {
            let received = ReceivedBytes(tally.clone(), group.size() as u64);
            Arc::new(Hooked::with(group, received))
        });
        let engine = Engine::unfilled(Arc::new(OpDevice::new(Sum(tally.clone(), meter))), &mesh, options)?;
        Ok(Counting { engine, tally, steps: 0 })
    }
    fn step(&mut self, batches: &[MicroBatch]) -> Result<StepWork> {
        // A store gathers more in its first step than in later ones.
        for _ in 0..if self.steps == 0 { 2 } else { 1 } {
            self.steps += 1;
            *lock(&self.tally) = StepWork::default();
            self.engine.train_step(batches, &Step { number: self.steps, lr: 1e-3, tokens: 1 })?;
        }
        Ok(std::mem::take(&mut *lock(&self.tally)))
    }
}

/// Makes the calls of a step on `device`, which has no memory, as rank `rank` of a world that does not exist. `options`
/// as for [`StepCounter::new`].
pub fn rehearse(
    device: Arc<dyn Device>,
    options: &EngineOptions,
    mesh: MeshSizes,
    rank: usize,
    batches: &[MicroBatch],
) -> Result<()> {
    let member = UnbackedMember::new(device.meter(), (rank, mesh.world()), 1, 0);
    let mut engine = Engine::unfilled(device, &Mesh::new(member, mesh)?, options)?;
    engine.train_step(batches, &Step { number: 1, lr: 1e-3, tokens: 1 }).map(drop)
}

/// Counts the work of each step of a rank, recomputation apart.
pub struct StepCounter {
    model: Counting,
    /// With activation checkpointing.
    again: Option<Counting>,
    /// Documents and numbers of targets of the counted step.
    documents: Vec<(Vec<u32>, u64)>,
    work: StepWork,
}

impl StepCounter {
    /// `options` without offloading: updates of offloaded weights would touch host memory.
    pub fn new(options: &EngineOptions, mesh: MeshSizes, rank: usize) -> Result<StepCounter> {
        let saved = EngineOptions { checkpoint: Checkpointing::Off, ..options.clone() };
        let again = options.checkpoint != Checkpointing::Off;
        Ok(StepCounter {
            model: Counting::new(&saved, mesh, rank)?,
            again: again.then(|| Counting::new(options, mesh, rank)).transpose()?,
            documents: Vec::new(),
            work: StepWork::default(),
        })
    }

    /// The work of a step on these micro-batches, counted again only if their documents or numbers of targets
    /// differ from the last ones.
    pub fn step(&mut self, batches: &[MicroBatch]) -> Result<&StepWork> {
        let documents: Vec<_> = batches.iter().map(|batch| (batch.cu_seqlens.clone(), batch.loss_tokens())).collect();
        if documents != self.documents {
            self.work = self.model.step(batches)?;
            if let Some(again) = &mut self.again {
                let all = again.step(batches)?;
                self.work.recomputed = all.all_flops() + all.recomputed - self.work.all_flops();
            }
            self.documents = documents;
        }
        Ok(&self.work)
    }
}
