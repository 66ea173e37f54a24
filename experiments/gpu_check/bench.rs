//! Rates of single operations on the GPU, by its own clock: products, attention, and memory-bound kernels compared with
//! a copy. Reports medians, and each rate on standard error as soon as it is measured; operands exceed the L2 cache or
//! alternate. On the simulated GPU shapes are tiny: the calls are exercised, and the rates mean nothing. Never judges.
use crate::gpu::OpenGpu;
use flatshard::base::fp8::{Fp8, Fp8Shape};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Result};
use flatshard::device::gpu::Driver;
use flatshard::device::ops::{
    AdamW, AdamWScalars, AdamWStep, Attention, AttentionBackward, AttentionShape, BackwardOf, Fp8Gemm, Fp8Values,
    Fp8Weight, Fp8Work, Gemm, GemmShape, Glu, RmsNorm, RmsNormShape, SumSquares, TensorPart, documents_of_rows,
};
use flatshard::device::{Buf, Device, LIMBS};
use serde_json::{Map, Value, json};

const ROUNDS: usize = 15;
/// Suffix of rows that measure the kernels for older GPUs on this one.
const OLDER: &str = ", sm_80 kernels";

struct Bench {
    gpu: OpenGpu,
    rows: Map<String, Value>,
    /// The GPU is simulated.
    tiny: bool,
}

impl Bench {
    fn open() -> Result<Bench> {
        let gpu = OpenGpu::open(0, 1)?;
        let tiny = gpu.cuda.model()?.starts_with("Simulated");
        Ok(Bench { gpu, rows: Map::new(), tiny })
    }
    /// A size, or a simulated GPU's.
    fn size(&self, real: usize) -> usize {
        if self.tiny { (real / 256).max(16) } else { real }
    }
    fn rounds(&self) -> usize {
        if self.tiny { 1 } else { ROUNDS }
    }
    fn row(&mut self, name: &str, row: Value) {
        eprintln!("{name}: {row}");
        self.rows.insert(name.into(), row);
    }
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buf> {
        self.gpu.device.alloc(dtype, len, Category::Other)
    }
    /// Random numbers, because zeros multiply faster: one block of them, repeated.
    fn random(&self, dtype: DType, len: usize) -> Result<Buf> {
        let rng = Rng::new(len as u64, 1);
        let block: Vec<u8> = (0..1 << 16)
            .flat_map(|i| {
                let x = rng.normal(i);
                if dtype == DType::F32 {
                    x.to_ne_bytes().to_vec()
                } else {
                    half::bf16::from_f32(x).to_ne_bytes().to_vec()
                }
            })
            .collect();
        let mut buf = self.alloc(dtype, len)?;
        let step = block.len() / dtype.size();
        for start in (0..len).step_by(step) {
            let n = step.min(len - start);
            self.gpu.device.upload(&block[..n * dtype.size()], buf.view_mut().slice(start..start + n))?;
        }
        Ok(buf)
    }
    /// Median seconds of one call.
    fn time(&self, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        let cuda = &self.gpu.cuda;
        let (from, to) = (cuda.event(true)?, cuda.event(true)?);
        let rounds = self.rounds();
        let mut times = Vec::with_capacity(rounds);
        for round in 0..rounds + 3 {
            let failed = |e| cuda.failed("bench", e);
            from.record(cuda.compute()).map_err(failed)?;
            call()?;
            to.record(cuda.compute()).map_err(failed)?;
            to.synchronize().map_err(failed)?;
            if round >= 3 {
                times.push(cuda.seconds(&from, &to)?);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[rounds / 2])
    }
    fn flops(&mut self, name: String, flops: f64, call: impl FnMut() -> Result<()>) -> Result<()> {
        let row = match self.time(call) {
            Ok(seconds) => json!({"tflops": flops / seconds / 1e12, "ms": seconds * 1e3}),
            Err(e) => json!({"error": e.to_string()}),
        };
        self.row(&name, row);
        Ok(())
    }
    fn bytes(&mut self, name: &str, bytes: usize, call: impl FnMut() -> Result<()>) -> Result<()> {
        let row = match self.time(call) {
            Ok(seconds) => json!({"gb_per_s": bytes as f64 / seconds / 1e9, "ms": seconds * 1e3}),
            Err(e) => json!({"error": e.to_string()}),
        };
        self.row(name, row);
        Ok(())
    }
}

/// Query heads of [`attention_rates`].
const HEADS: usize = 32;
/// Tokens of each row of attention.
const TOKENS: usize = 16_384;

/// Attention alone, heads of 128: backward at 8k with as many key/value heads as query heads and with a quarter of
/// them, where forward on sm_90a is by clusters for pairs of heads; forward for single heads at 2k, 4k and 8k. What a
/// build with other kernels is compared with.
pub fn attention_rates() -> Result<Value> {
    let mut bench = Bench::open()?;
    for kv_heads in [HEADS, HEADS / 4] {
        let shape = AttentionBench { head_dim: 128, heads: HEADS, kv_heads, len: 8192 };
        attention(&mut bench, shape, [kv_heads < HEADS, true], &format!(", {kv_heads} kv heads"))?;
    }
    for len in [2048, 4096, 8192] {
        let shape = AttentionBench { head_dim: 128, heads: HEADS, kv_heads: HEADS, len };
        attention(&mut bench, shape, [true, false], &format!(", {HEADS} kv heads"))?;
    }
    Ok(Value::Object(bench.rows))
}

pub fn run() -> Result<Value> {
    let mut bench = Bench::open()?;
    let shape = |head_dim, len| AttentionBench { head_dim, heads: 2048 / head_dim, kv_heads: 2048 / head_dim, len };
    for head_dim in [64, 128, 256] {
        for len in [2048, 8192] {
            attention(&mut bench, shape(head_dim, len), [true; 2], "")?;
        }
    }
    products(&mut bench)?;
    memory_bound(&mut bench)?;
    if bench.gpu.cuda.arch() > 80 {
        bench.gpu = OpenGpu::as_old_as(80)?;
        attention(&mut bench, shape(128, 8192), [true; 2], OLDER)?;
    }
    Ok(Value::Object(bench.rows))
}

/// Bytes read and written, at the minimum an operation needs.
fn memory_bound(b: &mut Bench) -> Result<()> {
    let n = if b.tiny { 1 << 14 } else { 1 << 27 }; // 256 MiB of bf16, several times the L2
    let (x, y, mut z) = (b.random(DType::Bf16, n)?, b.random(DType::Bf16, n)?, b.alloc(DType::Bf16, n)?);
    let device = b.gpu.device.clone();
    b.bytes("copy bf16", 4 * n, || device.copy(x.view(), z.view_mut()))?;
    b.bytes("add bf16", 6 * n, || device.add(x.view(), z.view_mut()))?;
    b.bytes("swiglu bf16", 6 * n, || device.swiglu(Glu { gate: x.view(), up: y.view(), y: z.view_mut() }))?;
    let width = 4096;
    let (w, mut rstd) = (b.random(DType::Bf16, width)?, b.alloc(DType::F32, n / width)?);
    let norm = RmsNormShape { eps: 1e-5, offset: 0.0 };
    b.bytes("rmsnorm bf16 4096", 4 * n, || {
        device.rmsnorm(RmsNorm { shape: norm, x: x.view(), w: w.view(), y: z.view_mut(), rstd: rstd.view_mut() })
    })?;
    drop((x, y));
    let p = n / 4;
    let (g, mut m, mut v, mut master) =
        (b.random(DType::F32, p)?, b.random(DType::F32, p)?, b.alloc(DType::F32, p)?, b.random(DType::F32, p)?);
    let mut out = b.alloc(DType::Bf16, p)?;
    let mut scale = b.alloc(DType::F32, 1)?;
    device.upload(&1f32.to_ne_bytes(), scale.view_mut())?;
    let constants = AdamWStep { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 10 }.scalars();
    let mut h = b.alloc(DType::F32, AdamWScalars::LEN)?;
    device.upload(bytemuck::bytes_of(&constants), h.view_mut())?;
    b.bytes("adamw f32 with a bf16 copy", 30 * p, || {
        let copy = Some(out.view_mut());
        device.adamw(AdamW {
            h: h.view(),
            scale: scale.view(),
            g: g.view(),
            m: m.view_mut(),
            v: v.view_mut(),
            p: master.view_mut(),
            out: copy,
            absmax: None,
            at: TensorPart::default(),
        })
    })?;
    let mut acc = b.alloc(DType::F64, LIMBS)?;
    b.bytes("sum of squares f32", 4 * p, || device.sum_squares(SumSquares { x: g.view(), acc: acc.view_mut() }))
}

fn products(b: &mut Bench) -> Result<()> {
    let device = b.gpu.device.clone();
    let rows = b.size(8192);
    let linear = |out, inn| {
        [
            ("nt", GemmShape::nt(rows, out, inn)),
            ("nn", GemmShape::nn(rows, inn, out)),
            ("tn", GemmShape::tn(out, inn, rows).accumulate()),
        ]
    };
    let (width, wide, words) = (b.size(2048), b.size(5632), b.size(32000));
    let square = [("nt", GemmShape::nt(rows, rows, rows))];
    for (form, shape) in square.into_iter().chain(linear(wide, width)).chain(linear(words, width)) {
        let [la, lb, lc] = shape.extents();
        let (x, y) = (b.random(DType::Bf16, la)?, b.random(DType::Bf16, lb)?);
        let mut c = b.alloc(if shape.accumulate { DType::F32 } else { DType::Bf16 }, lc)?;
        let name = format!("product bf16 {form} {}x{}x{}", shape.m, shape.n, shape.k);
        let in_fp8 = name.replace("bf16", "fp8");
        b.flops(name, shape.flops() as f64, || device.gemm(Gemm { shape, a: x.view(), b: y.view(), c: c.view_mut() }))?;
        if shape.ta {
            continue;
        }
        // With the casts of both operands, and the transpose of the weight for an input gradient.
        let tokens = Fp8Shape::tokens(if shape.tb { Fp8::E4m3 } else { Fp8::E5m2 }, shape.m, shape.k);
        let weight = if shape.tb { Fp8Shape::weight(shape.n, shape.k) } else { Fp8Shape::weight(shape.k, shape.n) };
        let mut bytes = b.alloc(DType::U8, tokens.len().max(lb))?;
        let mut scales = b.alloc(DType::F32, tokens.scales() + Fp8Work::scales(&weight))?;
        let (mut rows, mut whole) = (b.alloc(DType::Bf16, tokens.len())?, b.alloc(DType::Bf16, lb)?);
        b.flops(in_fp8, shape.flops() as f64, || {
            let (values, rows_of) = (Fp8Values::Whole(y.view()), 0..weight.rows);
            let work = Fp8Work {
                bytes: bytes.view_mut(),
                scales: scales.view_mut(),
                rows: rows.view_mut(),
                weight: whole.view_mut(),
            };
            let b = Fp8Weight { shape: weight, values, rows: rows_of };
            let (format, a, c) = (tokens.format, x.view(), c.view_mut());
            device.fp8_gemm(Fp8Gemm { shape, format, a, b, c, then: None, work })
        })?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct AttentionBench {
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    /// Tokens of each sequence.
    len: usize,
}

/// Causal, 16k tokens in sequences of `len`: 2 S² D H multiply-adds forward, 2.5 times that backward. `passes`: whether
/// forward and backward are measured.
fn attention(b: &mut Bench, bench: AttentionBench, passes: [bool; 2], whose: &str) -> Result<()> {
    let AttentionBench { head_dim, heads, kv_heads, len: named } = bench;
    let (tokens, len) = if b.tiny { (64, named / 256) } else { (TOKENS, named) };
    let device = b.gpu.device.clone();
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { heads, kv_heads, head_dim, scale, window: 0, softcap: 0.0 };
    let borders: Vec<u32> = (0..=tokens / len).map(|i| (i * len) as u32).collect();
    let of_rows: Vec<u32> = documents_of_rows(&borders).collect();
    let mut documents = b.alloc(DType::U32, of_rows.len())?;
    device.upload(bytemuck::cast_slice(&of_rows), documents.view_mut())?;
    let (qkv, d_o) = (b.random(DType::Bf16, tokens * shape.row())?, b.random(DType::Bf16, tokens * heads * head_dim)?);
    let (mut o, mut dqkv) = (b.alloc(DType::Bf16, d_o.len())?, b.alloc(DType::Bf16, qkv.len())?);
    let (mut lse, mut delta) = (b.alloc(DType::F32, heads * tokens)?, b.alloc(DType::F32, heads * tokens)?);
    let mut sums = b.alloc(DType::F32, device.backward_scratch(&BackwardOf::Attention(shape), DType::Bf16, tokens))?;
    let flops = 2.0 * (tokens * len * head_dim * heads) as f64;
    let mut forward = || {
        let (documents, qkv) = (documents.view(), qkv.view());
        device.attention(Attention { shape, documents, qkv, o: o.view_mut(), lse: lse.view_mut() })
    };
    match passes[0] {
        true => b.flops(format!("attention forward causal {head_dim} x {named}{whose}"), flops, forward)?,
        false => forward()?, // the backward pass reads its results
    }
    if !passes[1] {
        return Ok(());
    }
    b.flops(format!("attention backward causal {head_dim} x {named}{whose}"), 2.5 * flops, || {
        let (documents, qkv, o, lse, d_o) = (documents.view(), qkv.view(), o.view(), lse.view(), d_o.view());
        let (delta, sums, dqkv) = (delta.view_mut(), sums.view_mut(), dqkv.view_mut());
        device.attention_backward(AttentionBackward { shape, documents, qkv, o, lse, d_o, delta, sums, dqkv })
    })
}
