//! Runs one kernel under all schedules and compares. Never knows what the kernel means.
use flatshard_ptx::emulate::{
    Argument, GlobalMemory, KernelLaunch, LATE, LaunchCounts, LaunchReport, PtxKernel, parse,
};
use flatshard_ptx::kernels::Variant;
use half::{bf16, f16};

/// Tolerance where the naive code happens to be exact, as a fraction of the largest reference value.
const FLOOR: f64 = 1.2e-7;
/// Error of lg2.approx near 1, 2^-22, as a natural logarithm.
pub const LOG: f64 = 1.7e-7;
pub const FORWARD: f64 = 2.0;
pub const GRADIENT: f64 = 3.0;
/// The last ones keep diverged lanes apart; their costs differ.
pub const SCHEDULES: [u64; 4] = [0, 1, LATE | 2, LATE | 3];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DType {
    F32,
    Bf16,
    F16,
    F64,
    U8,
    U32,
    I32,
    U64,
}
pub use DType::*;
/// The compute dtypes, with their names in variants.
pub const DTYPES: [(DType, &str); 3] = [(F32, "f32"), (Bf16, "bf16"), (F16, "f16")];

impl DType {
    pub fn size(self) -> usize {
        match self {
            U8 => 1,
            Bf16 | F16 => 2,
            F32 | U32 | I32 => 4,
            F64 | U64 => 8,
        }
    }
}

pub fn encode(values: &[f64], dtype: DType) -> Vec<u8> {
    let each = |v: &f64| match dtype {
        F32 => (*v as f32).to_le_bytes().to_vec(),
        Bf16 => bf16::from_f32(*v as f32).to_le_bytes().to_vec(),
        F16 => f16::from_f32(*v as f32).to_le_bytes().to_vec(),
        F64 => v.to_le_bytes().to_vec(),
        U8 => vec![*v as u8],
        U32 => (*v as u32).to_le_bytes().to_vec(),
        I32 => (*v as i32).to_le_bytes().to_vec(),
        U64 => (*v as u64).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64).collect(),
        Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
        F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
        F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        U8 => bytes.iter().map(|b| *b as f64).collect(),
        U32 => bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b) as f64).collect(),
        I32 => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b) as f64).collect(),
        U64 => bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b) as f64).collect(),
    }
}
/// The values as the dtype holds them.
pub fn rounded(values: &[f64], dtype: DType) -> Vec<f64> {
    decode(&encode(values, dtype), dtype)
}

/// Bell-shaped numbers that f32, bf16 and f16 all hold exactly: sums of four draws of a SplitMix64.
pub fn normal(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    let mut draw = || f16::from_f64(1.7 * (uniform() + uniform() + uniform() + uniform())).to_f64();
    (0..n).map(|_| bf16::from_f64(draw()).to_f64()).collect()
}

/// A kernel's argument.
pub enum Slot {
    In(DType, Vec<f64>),
    /// Compared, with this initial value.
    InOut(DType, Vec<f64>),
    /// Compared, initially uninitialized.
    Out(DType, usize),
    Value(Argument),
}
pub use Slot::*;
pub fn int(value: usize) -> Slot {
    Value(Argument::U32(value as u32))
}
pub fn long(value: usize) -> Slot {
    Value(Argument::U64(value as u64))
}
pub fn real(value: f32) -> Slot {
    Value(Argument::F32(value))
}
/// The state without an index fault.
pub fn no_fault() -> Slot {
    In(U64, vec![0.0])
}

/// A launch of a variant's entry point.
pub struct Job {
    pub variant: String,
    /// Empty if there is only one.
    pub entry: &'static str,
    pub grid: [u32; 2],
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Elements between an aligned address and each operand.
    pub skew: usize,
    pub slots: Vec<Slot>,
}

pub fn job(variant: impl Into<String>, ctas: u32, threads: u32, slots: Vec<Slot>) -> Job {
    Job { variant: variant.into(), entry: "", grid: [ctas, 1], block: threads, shared: 0, skew: 0, slots }
}

impl Job {
    pub fn skewed(self, elements: usize) -> Job {
        Job { skew: elements, ..self }
    }
    pub fn kernels(&self) -> Vec<PtxKernel> {
        let variant = Variant::by_name(&self.variant).unwrap_or_else(|| panic!("no variant {}", self.variant));
        let text = variant.expand().unwrap_or_else(|e| panic!("{e}"));
        parse(variant.file, &text).unwrap_or_else(|e| panic!("{e}"))
    }
    pub fn choose<'k>(&self, kernels: &'k [PtxKernel]) -> &'k PtxKernel {
        match kernels {
            [one] if self.entry.is_empty() => one,
            all => all.iter().find(|k| k.name == self.entry).unwrap_or_else(|| panic!("no entry {}", self.entry)),
        }
    }
    /// The outputs' bytes.
    pub fn run(&self, kernel: &PtxKernel, schedule: u64) -> Result<(LaunchCounts, Vec<Vec<u8>>), LaunchReport> {
        let mut memory = GlobalMemory::new();
        let mut outputs = vec![];
        let mut arguments = vec![];
        for slot in &self.slots {
            let (dtype, before) = match slot {
                In(dtype, values) | InOut(dtype, values) => (*dtype, Some(encode(values, *dtype))),
                Out(dtype, n) if self.skew > 0 => (*dtype, Some(vec![0xFF; n * dtype.size()])),
                Out(dtype, _) => (*dtype, None),
                Value(argument) => {
                    arguments.push(*argument);
                    continue;
                }
            };
            let start = self.skew * dtype.size();
            let pointer = match (slot, before) {
                (Out(dtype, n), None) => memory.alloc("output", n * dtype.size()),
                (_, bytes) => memory.upload("operand", &[vec![0; start], bytes.unwrap_or_default()].concat()),
            };
            arguments.push(Argument::Pointer(pointer + start as u64));
            if !matches!(slot, In(..)) {
                outputs.push((pointer, start));
            }
        }
        let (grid, block) = ([self.grid[0], self.grid[1], 1], [self.block, 1, 1]);
        let launch =
            KernelLaunch { kernel, grid, block, dynamic_shared: self.shared as usize, arguments: &arguments, schedule };
        let counts = launch.run(&mut memory)?;
        let read = |(pointer, start)| memory.download(pointer).unwrap_or_else(|e| panic!("{e}"))[start..].to_vec();
        Ok((counts, outputs.into_iter().map(read).collect()))
    }
    /// The outputs, which must be the same bytes under every schedule.
    pub fn bytes(&self) -> Vec<Vec<u8>> {
        let kernels = self.kernels();
        let of = |schedule: u64| match self.run(self.choose(&kernels), schedule) {
            Ok((_, outputs)) => outputs,
            Err(report) => panic!("{} under schedule {schedule}:\n{report}", self.variant),
        };
        let first = of(SCHEDULES[0]);
        for schedule in &SCHEDULES[1..] {
            assert!(of(*schedule) == first, "{}: schedule {schedule} gives other bytes", self.variant);
        }
        first
    }
    pub fn outputs(&self) -> Vec<Vec<f64>> {
        let dtypes = self.slots.iter().filter_map(|slot| match slot {
            InOut(dtype, _) | Out(dtype, _) => Some(*dtype),
            _ => None,
        });
        self.bytes().iter().zip(dtypes).map(|(bytes, dtype)| decode(bytes, dtype)).collect()
    }
}

/// Rounds `naive` to the dtype.
pub fn compare(label: &str, factor: f64, got: &[f64], dtype: DType, exact: &[f64], naive: &[f64]) {
    within(label, factor, 0.0, (got, dtype), exact, naive);
}
/// The same with an additional absolute tolerance.
pub fn within(label: &str, factor: f64, more: f64, (got, dtype): (&[f64], DType), exact: &[f64], naive: &[f64]) {
    let naive = rounded(naive, dtype);
    assert_eq!((got.len(), naive.len()), (exact.len(), exact.len()), "{label}: lengths");
    let errors = |of: &[f64]| {
        let (mut worst, mut sum) = (0.0f64, 0.0);
        for (i, (a, b)) in of.iter().zip(exact).enumerate() {
            let e = (a - b).abs();
            assert!(e.is_finite(), "{label}: element {i} is {a}, should be {b}");
            worst = worst.max(e);
            sum += e;
        }
        (worst, sum / exact.len().max(1) as f64)
    };
    let floor = more + FLOOR * exact.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let ((worst, mean), (naive_worst, naive_mean)) = (errors(got), errors(&naive));
    assert!(worst <= factor * naive_worst + floor, "{label}: largest error {worst:e}, naive {naive_worst:e}");
    assert!(mean <= factor * naive_mean + floor, "{label}: mean error {mean:e}, naive {naive_mean:e}");
}

/// What references compute in: f64, and f32 for the naive code.
pub trait Real:
    Copy
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::AddAssign
    + std::ops::Neg<Output = Self>
{
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
}
macro_rules! reals {
    ($($type:ident),*) => {
        $(impl Real for $type {
            fn of(x: f64) -> $type {
                x as $type
            }
            fn f64(self) -> f64 {
                self as f64
            }
            fn sqrt(self) -> $type {
                $type::sqrt(self)
            }
            fn exp(self) -> $type {
                $type::exp(self)
            }
            fn ln(self) -> $type {
                $type::ln(self)
            }
            fn tanh(self) -> $type {
                $type::tanh(self)
            }
        })*
    };
}
reals!(f32, f64);
pub fn reals<R: Real>(values: &[f64]) -> Vec<R> {
    values.iter().map(|v| R::of(*v)).collect()
}
pub fn f64s<R: Real>(values: &[R]) -> Vec<f64> {
    values.iter().map(|v| v.f64()).collect()
}
pub fn zero<R: Real>() -> R {
    R::of(0.0)
}
