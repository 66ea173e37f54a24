//! The emulator against the GPU: fragments of matrix instructions and whole operations on both, compared by bits where the
//! arithmetic is exact; and attention against an f32 reference.
use crate::Gpu;
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::driver::{Arg, Driver, Kernel, Shape};
use flatshard::device::gpu::kernels::{TEXTS, Text};
use flatshard::device::gpu::sim::Sim;
use flatshard::device::{AdamW, Attention, Buf, Device, LIMBS};
use serde_json::{Map, Value, json};
use std::sync::Arc;

const LDMATRIX: &str = include_str!("probes/ldmatrix.ptx");
const MMA: &str = include_str!("probes/mma.ptx");
static PROBES: &[Text] = &[
    Text { variant: "ldmatrix", file: "ldmatrix.ptx", ptx: LDMATRIX },
    Text { variant: "mma", file: "mma.ptx", ptx: MMA },
];
/// The simulated GPU runs a probe in this kernel's place.
const STAND_IN: &str = "add_f32";

struct Probe {
    variant: &'static str,
    entry: &'static str,
    input: Vec<u32>,
    /// 32-bit words.
    output: usize,
}

/// Small integers, which every one of these formats holds and sums exactly.
fn small(i: usize) -> f32 {
    (i * 7 % 11) as f32 - 5.0
}
fn pair(i: usize, bits: fn(f32) -> u16) -> u32 {
    u32::from(bits(small(2 * i))) | u32::from(bits(small(2 * i + 1))) << 16
}

fn probes() -> Vec<Probe> {
    let bf16 = |x: f32| half::bf16::from_f32(x).to_bits();
    let f16 = |x: f32| half::f16::from_f32(x).to_bits();
    let mma = |entry, word: &dyn Fn(usize) -> u32| {
        // Per lane: 4 words of A, 2 of B, 2 unused, 4 of C.
        let input = (0..32 * 12).map(|i| if i % 12 < 8 { word(i) } else { small(i).to_bits() }).collect();
        Probe { variant: "mma", entry, input, output: 32 * 4 }
    };
    vec![
        Probe {
            variant: "ldmatrix",
            entry: "ldmatrix",
            input: (0..128).map(|i| ((2 * i + 1) << 16) | (2 * i)).collect(),
            output: 256,
        },
        mma("mma_bf16", &|i| pair(i, bf16)),
        mma("mma_f16", &|i| pair(i, f16)),
        mma("mma_tf32", &|i| small(i).to_bits()),
    ]
}

fn run_probe(driver: &dyn Driver, variant: &'static str, probe: &Probe) -> Result<Vec<u32>> {
    let meter = Meter::default();
    let alloc =
        |words: usize| driver.alloc(DType::U32, words, Category::Other, meter.lease(Category::Other, 4 * words));
    let (mut input, mut output) = (alloc(probe.input.len())?, alloc(probe.output)?);
    driver.upload(bytemuck::cast_slice(&probe.input), input.view_mut())?;
    let kernel = Kernel { variant, entry: probe.entry };
    driver.launch(kernel, Shape::line(1, 32), &mut [Arg::In(input.view()), Arg::Out(output.view_mut())])?;
    let mut words = vec![0u32; probe.output];
    driver.download(output.view(), bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

fn simulated(probe: &Probe) -> Result<Vec<u32>> {
    let text = PROBES.iter().find(|t| t.variant == probe.variant).map_or("", |t| t.ptx);
    let sim = Sim::new().replace(STAND_IN, probe.variant, text)?;
    run_probe(&sim, STAND_IN, probe)
}

pub fn run() -> Result<Value> {
    let gpu = Gpu::open(PROBES, 0, 1)?;
    let (mut report, mut wrong) = (Map::new(), Vec::new());
    for probe in probes() {
        let (there, here) = (run_probe(&*gpu.cuda, probe.variant, &probe)?, simulated(&probe)?);
        let first = there.iter().zip(&here).position(|(a, b)| a != b);
        if let Some(at) = first {
            wrong.push(format!("{} word {at}: GPU {:#x}, emulator {:#x}", probe.entry, there[at], here[at]));
        }
        report.insert(probe.entry.into(), json!({"words": there.len(), "equal": first.is_none()}));
    }
    drop(gpu);
    let gpu = Gpu::open(TEXTS, 0, 1)?;
    let sim = GpuDevice::new(Arc::new(Sim::new()), Meter::default())?;
    for (name, bits, operation) in operations() {
        let (there, here) = (operation(&*gpu.device)?, operation(&sim)?);
        let difference = there.iter().zip(&here).map(|(a, b)| f64::from((a - b).abs() / b.abs().max(1e-3)));
        let largest = largest(difference);
        let equal = there.iter().zip(&here).all(|(a, b)| a.to_bits() == b.to_bits());
        // Instructions with an `approx` differ in the last bits between the GPU and the emulator's libm.
        let passed = if bits { equal } else { largest < 1e-5 };
        if !passed {
            wrong.push(format!("{name}: GPU and emulator differ by {largest:e}"));
        }
        report.insert(name.into(), json!({"equal": equal, "largest_difference": largest}));
    }
    match wrong.is_empty() {
        true => Ok(Value::Object(report)),
        false => Err(Error::Run(wrong.join("; "))),
    }
}

/// A NaN is larger than any number.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
}

const N: usize = 5000;

fn filled(dev: &dyn Device, dtype: DType, n: usize, seed: u64) -> Result<Buf> {
    let rng = Rng::new(seed, 3);
    let values: Vec<f32> = (0..n as u64).map(|i| rng.normal(i)).collect();
    let mut x = dev.alloc(DType::F32, n, Category::Other)?;
    dev.upload(bytemuck::cast_slice(&values), x.view_mut())?;
    if dtype == DType::F32 {
        return Ok(x);
    }
    let mut y = dev.alloc(dtype, n, Category::Other)?;
    dev.copy(x.view(), y.view_mut())?;
    Ok(y)
}
fn floats(dev: &dyn Device, buf: &Buf) -> Result<Vec<f32>> {
    let mut values = vec![0f32; buf.len()];
    match buf.dtype() {
        DType::F32 => dev.download(buf.view(), bytemuck::cast_slice_mut(&mut values))?,
        _ => {
            let mut wide = dev.alloc(DType::F32, buf.len(), Category::Other)?;
            dev.copy(buf.view(), wide.view_mut())?;
            dev.download(wide.view(), bytemuck::cast_slice_mut(&mut values))?;
        }
    }
    Ok(values)
}

type Operation = Box<dyn Fn(&dyn Device) -> Result<Vec<f32>>>;

/// Name, whether both must give the same bits, and the operation.
fn operations() -> Vec<(&'static str, bool, Operation)> {
    let mut list: Vec<(&'static str, bool, Operation)> = Vec::new();
    let mut put =
        |name, bits, f: fn(&dyn Device) -> Result<Vec<f32>>| list.push((name, bits, Box::new(f) as Operation));
    put("add f32", true, |dev| {
        let (x, mut y) = (filled(dev, DType::F32, N, 1)?, filled(dev, DType::F32, N, 2)?);
        dev.add(x.view(), y.view_mut())?;
        floats(dev, &y)
    });
    put("cast to bf16", true, |dev| floats(dev, &filled(dev, DType::Bf16, N, 1)?));
    put("sum of squares", true, |dev| {
        let (x, mut acc) = (filled(dev, DType::F32, N, 1)?, dev.alloc(DType::F64, LIMBS, Category::Other)?);
        dev.sum_squares(x.view(), acc.view_mut())?;
        let mut limbs = [0f64; LIMBS];
        dev.download(acc.view(), bytemuck::cast_slice_mut(&mut limbs))?;
        // Limbs hold 32 bits: both halves as f32, exactly.
        Ok(limbs.iter().flat_map(|l| [(*l / 65536.0).floor() as f32, (*l % 65536.0) as f32]).collect())
    });
    put("swiglu bf16", false, |dev| {
        let (g, u, mut y) =
            (filled(dev, DType::Bf16, N, 1)?, filled(dev, DType::Bf16, N, 2)?, filled(dev, DType::F32, N, 3)?);
        let mut out = dev.alloc(DType::Bf16, N, Category::Other)?;
        dev.swiglu(g.view(), u.view(), out.view_mut())?;
        dev.copy(out.view(), y.view_mut())?;
        // One rounding to bf16 may fall the other way: compared after it, a step of bf16 is allowed.
        Ok(floats(dev, &y)?.into_iter().map(|x| (x * 64.0).round() / 64.0).collect())
    });
    put("adamw", false, |dev| {
        let (g, scale) = (filled(dev, DType::F32, N, 1)?, filled(dev, DType::F32, 1, 9)?);
        let (mut m, mut p) = (filled(dev, DType::F32, N, 2)?, filled(dev, DType::F32, N, 3)?);
        let mut v = dev.alloc(DType::F32, N, Category::Other)?;
        let h = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
        dev.adamw(&h, scale.view(), g.view(), m.view_mut(), v.view_mut(), p.view_mut(), None)?;
        floats(dev, &p)
    });
    list
}

/// Largest error over the largest value, against the CPU's f32 attention of the same bf16 inputs.
pub fn attention() -> Result<Value> {
    let gpu = Gpu::open(TEXTS, 0, 1)?;
    let cpu = CpuDevice::new(Meter::default());
    let mut report = Map::new();
    let mut wrong = Vec::new();
    let tokens = 777;
    let documents = [0u32, 300, 301, tokens as u32];
    for head_dim in [64, 96, 128, 256] {
        for (kind, kv_heads, window, softcap) in
            [("causal", 4, 0, 0.0), ("grouped, window", 2, 100, 0.0), ("softcap", 4, 0, 30.0)]
        {
            let scale = 1.0 / (head_dim as f32).sqrt();
            let shape = Attention { heads: 4, kv_heads, head_dim, scale, window, softcap };
            let label = format!("{head_dim} {kind}");
            let (there, here) =
                (both(&*gpu.device, &shape, &documents, DType::Bf16)?, both(&cpu, &shape, &documents, DType::F32)?);
            let error = |a: &[f32], b: &[f32]| {
                let most = largest(b.iter().map(|x| f64::from(x.abs())));
                largest(a.iter().zip(b).map(|(x, y)| f64::from((x - y).abs()))) / most
            };
            let (output, gradient) = (error(&there[0], &here[0]), error(&there[1], &here[1]));
            // bf16 rounds to 2^-9 of a value; scores, probabilities and sums are f32.
            let passed = output < 0.01 && gradient < 0.03;
            if !passed {
                wrong.push(format!("head dim {label}: output {output:e}, gradient {gradient:e}"));
            }
            report.insert(label, json!({"output": output, "gradient": gradient}));
        }
    }
    match wrong.is_empty() {
        true => Ok(Value::Object(report)),
        false => Err(Error::Run(wrong.join("; "))),
    }
}

/// Output, and the gradient of qkv for a fixed gradient of the output.
fn both(dev: &dyn Device, shape: &Attention, documents: &[u32], dtype: DType) -> Result<[Vec<f32>; 2]> {
    let tokens = documents.last().copied().unwrap_or(0) as usize;
    let (row, out) = (shape.row(), shape.heads * shape.head_dim);
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
    // The same numbers for both: rounded to bf16 first.
    let rounded = |n, seed| {
        let narrow = filled(dev, DType::Bf16, n, seed)?;
        if dtype == DType::Bf16 {
            return Ok(narrow);
        }
        let mut wide = alloc(dtype, n)?;
        dev.copy(narrow.view(), wide.view_mut())?;
        Ok(wide)
    };
    let (qkv, d_o): (Buf, Buf) = (rounded(tokens * row, 1)?, rounded(tokens * out, 2)?);
    let mut cu = alloc(DType::U32, documents.len())?;
    dev.upload(bytemuck::cast_slice(documents), cu.view_mut())?;
    let (mut o, mut dqkv) = (alloc(dtype, tokens * out)?, alloc(dtype, tokens * row)?);
    let (mut lse, mut delta) = (alloc(DType::F32, shape.heads * tokens)?, alloc(DType::F32, shape.heads * tokens)?);
    dev.attention(shape, cu.view(), qkv.view(), o.view_mut(), lse.view_mut())?;
    dev.attention_backward(
        shape,
        cu.view(),
        qkv.view(),
        o.view(),
        lse.view(),
        d_o.view(),
        delta.view_mut(),
        dqkv.view_mut(),
    )?;
    Ok([floats(dev, &o)?, floats(dev, &dqkv)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The probes run in the emulator; what an mma gives is the product by the instruction's own definition.
    #[test]
    fn probes_run_in_the_emulator_and_mma_multiplies() {
        for probe in probes() {
            let words = simulated(&probe).unwrap();
            assert_eq!(words.len(), probe.output);
            if probe.entry == "ldmatrix" {
                // Lane l gets the elements 2 (l % 4) and the next of row l / 4 of each matrix: word 4 row + l % 4.
                assert_eq!(words[8 * 5], probe.input[4 * (5 / 4) + 5 % 4]);
                continue;
            }
            assert!(words.iter().any(|&w| w != 0), "{}", probe.entry);
            // Every lane's D is its C plus an integer.
            for (lane, d) in words.chunks(4).enumerate() {
                let c = &probe.input[12 * lane + 8..][..4];
                let whole = d.iter().zip(c).all(|(d, c)| (f32::from_bits(*d) - f32::from_bits(*c)).fract() == 0.0);
                assert!(whole, "{} lane {lane}", probe.entry);
            }
        }
    }

    #[test]
    fn operations_run_on_the_simulated_gpu() {
        let sim = GpuDevice::new(Arc::new(Sim::new()), Meter::default()).unwrap();
        for (name, _, operation) in operations() {
            assert!(operation(&sim).unwrap().iter().all(|x| x.is_finite()), "{name}");
        }
    }
}
