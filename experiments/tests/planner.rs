//! The planner compared with what it plans: simulated calls and bytes are those of a real engine, and schedules of
//! known length take that long.
use crate::plan::clock::{Clock, Seconds};
use crate::plan::group::PlannedWorld;
use crate::plan::links::{Collected, Placement};
use crate::plan::machine::{GPUS, MachineModel, Rated};
use crate::plan::simulate::{self, BatchShape};
use crate::probe::{Watched, words};
use crate::worlds::*;
use cpu_time::ThreadTime;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::comm::recorder::{Entry, Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, CommStats, Mesh, MeshSizes};
use flatshard::device::cost::OpCost;
use flatshard::device::{Device, LIMBS};
use flatshard::engine::{Engine, EngineOptions, PlannedRank, Step, Strategy};
use flatshard::nn::{Arch, Checkpointing, Experts, SpImpl, Spec};
use flatshard::optim::Rule;
use flatshard::store::{BackwardPrefetch, ShardedOptions, Stage, Wrap, ZeroOptions};
use std::sync::Arc;

/// A machine on which all operations take the same time, and all collectives except all-reduces.
struct Even {
    op: Seconds,
    collective: Seconds,
    inline: bool,
}

impl MachineModel for Even {
    fn name(&self) -> &str {
        "even"
    }
    fn op(&self, _: &OpCost) -> Seconds {
        self.op
    }
    fn launch(&self) -> Seconds {
        0.0
    }
    fn collective(&self, what: Collected, _: u64, _: Placement) -> Seconds {
        if what == Collected::AllReduce { 0.0 } else { self.collective }
    }
    fn inline(&self) -> bool {
        self.inline
    }
    fn memory(&self) -> Option<usize> {
        None
    }
    fn peak(&self, _: DType) -> Option<f64> {
        None
    }
}

fn even(op: Seconds, collective: Seconds) -> Arc<dyn MachineModel> {
    Arc::new(Even { op, collective, inline: false })
}
fn world(machine: Arc<dyn MachineModel>, ranks: usize) -> PlannedWorld {
    PlannedWorld { machine, clock: Arc::new(Clock::new(false)), meter: Meter::default(), ranks, per_node: 8 }
}

/// The calls of a second step on rank 0: every call of every group and every use by the model, with bytes; and its
/// traffic.
fn recorded(
    device: Arc<dyn Device>,
    mesh: Mesh,
    strategy: Arc<dyn Strategy>,
    spec: &Spec,
    sp_impl: SpImpl,
    accum: usize,
) -> Result<(Vec<Entry>, String, CommStats)> {
    let log = Log::default();
    let rank = mesh.group(Axis::Dp).rank();
    let mesh = mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
    let watched = Arc::new(Watched::noting(strategy, &log));
    let options = EngineOptions { sp_impl, ..options(spec, watched, ADAMW) };
    let mut engine = Engine::new(device, &mesh, &options)?;
    let group = if engine.state().0.replicated() { mesh.group(Axis::Loss) } else { mesh.group(Axis::Fsdp) };
    let mut before = CommStats::default();
    for number in 1..=2 {
        let batches: Vec<_> = (0..accum).map(|micro| batch(spec, number, micro, rank)).collect();
        let tokens = engine.global_count(batches.iter().map(|b| b.loss_tokens()).sum())?;
        log.clear();
        before = group.stats();
        engine.train_step(&batches, &Step { number, lr: 0.01, tokens: tokens.max(1) })?;
    }
    let after = group.stats();
    let traffic = CommStats { bytes: after.bytes - before.bytes, ops: after.ops - before.ops, ..CommStats::default() };
    let entries = log.entries().into_iter().filter(|e| e.seam != Some(Seam::Alloc)).collect();
    Ok((entries, words(&log), traffic))
}

/// Ranks in most tests here.
const RANKS: usize = 3;

/// `accum` micro-batches per step. Compares rank 0 of real ranks with rank 0 of a simulated world of the same size.
fn assert_same_calls(strategy: Arc<dyn Strategy>, sizes: MeshSizes, accum: usize) {
    assert_same_calls_over(strategy, sizes, SpImpl::Ring, accum);
}
fn assert_same_calls_over(strategy: Arc<dyn Strategy>, sizes: MeshSizes, sp_impl: SpImpl, accum: usize) {
    let spec = Spec { ff: 45, vocab: 63, ..llama() }; // tensor parallelism splits both by 3
    assert_same_calls_of(&spec, strategy, sizes, sp_impl, accum);
}
fn assert_same_calls_of(spec: &Spec, strategy: Arc<dyn Strategy>, sizes: MeshSizes, sp_impl: SpImpl, accum: usize) {
    let real = mesh_ranks(sizes, |rank| recorded(rank.device, rank.mesh, strategy.clone(), spec, sp_impl, accum))
        .swap_remove(0);
    let world = world(even(1.0, 1.0), sizes.world());
    let mesh = simulate::mesh(&world, sizes, |group| group).unwrap();
    let simulated = recorded(simulate::device(&world), mesh, strategy, spec, sp_impl, accum).unwrap();
    assert!(simulated.1.contains("reduce"), "{}", simulated.1);
    assert_eq!(simulated.1, real.1, "{sizes:?}");
    assert_eq!(simulated.0, real.0, "{sizes:?}: {}", real.1);
    assert_eq!(simulated.2, real.2, "traffic of {sizes:?}");
}

#[test]
fn simulated_calls_match_a_real_engine() {
    use BackwardPrefetch::{None, Post, Pre};
    let same = |options: ShardedOptions| {
        let accum = options.grad_accum;
        assert_same_calls(fsdp(options), MeshSizes::sharded(RANKS), accum);
    };
    for backward_prefetch in [Pre, Post, None] {
        for forward_prefetch in [true, false] {
            same(ShardedOptions { backward_prefetch, forward_prefetch, ..sharded() });
        }
    }
    let whole = ShardedOptions { reshard: false, ..sharded() };
    same(whole.clone());
    same(ShardedOptions { grad_accum: 2, ..whole });
    same(ShardedOptions { grad_accum: 3, sync_each_batch: true, ..sharded() });
    same(ShardedOptions { wrap: Wrap::Size(8000), dtype: DType::Bf16, ..sharded() });
}

#[test]
fn simulated_calls_match_for_every_store_and_axis() {
    let mesh = |dp_replicate, dp_shard, tp| MeshSizes { dp_replicate, dp_shard, sp: 1, tp, ep: 1 };
    assert_same_calls(ddp(DType::F32), mesh(RANKS, 1, 1), 2);
    for stage in [Stage::One, Stage::Two, Stage::Three] {
        assert_same_calls(Arc::new(ZeroOptions::new(stage, DType::Bf16)), mesh(1, RANKS, 1), 1);
    }
    assert_same_calls(fsdp(sharded()), mesh(2, 2, 1), 1);
    assert_same_calls(fsdp(sharded()), mesh(1, 2, 3), 1);
    // Six heads: of four ranks that share sequences, each has some; eight are two groups on a ring.
    for (sp_impl, sp) in [(SpImpl::Ring, 4), (SpImpl::AllGather, 4), (SpImpl::Ulysses, 4), (SpImpl::Ulysses, 8)] {
        assert_same_calls_over(fsdp(sharded()), MeshSizes { sp, ..mesh(1, 1, 1) }, sp_impl, 2);
    }
}

/// Ranks that share experts, all of which every token chooses: then real routing is as even as the planner assumes.
#[test]
fn simulated_calls_match_for_shared_experts() {
    let experts = Experts { count: 3, top_k: 3, ..sparse().experts.unwrap() };
    let spec = Spec { experts: Some(experts), ..sparse() };
    let sizes = MeshSizes { ep: 2, ..MeshSizes::sharded(4) };
    for strategy in [fsdp(sharded()), Arc::new(ZeroOptions::new(Stage::Three, DType::Bf16))] {
        assert_same_calls_of(&spec, strategy, sizes, SpImpl::Ring, 1);
    }
}

/// The simulation allocates what the formula says, for ranks that share a host's memory and for GPUs, which do not.
#[test]
fn planned_bytes_equal_allocated_bytes() {
    let spec = gpt();
    let zero = |stage| -> Arc<dyn Strategy> { Arc::new(ZeroOptions::new(stage, DType::Bf16)) };
    let strategies: [Arc<dyn Strategy>; 6] = [
        fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() }),
        fsdp(sharded()),
        ddp(DType::Bf16),
        zero(Stage::One),
        zero(Stage::Two),
        zero(Stage::Three),
    ];
    for strategy in strategies {
        for inline in [true, false] {
            let options = EngineOptions {
                checkpoint: if inline { Checkpointing::Full } else { Checkpointing::Off },
                ..options(&spec, strategy.clone(), ADAMW)
            };
            let sizes = MeshSizes::sharded(RANKS);
            let machine: Arc<dyn MachineModel> = Arc::new(Even { op: 1.0, collective: 1.0, inline });
            let work = BatchShape { max_len: ROW, batch_size: 2, grad_accum: 1 };
            let step = simulate::step(&options, sizes, &work, &machine, 8, false).unwrap();
            let sharing = if inline { RANKS } else { 1 };
            let planned = PlannedRank { mesh: sizes, rank: 0, sharing, stage: 0, gpu: false };
            let planned = planned.bytes(|dev, mesh| Engine::unfilled(dev, mesh, &options)).unwrap();
            assert_eq!(step.allocated, planned, "{} inline {inline}", strategy.name());
        }
    }
}

/// Ranks that share experts: rows and their counts are exchanged as planned, with all experts used alike, and the
/// engine allocates what the formula says.
#[test]
fn shared_experts_are_planned_to_the_byte() {
    let spec = sparse();
    let experts = Experts { count: 8, top_k: 3, ..spec.experts.clone().unwrap() };
    let spec = Spec { experts: Some(experts), ..spec };
    let options = EngineOptions { tokens: 2 * ROW, ..options(&spec, fsdp(sharded()), ADAMW) };
    let sizes = MeshSizes { ep: 4, ..MeshSizes::sharded(8) };
    let work = BatchShape { max_len: ROW, batch_size: 2, grad_accum: 1 };
    let step = simulate::step(&options, sizes, &work, &even(1.0, 1.0), 8, false).unwrap();
    // Three quarters of a rank's 72 rows belong to other ranks. Forward: nine offsets of each rank, then rows there
    // and back. Backward: rows, gradients and weights there, gradients of both back.
    let (rows, others, blocks) = (72 * 3 / 4, 3, spec.sparse_blocks());
    let bytes = 4 * (5 * rows * spec.dim + 2 * rows + others * 9);
    let on_ep = step.received.iter().find(|(axis, ..)| *axis == Axis::Ep).unwrap();
    assert_eq!((on_ep.1, on_ep.2), ((blocks * bytes) as u64, 8 * blocks as u64));
    let planned = PlannedRank { mesh: sizes, rank: 0, sharing: 8, stage: 0, gpu: false };
    let planned = planned.bytes(|dev, mesh| Engine::unfilled(dev, mesh, &options)).unwrap();
    let inline: Arc<dyn MachineModel> = Arc::new(Even { op: 1.0, collective: 1.0, inline: true });
    assert_eq!(simulate::step(&options, sizes, &work, &inline, 8, false).unwrap().allocated, planned);
}

fn simulated(options: ShardedOptions, machine: Arc<dyn MachineModel>) -> simulate::Simulated {
    let accum = options.grad_accum;
    let options = crate::worlds::options(&llama(), fsdp(options), Rule::Sgd { momentum: 0.0, weight_decay: 0.0 });
    let work = BatchShape { max_len: ROW, batch_size: 2, grad_accum: accum };
    simulate::step(&options, MeshSizes::sharded(8), &work, &machine, 8, false).unwrap()
}

/// Collectives shorter than the computation of any unit: only the first all-gather and the last reduction are exposed.
/// Four blocks.
#[test]
fn a_compute_bound_step_exposes_its_first_gather_and_last_reduction() {
    let c = 0.25;
    let t = simulated(sharded(), even(1.0, c)).totals;
    assert_eq!((t.exposed, t.seconds), (2.0 * c, t.compute + 2.0 * c));
    assert_eq!(t.communication, (7 + 5) as f64 * c);
    // Without prefetch: five all-gathers forward, and in backward those of units 2 and 1, each queued after the
    // preceding reduction; then the last reduction.
    let late = ShardedOptions { forward_prefetch: false, backward_prefetch: BackwardPrefetch::None, ..sharded() };
    assert_eq!(simulated(late, even(1.0, c)).totals.exposed, (5 + 2 + 2 + 1) as f64 * c);
    // If every unit keeps its slot, nothing is gathered in backward.
    let whole = simulated(ShardedOptions { reshard: false, ..sharded() }, even(1.0, c)).totals;
    assert_eq!((whole.exposed, whole.communication), (2.0 * c, (5 + 5) as f64 * c));
}

#[test]
fn a_communication_bound_step_takes_the_sum_of_its_collectives() {
    for accum in [1, 3] {
        let options = ShardedOptions { grad_accum: accum, ..sharded() };
        let t = simulated(options, even(0.0, 2.0)).totals;
        assert_eq!((t.seconds, t.exposed), (t.communication, t.communication));
        assert_eq!(t.communication, 2.0 * (7 + 4 * (accum - 1) + 5) as f64);
    }
}

/// Zigzag chunks give each rank of a ring the same number of (query, key) pairs, half of the total work: every pass is
/// counted. Ulysses gives each half of the heads.
#[test]
fn two_ranks_of_a_sequence_halve_the_work() {
    let spec = Spec { max_len: 512, heads: 4, kv_heads: 2, ..llama() };
    let work = BatchShape { max_len: 512, batch_size: 1, grad_accum: 1 };
    let options = EngineOptions { tokens: 512, ..options(&spec, fsdp(sharded()), ADAMW) };
    let flops = |sp, sp_impl| {
        let sizes = MeshSizes { dp_replicate: 1, dp_shard: 2, sp, tp: 1, ep: 1 };
        let options = EngineOptions { sp_impl, ..options.clone() };
        simulate::step(&options, sizes, &work, &even(1.0, 1.0), 8, false).unwrap().totals.flops
    };
    for sp_impl in [SpImpl::Ring, SpImpl::Ulysses] {
        assert_eq!(2 * flops(2, sp_impl), flops(1, sp_impl), "{sp_impl:?}");
    }
}

/// Llama 3.1 405B on 16,384 GPUs: the layout, the world and two steps.
#[test]
fn sixteen_thousand_ranks_can_be_simulated() {
    let spec = Spec {
        vocab: 128_256,
        dim: 16_384,
        layers: 126,
        heads: 128,
        kv_heads: 8,
        head_dim: 128,
        ff: 53_248,
        max_len: 8192,
        ..Spec::default()
    };
    assert_eq!(spec.params(), 405_853_388_800);
    let strategy = fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() });
    let options = EngineOptions { tokens: 8192, checkpoint: Checkpointing::Full, ..options(&spec, strategy, ADAMW) };
    let work = BatchShape { max_len: 8192, batch_size: 1, grad_accum: 1 };
    let h100 = GPUS.iter().find(|gpu| gpu.name == "h100").unwrap();
    let machine: Arc<dyn MachineModel> = Arc::new(Rated { gpu: *h100, tf32: false });
    // Including the processor's time.
    let at = |ranks| {
        let started = ThreadTime::now();
        let step = simulate::step(&options, MeshSizes::sharded(ranks), &work, &machine, 8, false).unwrap();
        (step, ThreadTime::now().duration_since(started))
    };
    let ((few, short), (many, long)) = (at(512), at(16_384));
    assert!(long < 8 * short, "{short:?} for 512 ranks, {long:?} for 16,384");
    // The same calls and nearly the same volume, over rings with 32 times the steps.
    assert_eq!((many.totals.launches, many.totals.collectives), (few.totals.launches, few.totals.collectives));
    assert!(many.received_bytes() > few.received_bytes());
    assert!(many.totals.exposed > few.totals.exposed && many.seconds() > few.seconds());
    let optimizer = |s: &simulate::Simulated| s.allocated.iter().find(|a| a.0 == Category::Optimizer).unwrap().1;
    assert!(optimizer(&few) > 31 * optimizer(&many));
}

/// A sparse model of 405B's class on up to 16,384 GPUs: what ranks hold, gather, reduce and send to the ranks
/// that share experts with them, to the byte.
#[test]
fn sixteen_thousand_ranks_that_share_experts_are_planned_to_the_byte() {
    let experts = Experts { count: 128, top_k: 8, ff: 2048, normalize: true, ..Experts::default() };
    let spec = Spec {
        arch: Arch::Mixtral,
        vocab: 32_768,
        dim: 8192,
        layers: 64,
        heads: 64,
        kv_heads: 8,
        head_dim: 128,
        ff: 2048,
        max_len: 8192,
        experts: Some(experts),
        ..Spec::default()
    };
    let (blocks, expert) = (64, 3 * 8192 * 2048);
    assert!(spec.params() > 420_000_000_000 && spec.params() > blocks * 128 * expert);
    let tokens = 4096;
    let strategy = fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() });
    let options = EngineOptions { tokens, ..options(&spec, strategy, ADAMW) };
    let work = BatchShape { max_len: tokens, batch_size: 1, grad_accum: 1 };
    for (ranks, ep) in [(1024, 8), (16_384, 8), (16_384, 64)] {
        let sizes = MeshSizes { ep, ..MeshSizes::sharded(ranks) };
        let step = simulate::step(&options, sizes, &work, &even(1.0, 1.0), 8, false).unwrap();
        let what = format!("{ranks} ranks, ep {ep}");
        let planned = PlannedRank { mesh: sizes, rank: 0, sharing: 1, stage: 0, gpu: false };
        let planned = planned.bytes(|dev, mesh| Engine::unfilled(dev, mesh, &options)).unwrap();
        assert_eq!(step.allocated, planned, "{what}");
        // AdamW's moments: 8 bytes for an equal share of all parameters. Units (blocks, experts, root) end in padding.
        let moments = step.allocated.iter().find(|a| a.0 == Category::Optimizer).unwrap().1;
        let padding = moments.checked_sub(8 * spec.params() / ranks).expect("some parameters have no moments");
        assert!(padding <= 8 * 256 * (2 * blocks + 1), "{what}: {padding} bytes of padding");

        let on = |axis| step.received.iter().find(|(there, ..)| *there == axis).map(|r| (r.1 as usize, r.2 as usize));
        // What n ranks with an equal share of `len` elements receive of the others.
        let others = |len: usize, n: usize| len.next_multiple_of(256 * n) / n * (n - 1);
        // Weights of blocks are gathered in bf16 for forward and, but for the last two, again for backward; gradients
        // are reduced in f32. Experts by those ranks that have them, the rest by all.
        let (gathers, owners) = (2 * blocks - 2, ranks / ep);
        let experts = (2 * gathers + 4 * blocks) * others(128 / ep * expert, owners);
        assert_eq!(on(Axis::ExpertFsdp), Some((experts, gathers + blocks)), "{what}");
        let [block, root] = [2 * 8192 * (8192 + 1024 + 1) + 128 * 8192, 8192 * (2 * 32_768 + 1)];
        let dense = (2 * gathers + 4 * blocks) * others(block, ranks) + (2 + 4) * others(root, ranks);
        let norm = 2 * 8 * LIMBS * (ranks - 1) / ranks;
        assert_eq!(on(Axis::Fsdp), Some((dense + norm, gathers + blocks + 3)), "{what}");
        // A rank's rows go to all ranks alike: five times in bf16, next to two words per row and each peer's offsets.
        let rows = 8 * tokens / ep * (ep - 1);
        let exchanged = 2 * 5 * rows * 8192 + 4 * (2 * rows + (ep - 1) * 129);
        assert_eq!(on(Axis::Ep), Some((blocks * exchanged, 8 * blocks)), "{what}");
    }
}
