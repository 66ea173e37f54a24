//! A whole optimizer step of a small llama on 2 ranks, one thread each, with every strategy: manual FSDP (FULL_SHARD
//! and SHARD_GRAD_OP), reference FSDP, ZeRO-1 to 3 with DeepSpeed's default buckets, DDP; in f32 and bf16. Tokens per
//! second of both ranks together. Compare rows of one run only, never runs of different machines.
//!
//!     cargo bench --bench step [-- strategies/bf16]
#[path = "../tests/common/worlds.rs"]
#[allow(dead_code)] // only a part is used here
mod worlds;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::DType;
use flatshard::engine::{Engine, EngineOptions, Step, Strategy};
use flatshard::nn::Spec;
use flatshard::store::{ReferenceOptions, ReplicatedOptions, ShardedOptions, Stage, ZeroOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worlds::{ADAMW, options, ranks, rows_of};

const WORLD: usize = 2;
/// Tokens per row, rows per micro-batch.
const SHAPE: (usize, usize) = (128, 2);

/// 3.7 M parameters: per token, products cost what they do in a block of a large model, and 4 units overlap with them.
fn spec() -> Spec {
    let small = worlds::llama();
    Spec { vocab: 512, dim: 256, layers: 4, heads: 4, kv_heads: 4, head_dim: 64, ff: 768, max_len: SHAPE.0, ..small }
}

fn strategies(dtype: DType) -> [(&'static str, Arc<dyn Strategy>); 7] {
    let manual = ShardedOptions { dtype, ..ShardedOptions::default() };
    let zero = |stage| Arc::new(ZeroOptions::new(stage, dtype));
    [
        ("manual", Arc::new(manual.clone())),
        ("manual_shard_grad_op", Arc::new(ShardedOptions { reshard: false, ..manual })),
        ("reference", Arc::new(ReferenceOptions { dtype, ..ReferenceOptions::default() })),
        ("zero_1", zero(Stage::One)),
        ("zero_2", zero(Stage::Two)),
        ("zero_3", zero(Stage::Three)),
        ("ddp", Arc::new(ReplicatedOptions { dtype, ..ReplicatedOptions::default() })),
    ]
}

/// Time of `steps` steps after a warm-up step, on rank 0.
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
    let mut group = c.benchmark_group("strategies");
    group.throughput(Throughput::Elements((WORLD * SHAPE.0 * SHAPE.1) as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_millis(300));
    for dtype in [DType::F32, DType::Bf16] {
        for (name, strategy) in strategies(dtype) {
            let options = EngineOptions { tokens: SHAPE.0 * SHAPE.1, ..options(&spec(), strategy, ADAMW) };
            group.bench_function(BenchmarkId::new(dtype.to_string(), name), |b| {
                b.iter_custom(|steps| time(&options, steps))
            });
        }
    }
    group.finish();
}

criterion_group!(benches, step);
criterion_main!(benches);
