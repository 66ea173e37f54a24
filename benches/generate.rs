//! Text generation: recomputing the whole prefix for each token, one token at a time with a key-value cache, and 32
//! texts at once. Tokens per second of one rank on one core. Compare rows of one run only, never runs of different
//! machines.
//! `cargo bench --bench generate`
#[path = "../tests/common/plain_store.rs"]
#[allow(dead_code)] // only a part is used here
mod plain_store;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::DType;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::ops::PagedRows;
use flatshard::nn::{Arch, CacheSize, Checkpointing, Decoder, Spec, WorkspaceOptions};
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

/// The time of `texts` texts together, or, without a cache, of one.
fn time(dev: &CpuDevice, decoder: &Decoder, store: &mut Plain, dtype: DType, texts: Option<usize>) -> Duration {
    let (prompt, count) = SHAPE;
    let (length, all) = (prompt + count, texts.unwrap_or(1));
    let options = WorkspaceOptions { tokens: length * all, dtype, checkpoint: Checkpointing::Off, train: false };
    let mut ws = decoder.workspace(dev, &groups(), &options).unwrap();
    let each = CacheSize::pages_of(length);
    let rows = prompt * all;
    decoder.remember(dev, &mut ws, &CacheSize { pages: each * all, rows, longest: length, slots: all }).unwrap();
    let pages: Vec<Vec<u32>> = (0..all).map(|i| (i * each..(i + 1) * each).map(|page| page as u32).collect()).collect();
    let mut logits = vec![0f32; spec().vocab];
    let start = Instant::now();
    for i in 0..count {
        let Some(texts) = texts else {
            let whole = Docs::random(dev, 5, spec().vocab, &[prompt + i], 0);
            decoder.next_token_logits(dev, store, &whole.batch(), &mut ws, prompt + i - 1, &mut logits).unwrap();
            continue;
        };
        let (rows, past) = if i == 0 { (prompt, 0) } else { (1, prompt + i - 1) };
        let docs = Docs::random(dev, 5, spec().vocab, &vec![rows; texts], 0);
        let mut batch = docs.batch();
        batch.targets = batch.targets.slice(0..0);
        let runs: Vec<PagedRows> = (0..texts)
            .map(|text| PagedRows { first: text * rows, rows, past, pages: &pages[text], slot: text })
            .collect();
        let wanted: Vec<usize> = (1..=texts).map(|text| text * rows - 1).collect();
        decoder.go_on(dev, store, &batch, &mut ws, (&runs, &wanted), &|_, _| 3, &mut Vec::new()).unwrap();
    }
    start.elapsed()
}

fn generate(c: &mut Criterion) {
    let mut group = c.benchmark_group("generate");
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(300));
    let dev = device();
    for dtype in [DType::F32, DType::Bf16] {
        let decoder = Decoder::new(spec()).unwrap();
        let mut store = Plain::random(&dev, &decoder, dtype, 0.02);
        for (name, texts) in [("whole prefix", None), ("cached", Some(1)), ("32 texts", Some(32))] {
            group.throughput(Throughput::Elements((SHAPE.1 * texts.unwrap_or(1)) as u64));
            group.bench_function(BenchmarkId::new(name, dtype), |b| {
                b.iter_custom(|n| (0..n).map(|_| time(&dev, &decoder, &mut store, dtype, texts)).sum())
            });
        }
    }
    group.finish();
}

criterion_group!(benches, generate);
criterion_main!(benches);
