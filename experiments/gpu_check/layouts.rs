//! The emulator compared with the GPU: fragments of matrix instructions and whole operations run on both, and must be
//! bitwise equal where the arithmetic is exact. Never measures speed.
use crate::gpu::OpenGpu;
use crate::report::PartReport;
use flatshard::base::fp8::{BLOCK, Fp8, Fp8Shape};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::driver::{Arg, Driver, Kernel, LaunchShape, Map, Swizzle};
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::{
    AdamW, AdamWScalars, AdamWStep, Fp8Gemm, Fp8Values, Fp8Weight, Fp8Work, GemmShape, Glu, SumSquares, TensorPart,
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
        for corner in [[0, 0, 0], [8, 2, 1], [-8, -3, 0], [32, 5, 4], [16, -1, -2]] {
            let answer = Box::new(move |d: &dyn Driver| run_box(d, swizzle, wide, corner)) as Answer;
            all.push((format!("box of {wide}, {swizzle:?}, at {corner:?}"), answer));
        }
    }
    all
}

/// Raw words that a report keeps of a probe that differs.
const RAW: usize = 4096;

/// From question `from` on.
pub fn run(from: usize) -> Result<PartReport> {
    let gpu = OpenGpu::open(0, 1)?;
    let sim = GpuDevice::new(Arc::new(Sim::new()), Meter::default())?;
    let mut report = PartReport::from(json!({}));
    let layouts = questions(gpu.cuda.arch() == 90).into_iter().map(|(name, ask)| (name, Question::Layout(ask)));
    let operations =
        operations().into_iter().map(|(name, closeness, run)| (name.into(), Question::Operation(closeness, run)));
    for (i, (name, question)) in layouts.chain(operations).enumerate().skip(from) {
        let answer = match &question {
            Question::Layout(ask) => ask(&*gpu.cuda).and_then(|there| Ok(compared(&there, &ask(&Sim::new())?))),
            Question::Operation(closeness, run) => {
                run(&*gpu.device).and_then(|there| Ok(agreement(&there, &run(&sim)?, closeness)))
            }
        };
        match answer {
            Ok((row, wrong)) => {
                report.measured[&name] = row;
                report.wrong.extend(wrong.map(|what| format!("{name}: {what}")));
            }
            Err(e) => {
                report.go_on_after("layouts", i, &name, &e)?;
                break;
            }
        }
    }
    Ok(report)
}

enum Question {
    Layout(Answer),
    Operation(Closeness, Operation),
}

/// A row of the report, and what is wrong: the words of a GPU and of the emulator.
fn compared(there: &[u32], here: &[u32]) -> (Value, Option<String>) {
    let differing: Vec<usize> = (0..here.len()).filter(|&i| there[i] != here[i]).collect();
    let mut row = json!({"words": there.len(), "equal": differing.is_empty()});
    let (Some(&at), Some(&last)) = (differing.first(), differing.last()) else {
        return (row, None);
    };
    let (gpu, emulator, count) = (there[at], here[at], differing.len());
    // From the first one on, so that one run tells what is wrong.
    let part = at..here.len().min(at + RAW);
    row["from"] = json!(at);
    row["gpu"] = json!(there[part.clone()]);
    row["emulator"] = json!(here[part]);
    let what = format!("{count} words differ, from {at} to {last}; the first: GPU {gpu:#x}, emulator {emulator:#x}");
    (row, Some(what))
}
/// The same of an operation's values.
fn agreement(there: &[f32], here: &[f32], closeness: &Closeness) -> (Value, Option<String>) {
    let difference = there.iter().zip(here).map(|(a, b)| f64::from((a - b).abs() / b.abs().max(1e-3)));
    let largest = largest(difference);
    let equal = there.iter().zip(here).all(|(a, b)| a.to_bits() == b.to_bits());
    let passed = match closeness {
        Closeness::Bits => equal,
        Closeness::Within(most) => largest < *most,
    };
    let wrong = (!passed).then(|| format!("GPU and emulator differ by {largest:e}"));
    (json!({"equal": equal, "largest_difference": largest}), wrong)
}

/// The largest value; NaN counts as the largest.
pub fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
}

const N: usize = 5000;

pub fn filled(dev: &dyn Device, dtype: DType, n: usize, seed: u64) -> Result<Buf> {
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
pub fn floats(dev: &dyn Device, buf: &Buf) -> Result<Vec<f32>> {
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
    fn words_that_differ_are_reported_with_their_place() {
        let (row, wrong) = compared(&[1, 2, 3, 4], &[1, 9, 3, 5]);
        assert_eq!((&row["from"], &row["gpu"], &row["equal"]), (&json!(1), &json!([2, 3, 4]), &json!(false)));
        assert!(wrong.unwrap().starts_with("2 words differ, from 1 to 3; the first: GPU 0x2, emulator 0x9"));
        assert_eq!(compared(&[1], &[1]).1, None);
        assert!(agreement(&[1.0, 2.0], &[1.0, 2.1], &F32).1.unwrap().contains("differ by 4.7"));
    }

    #[test]
    fn operations_run_on_the_simulated_gpu() {
        let sim = GpuDevice::new(Arc::new(Sim::new()), Meter::default()).unwrap();
        for (name, _, operation) in operations() {
            assert!(operation(&sim).unwrap().iter().all(|x| x.is_finite()), "{name}");
        }
    }
}
