//! A simulated step: the engine itself on a device that computes nothing, in a world of one rank that pretends to be
//! many. Unit order, prefetch, slots and their reuse are therefore those of the real stores. Never measures.
use super::clock::{Clock, Seconds, SimEvent, Totals};
use super::group::{PlannedMember, PlannedWorld};
use super::machine::MachineModel;
use flatshard::base::CATEGORIES;
use flatshard::base::{Category, Meter, Result};
use flatshard::comm::{Axis, Collective, Mesh, MeshSizes};
use flatshard::data::MicroBatch;
use flatshard::device::cost::OpCost;
use flatshard::device::counted::{OpDevice, OpExecutor};
use flatshard::device::{Device, View};
use flatshard::engine::{Engine, EngineOptions, Step};
use std::sync::Arc;

/// The data of a data-parallel rank in a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BatchShape {
    /// Tokens per sequence, sequences per micro-batch, micro-batches per step.
    pub max_len: usize,
    pub batch_size: usize,
    pub grad_accum: usize,
}

impl BatchShape {
    /// Sequences of `max_len` tokens, each a document.
    pub fn batch(&self, vocab: usize) -> MicroBatch {
        let tokens = self.max_len * self.batch_size;
        MicroBatch {
            tokens: (0..tokens).map(|i| (i * 7919 % vocab) as u32).collect(),
            targets: (0..tokens).map(|i| (i * 104_729 % vocab) as i32).collect(),
            positions: (0..tokens).map(|i| (i % self.max_len) as u32).collect(),
            cu_seqlens: (0..=self.batch_size).map(|i| (i * self.max_len) as u32).collect(),
            reference: vec![0.0; self.batch_size],
            ..MicroBatch::default()
        }
    }
    /// Tokens of one data-parallel rank.
    pub fn tokens(&self) -> usize {
        self.max_len * self.batch_size * self.grad_accum
    }
}

#[derive(Clone, Debug)]
pub struct Simulated {
    pub totals: Totals,
    /// Bytes received by a rank in the step, and number of collectives, by the axis of their group.
    pub received: Vec<(Axis, u64, u64)>,
    /// Bytes allocated by the engine, in the order of [`CATEGORIES`].
    pub allocated: Vec<(Category, usize)>,
    pub events: Vec<SimEvent>,
}

impl Simulated {
    pub fn seconds(&self) -> Seconds {
        self.totals.seconds
    }
    pub fn received_bytes(&self) -> u64 {
        self.received.iter().map(|r| r.1).sum()
    }
}

/// Spends the machine's time on the clock; has addresses but no memory.
struct Spend(PlannedWorld);

impl OpExecutor for Spend {
    fn name(&self) -> String {
        format!("plan ({})", self.0.machine.name())
    }
    fn meter(&self) -> &Meter {
        &self.0.meter
    }
    fn download(&self, _: View, dst: &mut [u8]) -> Result<()> {
        self.0.clock.sync();
        dst.fill(0);
        Ok(())
    }
    fn op(&self, op: OpCost, _: impl FnOnce(&dyn Device) -> Result<()>) -> Result<()> {
        let PlannedWorld { machine, clock, .. } = &self.0;
        clock.compute(op.name, machine.launch(), machine.op(&op), op.flops);
        Ok(())
    }
}

/// The device of a planned world.
pub fn device(world: &PlannedWorld) -> Arc<dyn Device> {
    Arc::new(OpDevice::new(Spend(world.clone())))
}

/// Rank 0 of a planned world; `wrap` wraps each of its groups.
pub fn mesh(
    world: &PlannedWorld,
    sizes: MeshSizes,
    wrap: impl Fn(Arc<dyn Collective>) -> Arc<dyn Collective>,
) -> Result<Mesh> {
    Ok(Mesh::new(PlannedMember::new(world.clone()), sizes)?.wrap(wrap))
}

/// A step after the first, on ranks of `machine`, `per_node` per node.
pub fn step(
    options: &EngineOptions,
    sizes: MeshSizes,
    work: &BatchShape,
    machine: &Arc<dyn MachineModel>,
    per_node: usize,
    keep_events: bool,
) -> Result<Simulated> {
    let clock = Arc::new(Clock::new(keep_events));
    let world =
        PlannedWorld { machine: machine.clone(), clock, meter: Meter::default(), ranks: sizes.world(), per_node };
    let mesh = mesh(&world, sizes, |group| group)?;
    let mut engine = Engine::unfilled(device(&world), &mesh, options)?;
    let batches = vec![work.batch(options.spec.vocab); work.grad_accum];
    let mut run = |number| -> Result<()> {
        let tokens = engine.global_count(work.tokens() as u64)?;
        engine.train_step(&batches, &Step { number, lr: 1e-3, tokens: tokens.max(1) })?;
        Ok(())
    };
    run(1)?;
    let axes: Vec<_> = mesh.axes().collect();
    let stats = || axes.iter().map(|&axis| mesh.group(axis).stats()).collect::<Vec<_>>();
    let before = stats();
    world.clock.reset();
    run(2)?;
    let received = axes.iter().zip(stats()).zip(before);
    let received = received.map(|((&axis, now), then)| (axis, now.bytes - then.bytes, now.ops - then.ops));
    Ok(Simulated {
        totals: world.clock.totals(),
        received: received.filter(|r| r.2 > 0).collect(),
        allocated: CATEGORIES.iter().map(|&(category, _)| (category, world.meter.live(category))).collect(),
        events: world.clock.events(),
    })
}
