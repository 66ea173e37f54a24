//! One launch of each variant's entries, for what is asked of all alike: their cost, and that each barrier is needed.
use crate::harness::*;
use flatshard_ptx::emulate::{Argument, Argument::*, Counts, Kernel, Launch, Memory, Report};

pub struct Case {
    pub variant: &'static str,
    pub entry: &'static str,
    pub shape: &'static str,
    /// Bytes of global memory that must move at least once.
    pub floor: usize,
    pub grid: u32,
    pub block: u32,
    arguments: fn(&mut Memory) -> Vec<Argument>,
}

impl Case {
    pub fn run(&self, kernel: &Kernel, schedule: u64) -> Result<Counts, Report> {
        let mut memory = Memory::new();
        let arguments = &(self.arguments)(&mut memory);
        let (grid, block) = ([self.grid, 1, 1], [self.block, 1, 1]);
        Launch { kernel, grid, block, dynamic_shared: 0, arguments, schedule }.run(&mut memory)
    }
}

const N: usize = 4099;
const ROWS: usize = 7;

/// Inputs of n elements each, then outputs, then n.
fn flat(memory: &mut Memory, dtypes: &[DType], inputs: usize) -> Vec<Argument> {
    let mut arguments = vec![];
    for (i, dtype) in dtypes.iter().enumerate() {
        let bytes = encode(&normal(i as u64, N), *dtype);
        let pointer = if i < inputs { memory.upload("input", &bytes) } else { memory.alloc("output", bytes.len()) };
        arguments.push(Pointer(pointer));
    }
    arguments.push(U64(N as u64));
    arguments
}
fn adamw(memory: &mut Memory) -> Vec<Argument> {
    let mut arguments = flat(memory, &[DType::F32; 4], 4);
    let n = arguments.pop();
    arguments.push(Pointer(memory.alloc("out", 2 * N)));
    arguments.push(Pointer(memory.upload("scale", &encode(&[1.0, 1.0], DType::F32))));
    arguments.extend(n);
    arguments.extend([0.99, 0.1, 0.95, 0.05, 0.01, 1.0, 1e-8].map(Argument::F32));
    arguments
}
fn rmsnorm(memory: &mut Memory, dtype: DType, columns: usize) -> Vec<Argument> {
    let x = memory.upload("x", &encode(&normal(1, ROWS * columns), dtype));
    let w = memory.upload("w", &encode(&normal(2, columns), dtype));
    let y = memory.alloc("y", encode(&vec![0.0; ROWS * columns], dtype).len());
    let rstd = memory.alloc("rstd", 4 * ROWS);
    vec![Pointer(x), Pointer(w), Pointer(y), Pointer(rstd), U32(ROWS as u32), U32(columns as u32), Argument::F32(1e-5)]
}
/// Neighbouring blocks of very different sizes: each adds to other limbs.
fn sum_squares(memory: &mut Memory) -> Vec<Argument> {
    let scales = [1.0, 1e-20, 1e18, 1e-5, 1e30, 1e-30, 1e10];
    let x: Vec<f64> = normal(3, 100 * N).iter().enumerate().map(|(i, x)| x * scales[i / 512 % 7]).collect();
    let x = memory.upload("x", &encode(&x, DType::F32));
    vec![Pointer(x), Pointer(memory.alloc("partial", 3 * 68 * 8)), U64(100 * N as u64)]
}
fn finish(memory: &mut Memory) -> Vec<Argument> {
    let partial = memory.upload("partial", &[3; 3 * 68 * 8]);
    let acc: Vec<u8> = (0..68).flat_map(|i| (i as f64).to_le_bytes()).collect();
    vec![Pointer(partial), Pointer(memory.upload("acc", &acc)), U32(3)]
}

use DType::{Bf16, F32 as Single};
const fn case(
    variant: &'static str,
    entry: &'static str,
    shape: &'static str,
    floor: usize,
    arguments: fn(&mut Memory) -> Vec<Argument>,
) -> Case {
    Case { variant, entry, shape, floor, grid: 3, block: 256, arguments }
}

pub const CASES: &[Case] = &[
    case("add_f32", "add", "4099", 12 * N, |m| flat(m, &[Single; 2], 2)),
    case("add_bf16", "add", "4099", 6 * N, |m| flat(m, &[Bf16; 2], 2)),
    case("adamw", "adamw", "4099", 28 * N, adamw),
    case("adamw_bf16", "adamw", "4099", 30 * N, adamw),
    case("adamw_f32", "adamw", "4099", 32 * N, |memory| {
        let mut arguments = adamw(memory);
        arguments[4] = Pointer(memory.alloc("out", 4 * N));
        arguments
    }),
    case("cast_f32_bf16", "cast", "4099", 6 * N, |m| flat(m, &[Single, Bf16], 1)),
    case("cast_bf16_f32", "cast", "4099", 6 * N, |m| flat(m, &[Bf16, Single], 1)),
    case("gelu_f32", "gelu", "4099", 8 * N, |m| flat(m, &[Single; 2], 1)),
    case("gelu_bf16", "gelu", "4099", 4 * N, |m| flat(m, &[Bf16; 2], 1)),
    case("gelu_backward_f32", "gelu_backward", "4099", 12 * N, |m| flat(m, &[Single; 3], 2)),
    case("gelu_backward_bf16", "gelu_backward", "4099", 6 * N, |m| flat(m, &[Bf16; 3], 2)),
    case("rmsnorm_f32", "rmsnorm", "7x1000", 8 * ROWS * 1000, |m| rmsnorm(m, Single, 1000)),
    case("rmsnorm_bf16", "rmsnorm", "7x1000", 4 * ROWS * 1000, |m| rmsnorm(m, Bf16, 1000)),
    case("rmsnorm_bf16", "rmsnorm", "7x257", 4 * ROWS * 257, |m| rmsnorm(m, Bf16, 257)),
    case("sum_squares", "sum_squares", "409900", 400 * N, sum_squares),
    Case { grid: 1, block: 96, ..case("sum_squares", "sum_squares_finish", "3", 5 * 68 * 8, finish) },
    case("swiglu_f32", "swiglu", "4099", 12 * N, |m| flat(m, &[Single; 3], 2)),
    case("swiglu_bf16", "swiglu", "4099", 6 * N, |m| flat(m, &[Bf16; 3], 2)),
    case("swiglu_backward_f32", "swiglu_backward", "4099", 20 * N, |m| flat(m, &[Single; 5], 3)),
    case("swiglu_backward_bf16", "swiglu_backward", "4099", 10 * N, |m| flat(m, &[Bf16; 5], 3)),
];
