//! Speed of single operations of the CPU device, one thread. `cargo bench --bench kernels -- gemm/bf16` runs a part;
//! rates are in floating-point operations ("elem") a second. Compare within one run only: neighbors change a machine's
//! speed.
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::cpu::gemm::{Kernel, Scratch, gemm};
use flatshard::device::{AdamW, AdamWScalars, Attention, Buf, CrossEntropy, Device, Gemm, LIMBS, RmsNorm, Rope};
use std::time::Duration;

/// Few samples, short: the whole file is a matter of minutes.
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
/// added in f32 (TN). The layers are those of the 105.8 M model: attention, both halves of the MLP, head.
fn linear_layers() -> impl Iterator<Item = (&'static str, Gemm)> {
    const TOKENS: usize = 1024;
    [(768, 768), (3072, 768), (768, 3072), (32000, 768)].into_iter().flat_map(|(out, inn)| {
        [
            ("nt", Gemm::nt(TOKENS, out, inn)),
            ("nn", Gemm::nn(TOKENS, inn, out)),
            ("tn", Gemm::tn(out, inn, TOKENS).accumulate()),
        ]
    })
}

fn products(c: &mut Criterion) {
    let dev = device();
    let (kernels, absent): (Vec<Kernel>, Vec<Kernel>) = Kernel::ALL.iter().partition(|k| k.available());
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
                let mut scratch = Scratch::with_kernel(*kernel).expect("available");
                let size = format!("{form} {}x{}x{}", shape.m, shape.n, shape.k);
                group.bench_function(BenchmarkId::new(kernel.name(), size), |bench| {
                    bench.iter(|| gemm(&mut scratch, &shape, a.view(), b.view(), out.view_mut()).expect("it fits"))
                });
            }
        }
        group.finish();
    }
}

/// Runs `f` and reports its rate in these units a second.
fn timed(group: &mut BenchmarkGroup<WallTime>, name: impl Into<String>, rate: Throughput, mut f: impl FnMut()) {
    group.throughput(rate);
    group.bench_function(name.into(), |bench| bench.iter(&mut f));
}

/// 12 heads of 64, one document. Rates count the products below the diagonal only: 2 forward, 5 backward.
fn attention(c: &mut Criterion) {
    let dev = device();
    let shape = Attention { heads: 12, kv_heads: 12, head_dim: 64, scale: 0.125, window: 0, softcap: 0.0 };
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let mut group = group(c, &format!("attention/{dtype}"));
        for t in [256, 2048] {
            let (qkv, d_o) = (random(&dev, dtype, t * shape.row()), random(&dev, dtype, t * 768));
            let zeroed = |dtype, len| dev.alloc(dtype, len, Category::Other).expect("memory");
            let (mut o, mut lse, mut delta) =
                (zeroed(dtype, t * 768), zeroed(DType::F32, 12 * t), zeroed(DType::F32, 12 * t));
            let mut sums = zeroed(DType::F32, dev.attention_sums(&shape, dtype, t));
            let (mut dqkv, mut cu) = (zeroed(dtype, t * shape.row()), zeroed(DType::U32, 2));
            dev.upload(bytemuck::cast_slice(&[0, t as u32]), cu.view_mut()).expect("equal lengths");
            let product = (t * (t + 1) * 768) as u64;
            timed(&mut group, format!("forward {t}"), Throughput::Elements(2 * product), || {
                dev.attention(&shape, cu.view(), qkv.view(), o.view_mut(), lse.view_mut()).expect("it fits")
            });
            timed(&mut group, format!("backward {t}"), Throughput::Elements(5 * product), || {
                let (delta, sums, dqkv) = (delta.view_mut(), sums.view_mut(), dqkv.view_mut());
                let (cu, qkv, o, lse, d_o) = (cu.view(), qkv.view(), o.view(), lse.view(), d_o.view());
                dev.attention_backward(&shape, cu, qkv, o, lse, d_o, delta, sums, dqkv).expect("it fits")
            });
        }
        group.finish();
    }
}

/// Rates in bytes read and written. The copy is the bound: memory bandwidth.
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
    let constants = AdamW { lr: 1e-6, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 10 }.scalars();
    let mut h = dev.alloc(DType::F32, AdamWScalars::LEN, Category::Other).expect("memory");
    dev.upload(bytemuck::bytes_of(&constants), h.view_mut()).expect("it fits");
    timed(&mut group, "memcpy", Throughput::Bytes(8 * N as u64), || dev.copy(g.view(), m.view_mut()).expect("it fits"));
    dev.zero(v.view_mut()).expect("it fits");
    timed(&mut group, "adamw", Throughput::Bytes(28 * N as u64), || {
        dev.adamw(h.view(), scale.view(), g.view(), m.view_mut(), v.view_mut(), p.view_mut(), None).expect("it fits")
    });
    timed(&mut group, "adamw with a bf16 copy", Throughput::Bytes(30 * N as u64), || {
        let out = Some(out.view_mut());
        dev.adamw(h.view(), scale.view(), g.view(), m.view_mut(), v.view_mut(), p.view_mut(), out).expect("it fits")
    });
    let mut acc = dev.alloc(DType::F64, LIMBS, Category::Other).expect("memory");
    timed(&mut group, "sum of squares", Throughput::Bytes(4 * N as u64), || {
        dev.sum_squares(g.view(), acc.view_mut()).expect("it fits")
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
        let norm = RmsNorm { eps: 1e-5, offset: 0.0 };
        timed(&mut group, "rmsnorm", Throughput::Elements(n as u64), || {
            dev.rmsnorm(&norm, x.view(), w.view(), y.view_mut(), rstd.view_mut()).expect("it fits")
        });
        timed(&mut group, "rmsnorm backward", Throughput::Elements(n as u64), || {
            let (dx, dw) = (dx.view_mut(), dw.view_mut());
            dev.rmsnorm_backward(&norm, x.view(), w.view(), rstd.view(), dy.view(), dx, dw).expect("it fits")
        });
        let shape = Rope { heads: 8, head_dim: 64, row: 768 };
        let (table, positions) =
            (random(&dev, DType::F32, 64), dev.alloc(DType::U32, TOKENS, Category::Other).expect("memory"));
        timed(&mut group, "rope", Throughput::Elements(n as u64), || {
            dev.rope(&shape, table.view(), positions.view(), y.view_mut(), false).expect("it fits")
        });
        let key = dev.alloc(DType::U32, 2, Category::Other).expect("memory");
        timed(&mut group, "dropout", Throughput::Elements(n as u64), || {
            dev.dropout(1e-3, key.view(), dx.view_mut()).expect("it fits")
        });
        let n = TOKENS * 3072;
        let (gate, up, dy, mut y, mut dgate) = (of(n), of(n), of(n), of(n), of(n));
        timed(&mut group, "swiglu", Throughput::Elements(n as u64), || {
            dev.swiglu(gate.view(), up.view(), y.view_mut()).expect("it fits")
        });
        timed(&mut group, "swiglu backward", Throughput::Elements(n as u64), || {
            dev.swiglu_backward(gate.view(), up.view(), dy.view(), dgate.view_mut(), y.view_mut()).expect("it fits")
        });
        timed(&mut group, "gelu", Throughput::Elements(n as u64), || {
            dev.gelu(gate.view(), y.view_mut()).expect("it fits")
        });
        timed(&mut group, "gelu backward", Throughput::Elements(n as u64), || {
            dev.gelu_backward(gate.view(), dy.view(), y.view_mut()).expect("it fits")
        });
        let n = 256 * VOCAB;
        let (mut logits, shape) = (of(n), CrossEntropy { vocab: VOCAB, softcap: 0.0 });
        let scale = random(&dev, DType::F32, 1);
        let (targets, mut loss) = (
            dev.alloc(DType::I32, 256, Category::Other).expect("memory"),
            dev.alloc(DType::F64, 1, Category::Other).expect("memory"),
        );
        timed(&mut group, "cross entropy", Throughput::Elements(n as u64), || {
            dev.cross_entropy(&shape, targets.view(), Some(scale.view()), logits.view_mut(), loss.view_mut())
                .expect("it fits")
        });
        group.finish();
    }
}

criterion_group!(benches, products, attention, optimizer, rows);
criterion_main!(benches);
