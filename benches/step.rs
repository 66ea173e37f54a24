//! A whole optimizer step of a small llama on 2 ranks, one thread each: sharded and replicated, f32 and bf16. Tokens a
//! second of all ranks together; compare rows of one run, never runs of different machines.
//! `cargo bench --bench step`
#[path = "../tests/common/worlds.rs"]
#[allow(dead_code)] // a part is used here
mod worlds;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::DType;
use flatshard::engine::{Engine, EngineOptions, Step, Strategy};
use flatshard::nn::Spec;
use flatshard::store::{Offload, ReplicatedOptions, ShardedOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worlds::{ADAMW, fsdp, options, ranks, rows_of, sharded};

const WORLD: usize = 2;
/// Tokens of a row, rows of a micro-batch.
const SHAPE: (usize, usize) = (128, 2);

/// 0.9 M parameters.
fn spec() -> Spec {
    let small = worlds::llama();
    Spec { vocab: 512, dim: 128, layers: 4, heads: 4, kv_heads: 4, head_dim: 32, ff: 384, max_len: SHAPE.0, ..small }
}

/// Time of `steps` steps after a first one, on rank 0.
fn time(options: &EngineOptions, steps: u64) -> Duration {
    let times = ranks(WORLD, |rank| {
        let batches = [rows_of(SHAPE, rank.rank)];
        let mut engine = Engine::new(rank.device, &rank.mesh, options)?;
        let tokens = engine.global_count(batches[0].loss_tokens())?;
        engine.train_step(&batches, &Step { number: 1, lr: 1e-3, tokens })?;
        let start = Instant::now();
        for number in 2..2 + steps {
            engine.train_step(&batches, &Step { number, lr: 1e-3, tokens })?;
        }
        Ok(start.elapsed())
    });
    times[0]
}

fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("step");
    group.throughput(Throughput::Elements((WORLD * SHAPE.0 * SHAPE.1) as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(300));
    for dtype in [DType::F32, DType::Bf16] {
        let ddp: Arc<dyn Strategy> = Arc::new(ReplicatedOptions {
            dtype,
            reduce_dtype: DType::F32,
            bucket_bytes: ReplicatedOptions::BUCKET,
            offload: Offload::Nothing,
        });
        let full = ShardedOptions { dtype, ..sharded() };
        let whole = ShardedOptions { reshard: false, ..full.clone() };
        for (name, strategy) in [("ddp", ddp), ("full_shard", fsdp(full)), ("shard_grad_op", fsdp(whole))] {
            let options = EngineOptions { tokens: SHAPE.0 * SHAPE.1, ..options(&spec(), strategy, ADAMW) };
            group.bench_function(BenchmarkId::new(name, dtype), |b| b.iter_custom(|steps| time(&options, steps)));
        }
    }
    group.finish();
}

criterion_group!(benches, step);
criterion_main!(benches);
