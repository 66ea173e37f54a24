//! Every store, with options that give the tiny models several units, buckets and slots.
use super::worlds::{Outcome, assert_same_bits, ddp, fsdp, sharded};
use flatshard::base::DType;
use flatshard::engine::Strategy;
use flatshard::store::{ReferenceOptions, ShardedOptions, Stage, ZeroOptions};
use std::sync::Arc;

pub fn reference(options: ReferenceOptions) -> Arc<dyn Strategy> {
    Arc::new(options)
}
pub fn by_tensor(dtype: DType, grad_accum: usize) -> ReferenceOptions {
    ReferenceOptions { dtype, grad_accum, ..ReferenceOptions::default() }
}
pub fn zero(options: ZeroOptions) -> Arc<dyn Strategy> {
    Arc::new(options)
}

/// Elements of a block of `llama()` over three ranks, padding and all.
pub const BLOCK: usize = 6144;

/// Buckets of two blocks; weights gathered a unit at a time; in stage 3 one block ahead, two there.
pub fn staged(stage: Stage, dtype: DType) -> ZeroOptions {
    ZeroOptions {
        reduce_bucket: 2 * BLOCK,
        gather_bucket: BLOCK,
        prefetch: 1,
        max_reuse: 0,
        ..ZeroOptions::new(stage, dtype)
    }
}

/// Stores that reduce the sum over a step's micro-batches: bit for bit what replicated training does.
pub fn at_once(dtype: DType, grad_accum: usize) -> Vec<Arc<dyn Strategy>> {
    let mut all = vec![zero(staged(Stage::One, dtype))];
    all.push(fsdp(ShardedOptions { dtype, grad_accum, max_live: 4 * BLOCK, ..sharded() }));
    for reshard in [true, false] {
        all.push(fsdp(ShardedOptions { dtype, reshard, grad_accum, ..sharded() }));
        all.push(reference(ReferenceOptions { reshard, ..by_tensor(dtype, grad_accum) }));
    }
    all
}

/// Stores that reduce each micro-batch by itself: the same sum in another order.
pub fn by_batch(dtype: DType, grad_accum: usize) -> Vec<Arc<dyn Strategy>> {
    let three = staged(Stage::Three, dtype);
    vec![
        fsdp(ShardedOptions { dtype, grad_accum, sync_each_batch: true, ..sharded() }),
        reference(ReferenceOptions { sync_each_batch: true, ..by_tensor(dtype, grad_accum) }),
        zero(staged(Stage::Two, dtype)),
        zero(ZeroOptions { overlap: true, reduce_bucket: 0, ..staged(Stage::Two, dtype) }),
        zero(ZeroOptions::new(Stage::Two, dtype)),
        zero(ZeroOptions { max_live: 0, ..three.clone() }),
        zero(ZeroOptions { overlap: false, prefetch: 3 * BLOCK, ..three.clone() }),
        zero(ZeroOptions { reduce_bucket: 3 * BLOCK, max_reuse: 2 * BLOCK, ..three.clone() }),
        zero(three),
        zero(ZeroOptions::new(Stage::Three, dtype)),
    ]
}

/// Every store ends in the bits of replicated training: `outcome` trains in one, with this many micro-batches a step
/// (1 or 2), and `what` names the case.
pub fn assert_stores_agree(what: &str, dtype: DType, outcome: &dyn Fn(Arc<dyn Strategy>, usize) -> Outcome) {
    for accum in [1, 2] {
        let replicated = outcome(ddp(dtype), accum);
        for strategy in at_once(dtype, accum) {
            let what = format!("{what} in {} {dtype} accum {accum}", strategy.name());
            assert_same_bits(&replicated, &outcome(strategy, accum), &what);
        }
    }
    let alone = outcome(ddp(dtype), 1);
    for strategy in by_batch(dtype, 1) {
        let what = format!("{what} in {} {dtype} by batch", strategy.name());
        assert_same_bits(&alone, &outcome(strategy, 1), &what);
    }
}

/// One of each kind.
pub fn kinds(dtype: DType) -> Vec<Arc<dyn Strategy>> {
    let stages = [Stage::One, Stage::Two, Stage::Three].map(|stage| zero(staged(stage, dtype)));
    let others = [ddp(dtype), fsdp(ShardedOptions { dtype, ..sharded() }), reference(by_tensor(dtype, 1))];
    others.into_iter().chain(stages).collect()
}

/// All of them, for steps of one micro-batch.
pub fn every(dtype: DType) -> Vec<Arc<dyn Strategy>> {
    [vec![ddp(dtype)], at_once(dtype, 1), by_batch(dtype, 1)].concat()
}
