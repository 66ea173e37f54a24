//! Runs one kernel everywhere and compares. Never knows what the kernel means.
use flatshard_ptx::emulate::{Argument, Counts, Kernel, Launch, Memory, parse};
use flatshard_ptx::kernels::Variant;
use half::bf16;

/// Error forgiven where the naive code happens to be exact: this part of the largest reference value.
const FLOOR: f64 = 1.2e-7;
pub const FORWARD: f64 = 2.0;
pub const GRADIENT: f64 = 3.0;
pub const SCHEDULES: [u64; 4] = [0, 1, 2, 3];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DType {
    F32,
    Bf16,
}
use DType::*;
pub const DTYPES: [(DType, &str); 2] = [(F32, "f32"), (Bf16, "bf16")];

pub fn encode(values: &[f64], dtype: DType) -> Vec<u8> {
    let each = |v: &f64| match dtype {
        F32 => (*v as f32).to_le_bytes().to_vec(),
        Bf16 => bf16::from_f32(*v as f32).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}
pub fn decode(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64).collect(),
        Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
    }
}

/// Numbers of a bell shape that f32 and bf16 both hold exactly: sums of four draws of a SplitMix64.
pub fn normal(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    (0..n).map(|_| bf16::from_f64(1.7 * (uniform() + uniform() + uniform() + uniform())).to_f64()).collect()
}

/// A variant's entry; the first one where it has no other name.
pub struct Program {
    kernels: Vec<Kernel>,
}
pub fn program(variant: &str) -> Program {
    let variant = Variant::by_name(variant).unwrap_or_else(|| panic!("no variant {variant}"));
    let text = variant.expand().unwrap_or_else(|e| panic!("{e}"));
    Program { kernels: parse(variant.file, &text).unwrap_or_else(|e| panic!("{e}")) }
}
impl Program {
    pub fn run(
        &self,
        entry: &str,
        memory: &mut Memory,
        (grid, block): (u32, u32),
        arguments: &[Argument],
        schedule: u64,
    ) -> Counts {
        let kernel = self.kernels.iter().find(|k| k.name == entry).unwrap_or_else(|| panic!("no entry {entry}"));
        let (grid, block) = ([grid, 1, 1], [block, 1, 1]);
        let launch = Launch { kernel, grid, block, dynamic_shared: 0, arguments, schedule };
        launch.run(memory).unwrap_or_else(|report| panic!("schedule {schedule}:\n{report}"))
    }
}

/// Under every schedule the same bytes, which are given back.
pub fn agree(run: impl Fn(u64) -> Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let first = run(SCHEDULES[0]);
    for schedule in &SCHEDULES[1..] {
        assert!(run(*schedule) == first, "schedule {schedule} gives other bytes");
    }
    first
}

/// `naive` is rounded to the dtype here.
pub fn compare(label: &str, factor: f64, got: &[u8], dtype: DType, exact: &[f64], naive: &[f64]) {
    let (got, naive) = (decode(got, dtype), decode(&encode(naive, dtype), dtype));
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
    let floor = FLOOR * exact.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let ((worst, mean), (naive_worst, naive_mean)) = (errors(&got), errors(&naive));
    assert!(worst <= factor * naive_worst + floor, "{label}: largest error {worst:e}, naive {naive_worst:e}");
    assert!(mean <= factor * naive_mean + floor, "{label}: mean error {mean:e}, naive {naive_mean:e}");
}

/// Arithmetic of the reference: in f64, and in f32 for the naive code.
pub fn f32s(values: &[f64]) -> Vec<f32> {
    values.iter().map(|v| *v as f32).collect()
}
pub fn f64s(values: impl IntoIterator<Item = f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}
