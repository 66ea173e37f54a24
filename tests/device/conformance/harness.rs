//! Runs one operation on every device and compares the results. Never knows what the operation means.
use crate::common::deep::deep;
use flatshard_base::dtype::Float;
use flatshard_base::rng::Rng;
use flatshard_base::{Category, DType, Error, Meter, Result};
use flatshard_device::cpu::{CpuDevice, gemm::GemmKernel, simd::Level};
use flatshard_device::gpu::cuda::{Cuda, CudaOptions, Machine, has_blas};
use flatshard_device::gpu::sim::Sim;
use flatshard_device::gpu::{Driver, GpuDevice};
use flatshard_device::{Buf, Device};
use half::{bf16, f16};
use std::io::Write;
use std::sync::{Arc, LazyLock};

/// Error allowed where the naive code happens to be exact: this fraction of the largest reference value.
pub const FLOOR: f64 = 1.2e-7;
/// Maximum ratio to the error of the naive code: for outputs of a forward pass, and for gradients.
pub const FORWARD: f64 = 2.0;
pub const GRADIENT: f64 = 3.0;

/// Restricts a process to the GPU that its CUDA driver shows.
pub const ONLY_CUDA: &str = "FLATSHARD_TEST_ONLY_CUDA";
fn only_cuda() -> Option<Vec<Box<dyn Device>>> {
    std::env::var_os(ONLY_CUDA).map(|_| vec![gpu(cuda().expect("the driver has a GPU"))])
}

/// Every vector width of the CPU, several of its threads, the simulated GPU, and a real one if available.
pub fn devices() -> Vec<Box<dyn Device>> {
    if let Some(cuda) = only_cuda() {
        return cuda;
    }
    static SIM: LazyLock<Arc<Sim>> = LazyLock::new(Arc::default);
    let cpus = levels().iter().map(|&level| CpuDevice::with_level(Meter::default(), level).unwrap());
    let threaded = CpuDevice::with_level(Meter::default(), Level::best()).and_then(|cpu| cpu.with_threads(3)).unwrap();
    let cpus = cpus.chain([threaded.with_grain(1)]);
    let gpus = [gpu(SIM.clone())].into_iter().chain(cuda().map(|cuda| gpu(cuda)));
    cpus.map(|cpu| Box::new(cpu) as Box<dyn Device>).chain(gpus).collect()
}
/// The vector widths of this CPU according to Linux. Those that run and those that are missing are printed despite the
/// test runner's capture.
fn levels() -> &'static [Level] {
    static LEVELS: LazyLock<Vec<Level>> = LazyLock::new(|| {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags: Vec<&str> = info.lines().find(|line| line.starts_with("flags")).unwrap_or("").split(' ').collect();
        let needs: [(Level, &[&str]); 3] = [
            (Level::Baseline, &[]),
            (Level::Avx2, &["avx2", "fma"]),
            (Level::Avx512, &["avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"]),
        ];
        let has = |(_, needed): &(Level, &[&str])| needed.iter().all(|flag| flags.contains(flag));
        let (run, missing): (Vec<_>, Vec<_>) = needs.into_iter().partition(has);
        let [run, missing] = [run, missing].map(|some| some.into_iter().map(|(level, _)| level).collect::<Vec<_>>());
        let _ = writeln!(std::io::stderr(), "conformance: CPU levels {run:?} run; this CPU lacks {missing:?}");
        assert_eq!(Level::all().collect::<Vec<_>>(), run, "levels of the device, and of the CPU's flags");
        run
    });
    &LEVELS
}
/// Also those with 16-bit kernels of their own: a simulated H100, which uses the kernels for sm_90a, and the CPU with
/// each of the product kernels that it has.
pub fn every_device() -> Vec<Box<dyn Device>> {
    if let Some(cuda) = only_cuda() {
        return cuda;
    }
    static HOPPER: LazyLock<Arc<Sim>> = LazyLock::new(|| Arc::new(Sim::new().of_arch(90)));
    let kernels = GemmKernel::ALL.into_iter().filter(|kernel| kernel.available());
    let cpus = kernels
        .map(|kernel| -> Box<dyn Device> { Box::new(CpuDevice::with_kernel(Meter::default(), kernel).unwrap()) });
    devices().into_iter().chain([gpu(HOPPER.clone())]).chain(cpus).collect()
}
/// A device with its own meter on a driver shared by all tests: each kernel is parsed, or compiled, once.
fn gpu(driver: Arc<dyn Driver>) -> Box<dyn Device> {
    Box::new(GpuDevice::new(driver, Meter::default()).unwrap())
}
/// The first usable GPU of this machine, if any.
fn cuda() -> Option<Arc<Cuda>> {
    static CUDA: LazyLock<Option<Arc<Cuda>>> = LazyLock::new(|| {
        let machine = Machine::probe().ok().filter(|machine| machine.choose(0, 1).is_ok() && has_blas())?;
        let options = CudaOptions { local_rank: 0, ranks_per_gpu: 1, tf32: false };
        Some(Arc::new(Cuda::open(&machine, &options, &Meter::default()).unwrap()))
    });
    CUDA.clone()
}
pub fn is_cpu(dev: &dyn Device) -> bool {
    dev.name().starts_with("cpu")
}
/// Checks faults through a download: an asynchronous GPU reports an index outside its table only there.
pub fn settled(dev: &dyn Device, done: Result<()>, any: &Buf) -> Result<()> {
    done?;
    dev.download(any.view(), &mut vec![0; any.bytes()])
}

/// The dtype of an operand: the run's compute dtype, or a fixed one.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Compute,
    Fixed(DType),
}
#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    Input,
    /// Compared with the reference, in the order of the operands.
    Output,
    /// Written, or of any sufficient length: not compared.
    Scratch,
}

#[derive(Clone)]
pub struct Operand {
    pub name: &'static str,
    pub kind: Kind,
    pub role: Role,
    pub values: Vec<f64>,
}

pub fn operand(
    name: &'static str,
    kind: Kind,
    role: Role,
    values: impl IntoIterator<Item = impl Into<f64>>,
) -> Operand {
    Operand { name, kind, role, values: values.into_iter().map(Into::into).collect() }
}
/// An input in the compute dtype.
pub fn x(name: &'static str, values: &[f64]) -> Operand {
    operand(name, Kind::Compute, Role::Input, values.iter().copied())
}
/// An output in the compute dtype; `values` are its previous contents.
pub fn y(name: &'static str, values: &[f64]) -> Operand {
    operand(name, Kind::Compute, Role::Output, values.iter().copied())
}
pub fn f32_in(name: &'static str, values: &[f64]) -> Operand {
    operand(name, Kind::Fixed(DType::F32), Role::Input, values.iter().copied())
}
pub fn f32_out(name: &'static str, values: &[f64]) -> Operand {
    operand(name, Kind::Fixed(DType::F32), Role::Output, values.iter().copied())
}
pub fn u32_in(name: &'static str, values: &[u32]) -> Operand {
    operand(name, Kind::Fixed(DType::U32), Role::Input, values.iter().copied())
}

/// The dtypes layers compute in.
pub const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// The nearest number that is exact in all of [`FLOATS`].
pub fn rounded(x: f64) -> f64 {
    f16::from_f32(bf16::from_f64(x).to_f32()).to_f64()
}
/// Standard normal numbers that are exact in them, so that every run has the same inputs.
pub fn normal(seed: u64, n: usize) -> Vec<f64> {
    let rng = Rng::new(seed, 7);
    (0..n as u64).map(|i| rounded(rng.normal(i) as f64)).collect()
}
/// Previous contents of an output: an operation that adds must keep them, one that assigns must not.
pub fn before(n: usize) -> Vec<f64> {
    (0..n).map(|i| (i % 3) as f64 - 0.75).collect()
}

// Tests are compiled without optimization: no allocation or iterator for each of millions of elements.
fn spread<const N: usize>(values: &[f64], each: fn(f64) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * N];
    for (to, &value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *to = each(value);
    }
    bytes
}
fn gathered<const N: usize>(bytes: &[u8], each: fn([u8; N]) -> f64) -> Vec<f64> {
    let mut values = vec![0.0; bytes.len() / N];
    for (to, from) in values.iter_mut().zip(bytes.as_chunks().0) {
        *to = each(*from);
    }
    values
}
fn bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => spread(values, |v| (v as f32).to_ne_bytes()),
        DType::Bf16 => spread(values, |v| <bf16 as Float>::from_f32(v as f32).to_ne_bytes()),
        DType::F16 => spread(values, |v| f16::from_f64(v).to_ne_bytes()),
        DType::F64 => spread(values, f64::to_ne_bytes),
        DType::U32 => spread(values, |v| (v as u32).to_ne_bytes()),
        DType::I32 => spread(values, |v| (v as i32).to_ne_bytes()),
        DType::U8 => spread(values, |v| [v as u8]),
    }
}
pub fn buf(dev: &dyn Device, dtype: DType, values: &[f64]) -> Buf {
    let mut buf = dev.alloc(dtype, values.len(), Category::Other).unwrap();
    dev.upload(&bytes(dtype, values), buf.view_mut()).unwrap();
    buf
}
pub fn read(dev: &dyn Device, buf: &Buf) -> Vec<f64> {
    let mut bytes = vec![0; buf.bytes()];
    dev.download(buf.view(), &mut bytes).unwrap();
    match buf.dtype() {
        DType::F32 => gathered(&bytes, |b| f32::from_ne_bytes(b).into()),
        DType::Bf16 => gathered(&bytes, |b| bf16::from_ne_bytes(b).to_f32().into()),
        DType::F16 => gathered(&bytes, |b| f16::from_ne_bytes(b).to_f32().into()),
        DType::F64 => gathered(&bytes, f64::from_ne_bytes),
        DType::U32 => gathered(&bytes, |b| u32::from_ne_bytes(b).into()),
        DType::I32 => gathered(&bytes, |b| i32::from_ne_bytes(b).into()),
        DType::U8 => gathered(&bytes, |[b]| b.into()),
    }
}

/// The reference's outputs, in the order of the output operands.
pub type Outputs = Vec<Vec<f64>>;
pub type Run<'a> = &'a dyn Fn(&dyn Device, &mut [Buf]) -> Result<()>;

/// Whether this device computes all cases: emulated GPUs and the CPU without FMA are slow, and compute representative
/// ones, unless the suite is deep.
pub fn computes_all(dev: &dyn Device) -> bool {
    is_cpu(dev) && !dev.name().contains("baseline") || deep()
}
/// Whether it computes with so many elements in this dtype: of many, in one of the three at least.
pub fn computes(dev: &dyn Device, compute: DType, elements: usize) -> bool {
    computes_all(dev) || elements < 8_000 || FLOATS[elements % FLOATS.len()] == compute
}

/// Runs the operation on every device and dtype, compares, then passes every operand wrongly. The CPU's vector widths
/// must be bitwise equal.
pub fn conform(op: &str, factor: f64, operands: &[Operand], exact: Outputs, naive: Outputs, run: Run) {
    for compute in FLOATS {
        let mut narrowest: Option<Vec<Vec<f64>>> = None;
        // In f32 they run the same kernels as the others.
        let narrow = op.starts_with("attention") && compute != DType::F32;
        for (i, dev) in if narrow { every_device() } else { devices() }.into_iter().enumerate() {
            if !computes(&*dev, compute, operands.iter().map(|o| o.values.len()).sum()) {
                continue;
            }
            let label = format!("{op} on {} in {compute}", dev.name());
            let mut bufs = buffers(&*dev, compute, operands);
            run(&*dev, &mut bufs).unwrap_or_else(|e| panic!("{label}: {e}"));
            let outputs = operands.iter().zip(&bufs).filter(|(o, _)| o.role == Role::Output);
            if i < levels().len() {
                let bits: Vec<Vec<f64>> = outputs.clone().map(|(_, buf)| read(&*dev, buf)).collect();
                assert!(narrowest.get_or_insert(bits.clone()) == &bits, "{label}: not the bits of the baseline");
            }
            let mut compared = 0;
            for (((o, buf), exact), naive) in outputs.zip(&exact).zip(&naive) {
                let naive = read(&*dev, &self::buf(&*dev, buf.dtype(), naive));
                compare(&format!("{label}: {}", o.name), factor, &read(&*dev, buf), exact, &naive);
                compared += 1;
            }
            assert_eq!((compared, exact.len()), (exact.len(), naive.len()), "{label}: outputs of the reference");
            // For empty operands, one more element may be valid.
            if operands.iter().all(|o| !o.values.is_empty()) {
                refuse(&label, &*dev, compute, operands, run);
            }
        }
    }
}

fn dtype(kind: Kind, compute: DType) -> DType {
    match kind {
        Kind::Compute => compute,
        Kind::Fixed(dtype) => dtype,
    }
}
fn buffers(dev: &dyn Device, compute: DType, operands: &[Operand]) -> Vec<Buf> {
    let of = |o: &Operand| {
        let buf = buf(dev, dtype(o.kind, compute), &o.values);
        assert!(o.role != Role::Input || read(dev, &buf) == o.values, "{} is not exact in {}", o.name, buf.dtype());
        buf
    };
    operands.iter().map(of).collect()
}

pub fn compare(label: &str, factor: f64, got: &[f64], exact: &[f64], naive: &[f64]) {
    assert_eq!((got.len(), naive.len()), (exact.len(), exact.len()), "{label}: lengths");
    let errors = |of: &[f64]| {
        let (mut worst, mut sum) = (0.0f64, 0.0);
        for (i, (a, b)) in of.iter().zip(exact).enumerate() {
            let e = if a == b { 0.0 } else { (a - b).abs() };
            assert!(e.is_finite(), "{label}: element {i} is {a}, should be {b}");
            worst = worst.max(e);
            sum += e;
        }
        (worst, sum / exact.len().max(1) as f64)
    };
    let floor = FLOOR * exact.iter().fold(0.0f64, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    let ((worst, mean), (naive_worst, naive_mean)) = (errors(got), errors(naive));
    assert!(worst <= factor * naive_worst + floor, "{label}: largest error {worst:e}, naive {naive_worst:e}");
    assert!(mean <= factor * naive_mean + floor, "{label}: mean error {mean:e}, naive {naive_mean:e}");
}

/// Every operand in turn one element too long or too short (a single one may be), and with another dtype.
fn refuse(label: &str, dev: &dyn Device, compute: DType, operands: &[Operand], run: Run) {
    let refused = |bufs: &mut [Buf], what: String| match run(dev, bufs) {
        Err(Error::Op { op, what }) => assert!(!op.is_empty() && what.len() > 10, "{label}: says only {op}: {what}"),
        other => panic!("{label}: {what} gave {other:?}"),
    };
    // What is refused writes nothing, so that the other operands stay as they are.
    let mut bufs = buffers(dev, compute, operands);
    for (i, o) in operands.iter().enumerate() {
        let right = dtype(o.kind, compute);
        let wrong = buf(dev, if right == DType::U8 { DType::F32 } else { DType::U8 }, &o.values);
        let own = std::mem::replace(&mut bufs[i], wrong);
        refused(&mut bufs, format!("{} as u8", o.name));
        if o.role != Role::Scratch && operands.len() > 1 {
            let longer: Vec<f64> = o.values.iter().copied().chain([0.0]).collect();
            bufs[i] = buf(dev, right, &longer);
            refused(&mut bufs, format!("{} one longer", o.name));
            if !o.values.is_empty() {
                bufs[i] = buf(dev, right, &o.values[1..]);
                refused(&mut bufs, format!("{} one shorter", o.name));
            }
        }
        bufs[i] = own;
    }
}
