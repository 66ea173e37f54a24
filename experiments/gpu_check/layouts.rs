//! The emulator compared with the GPU: fragments of matrix instructions and whole operations run on both, and must be
//! bitwise equal where the arithmetic is exact. Attention is compared with an f32 reference. Never measures speed.
use crate::gpu::OpenGpu;
use flatshard::base::fp8::{BLOCK, Fp8, Fp8Shape};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Error, Meter, Result};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::driver::{Arg, Driver, Kernel, LaunchShape, Map, Swizzle};
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::{
    AdamW, AdamWScalars, AdamWStep, Attention, AttentionBackward, AttentionShape, Fp8Gemm, Fp8Values, Fp8Weight,
    Fp8Work, GemmShape, Glu, SumSquares, TensorPart, documents_of_rows,
};
use flatshard::device::{Buf, Device, LIMBS, ViewMut};
use flatshard_ptx::kernels::probes::{LayoutProbe, PROBES, TENSOR_WORDS};
use serde_json::{Value, json};
use std::sync::Arc;

/// Shape of the tensor that boxes are copied from, and its strides in elements.
const TENSOR: ([u64; 3], [u64; 2]) = ([40, 7, 5], [48, 7 * 48]);

fn run_probe(driver: &dyn Driver, probe: &LayoutProbe) -> Result<Vec<u32>> {
    let input = probe.inputs();
    let kernel = Kernel { variant: probe.variant, entry: probe.entry };
    words(driver, probe.words[1], |out| {
        let x = uploaded(driver, DType::U32, bytemuck::cast_slice(&input))?;
        driver.launch(kernel, LaunchShape::line(probe.ctas, probe.threads), &mut [Arg::In(x.view()), Arg::Out(out)])
    })
}

/// A box of a tensor as a tensor copy (TMA) writes it to shared memory.
fn run_box(driver: &dyn Driver, swizzle: Swizzle, wide: u32, corner: [i32; 3]) -> Result<Vec<u32>> {
    let (sizes, strides) = TENSOR;
    let values: Vec<u16> = (0..5 * 7 * 48).collect();
    let tensor = uploaded(driver, DType::Bf16, bytemuck::cast_slice(&values))?;
    let map = Map { of: tensor.view(), sizes, strides, tile: [wide, 8, 3], swizzle };
    let kernel = Kernel { variant: "probe_hopper", entry: "probe_tensor" };
    let [a, b, c] = corner.map(|x| Arg::U32(x as u32));
    words(driver, TENSOR_WORDS, |out| {
        let args = &mut [Arg::Map(map), Arg::Out(out), a, b, c, Arg::U32(wide * 8 * 3 * 2)];
        driver.launch(kernel, LaunchShape::line(1, 128), args)
    })
}

fn uploaded(driver: &dyn Driver, dtype: DType, bytes: &[u8]) -> Result<Buf> {
    let lease = Meter::default().lease(Category::Other, bytes.len());
    let mut buf = driver.alloc(dtype, bytes.len() / dtype.size(), Category::Other, lease)?;
    driver.upload(bytes, buf.view_mut())?;
    Ok(buf)
}
fn words(driver: &dyn Driver, count: usize, launch: impl FnOnce(ViewMut) -> Result<()>) -> Result<Vec<u32>> {
    let mut out = uploaded(driver, DType::U32, &vec![0; 4 * count])?;
    launch(out.view_mut())?;
    let mut words = vec![0u32; count];
    driver.download(&mut [(out.view(), bytemuck::cast_slice_mut(&mut words))])?;
    Ok(words)
}

type Answer = Box<dyn Fn(&dyn Driver) -> Result<Vec<u32>>>;

/// What is run on both, by name; Hopper instructions only on Hopper.
fn questions(hopper: bool) -> Vec<(String, Answer)> {
    let probes = PROBES.into_iter().filter(|p| hopper || p.variant != "probe_hopper");
    let mut all: Vec<(String, Answer)> = probes
        .map(|probe| (probe.entry.to_string(), Box::new(move |d: &dyn Driver| run_probe(d, &probe)) as Answer))
        .collect();
    let swizzles = [(Swizzle::None, 24), (Swizzle::B32, 16), (Swizzle::B64, 32), (Swizzle::B128, 64)];
    for (swizzle, wide) in swizzles.into_iter().filter(|_| hopper) {
        for corner in [[0, 0, 0], [8, 2, 1], [-8, -3, 0], [30, 5, 4], [16, -1, -2]] {
            let answer = Box::new(move |d: &dyn Driver| run_box(d, swizzle, wide, corner)) as Answer;
            all.push((format!("box of {wide}, {swizzle:?}, at {corner:?}"), answer));
        }
    }
    all
}

pub fn run() -> Result<Value> {
    let gpu = OpenGpu::open(0, 1)?;
    let (mut report, mut wrong) = (serde_json::Map::new(), Vec::new());
    for (name, answer) in questions(gpu.cuda.arch() == 90) {
        let (there, here) = (answer(&*gpu.cuda)?, answer(&Sim::new())?);
        let first = there.iter().zip(&here).position(|(a, b)| a != b);
        if let Some(at) = first {
            wrong.push(format!("{name} word {at}: GPU {:#x}, emulator {:#x}", there[at], here[at]));
        }
        report.insert(name, json!({"words": there.len(), "equal": first.is_none()}));
    }
    let sim = GpuDevice::new(Arc::new(Sim::new()), Meter::default())?;
    for (name, agreement, operation) in operations() {
        let (there, here) = (operation(&*gpu.device)?, operation(&sim)?);
        let difference = there.iter().zip(&here).map(|(a, b)| f64::from((a - b).abs() / b.abs().max(1e-3)));
        let largest = largest(difference);
        let equal = there.iter().zip(&here).all(|(a, b)| a.to_bits() == b.to_bits());
        let passed = match agreement {
            Closeness::Bits => equal,
            Closeness::Within(most) => largest < most,
        };
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

/// The largest value; NaN counts as the largest.
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

/// How a GPU must agree with the emulator.
enum Closeness {
    Bits,
    /// Relative: `approx` instructions differ in the last bits between the GPU and the emulator's libm.
    Within(f64),
}
const F32: Closeness = Closeness::Within(1e-5);
/// Rounding to bf16 may differ by one step.
const BF16: Closeness = Closeness::Within(1.0 / 128.0 + 1e-5);

type Operation = Box<dyn Fn(&dyn Device) -> Result<Vec<f32>>>;

/// Name, agreement, and the operation.
fn operations() -> Vec<(&'static str, Closeness, Operation)> {
    let mut list: Vec<(&'static str, Closeness, Operation)> = Vec::new();
    let mut put = |name, agreement, f: fn(&dyn Device) -> Result<Vec<f32>>| {
        list.push((name, agreement, Box::new(f) as Operation))
    };
    put("add f32", Closeness::Bits, |dev| {
        let (x, mut y) = (filled(dev, DType::F32, N, 1)?, filled(dev, DType::F32, N, 2)?);
        dev.add(x.view(), y.view_mut())?;
        floats(dev, &y)
    });
    put("cast to bf16", Closeness::Bits, |dev| floats(dev, &filled(dev, DType::Bf16, N, 1)?));
    put("sum of squares", Closeness::Bits, |dev| {
        let (x, mut acc) = (filled(dev, DType::F32, N, 1)?, dev.alloc(DType::F64, LIMBS, Category::Other)?);
        dev.sum_squares(SumSquares { x: x.view(), acc: acc.view_mut() })?;
        let mut limbs = [0f64; LIMBS];
        dev.download(acc.view(), bytemuck::cast_slice_mut(&mut limbs))?;
        // Limbs have 32 bits: split into two f32 halves, exactly.
        Ok(limbs.iter().flat_map(|l| [(*l / 65536.0).floor() as f32, (*l % 65536.0) as f32]).collect())
    });
    put("swiglu bf16", BF16, |dev| {
        let (g, u, mut y) =
            (filled(dev, DType::Bf16, N, 1)?, filled(dev, DType::Bf16, N, 2)?, filled(dev, DType::F32, N, 3)?);
        let mut out = dev.alloc(DType::Bf16, N, Category::Other)?;
        dev.swiglu(Glu { gate: g.view(), up: u.view(), y: out.view_mut() })?;
        dev.copy(out.view(), y.view_mut())?;
        floats(dev, &y)
    });
    put("adamw", F32, |dev| {
        let (g, scale) = (filled(dev, DType::F32, N, 1)?, filled(dev, DType::F32, 1, 9)?);
        let (mut m, mut p) = (filled(dev, DType::F32, N, 2)?, filled(dev, DType::F32, N, 3)?);
        let mut v = dev.alloc(DType::F32, N, Category::Other)?;
        let constants =
            AdamWStep { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 }.scalars();
        let mut h = dev.alloc(DType::F32, AdamWScalars::LEN, Category::Other)?;
        dev.upload(bytemuck::bytes_of(&constants), h.view_mut())?;
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
        })?;
        floats(dev, &p)
    });
    put("fp8 products", Closeness::Bits, fp8_products);
    list
}

/// A forward product and an input gradient in FP8, of small integers in blocks of different scales: every sum is exact,
/// in whatever order, so that a scale or a byte in the wrong place shows. On GPUs that have no such products, those of
/// the rounded values in bf16.
fn fp8_products(dev: &dyn Device) -> Result<Vec<f32>> {
    let (m, n, k) = (64, 272, 336);
    let integers = |rows: usize, columns: usize, tall: usize, seed: u64| -> Result<Buf> {
        let rng = Rng::new(seed, 5);
        let value = |i: usize| {
            let scale = (i / columns / tall + i % columns / BLOCK * 3) % 4;
            half::bf16::from_f32((rng.u64(i as u64) % 5) as f32 - 2.0) * half::bf16::from_f32((1 << scale) as f32)
        };
        let values: Vec<half::bf16> = (0..rows * columns).map(value).collect();
        let mut buf = dev.alloc(DType::Bf16, values.len(), Category::Other)?;
        dev.upload(bytemuck::cast_slice(&values), buf.view_mut())?;
        Ok(buf)
    };
    let shape = Fp8Shape::weight(n, k);
    let (x, dy, w) = (integers(m, k, 1, 1)?, integers(m, n, 1, 2)?, integers(n, k, BLOCK, 3)?);
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
    let (mut bytes, mut scales) = (alloc(DType::U8, n * k)?, alloc(DType::F32, 8 * m + Fp8Work::scales(&shape))?);
    let (mut rows, mut weight) = (alloc(DType::Bf16, m * k)?, alloc(DType::Bf16, n * k)?);
    let mut all = Vec::new();
    for (format, a, shape_of, wide) in
        [(Fp8::E4m3, &x, GemmShape::nt(m, n, k), n), (Fp8::E5m2, &dy, GemmShape::nn(m, k, n), k)]
    {
        let mut c = alloc(DType::F32, m * wide)?;
        dev.fp8_gemm(Fp8Gemm {
            shape: shape_of,
            format,
            a: a.view(),
            b: Fp8Weight { shape, values: Fp8Values::Whole(w.view()), rows: 0..n },
            c: c.view_mut(),
            then: None,
            work: Fp8Work {
                bytes: bytes.view_mut(),
                scales: scales.view_mut(),
                rows: rows.view_mut(),
                weight: weight.view_mut(),
            },
        })?;
        all.extend(floats(dev, &c)?);
    }
    Ok(all)
}

/// Largest error relative to the largest value, against the CPU's f32 attention on the same bf16 inputs, of packed
/// documents (grouped heads of 128 by the kernel for pairs on sm_90a); and whether a second run gives the same bits,
/// which the fixed order of every sum guarantees.
pub fn attention() -> Result<Value> {
    let gpu = OpenGpu::open(0, 1)?;
    let cpu = CpuDevice::new(Meter::default());
    let mut report = serde_json::Map::new();
    let mut wrong = Vec::new();
    // Fewer on the simulated GPU, which is slow.
    let tiny = gpu.cuda.model()?.starts_with("Simulated");
    let documents: [u32; 4] = if tiny { [0, 40, 41, 97] } else { [0, 300, 301, 777] };
    for head_dim in [64, 96, 128, 256] {
        for (kind, kv_heads, window, softcap) in
            [("causal", 4, 0, 0.0), ("grouped, window", 2, 100, 0.0), ("softcap", 4, 0, 30.0)]
        {
            let scale = 1.0 / (head_dim as f32).sqrt();
            let shape = AttentionShape { heads: 4, kv_heads, head_dim, scale, window, softcap };
            let label = format!("{head_dim} {kind}");
            let (there, here) =
                (both(&*gpu.device, &shape, &documents, DType::Bf16)?, both(&cpu, &shape, &documents, DType::F32)?);
            let again = both(&*gpu.device, &shape, &documents, DType::Bf16)?;
            let bits = |[o, d]: &[Vec<f32>; 2]| o.iter().chain(d).map(|x| x.to_bits()).collect::<Vec<u32>>();
            let repeats = bits(&there) == bits(&again);
            let error = |a: &[f32], b: &[f32]| {
                let most = largest(b.iter().map(|x| f64::from(x.abs())));
                largest(a.iter().zip(b).map(|(x, y)| f64::from((x - y).abs()))) / most
            };
            let (output, gradient) = (error(&there[0], &here[0]), error(&there[1], &here[1]));
            // bf16 rounds to 2^-9 relative; scores, probabilities and sums are f32.
            let passed = output < 0.01 && gradient < 0.03;
            if !passed {
                wrong.push(format!("head dim {label}: output {output:e}, gradient {gradient:e}"));
            }
            if !repeats {
                wrong.push(format!("head dim {label}: a second run gives other bits"));
            }
            report.insert(label, json!({"output": output, "gradient": gradient, "repeats": repeats}));
        }
    }
    match wrong.is_empty() {
        true => Ok(Value::Object(report)),
        false => Err(Error::Run(wrong.join("; "))),
    }
}

/// The output, and the gradient of qkv for a fixed output gradient.
fn both(dev: &dyn Device, shape: &AttentionShape, documents: &[u32], dtype: DType) -> Result<[Vec<f32>; 2]> {
    let tokens = documents.last().copied().unwrap_or(0) as usize;
    let (row, out) = (shape.row(), shape.heads * shape.head_dim);
    let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
    // The same inputs for both: rounded to bf16 first.
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
    let of_rows: Vec<u32> = documents_of_rows(documents).collect();
    let mut documents = alloc(DType::U32, of_rows.len())?;
    dev.upload(bytemuck::cast_slice(&of_rows), documents.view_mut())?;
    let (mut o, mut dqkv) = (alloc(dtype, tokens * out)?, alloc(dtype, tokens * row)?);
    let (mut lse, mut delta) = (alloc(DType::F32, shape.heads * tokens)?, alloc(DType::F32, shape.heads * tokens)?);
    let mut sums = alloc(DType::F32, dev.attention_sums(shape, dtype, tokens))?;
    dev.attention(Attention {
        shape: *shape,
        documents: documents.view(),
        qkv: qkv.view(),
        o: o.view_mut(),
        lse: lse.view_mut(),
    })?;
    dev.attention_backward(AttentionBackward {
        shape: *shape,
        documents: documents.view(),
        qkv: qkv.view(),
        o: o.view(),
        lse: lse.view(),
        d_o: d_o.view(),
        delta: delta.view_mut(),
        sums: sums.view_mut(),
        dqkv: dqkv.view_mut(),
    })?;
    Ok([floats(dev, &o)?, floats(dev, &dqkv)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every question is answered by the simulated GPU, with the same launches as on a real one.
    #[test]
    fn questions_are_answered_by_the_emulator() {
        let answers: Vec<Vec<u32>> = questions(true).iter().map(|(_, ask)| ask(&Sim::new()).unwrap()).collect();
        assert_eq!(answers.len(), PROBES.len() + 20);
        assert!(answers.iter().all(|words| words.iter().any(|&w| w != 0)));
        // The first box is not swizzled: each element is its own index.
        let first = &answers[PROBES.len()];
        assert_eq!([first[0], first[1], first[12]], [1 << 16, 3 << 16 | 2, 49 << 16 | 48]);
    }

    #[test]
    fn operations_run_on_the_simulated_gpu() {
        let sim = GpuDevice::new(Arc::new(Sim::new()), Meter::default()).unwrap();
        for (name, _, operation) in operations() {
            assert!(operation(&sim).unwrap().iter().all(|x| x.is_finite()), "{name}");
        }
    }
}
