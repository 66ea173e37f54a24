//! Text generation: recomputing the whole prefix for each token, and one token at a time with a key-value cache. Tokens
//! per second of one rank on one core. Compare rows of one run only, never runs of different machines.
//! `cargo bench --bench generate`
#[path = "../tests/common/plain_store.rs"]
#[allow(dead_code)] // only a part is used here
mod plain_store;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::DType;
use flatshard::device::cpu::CpuDevice;
use flatshard::nn::{Arch, Checkpointing, Decoder, Spec, WorkspaceOptions};
use plain_store::{Docs, Plain, device, groups};
use std::time::{Duration, Instant};

/// Prompt tokens, and generated tokens.
const SHAPE: (usize, usize) = (128, 64);

/// 29 M parameters.
fn spec() -> Spec {
    Spec {
        arch: Arch::Llama,
        vocab: 8192,
        dim: 512,
        layers: 8,
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        ff: 1408,
        max_len: SHAPE.0 + SHAPE.1,
        tied: true,
        ..Spec::default()
    }
}

/// The time of one text, with or without the key-value cache (`keeps`).
fn time(dev: &CpuDevice, decoder: &Decoder, store: &mut Plain, dtype: DType, keeps: bool) -> Duration {
    let (prompt, count) = SHAPE;
    let options = WorkspaceOptions { tokens: prompt + count, dtype, checkpoint: Checkpointing::Off, train: false };
    let mut ws = decoder.workspace(dev, &groups(), &options).unwrap();
    decoder.remember(dev, &mut ws, if keeps { prompt + count } else { 0 }).unwrap();
    let mut logits = vec![0f32; spec().vocab];
    let texts: Vec<Docs> = (prompt..prompt + count).map(|n| Docs::random(dev, 5, spec().vocab, &[n], 0)).collect();
    let last = Docs::random(dev, 5, spec().vocab, &[1], 0);
    let whole = Docs::random(dev, 5, spec().vocab, &[prompt + count], 0);
    let start = Instant::now();
    for (i, text) in texts.iter().enumerate() {
        let past = if keeps && i > 0 { prompt + i - 1 } else { 0 };
        let mut batch = text.batch();
        if past > 0 {
            batch = last.batch();
            batch.tokens = whole.batch().tokens.slice(past..past + 1);
            batch.positions = whole.batch().positions.slice(past..past + 1);
        }
        let row = batch.tokens.len() - 1;
        match keeps {
            true => decoder.go_on(dev, store, &batch, &mut ws, past, &mut logits).unwrap(),
            false => decoder.next_token_logits(dev, store, &batch, &mut ws, row, &mut logits).unwrap(),
        }
    }
    start.elapsed()
}

fn generate(c: &mut Criterion) {
    let mut group = c.benchmark_group("generate");
    group.throughput(Throughput::Elements(SHAPE.1 as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(300));
    let dev = device();
    for dtype in [DType::F32, DType::Bf16] {
        let decoder = Decoder::new(spec()).unwrap();
        let mut store = Plain::random(&dev, &decoder, dtype, 0.02);
        for (name, keeps) in [("whole prefix", false), ("cached", true)] {
            group.bench_function(BenchmarkId::new(name, dtype), |b| {
                b.iter_custom(|texts| (0..texts).map(|_| time(&dev, &decoder, &mut store, dtype, keeps)).sum())
            });
        }
    }
    group.finish();
}

criterion_group!(benches, generate);
criterion_main!(benches);
