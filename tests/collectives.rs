//! When collectives start: counted in a step, traced in order, and delayed at every seam. Bits alone do not show a missing
//! prefetch or an extra gather.
mod common;

use common::probe::{Watched, words};
use common::*;
use flatshard::base::DType;
use flatshard::comm::delayed::Delayed;
use flatshard::comm::recorder::{Log, Recorder};
use flatshard::comm::seam::Seam;
use flatshard::store::{BackwardPrefetch, ShardedOptions, Wrap};
use flatshard::strategy::{Engine, Step, Strategy};
use std::sync::Arc;
use std::time::Duration;

/// What every rank of 3 does in a step, the first and any later one alike: `gather2` when a gather starts, `use2` when a
/// layer's weights are handed to the model, `grads2` when its gradient buffer is, `reduce2` when its reduction starts.
fn trace(strategy: Arc<dyn Strategy>, accum: usize) -> String {
    let mut lines = ranks(3, |rank| {
        let log = Log::default();
        let mesh = rank.mesh.wrap(|group| Arc::new(Recorder::new(group, log.clone())));
        let watched = Arc::new(Watched { inner: strategy.clone(), log: log.clone() });
        let options = options(&llama(), watched, SGD);
        let mut engine = Engine::new(rank.device, &mesh, &options)?;
        let mut lines = Vec::new();
        for number in 1..=3 {
            let batches: Vec<_> = (0..accum).map(|micro| batch(&options.spec, number, micro, rank.rank)).collect();
            let tokens = engine.global_count(batches.iter().map(|b| b.loss_tokens()).sum())?;
            log.clear();
            engine.train_step(&batches, &Step { number, lr: 0.01, tokens })?;
            lines.push(words(&log));
        }
        Ok(lines)
    });
    assert!(lines.iter().all(|l| *l == lines[0]), "ranks start different collectives");
    let first = lines[0].swap_remove(0);
    assert!(lines[0].iter().all(|l| *l == first), "steps differ: {first}\n{:?}", lines[0]);
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
    // Four blocks, two slots. Units 3 and 4 are still there when backward begins; from then on each gather runs under the
    // backward of the block above, and each reduction under that of the block below.
    assert_eq!(
        one(sharded()),
        "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 use0 grads0 \
         use4 grads4 reduce4 gather2 use3 grads3 reduce3 gather1 use2 grads2 reduce2 use1 grads1 reduce1 \
         grads0 reduce0 norm0 loss0"
    );
}

#[test]
fn prefetch_after_the_gradient_or_not_at_all() {
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
    // (gathers, reductions) of a step with four blocks and the root.
    let counts = |options: ShardedOptions| {
        let line = one(options);
        (count(&line, "gather"), count(&line, "reduce"))
    };
    // Root, 4 forward, 2 backward: the last two are still in their slots.
    assert_eq!(counts(full(1)), (7, 5));
    // Each further micro-batch: units 1 and 2 and the root are still there, so 2 forward, 2 backward.
    assert_eq!(counts(full(2)), (11, 5));
    assert_eq!(counts(full(3)), (15, 5));
    assert_eq!(counts(ShardedOptions { sync_each_batch: true, ..full(3) }), (15, 15));
    // A slot a unit: every unit once, whatever the number of micro-batches.
    assert_eq!(counts(whole(1)), (5, 5));
    assert_eq!(counts(whole(3)), (5, 5));
    // Root, and two units of two blocks: both stay.
    assert_eq!(counts(ShardedOptions { wrap: Wrap::Size(8000), ..full(1) }), (3, 3));
    assert_eq!(counts(ShardedOptions { wrap: Wrap::None, ..full(2) }), (1, 1));
}

#[test]
fn a_step_has_as_many_micro_batches_as_one_likes() {
    // More operations than a group keeps unfinished (1,024), while the root's weights stay gathered.
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
    // Blocks have 5,376 elements: buckets of 30,000 bytes take two. Nothing before the last micro-batch, and no sum for
    // the norm: every rank has the whole gradient.
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

#[test]
fn delays_at_any_seam_change_no_bit() {
    // Up to 4 ms before and after each call of the delayed seams: every rank is ahead of every other now and then.
    let delayed = |strategy: Arc<dyn Strategy>, seams: &[Seam], accum: usize| {
        let options = options(&llama(), strategy, SGD);
        let results = ranks(3, |rank| {
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
    // Without gathers in backward nothing else keeps the ranks within a unit of each other.
    let whole = ShardedOptions { reshard: false, ..sharded() };
    for (strategy, accum) in
        [(fsdp(sharded()), 1), (fsdp(post), 1), (fsdp(each), 2), (fsdp(whole), 1), (ddp(DType::F32), 2)]
    {
        let expected = delayed(strategy.clone(), &[], accum);
        for seam in Seam::ALL {
            assert_same_bits(&expected, &delayed(strategy.clone(), &[seam], accum), &format!("{seam:?}"));
        }
        assert_same_bits(&expected, &delayed(strategy, &Seam::ALL, accum), "all seams");
    }
}
