//! Memory compared with the formula, and steps without allocations. The heap counts allocations per thread, which is
//! per rank here.

use crate::common::stores::*;
use crate::common::*;
use crate::heap;
use crate::states::{adamw, wide};
use flatshard::base::CATEGORIES;
use flatshard::base::timeline::Timeline;
use flatshard::base::{Category, DType};
use flatshard::comm::{Axis, MeshSizes, timed};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::cpu::gemm::GemmKernel;
use flatshard::engine::{Engine, EngineOptions, Strategy};
use flatshard::nn::{Checkpointing, SpImpl, Spec, Tuning};
use flatshard::optim::Rule;
use flatshard::store::{Offload, ReferenceOptions, ShardedOptions, Stage, Wrap, ZeroOptions};
use std::sync::Arc;

/// Allocations of this thread; with the plain kernel, those outside the `gemm` crate.
fn allocations(kernel: GemmKernel) -> usize {
    if kernel == GemmKernel::Plain { heap::allocations_without_packing() } else { heap::allocations() }
}
/// The kernels that compute products here, including the plain one.
fn kernels() -> impl Iterator<Item = GemmKernel> {
    GemmKernel::ALL.into_iter().filter(|kernel| kernel.available())
}

/// Two replicas of two shards each.
const HYBRID: MeshSizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };

fn strategies() -> Vec<(Arc<dyn Strategy>, usize)> {
    let bf16 = ShardedOptions { dtype: DType::Bf16, ..sharded() };
    vec![
        (fsdp(sharded()), 1),
        (fsdp(bf16.clone()), 1),
        (fsdp(ShardedOptions { reshard: false, ..bf16.clone() }), 1),
        (fsdp(ShardedOptions { grad_accum: 2, max_live: 4 * BLOCK, ..bf16.clone() }), 2),
        (fsdp(ShardedOptions { grad_accum: 2, sync_each_batch: true, ..bf16.clone() }), 2),
        (fsdp(ShardedOptions { wrap: Wrap::Size(8000), ..bf16.clone() }), 1),
        (fsdp(ShardedOptions { wrap: Wrap::None, ..bf16.clone() }), 1),
        (fsdp(ShardedOptions { reduce_dtype: DType::Bf16, ..bf16.clone() }), 1),
        (fsdp(ShardedOptions { reduce_dtype: DType::Bf16, grad_accum: 2, ..bf16 }), 2),
        (fsdp(ShardedOptions { dtype: DType::F16, reduce_dtype: DType::F16, ..sharded() }), 1),
        (fsdp(ShardedOptions { dtype: DType::Bf16, masters: DType::Bf16, ..sharded() }), 1),
        (travelling(DType::Bf16), 2),
        (fsdp(ShardedOptions { offload: Offload::Optimizer, grad_accum: 2, ..sharded() }), 2),
        (fsdp(ShardedOptions { offload: Offload::Gradients, dtype: DType::Bf16, ..sharded() }), 1),
        (fsdp(ShardedOptions { offload: Offload::Parameters, dtype: DType::Bf16, ..sharded() }), 1),
        (ddp(DType::F32), 2),
        (ddp(DType::Bf16), 1),
        (reference(by_tensor(DType::F32, 1)), 1),
        (reference(ReferenceOptions { reshard: false, ..by_tensor(DType::Bf16, 2) }), 2),
        (zero(staged(Stage::One, DType::Bf16)), 2),
        (zero(staged(Stage::Two, DType::F32)), 1),
        (zero(ZeroOptions { overlap: true, ..staged(Stage::Two, DType::Bf16) }), 2),
        (zero(staged(Stage::Three, DType::Bf16)), 1),
        (zero(ZeroOptions::new(Stage::Three, DType::F32)), 2),
    ]
}

#[test]
fn planned_bytes_equal_allocated_bytes_and_a_step_adds_nothing() {
    for (spec, rule, checkpoint) in [
        (llama(), ADAMW, Checkpointing::Off),
        (qwen3(), ADAMW, Checkpointing::SelectiveEvery(2)),
        (gpt(), SGD, Checkpointing::Full),
        (llama(), MUON, Checkpointing::Off),
        (llama(), adamw(DType::Bf16), Checkpointing::Off),
        (wide(llama()), adamw(DType::U8), Checkpointing::Off),
    ] {
        let rounds = matches!(rule, Rule::AdamW { .. });
        for (strategy, accum) in strategies().into_iter().filter(|s| rounds || s.0.masters() == DType::F32) {
            let options = EngineOptions { checkpoint, ..options(&spec, strategy, rule) };
            for sizes in [MeshSizes::sharded(1), MeshSizes::sharded(3), HYBRID] {
                let planned = options.bytes(&sizes, 0).unwrap();
                mesh_ranks(sizes, |rank| {
                    let meter = rank.meter.clone();
                    let mut engine = Engine::new(rank.device, &rank.mesh, &options)?;
                    train(&mut engine, &spec, 1, accum)?;
                    engine.evaluate(&[batch(&spec, 9, 0, 0)])?;
                    let buffers = meter.allocations();
                    train(&mut engine, &spec, 2, accum)?;
                    engine.evaluate(&[batch(&spec, 9, 0, 0)])?;
                    assert_eq!(meter.allocations(), buffers, "a step allocates buffers");
                    for (i, &(category, name)) in CATEGORIES.iter().enumerate() {
                        assert_eq!(planned[i].0, category);
                        let what = format!("{name} of {:?} on {sizes:?}", options.strategy.name());
                        assert_eq!(meter.live(category), planned[i].1, "{what}");
                    }
                    let device = planned.iter().filter(|p| p.0 != Category::Host).map(|p| p.1).sum::<usize>();
                    assert_eq!(meter.peak(), device, "peak on {sizes:?}");
                    Ok(())
                });
            }
        }
    }
}

/// Two shards of layers that are split over two ranks.
const CUT: MeshSizes = MeshSizes { dp_replicate: 1, dp_shard: 2, sp: 1, tp: 2, ep: 1 };

#[test]
fn split_layers_are_planned_and_a_step_allocates_nothing() {
    let spec = Spec { ff: 45, kv_heads: 2, ..qwen3() }; // a vocabulary of 61
    let bf16 = fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() });
    let cases = [
        (false, Checkpointing::Off, fsdp(sharded())),
        (true, Checkpointing::Off, bf16),
        (true, Checkpointing::Full, ddp(DType::F32)),
    ];
    for (kernel, (sequence_parallel, checkpoint, strategy)) in kernels().flat_map(|k| cases.clone().map(|c| (k, c))) {
        let options = EngineOptions { sequence_parallel, checkpoint, ..options(&spec, strategy, ADAMW) };
        let most = options.bytes(&CUT, 0).unwrap();
        mesh_ranks(CUT, |rank| {
            let planned = options.bytes(&CUT, rank.mesh.rank())?;
            assert!(planned.iter().zip(&most).all(|(planned, most)| planned.1 <= most.1), "{planned:?}, {most:?}");
            let device = Arc::new(CpuDevice::with_kernel(rank.meter.clone(), kernel)?);
            let mut engine = Engine::new(device, &rank.mesh, &options)?;
            let batches = [batch(&spec, 3, 0, rank.mesh.group(Axis::Dp).rank())];
            step(&mut engine, &batches, 1)?;
            let before = (allocations(kernel), rank.meter.allocations());
            step(&mut engine, &batches, 2)?;
            assert_eq!((allocations(kernel), rank.meter.allocations()), before, "a step allocates, with {kernel:?}");
            for (planned, (category, name)) in planned.iter().zip(CATEGORIES) {
                assert_eq!(rank.meter.live(category), planned.1, "{name}, sequence parallel {sequence_parallel}");
            }
            assert_eq!(rank.meter.peak(), planned.iter().map(|p| p.1).sum::<usize>());
            Ok(())
        });
    }
}

/// The documented formula in plain numbers: 18 bytes per parameter and sharding rank, two slots of the largest block
/// and the root's, for weights and for gradients.
#[test]
fn the_documented_memory_formula_holds() {
    let spec = Spec { dim: 64, ff: 192, layers: 8, heads: 4, kv_heads: 4, head_dim: 16, ..llama() };
    let bf16 = ShardedOptions { dtype: DType::Bf16, ..sharded() };
    let bytes = |strategy: Arc<dyn Strategy>, ranks: usize, category: Category| {
        let planned = options(&spec, strategy, ADAMW).bytes(&MeshSizes::sharded(ranks), 0).unwrap();
        planned.into_iter().find(|p| p.0 == category).unwrap().1
    };
    let n = 2;
    // Every size here is a multiple of 2 * 256 except the norms (64 each, padded to 256): 2 per block, 1 in the root.
    let block = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 256;
    let table = (61usize * 64).next_multiple_of(256);
    let root = (2 * table + 256usize).next_multiple_of(n * 256);
    let p = root + 8 * block;
    let full = || fsdp(bf16.clone());
    assert_eq!(bytes(full(), n, Category::Params), 6 * p / n);
    assert_eq!(bytes(full(), n, Category::Grads), 4 * p / n);
    assert_eq!(bytes(full(), n, Category::Optimizer), 8 * p / n);
    // The weight slots are shared by both ranks.
    let staged = root + 2 * block;
    assert_eq!(bytes(full(), n, Category::Slots), 2 * staged / n + 4 * staged);
    let accumulating = fsdp(ShardedOptions { grad_accum: 4, ..bf16.clone() });
    assert_eq!(bytes(accumulating, n, Category::Slots), 2 * staged / n + 4 * p);
    let live = fsdp(ShardedOptions { max_live: root + 3 * block, ..bf16.clone() });
    assert_eq!(bytes(live, n, Category::Slots), 2 * (root + 3 * block) / n + 4 * staged);
    let kept = fsdp(ShardedOptions { reshard: false, ..bf16.clone() });
    assert_eq!(bytes(kept, n, Category::Slots), 2 * p / n + 4 * staged);

    // In FP8, masters have a byte for codes instead of a copy, and gathered weights are a byte, in all blocks but the
    // first and the last. Where slots take turns, each has room for either. Every rank has all scales.
    let in_8_bits = |sharded: &ShardedOptions, category: Category| {
        let tuning = Tuning { fp8: Some(vec![]), ..Tuning::default() };
        let options = EngineOptions { tuning, ..options(&spec, fsdp(sharded.clone()), ADAMW) };
        options.bytes(&MeshSizes::sharded(n), 0).unwrap().into_iter().find(|p| p.0 == category).unwrap().1
    };
    let (matrices, scales) = (block - 2 * 256, 4 * 6 * (4 + 3 * 2));
    let kept = ShardedOptions { reshard: false, ..bf16.clone() };
    assert_eq!(in_8_bits(&bf16, Category::Params), (6 * p - 6 * matrices) / n);
    assert_eq!(in_8_bits(&bf16, Category::Grads), 4 * p / n);
    assert_eq!(in_8_bits(&bf16, Category::Optimizer), 8 * p / n);
    assert_eq!(in_8_bits(&kept, Category::Slots), (2 * p - 6 * matrices) / n + 4 * staged + scales);
    assert_eq!(in_8_bits(&bf16, Category::Slots), (2 * staged + 2 * matrices) / n + 4 * staged + scales);

    // Moments in bf16, and masters that are the weights that are gathered: 18 bytes become 10.
    let rounded = fsdp(ShardedOptions { masters: DType::Bf16, ..bf16.clone() });
    let planned = options(&spec, rounded, adamw(DType::Bf16)).bytes(&MeshSizes::sharded(n), 0).unwrap();
    let each = |category| planned.iter().find(|p| p.0 == category).unwrap().1;
    assert_eq!([Category::Params, Category::Grads, Category::Optimizer].map(each), [2 * p / n, 4 * p / n, 4 * p / n]);
    assert_eq!(each(Category::Slots), 2 * staged / n + 4 * staged);

    // Two moments of a byte, and 4 bytes for each of their blocks of 256 elements: 10 bytes become 8.03. Norms and
    // these tables are below 4096 elements, and have f32 moments.
    let in_blocks = |strategy: Arc<dyn Strategy>, sizes: MeshSizes| -> Vec<usize> {
        let planned = options(&spec, strategy, adamw(DType::U8)).bytes(&sizes, 0).unwrap();
        let each = |category| planned.iter().find(|p| p.0 == category).unwrap().1;
        [Category::Params, Category::Grads, Category::Optimizer].map(each).to_vec()
    };
    let rounded = || fsdp(ShardedOptions { masters: DType::Bf16, ..bf16.clone() });
    let moments = |bytes: usize, f32: usize| 2 * bytes + 2 * 4 * (bytes / 256) + 2 * 4 * f32;
    let (matrices, vectors, of_root) = (block - 2 * 256, 2 * 256, 2 * table + 256);
    let (alone, one) = (of_root + 8 * block, MeshSizes::sharded(1));
    assert_eq!(in_blocks(rounded(), one), [2 * alone, 4 * alone, moments(8 * matrices, of_root + 8 * vectors)]);
    assert_eq!(in_blocks(ddp(DType::F32), MeshSizes::sharded(n))[2], moments(8 * matrices, of_root + 8 * vectors));
    // Over tp a matrix of 64 x 64 is below 4096 elements on each rank, but not as a whole.
    let over_tp = in_blocks(ddp(DType::F32), MeshSizes { tp: 2, ..one });
    let vectors_of_tp = 2 * (31usize * 64).next_multiple_of(256) + 256 + 8 * vectors;
    assert_eq!(over_tp[2], moments(8 * matrices / 2, vectors_of_tp));
    // Both norms of a block are in the first shard, and the second has matrices only.
    let halves = moments(8 * (block / n), table + 256 + 8 * vectors);
    assert_eq!(in_blocks(rounded(), MeshSizes::sharded(n)), [2 * p / n, 4 * p / n, halves]);

    // ZeRO keeps the same shards; full weights and gradients shrink with the stage.
    let partitioned = |stage, overlap, blocks: usize| {
        let sizes = ZeroOptions {
            reduce_bucket: blocks * block,
            max_live: root + blocks * block,
            ..ZeroOptions::new(stage, DType::Bf16)
        };
        zero(ZeroOptions { overlap, prefetch: usize::MAX, ..sizes })
    };
    for stage in [Stage::One, Stage::Two, Stage::Three] {
        for (category, each) in [(Category::Params, 6), (Category::Grads, 4), (Category::Optimizer, 8)] {
            assert_eq!(bytes(partitioned(stage, false, 2), n, category), each * p / n, "{stage:?}");
        }
    }
    for (blocks, overlap) in [(1, false), (1, true), (2, false), (2, true)] {
        let slots = |stage| bytes(partitioned(stage, overlap, blocks), n, Category::Slots);
        let buckets = root + if overlap { 2 } else { 1 } * blocks * block;
        assert_eq!(slots(Stage::One), 2 * p / n + 4 * p);
        assert_eq!(slots(Stage::Two), 2 * p / n + 4 * buckets);
        assert_eq!(slots(Stage::Three), 2 * (root + blocks * block) / n + 4 * buckets);
    }
    // The reference: whole layers next to the longest tensor, which is split into whole blocks of 256.
    let longest = table.max(64 * 192).next_multiple_of(n * 256);
    let layers = 2 * table + 256 + block;
    let by_tensor = bytes(reference(by_tensor(DType::Bf16, 1)), n, Category::Slots);
    assert_eq!(by_tensor, 2 * layers + 4 * layers + 2 * longest / n + 4 * longest);

    let p = 2 * table + 256 + 8 * block;
    let ddp: Arc<dyn Strategy> = ddp(DType::Bf16);
    for (category, each) in
        [(Category::Params, 6), (Category::Grads, 4), (Category::Optimizer, 8), (Category::Slots, 0)]
    {
        assert_eq!(bytes(ddp.clone(), n, category), each * p);
    }
}

/// Heap allocations after the first steps, with any kernel.
fn allocates_nothing(timeline: &Timeline, sizes: MeshSizes, options: &EngineOptions, accum: usize) {
    let spec = &options.spec;
    for kernel in kernels() {
        // Every step is recorded on `timeline`, which the ranks share here.
        let made = mesh_ranks(sizes, |rank| {
            let index = rank.mesh.group(Axis::Dp).rank();
            let mesh = timed::watch(rank.mesh, timeline);
            let mut engine = Engine::new(Arc::new(CpuDevice::with_kernel(rank.meter, kernel)?), &mesh, options)?;
            engine.on_timeline(timeline.clone());
            // The buffers of products grow to the most rows that an expert has had.
            train(&mut engine, spec, if spec.experts.is_some() { 8 } else { 2 }, accum)?;
            let batches: Vec<_> = (0..accum).map(|micro| batch(spec, 3, micro, index)).collect();
            let before = allocations(kernel);
            for number in 3..6 {
                step(&mut engine, &batches, number)?;
            }
            Ok(allocations(kernel) - before)
        });
        let what = (options.strategy.name(), options.strategy.dtype(), options.sp_impl, kernel);
        assert!(made.iter().all(|&made| made == 0), "{what:?} on {sizes:?}: {made:?}");
    }
}

#[test]
fn a_step_makes_no_heap_allocation() {
    let (two, off) = (MeshSizes::sharded(2), Timeline::default());
    for (strategy, accum) in strategies() {
        let options = options(&llama(), strategy, ADAMW);
        for sizes in [two, HYBRID] {
            allocates_nothing(&off, sizes, &options, accum);
        }
    }
    // Neither does Muon, whose owners exchange matrices.
    for strategy in [fsdp(sharded()), fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() }), ddp(DType::F32)] {
        let options = options(&llama(), strategy, MUON);
        for sizes in [two, HYBRID] {
            allocates_nothing(&off, sizes, &options, 1);
        }
    }
    // Neither do weights that are cast before they are gathered.
    let tuning = Tuning { fp8: Some(vec![]), ..Tuning::default() };
    let bf16 = fsdp(ShardedOptions { dtype: DType::Bf16, ..sharded() });
    for sizes in [two, HYBRID] {
        let tuning = tuning.clone();
        allocates_nothing(&off, sizes, &EngineOptions { tuning, ..options(&llama(), bf16.clone(), ADAMW) }, 1);
    }
    // Neither do experts that ranks share.
    let shared = options(&sparse(), fsdp(sharded()), ADAMW);
    for sizes in [two, MeshSizes { ep: 2, ..two }] {
        allocates_nothing(&off, sizes, &shared, 1);
    }
    // Neither does a profile.
    let timeline = Timeline::with_room(1 << 14);
    timeline.switch(true);
    let sharded = options(&llama(), fsdp(sharded()), ADAMW);
    allocates_nothing(&timeline, two, &sharded, 1);
    let mut spans = vec![];
    assert_eq!((timeline.drain(&mut spans), spans.len() > 500), (0, true), "{}", spans.len());
    // Neither do blocks whose ranks share sequences.
    let sizes = MeshSizes { dp_replicate: 1, dp_shard: 1, sp: 2, tp: 1, ep: 1 };
    for sp_impl in [SpImpl::Ring, SpImpl::AllGather, SpImpl::Ulysses] {
        allocates_nothing(&off, sizes, &EngineOptions { sp_impl, ..sharded.clone() }, 1);
    }
}
