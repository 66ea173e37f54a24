//! Speed of single operations of the CPU device, one thread. `cargo bench --bench kernels -- gemm/bf16` runs a part; rates
//! are in floating-point operations ("elem") a second. Compare within one run only: neighbours change a machine's speed.
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::cpu::gemm::{Kernel, Scratch, gemm};
use flatshard::device::{Buf, Device, Gemm};
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

/// The products of a linear layer (out, in) over 1024 tokens: forward (NT), input gradient (NN), and weight gradient added
/// in f32 (TN). The layers are those of the 105.8 M model: attention, both halves of the MLP, head.
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
    for dtype in [DType::F32, DType::Bf16] {
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

criterion_group!(benches, products);
criterion_main!(benches);
