//! Host-side work: the update of offloaded state, and tokenization, on one core and on all. Compare rows of one run
//! only, never runs of different machines.
//! `cargo bench --bench host`
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::{Category, DType, Meter};
use flatshard::data::{Cache, DataOptions, Dataset, Format, Tokenizer};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::host::Staged;
use flatshard::device::ops::{AdamW, AdamWStep, TensorPart};
use flatshard::device::{Device, HostUpdate};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::time::Duration;

/// Updated elements, and bytes of text.
const OWNED: usize = 16 << 20;
const TEXT: usize = 4 << 20;

/// Thread counts: one, and the number of cores.
fn threads() -> Vec<usize> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    if cores > 1 { vec![1, cores] } else { vec![1] }
}

/// AdamW with master weights, moments and gradients in host memory.
fn update(c: &mut Criterion) {
    let mut group = c.benchmark_group("offloaded adamw");
    group.throughput(Throughput::Elements(OWNED as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(300));
    let dev = CpuDevice::new(Meter::default());
    let h = AdamWStep { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1 }.scalars();
    let h: &[f32] = bytemuck::cast_slice(std::slice::from_ref(&h));
    let [g, mut m, mut v, mut p] = [0; 4].map(|_| dev.alloc_host(DType::F32, OWNED).unwrap());
    let mut weights = dev.alloc_host(DType::Bf16, OWNED).unwrap();
    let mut scale = dev.alloc(DType::F32, 1, Category::Other).unwrap();
    dev.upload(bytemuck::bytes_of(&1f32), scale.view_mut()).unwrap();
    let mut constants = dev.alloc(DType::F32, h.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(h), constants.view_mut()).unwrap();
    for threads in threads() {
        let staged = Staged { owned: OWNED, grads: false, weights: None };
        let mut host = HostUpdate::new(&dev, &staged, threads).unwrap();
        group.bench_function(BenchmarkId::new("threads", threads), |b| {
            b.iter(|| {
                let out = Some(weights.view_mut());
                let [m, v, p] = [&mut m, &mut v, &mut p].map(|x| x.view_mut());
                let (g, scale, h_view) = (g.view(), scale.view(), constants.view());
                host.adamw(
                    &dev,
                    h,
                    AdamW { h: h_view, scale, g, m, v, p, out, absmax: None, at: TensorPart::default() },
                )
                .unwrap();
                host.finish(&dev).unwrap();
            })
        });
    }
    group.finish();
}

/// Uses as many threads as this process has cores.
fn tokenize(c: &mut Criterion) {
    let mut group = c.benchmark_group("tokenize");
    group.throughput(Throughput::Bytes(TEXT as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(300));
    let dir = tempfile::tempdir().unwrap();
    // Words as often as in any text: those of the documentation.
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs");
    let pages = std::fs::read_dir(docs).unwrap().map(|page| page.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let words: String = pages.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let path = dir.path().join("text.txt");
    std::fs::write(&path, words.repeat(TEXT.div_ceil(words.len()))).unwrap();
    let golden = format!("{}/tests/data/golden/byte_level", env!("CARGO_MANIFEST_DIR"));
    let tokenizer = Tokenizer::from_name(&golden).unwrap();
    let all = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);
    for threads in threads() {
        sched_setaffinity(None, if threads == 1 { &one } else { &all }).unwrap();
        group.bench_function(BenchmarkId::new("threads", threads), |b| {
            b.iter_with_setup(
                || tempfile::tempdir().unwrap(),
                |cache| {
                    let options = DataOptions {
                        paths: vec![path.clone()],
                        tokenizer: tokenizer.clone(),
                        format: Format::default(),
                        vocab: 1000,
                        max_len: 256,
                        max_samples: None,
                        seed: 1,
                        cache: Cache::at(cache.path()),
                        cargo_home: None,
                    };
                    assert!(Dataset::open(&options).unwrap().report().built);
                    cache
                },
            )
        });
    }
    sched_setaffinity(None, &all).unwrap();
    group.finish();
}

criterion_group!(benches, update, tokenize);
criterion_main!(benches);
