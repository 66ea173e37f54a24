//! When collectives start: counted per step, traced in order, and delayed at every call. Bitwise results alone do not
//! reveal a missing prefetch or an extra all-gather.

use crate::common::probe::{Watched, words};
use crate::common::stores::*;
use crate::common::*;
use flatshard::base::DType;
use flatshard::comm::delayed::Delayed;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, MeshSizes};
use flatshard::engine::{Engine, Step, Strategy};
use flatshard::store::{BackwardPrefetch, ReferenceOptions, ShardedOptions, Stage, Wrap, ZeroOptions};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// Two replicas of two shards each.
const HYBRID: MeshSizes = MeshSizes { dp_replicate: 2, dp_shard: 2, sp: 1, tp: 1, ep: 1 };

/// The calls of each of 3 ranks in a step, the same in every step: `gather2` when an all-gather starts, `use2` when a
/// layer's weights are handed to the model, `grads2` when its gradient buffer is, `reduce2` when its reduction starts.
fn trace(strategy: Arc<dyn Strategy>, accum: usize) -> String {
    trace_on(MeshSizes::sharded(3), strategy, accum)
}
/// `replicate2` when the all-reduce of unit 2's shard over replicas starts.
fn trace_on(sizes: MeshSizes, strategy: Arc<dyn Strategy>, accum: usize) -> String {
    recorded_on(sizes, strategy, accum, words)
}

/// What `summarize` derives from the log of a step, which must be the same for every step of every one of 3 ranks.
fn recorded<T: PartialEq + Debug + Send>(strategy: Arc<dyn Strategy>, accum: usize, summarize: fn(&Log) -> T) -> T {
    recorded_on(MeshSizes::sharded(3), strategy, accum, summarize)
}
fn recorded_on<T: PartialEq + Debug + Send>(
    sizes: MeshSizes,
    strategy: Arc<dyn Strategy>,
    accum: usize,
    summarize: fn(&Log) -> T,
) -> T {
    let mut lines = mesh_ranks(sizes, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let watched = Arc::new(Watched::noting(strategy.clone(), &log));
        let options = options(&llama(), watched, SGD);
        let mut engine = Engine::new(rank.device, &mesh, &options)?;
        let mut lines = Vec::new();
        for number in 1..=3 {
            let batches: Vec<_> = (0..accum).map(|micro| batch(&options.spec, number, micro, rank.rank)).collect();
            let tokens = engine.global_count(batches.iter().map(|b| b.loss_tokens()).sum())?;
            log.clear();
            engine.train_step(&batches, &Step { number, lr: 0.01, tokens })?;
            lines.push(summarize(&log));
        }
        Ok(lines)
    });
    assert!(lines.iter().all(|l| *l == lines[0]), "ranks start different collectives");
    let first = lines[0].swap_remove(0);
    assert!(lines[0].iter().all(|l| *l == first), "steps differ: {first:?}\n{:?}", lines[0]);
    first
}
fn one(options: ShardedOptions) -> String {
    let accum = options.grad_accum;
    trace(fsdp(options), accum)
}
fn count(line: &str, what: &str) -> usize {
    line.split(' ').filter(|word| word.trim_end_matches(char::is_numeric) == what).count()
}

#[test]
fn the_next_gather_starts_before_the_current_unit_is_used() {
    // Four blocks, two slots. Units 3 and 4 are still unsharded when backward starts; from then on each all-gather
    // overlaps with the backward of the block above, and each reduction with that of the block below.
    assert_eq!(
        one(sharded()),
        "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 use0 grads0 \
         use4 grads4 reduce4 gather2 use3 grads3 reduce3 gather1 use2 grads2 reduce2 use1 grads1 reduce1 \
         grads0 reduce0 norm0 loss0"
    );
}

#[test]
fn prefetch_after_the_gradient_or_never() {
    let post = ShardedOptions { backward_prefetch: BackwardPrefetch::Post, ..sharded() };
    assert_eq!(
        one(post),
        "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 use0 grads0 \
         use4 grads4 reduce4 use3 grads3 reduce3 gather2 use2 grads2 reduce2 gather1 use1 grads1 reduce1 \
         grads0 reduce0 norm0 loss0"
    );
    let none = BackwardPrefetch::None;
    assert_eq!(
        one(ShardedOptions { forward_prefetch: false, backward_prefetch: none, ..sharded() }),
        "gather0 use0 gather1 use1 gather2 use2 gather3 use3 gather4 use4 use0 grads0 \
         use4 grads4 reduce4 use3 grads3 reduce3 gather2 use2 grads2 reduce2 gather1 use1 grads1 reduce1 \
         grads0 reduce0 norm0 loss0"
    );
}

#[test]
fn collectives_of_a_step_are_counted() {
    let full = |accum| ShardedOptions { grad_accum: accum, ..sharded() };
    let whole = |accum| ShardedOptions { reshard: false, ..full(accum) };
    // (all-gathers, reductions) of a step with four blocks and the root.
    let counts = |options: ShardedOptions| {
        let line = one(options);
        (count(&line, "gather"), count(&line, "reduce"))
    };
    // Root, 4 forward, 2 backward: the last two are still in their slots.
    assert_eq!(counts(full(1)), (7, 5));
    // With room for more than two, the last three or four are.
    let live = |blocks: usize, accum| ShardedOptions { max_live: ROOT + blocks * BLOCK, ..full(accum) };
    assert_eq!([1, 2, 3, 4, 9].map(|blocks| counts(live(blocks, 1))), [(7, 5), (7, 5), (6, 5), (5, 5), (5, 5)]);
    // In a further micro-batch, forward gathers unit 4 only, and backward unit 1 only.
    assert_eq!(counts(live(3, 2)), (8, 5));
    // Each further micro-batch: units 1 and 2 and the root are still unsharded, so 2 forward, 2 backward.
    assert_eq!(counts(full(2)), (11, 5));
    assert_eq!(counts(full(3)), (15, 5));
    assert_eq!(counts(ShardedOptions { sync_each_batch: true, ..full(3) }), (15, 15));
    // One slot per unit: every unit once, for any number of micro-batches.
    assert_eq!(counts(whole(1)), (5, 5));
    assert_eq!(counts(whole(3)), (5, 5));
    // Root, and two units of two blocks: both stay unsharded.
    assert_eq!(counts(ShardedOptions { wrap: Wrap::Size(8000), ..full(1) }), (3, 3));
    assert_eq!(counts(ShardedOptions { wrap: Wrap::None, ..full(2) }), (1, 1));
}

#[test]
fn a_replica_all_reduce_overlaps_backward_two_units_later() {
    // When it starts, the preceding reduce-scatter has had the whole backward of a unit to complete.
    assert_eq!(
        trace_on(HYBRID, fsdp(sharded()), 1),
        "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 use0 grads0 \
         use4 grads4 reduce4 gather2 use3 grads3 replicate4 reduce3 gather1 use2 grads2 replicate3 reduce2 \
         use1 grads1 replicate2 reduce1 grads0 replicate1 reduce0 replicate0 norm0 loss0"
    );
    // Once per step, even if every micro-batch is reduced over the shards.
    let accumulated = ShardedOptions { grad_accum: 3, ..sharded() };
    let each = ShardedOptions { sync_each_batch: true, ..accumulated.clone() };
    for (options, reductions) in [(accumulated, 5), (each, 15)] {
        let line = trace_on(HYBRID, fsdp(options), 3);
        assert_eq!((count(&line, "reduce"), count(&line, "replicate")), (reductions, 5));
        let last = line.rfind("use0 grads0").unwrap();
        assert!(line.find("replicate").unwrap() > last, "before the last backward: {line}");
    }
}

#[test]
fn replicas_all_reduce_a_shard_of_each_gradient_and_no_weights() {
    let options = options(&llama(), fsdp(ShardedOptions { grad_accum: 2, ..sharded() }), SGD);
    let sizes = MeshSizes { dp_replicate: 4, dp_shard: 2, sp: 1, tp: 1, ep: 1 };
    let layouts = flatshard::nn::Decoder::new(llama()).unwrap().layouts().to_vec();
    let flat = flatshard::store::flat::Flat::new(&layouts, Wrap::Transformer, sizes.dp_shard);
    let shard = flat.trained_shard() * DType::F32.size();
    mesh_ranks(sizes, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let mut engine = Engine::new(rank.device, &mesh, &options)?;
        let before = mesh.group(Axis::DpReplicate).stats().bytes;
        train(&mut engine, &options.spec, 1, 2)?;
        let across: Vec<_> = log.entries().into_iter().filter(|e| e.axis == Axis::DpReplicate && e.bytes > 0).collect();
        let operations = across.iter().filter(|e| e.seam != Some(Seam::Alloc));
        assert!(operations.clone().all(|e| e.seam == Some(Seam::AllReduce) && e.tag.what == "replicate"), "{across:?}");
        assert_eq!(operations.map(|e| e.bytes).sum::<usize>(), shard);
        // An all-reduce over n ranks receives 2 (n - 1) / n of its length.
        assert_eq!(mesh.group(Axis::DpReplicate).stats().bytes - before, (2 * 3 * shard / 4) as u64);
        Ok(())
    });
}

#[test]
fn a_step_may_have_any_number_of_micro_batches() {
    // More operations than a group keeps in flight (1,024), while the root's weights stay unsharded.
    let accum = 260;
    let spec = llama();
    let at_once = ShardedOptions { grad_accum: accum, ..sharded() };
    let each = ShardedOptions { sync_each_batch: true, reshard: false, ..at_once.clone() };
    let [replicated, at_once, each] = [ddp(DType::F32), fsdp(at_once), fsdp(each)]
        .map(|strategy| outcome(2, &options(&spec, strategy, SGD), 1, accum));
    assert_same_bits(&replicated, &at_once, "accumulated");
    let (weights, loss) = distance(&replicated, &each);
    assert!(weights < 1e-6 && loss < 1e-6, "weights differ by {weights}, loss by {loss}");
}

#[test]
fn replicas_reduce_buckets_as_soon_as_they_are_complete() {
    // Blocks have 5,376 elements: a bucket of 30,000 bytes holds two. Nothing before the last micro-batch, and no
    // all-reduce for the norm: every rank has the whole gradient.
    let line = trace(ddp(DType::F32), 2);
    let forward = "use0 use1 use2 use3 use4 use0 grads0 ";
    assert_eq!(
        line,
        format!(
            "{forward}use4 grads4 use3 grads3 use2 grads2 use1 grads1 grads0 \
             {forward}use4 grads4 use3 grads3 reduce2 use2 grads2 use1 grads1 reduce1 grads0 reduce0 loss0"
        )
    );
}

/// Total bytes of gathered buffers, and of reduced buffers, in a step.
fn traffic(strategy: Arc<dyn Strategy>, accum: usize) -> (usize, usize) {
    recorded(strategy, accum, |log| {
        let entries = log.entries();
        let of = |seam| entries.iter().filter(|e| e.seam == Some(seam)).map(|e| e.bytes).sum();
        (of(Seam::AllGather), of(Seam::ReduceScatter))
    })
}
/// The maximum bytes in flight at a time, in all-gathers and in reductions.
fn in_flight(strategy: Arc<dyn Strategy>, accum: usize) -> (usize, usize) {
    recorded(strategy, accum, |log| {
        let entries = log.entries();
        let most = |seam, what| {
            let (mut flying, mut most) = (std::collections::BTreeMap::new(), 0);
            for e in entries.iter().filter(|e| e.tag.what == what) {
                match e.seam {
                    Some(s) if s == seam => drop(flying.insert(e.tag.unit, e.bytes)),
                    Some(Seam::Wait) => drop(flying.remove(&e.tag.unit)),
                    _ => {}
                }
                most = flying.values().sum::<usize>().max(most);
            }
            most
        };
        (most(Seam::AllGather, "gather"), most(Seam::ReduceScatter, "reduce"))
    })
}

// Sizes of `llama()` over three ranks: the root, the blocks, everything.
const ROOT: usize = 3072;
const ALL: usize = ROOT + 4 * BLOCK;
/// The blocks as one bucket, padded once.
const TOGETHER: usize = 24_576;

/// "ZeRO", section 7: stages 1 and 2 move the same bytes as data parallelism, P in the reduction and P in the
/// all-gather; stage 3 gathers twice.
#[test]
fn zero_moves_the_bytes_given_in_the_paper() {
    for (dtype, size) in [(DType::F32, 4), (DType::Bf16, 2)] {
        for accum in [1, 2, 3] {
            let one = ZeroOptions::new(Stage::One, dtype);
            assert_eq!(traffic(zero(one), accum), (size * (ROOT + TOGETHER), 4 * (ROOT + TOGETHER)));
            assert_eq!(traffic(zero(staged(Stage::One, dtype)), accum), (size * ALL, 4 * ALL));
            assert_eq!(traffic(zero(staged(Stage::Two, dtype)), accum), (size * ALL, 4 * accum * ALL));
            // The root once; the other layers for each forward and each backward, except for k that are still
            // unsharded.
            let gathered = |k: usize| size * (ROOT + (accum * 8 - k - 2 * (accum - 1) * k) * BLOCK);
            let three = |max_live| ZeroOptions { max_live, ..ZeroOptions::new(Stage::Three, dtype) };
            for (k, max_live) in [(1, 0), (1, ROOT + BLOCK), (2, ROOT + 2 * BLOCK), (3, ROOT + 3 * BLOCK)] {
                assert_eq!(traffic(zero(three(max_live)), accum), (gathered(k), 4 * accum * ALL), "{max_live}");
            }
            assert_eq!(traffic(zero(three(usize::MAX)), accum), (size * ALL, 4 * accum * ALL));
        }
    }
}

#[test]
fn stages_1_and_2_reduce_in_buckets_and_gather_after_the_update() {
    // Buckets of two blocks. Stage 1 reduces once, stage 2 after each micro-batch, during backward.
    let forward = "use0 use1 use2 use3 use4 use0 grads0 ";
    let backward = "use4 grads4 use3 grads3 use2 grads2 use1 grads1 grads0 ";
    let reducing = "use4 grads4 use3 grads3 reduce2 use2 grads2 use1 grads1 reduce1 grads0 reduce0 ";
    let update = "norm0 gather0 gather1 gather2 loss0";
    let line = |stage| trace(zero(staged(stage, DType::F32)), 2);
    assert_eq!(line(Stage::One), format!("{forward}{backward}{forward}{reducing}{update}"));
    assert_eq!(line(Stage::Two), format!("{forward}{reducing}{forward}{reducing}{update}"));
}

#[test]
fn stage_3_gathers_ahead_and_reduces_in_buckets() {
    // One block ahead, two unsharded at a time, gradients of two reduced together.
    assert_eq!(
        trace(zero(staged(Stage::Three, DType::F32)), 1),
        "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 use0 grads0 \
         use4 grads4 gather2 use3 grads3 reduce4 reduce3 gather1 use2 grads2 use1 grads1 reduce2 reduce1 \
         grads0 reduce0 norm0 loss0"
    );
}

#[test]
fn each_bucket_size_of_zero_has_its_effect() {
    let of = |stage, change: &dyn Fn(&mut ZeroOptions)| {
        let mut options = ZeroOptions::new(stage, DType::F32);
        change(&mut options);
        zero(options)
    };
    // Buckets hold as many blocks as fit, at least one; the root has its own.
    for (size, reductions) in [(0, 5), (BLOCK, 5), (2 * BLOCK, 3), (usize::MAX, 2)] {
        let line = trace(of(Stage::Two, &|o| o.reduce_bucket = size), 1);
        assert_eq!(count(&line, "reduce"), reductions, "{size}");
    }
    // Without overlap a bucket is reduced before the next one fills; with it, two and the root's are in flight.
    let reducing = |overlap| {
        let change = move |o: &mut ZeroOptions| (o.overlap, o.reduce_bucket) = (overlap, BLOCK);
        in_flight(of(Stage::Two, &change), 1).1
    };
    assert_eq!((reducing(false), reducing(true)), (4 * BLOCK, 4 * (2 * BLOCK + ROOT)));
    // After the update: one unit at a time, two, all. The root has 2,460 weights, a block 4,840.
    let gathering = |size| in_flight(of(Stage::One, &|o| (o.reduce_bucket, o.gather_bucket) = (BLOCK, size)), 1).0;
    assert_eq!([0, 10_000, usize::MAX].map(gathering), [4 * BLOCK, 4 * 2 * BLOCK, 4 * ALL]);
    // Blocks ahead: none, one, two.
    for (size, start) in [
        (0, "gather0 use0 gather1 use1 gather2 use2"),
        (1, "gather0 gather1 use0 gather2 use1 gather3 use2"),
        (BLOCK, "gather0 gather1 gather2 use0 gather3 use1 gather4 use2"),
    ] {
        let line = trace(of(Stage::Three, &|o| o.prefetch = size), 1);
        assert!(line.starts_with(start), "prefetch {size}: {line}");
    }
    // Blocks that stay unsharded until backward, because fewer elements than the limit are used in between.
    for (distance, gathers) in [(0, 8), (2 * BLOCK, 7), (4 * BLOCK, 6), (usize::MAX, 5)] {
        let line = trace(of(Stage::Three, &|o| (o.prefetch, o.max_reuse) = (0, distance)), 1);
        assert_eq!(count(&line, "gather"), gathers, "{distance}");
    }
}

#[test]
fn the_reference_store_never_overlaps() {
    // Tensors: 3 in the root, 9 per block. Gathered for forward and for backward, or once; never two at a time.
    let counts = |options: ReferenceOptions| {
        let (line, accum) = (trace(reference(options.clone()), options.grad_accum), options.grad_accum);
        let longest = in_flight(reference(options), accum);
        assert_eq!(longest, (4 * 1536, 4 * 1536), "the longest tensor (61, 20): 3 shares of 21 rows, 420 up to 512");
        (count(&line, "gather"), count(&line, "reduce"))
    };
    let full = by_tensor(DType::F32, 1);
    assert_eq!(counts(full.clone()), (3 + 2 * 36, 39));
    assert_eq!(counts(ReferenceOptions { reshard: false, ..full.clone() }), (39, 39));
    assert_eq!(counts(ReferenceOptions { grad_accum: 2, ..full.clone() }), (2 * (3 + 2 * 36), 39));
    assert_eq!(counts(ReferenceOptions { grad_accum: 2, sync_each_batch: true, ..full }), (2 * (3 + 2 * 36), 2 * 39));
}

#[test]
fn delays_at_any_call_change_no_bit() {
    // Up to 4 ms before and after each delayed call: every rank is ahead of every other at times.
    let delayed = |sizes: MeshSizes, strategy: Arc<dyn Strategy>, seams: &[Seam], accum: usize| {
        let options = options(&llama(), strategy, SGD);
        let results = mesh_ranks(sizes, |rank| {
            let late = Duration::from_millis(4);
            let mesh = rank.mesh.wrap(|group| Arc::new(Delayed::new(group, 11, seams, late)));
            let mut engine = Engine::new(rank.device, &mesh, &options)?;
            let reports = train(&mut engine, &options.spec, 2, accum)?;
            Ok((reports, fragments(&mut engine)?))
        });
        gathered(&options.spec, results)
    };
    let post = ShardedOptions { backward_prefetch: BackwardPrefetch::Post, ..sharded() };
    let each = ShardedOptions { grad_accum: 2, sync_each_batch: true, ..sharded() };
    // Without all-gathers in backward, nothing else keeps the ranks within one unit of each other.
    let whole = ShardedOptions { reshard: false, ..sharded() };
    let bucket = |stage| zero(ZeroOptions { overlap: true, ..staged(stage, DType::F32) });
    let one = MeshSizes::sharded(3);
    for (sizes, strategy, accum) in [
        (one, fsdp(sharded()), 1),
        (one, fsdp(post), 1),
        (one, fsdp(each.clone()), 2),
        (one, fsdp(whole), 1),
        (one, ddp(DType::F32), 2),
        (one, bucket(Stage::Two), 1),
        (one, bucket(Stage::Three), 2),
        (HYBRID, fsdp(sharded()), 1),
        (HYBRID, fsdp(each), 2),
    ] {
        let expected = delayed(sizes, strategy.clone(), &[], accum);
        for seam in Seam::ALL {
            assert_same_bits(&expected, &delayed(sizes, strategy.clone(), &[seam], accum), &format!("{seam:?}"));
        }
        assert_same_bits(&expected, &delayed(sizes, strategy, &Seam::ALL, accum), "all seams");
    }
}
