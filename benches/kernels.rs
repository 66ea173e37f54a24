//! Speed of single operations of the CPU device on one thread. `cargo bench --bench kernels -- gemm/bf16` runs a part.
//! Rates are in floating-point operations ("elem") per second. Compare within one run only: other load changes a
//! machine's speed.
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::cpu::gemm::{GemmKernel, GemmScratch, gemm, pack_and_store};
use flatshard::device::ops::{
    AdamW, AdamWScalars, AdamWStep, Attention, AttentionBackward, AttentionShape, BackwardOf, CrossEntropy,
    CrossEntropyShape, DeltaRule, DeltaRuleBackward, DeltaShape, Dropout, Gelu, GeluBackward, Gemm, GemmShape, Glu,
    GluBackward, Grouped, GroupedGemm, RmsNorm, RmsNormBackward, RmsNormShape, Rope, RopeShape, RotaryPairs,
    RowSequences, StateRule, SumSquares, TensorPart, documents_of_rows,
};
use flatshard::device::{Buf, Device, LIMBS};
use std::time::Duration;

/// Few and short samples: the whole file takes minutes.
fn group<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group
}

fn device() -> CpuDevice {
    CpuDevice::new(Meter::default())
}

/// Normal values of `dtype`.
fn random(dev: &CpuDevice, dtype: DType, len: usize) -> Buf {
    let rng = Rng::new(1, len as u64);
    let values: Vec<f32> = (0..len).map(|i| rng.normal(i as u64)).collect();
    let mut x = dev.alloc(DType::F32, len, Category::Other).expect("memory");
    dev.upload(bytemuck::cast_slice(&values), x.view_mut()).expect("equal lengths");
    if dtype == DType::F32 {
        return x;
    }
    let mut y = dev.alloc(dtype, len, Category::Other).expect("memory");
    dev.copy(x.view(), y.view_mut()).expect("a cast");
    y
}

/// The products of a linear layer (out, in) over 1024 tokens: forward (NT), input gradient (NN), and weight gradient
/// accumulated in f32 (TN). The layers are those of the 105.8 M model: attention, both halves of the MLP, head.
fn linear_layers() -> impl Iterator<Item = (&'static str, GemmShape)> {
    const TOKENS: usize = 1024;
    [(768, 768), (3072, 768), (768, 3072), (32000, 768)].into_iter().flat_map(|(out, inn)| {
        [
            ("nt", GemmShape::nt(TOKENS, out, inn)),
            ("nn", GemmShape::nn(TOKENS, inn, out)),
            ("tn", GemmShape::tn(out, inn, TOKENS).accumulate()),
        ]
    })
}

fn products(c: &mut Criterion) {
    let dev = device();
    let (kernels, absent): (Vec<GemmKernel>, Vec<GemmKernel>) = GemmKernel::ALL.iter().partition(|k| k.available());
    absent.iter().for_each(|kernel| eprintln!("gemm: this machine has no {}", kernel.name()));
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let mut group = group(c, &format!("gemm/{dtype}"));
        for (form, shape) in linear_layers() {
            let [len_a, len_b, len_c] = shape.extents();
            let (a, b) = (random(&dev, dtype, len_a), random(&dev, dtype, len_b));
            let into = if shape.accumulate { DType::F32 } else { dtype };
            let mut out = dev.alloc(into, len_c, Category::Other).expect("memory");
            group.throughput(Throughput::Elements(shape.flops()));
            for kernel in &kernels {
                let mut scratch = GemmScratch::with_kernel(*kernel).expect("available");
                let size = format!("{form} {}x{}x{}", shape.m, shape.n, shape.k);
                group.bench_function(BenchmarkId::new(kernel.name(), size), |bench| {
                    bench.iter(|| {
                        let op = Gemm { shape, a: a.view(), b: b.view(), c: out.view_mut() };
                        gemm(&mut scratch, op).expect("it fits")
                    })
                });
            }
        }
        group.finish();
    }
}

/// The products of experts (768 to 1024) next to one product of all their rows, by rows per expert: the same FLOPs,
/// with as many weights as experts.
fn grouped_products(c: &mut Criterion) {
    const EXPERTS: usize = 8;
    const WIDTH: usize = 768;
    const HIDDEN: usize = 1024;
    let dev = device();
    for dtype in [DType::F32, DType::Bf16] {
        let mut group = group(c, &format!("grouped/{dtype}"));
        for each in [16, 64, 256] {
            let rows = EXPERTS * each;
            let mut offsets = dev.alloc(DType::U32, EXPERTS + 1, Category::Other).expect("memory");
            let starts: Vec<u32> = (0..=EXPERTS).map(|e| (e * each) as u32).collect();
            dev.upload(bytemuck::cast_slice(&starts), offsets.view_mut()).expect("equal lengths");
            for (kind, dense) in [
                (Grouped::Forward, GemmShape::nt(rows, HIDDEN, WIDTH)),
                (Grouped::Input, GemmShape::nn(rows, HIDDEN, WIDTH)),
                (Grouped::Weight, GemmShape::tn(HIDDEN, WIDTH, rows).accumulate()),
            ] {
                let [len_a, len_b, len_c] = dense.extents();
                let is_weight = kind == Grouped::Weight;
                let matrices = EXPERTS * HIDDEN * WIDTH;
                let a = random(&dev, dtype, len_a);
                let b = random(&dev, dtype, if is_weight { len_b } else { matrices });
                let into = if is_weight { DType::F32 } else { dtype };
                let mut out =
                    dev.alloc(into, if is_weight { matrices } else { len_c }, Category::Other).expect("memory");
                group.throughput(Throughput::Elements(dense.flops()));
                group.bench_function(BenchmarkId::new("dense", format!("{kind:?} {each} rows")), |bench| {
                    bench.iter(|| {
                        let (b, c) = (b.view().slice(0..len_b), out.view_mut().slice(0..len_c));
                        dev.gemm(Gemm { shape: dense, a: a.view(), b, c }).expect("it fits")
                    })
                });
                group.bench_function(BenchmarkId::new("grouped", format!("{kind:?} {each} rows")), |bench| {
                    bench.iter(|| {
                        let (offsets, a, b, c) = (offsets.view(), a.view(), b.view(), out.view_mut());
                        let (n, k, stride, accumulate, alike) = (HIDDEN, WIDTH, HIDDEN * WIDTH, is_weight, true);
                        dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate, alike })
                            .expect("it fits")
                    })
                });
            }
        }
        group.finish();
    }
}

/// Packing the operands of the same products and writing C, without the multiplications between; rates in bytes of A, B
/// and C.
fn packing(c: &mut Criterion) {
    let dev = device();
    for dtype in [DType::F32, DType::Bf16] {
        let mut group = group(c, &format!("packing/{dtype}"));
        for (form, shape) in linear_layers() {
            let [len_a, len_b, len_c] = shape.extents();
            let (a, b) = (random(&dev, dtype, len_a), random(&dev, dtype, len_b));
            let into = if shape.accumulate { DType::F32 } else { dtype };
            let mut out = dev.alloc(into, len_c, Category::Other).expect("memory");
            let bytes = (len_a + len_b) * dtype.size() + len_c * into.size();
            for kernel in [GemmKernel::Amx, GemmKernel::Avx512Bf16].into_iter().filter(|k| k.available()) {
                let mut scratch = GemmScratch::with_kernel(kernel).expect("available");
                let name = format!("{}/{form} {}x{}x{}", kernel.name(), shape.m, shape.n, shape.k);
                timed(&mut group, name, Throughput::Bytes(bytes as u64), || {
                    let op = Gemm { shape, a: a.view(), b: b.view(), c: out.view_mut() };
                    pack_and_store(&mut scratch, op).expect("it fits")
                });
            }
        }
        group.finish();
    }
}

/// Products of few rows, as in generation; rates in bytes of B. Of the larger matrix, memory bandwidth is the bound;
/// the smaller one stays in a large L3.
fn few_rows(c: &mut Criterion) {
    let dev = device();
    for dtype in [DType::F32, DType::Bf16] {
        let mut group = group(c, &format!("few rows/{dtype}"));
        for (m, n, k) in [1, 2, 4, 8, 12].into_iter().flat_map(|m| [(m, 3072, 768), (m, 32000, 768)]) {
            let (a, b, mut out) = (random(&dev, dtype, m * k), random(&dev, dtype, n * k), random(&dev, dtype, m * n));
            let (shape, bytes) = (GemmShape::nt(m, n, k), (n * k * dtype.size()) as u64);
            timed(&mut group, format!("nt {m}x{n}x{k}"), Throughput::Bytes(bytes), || {
                dev.gemm(Gemm { shape, a: a.view(), b: b.view(), c: out.view_mut() }).expect("it fits")
            });
        }
        group.finish();
    }
}

/// The products of an adapter of rank 8 or 16 next to that of its matrix, 576 by 576, of 512 tokens on one thread: with
/// A, with B, and their gradients.
fn adapters(c: &mut Criterion) {
    const TOKENS: usize = 512;
    const WIDTH: usize = 576;
    let dev = device();
    for dtype in [DType::F32, DType::Bf16] {
        let mut group = group(c, &format!("adapters/{dtype}"));
        let matrix = ("matrix".to_string(), GemmShape::nt(TOKENS, WIDTH, WIDTH));
        let of_rank = |rank: usize| {
            [
                (format!("x A^T, rank {rank}"), GemmShape::nt(TOKENS, rank, WIDTH)),
                (format!("+ B, rank {rank}"), GemmShape::nt(TOKENS, WIDTH, rank).accumulate()),
                (format!("dA, rank {rank}"), GemmShape::tn(rank, WIDTH, TOKENS)),
                (format!("dB, rank {rank}"), GemmShape::tn(WIDTH, rank, TOKENS)),
            ]
        };
        for (name, shape) in [matrix].into_iter().chain([8, 16].into_iter().flat_map(of_rank)) {
            let [len_a, len_b, len_c] = shape.extents();
            let (a, b, mut out) = (random(&dev, dtype, len_a), random(&dev, dtype, len_b), random(&dev, dtype, len_c));
            timed(&mut group, name, Throughput::Elements(shape.flops()), || {
                dev.gemm(Gemm { shape, a: a.view(), b: b.view(), c: out.view_mut() }).expect("it fits")
            });
        }
        group.finish();
    }
}

/// Measures `f` and reports its rate in these units per second.
fn timed(group: &mut BenchmarkGroup<WallTime>, name: impl Into<String>, rate: Throughput, mut f: impl FnMut()) {
    group.throughput(rate);
    group.bench_function(name.into(), |bench| bench.iter(&mut f));
}

/// One document: 12 heads of width 64, or one head if it is long. Rates count only the products below the
/// diagonal: 2 forward, 5 backward. bf16 runs with f32 products too, as on a CPU without bf16 dot products.
fn attention(c: &mut Criterion) {
    let plain = || CpuDevice::with_kernel(Meter::default(), GemmKernel::Plain).expect("everywhere");
    for (dtype, products, dev) in [
        (DType::F32, "", device()),
        (DType::Bf16, "", device()),
        (DType::Bf16, " in f32 products", plain()),
        (DType::F16, "", device()),
    ] {
        let mut group = group(c, &format!("attention/{dtype}{products}"));
        for (t, heads) in [(64, 12), (128, 12), (256, 12), (1024, 12), (4096, 1), (16384, 1)] {
            let shape = AttentionShape { heads, kv_heads: heads, head_dim: 64, scale: 0.125, window: 0, softcap: 0.0 };
            let width = heads * 64;
            let (qkv, d_o) = (random(&dev, dtype, t * shape.row()), random(&dev, dtype, t * width));
            let zeroed = |dtype, len| dev.alloc(dtype, len, Category::Other).expect("memory");
            let (mut o, mut lse, mut delta) =
                (zeroed(dtype, t * width), zeroed(DType::F32, heads * t), zeroed(DType::F32, heads * t));
            let mut sums = zeroed(DType::F32, dev.backward_scratch(&BackwardOf::Attention(shape), dtype, t));
            let (mut dqkv, mut documents) = (zeroed(dtype, t * shape.row()), zeroed(DType::U32, 2 * t));
            let of_rows: Vec<u32> = documents_of_rows(&[0, t as u32]).collect();
            dev.upload(bytemuck::cast_slice(&of_rows), documents.view_mut()).expect("equal lengths");
            let product = (t * (t + 1) * width) as u64;
            timed(&mut group, format!("forward {t}"), Throughput::Elements(2 * product), || {
                dev.attention(Attention {
                    shape,
                    documents: documents.view(),
                    qkv: qkv.view(),
                    o: o.view_mut(),
                    lse: lse.view_mut(),
                })
                .expect("it fits")
            });
            timed(&mut group, format!("backward {t}"), Throughput::Elements(5 * product), || {
                let (delta, sums, dqkv) = (delta.view_mut(), sums.view_mut(), dqkv.view_mut());
                let (documents, qkv, o, lse, d_o) = (documents.view(), qkv.view(), o.view(), lse.view(), d_o.view());
                dev.attention_backward(AttentionBackward { shape, documents, qkv, o, lse, d_o, delta, sums, dqkv })
                    .expect("it fits")
            });
        }
        group.finish();
    }
}

/// The gated delta rule with the heads of Qwen3-Next, in tokens per second: the same for any length.
fn delta_rule(c: &mut Criterion) {
    let (dev, dtype) = (device(), DType::F32);
    let mut group = group(c, "delta rule");
    let rule = StateRule::Delta { doubled: false };
    let shape = DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, rule };
    for (n, documents) in [(512, 4), (512, 1), (4096, 1), (16384, 1)] {
        let (gates, values) = (n * shape.value_heads, n * shape.values());
        let (qkv, d_o) = (random(&dev, dtype, n * shape.row()), random(&dev, dtype, values));
        let (a, b) = (random(&dev, dtype, gates), random(&dev, dtype, gates));
        let [a_log, dt_bias] = [0; 2].map(|_| random(&dev, dtype, shape.value_heads));
        let zeroed = |dtype, len| dev.alloc(dtype, len, Category::Other).expect("memory");
        let (mut o, mut states) = (zeroed(dtype, values), zeroed(dtype, DeltaShape::kept(n) * shape.state()));
        let (mut dqkv, mut of_rows) = (zeroed(dtype, n * shape.row()), zeroed(DType::U32, 2 * n));
        let (mut da, mut db) = (zeroed(dtype, gates), zeroed(dtype, gates));
        let mut scratch = zeroed(DType::F32, dev.backward_scratch(&BackwardOf::DeltaRule(shape), dtype, n));
        let ends: Vec<u32> = (0..=documents).map(|i| (i * n / documents) as u32).collect();
        let words: Vec<u32> = documents_of_rows(&ends).collect();
        dev.upload(bytemuck::cast_slice(&words), of_rows.view_mut()).expect("equal lengths");
        timed(&mut group, format!("forward {documents} x {}", n / documents), Throughput::Elements(n as u64), || {
            dev.delta_rule(DeltaRule {
                shape,
                along: RowSequences::Whole(of_rows.view()),
                qkv: qkv.view(),
                a: a.view(),
                b: b.view(),
                a_log: a_log.view(),
                dt_bias: dt_bias.view(),
                skip: None,
                o: o.view_mut(),
                states: states.view_mut(),
            })
            .expect("it fits")
        });
        timed(&mut group, format!("backward {documents} x {}", n / documents), Throughput::Elements(n as u64), || {
            dev.delta_rule_backward(DeltaRuleBackward {
                shape,
                documents: of_rows.view(),
                qkv: qkv.view(),
                a: a.view(),
                b: b.view(),
                a_log: a_log.view(),
                dt_bias: dt_bias.view(),
                skip: None,
                states: states.view(),
                d_o: d_o.view(),
                scratch: scratch.view_mut(),
                dqkv: dqkv.view_mut(),
                da: da.view_mut(),
                db: db.view_mut(),
                da_log: None,
                ddt_bias: None,
                dskip: None,
            })
            .expect("it fits")
        });
    }
    group.finish();
}

/// Rates in bytes read and written. The copy shows the bound: memory bandwidth.
fn optimizer(c: &mut Criterion) {
    const N: usize = 25_000_000;
    let dev = device();
    let mut group = group(c, "optimizer");
    let (g, mut m, mut v, mut p) = (
        random(&dev, DType::F32, N),
        random(&dev, DType::F32, N),
        random(&dev, DType::F32, N),
        random(&dev, DType::F32, N),
    );
    let (mut out, scale) = (random(&dev, DType::Bf16, N), random(&dev, DType::F32, 2));
    let constants = AdamWStep { lr: 1e-6, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 10 }.scalars();
    let mut h = dev.alloc(DType::F32, AdamWScalars::LEN, Category::Other).expect("memory");
    dev.upload(bytemuck::bytes_of(&constants), h.view_mut()).expect("it fits");
    timed(&mut group, "memcpy", Throughput::Bytes(8 * N as u64), || dev.copy(g.view(), m.view_mut()).expect("it fits"));
    dev.zero(v.view_mut()).expect("it fits");
    timed(&mut group, "adamw", Throughput::Bytes(28 * N as u64), || {
        dev.adamw(AdamW {
            h: h.view(),
            scale: scale.view(),
            g: g.view(),
            m: m.view_mut(),
            v: v.view_mut(),
            p: p.view_mut(),
            out: None,
            absmax: None,
            at: TensorPart::default(),
        })
        .expect("it fits")
    });
    timed(&mut group, "adamw with a bf16 copy", Throughput::Bytes(30 * N as u64), || {
        let out = Some(out.view_mut());
        dev.adamw(AdamW {
            h: h.view(),
            scale: scale.view(),
            g: g.view(),
            m: m.view_mut(),
            v: v.view_mut(),
            p: p.view_mut(),
            out,
            absmax: None,
            at: TensorPart::default(),
        })
        .expect("it fits")
    });
    let mut acc = dev.alloc(DType::F64, LIMBS, Category::Other).expect("memory");
    timed(&mut group, "sum of squares", Throughput::Bytes(4 * N as u64), || {
        dev.sum_squares(SumSquares { x: g.view(), acc: acc.view_mut() }).expect("it fits")
    });
    group.finish();
}

/// Over 1024 tokens of the 105.8 M model; rates in elements of the largest operand.
fn rows(c: &mut Criterion) {
    const TOKENS: usize = 1024;
    const VOCAB: usize = 32000;
    let dev = device();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let mut group = group(c, &format!("rows/{dtype}"));
        let of = |len| random(&dev, dtype, len);
        let n = TOKENS * 768;
        let (x, w, dy, mut y, mut dx) = (of(n), of(768), of(n), of(n), of(n));
        let mut rstd = random(&dev, DType::F32, TOKENS);
        let mut dw = random(&dev, DType::F32, 768);
        let norm = RmsNormShape { eps: 1e-5, offset: 0.0 };
        timed(&mut group, "rmsnorm", Throughput::Elements(n as u64), || {
            dev.rmsnorm(RmsNorm { shape: norm, x: x.view(), w: w.view(), y: y.view_mut(), rstd: rstd.view_mut() })
                .expect("it fits")
        });
        timed(&mut group, "rmsnorm backward", Throughput::Elements(n as u64), || {
            let (dx, dw) = (dx.view_mut(), dw.view_mut());
            dev.rmsnorm_backward(RmsNormBackward {
                shape: norm,
                x: x.view(),
                w: w.view(),
                rstd: rstd.view(),
                dy: dy.view(),
                dx,
                dw,
            })
            .expect("it fits")
        });
        let shape = RopeShape { heads: 8, head_dim: 64, rotated: 64, pairs: RotaryPairs::Halves, row: 768 };
        let (table, positions) =
            (random(&dev, DType::F32, 64), dev.alloc(DType::U32, TOKENS, Category::Other).expect("memory"));
        timed(&mut group, "rope", Throughput::Elements(n as u64), || {
            dev.rope(Rope {
                shape,
                table: table.view(),
                positions: positions.view(),
                qkv: y.view_mut(),
                inverse: false,
            })
            .expect("it fits")
        });
        let key = dev.alloc(DType::U32, 2, Category::Other).expect("memory");
        timed(&mut group, "dropout", Throughput::Elements(n as u64), || {
            dev.dropout(Dropout { p: 1e-3, key: key.view(), x: dx.view_mut() }).expect("it fits")
        });
        let n = TOKENS * 3072;
        let (gate, up, dy, mut y, mut dgate) = (of(n), of(n), of(n), of(n), of(n));
        timed(&mut group, "swiglu", Throughput::Elements(n as u64), || {
            dev.swiglu(Glu { gate: gate.view(), up: up.view(), y: y.view_mut() }).expect("it fits")
        });
        timed(&mut group, "swiglu backward", Throughput::Elements(n as u64), || {
            dev.swiglu_backward(GluBackward {
                gate: gate.view(),
                up: up.view(),
                dy: dy.view(),
                dgate: dgate.view_mut(),
                dup: y.view_mut(),
            })
            .expect("it fits")
        });
        timed(&mut group, "gelu", Throughput::Elements(n as u64), || {
            dev.gelu(Gelu { x: gate.view(), y: y.view_mut() }).expect("it fits")
        });
        timed(&mut group, "gelu backward", Throughput::Elements(n as u64), || {
            dev.gelu_backward(GeluBackward { x: gate.view(), dy: dy.view(), dx: y.view_mut() }).expect("it fits")
        });
        let n = 256 * VOCAB;
        let (mut logits, shape) = (of(n), CrossEntropyShape { vocab: VOCAB, softcap: 0.0 });
        let scale = random(&dev, DType::F32, 1);
        let (targets, mut loss) = (
            dev.alloc(DType::I32, 256, Category::Other).expect("memory"),
            dev.alloc(DType::F64, 1, Category::Other).expect("memory"),
        );
        timed(&mut group, "cross entropy", Throughput::Elements(n as u64), || {
            dev.cross_entropy(CrossEntropy {
                shape,
                targets: targets.view(),
                by_row: false,
                scale: Some(scale.view()),
                logits: logits.view_mut(),
                loss: loss.view_mut(),
            })
            .expect("it fits")
        });
        group.finish();
    }
}

criterion_group!(
    benches,
    products,
    grouped_products,
    packing,
    few_rows,
    adapters,
    attention,
    delta_rule,
    optimizer,
    rows
);
criterion_main!(benches);
