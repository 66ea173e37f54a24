//! Attention on the GPU compared with the CPU's in f32 on the same inputs. Where it is wrong, the report says in which
//! row, head and column most, and the error by head and by 32 columns. Never measures speed.
use crate::gpu::OpenGpu;
use crate::layouts::{filled, floats, largest};
use crate::report::PartReport;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::device::cpu::CpuDevice;
use flatshard::device::gpu::Driver;
use flatshard::device::ops::{Attention, AttentionBackward, AttentionShape, BackwardOf, documents_of_rows};
use flatshard::device::{Buf, Device};
use serde_json::{Value, json};

/// bf16 rounds to 2^-9 relative; scores, probabilities and sums are f32.
const OUTPUT: f64 = 0.01;
const GRADIENT: f64 = 0.03;

/// AttentionCase of attention, with its key/value heads, window and softcap.
type AttentionCase = (&'static str, usize, usize, f32);
const KINDS: [AttentionCase; 3] = [("causal", 4, 0, 0.0), ("grouped, window", 2, 100, 0.0), ("softcap", 4, 0, 30.0)];

/// Cases of packed documents, from question `from` on: grouped heads of 128 are by the kernel for pairs on sm_90a. The
/// kernels for sm_80 come last where they are not the GPU's own.
pub fn run(from: usize) -> Result<PartReport> {
    let mut gpu = OpenGpu::open(0, 1)?;
    let (cpu, mut report) = (CpuDevice::new(Meter::default()), PartReport::from(json!({})));
    // Fewer on the simulated GPU, which is slow.
    let tiny = gpu.cuda.model()?.starts_with("Simulated");
    let documents: &[u32] = if tiny { &[0, 40, 41, 97] } else { &[0, 300, 301, 777] };
    let dims: &[usize] = if tiny { &[128, 256] } else { &[64, 80, 96, 128, 256] };
    let older: &[usize] = if tiny || gpu.cuda.arch() == 80 { &[] } else { &[64, 128] };
    let dims = dims.iter().map(|dim| (dim, "")).chain(older.iter().map(|dim| (dim, ", sm_80 kernels")));
    let questions = dims.flat_map(|(dim, whose)| KINDS.map(|kind| (*dim, kind, whose)));
    for (i, (head_dim, (kind, kv_heads, window, softcap), whose)) in questions.enumerate().skip(from) {
        if !whose.is_empty() && gpu.cuda.arch() > 80 {
            gpu = OpenGpu::as_old_as(80)?;
        }
        let scale = 1.0 / (head_dim as f32).sqrt();
        let shape = AttentionShape { heads: 4, kv_heads, head_dim, scale, window, softcap };
        let label = format!("{head_dim} {kind}{whose}");
        let here = both(&cpu, &shape, documents, DType::F32)?;
        let run = || both(&*gpu.device, &shape, documents, DType::Bf16);
        match run().and_then(|there| Ok([there, run()?])) {
            Ok([there, again]) => judge(&mut report, label, &shape, [&there, &again, &here]),
            Err(e) => {
                report.go_on_after("attention", i, &label, &e)?;
                break;
            }
        }
    }
    Ok(report)
}

/// Compares two runs, and both with the right values.
fn judge(report: &mut PartReport, label: String, shape: &AttentionShape, [there, again, here]: [&[Vec<f32>; 2]; 3]) {
    let bits = |[o, d]: &[Vec<f32>; 2]| o.iter().chain(d).map(|x| x.to_bits()).collect::<Vec<u32>>();
    let repeats = bits(there) == bits(again);
    if !repeats {
        report.wrong.push(format!("head dim {label}: a second run gives other bits"));
    }
    let mut row = json!({"repeats": repeats});
    for (part, values) in parts(shape, there, here) {
        let most = if part == "output" { OUTPUT } else { GRADIENT };
        let error = values.error();
        row[part] = json!(error);
        if error.is_nan() || error >= most {
            report.wrong.push(format!("head dim {label}: {part} {error:e}"));
            row[format!("{part} is wrong")] = values.details();
        }
    }
    report.measured[&label] = row;
}

/// Values of `heads` heads of `dim` columns per row, on the GPU and right.
struct HeadValues {
    there: Vec<f32>,
    here: Vec<f32>,
    heads: usize,
    dim: usize,
}

/// The output, and the gradients of queries, keys and values, which one row has next to each other.
fn parts(shape: &AttentionShape, there: &[Vec<f32>; 2], here: &[Vec<f32>; 2]) -> [(&'static str, HeadValues); 4] {
    let (heads, kv_heads, dim) = (shape.heads, shape.kv_heads, shape.head_dim);
    let columns = |rows: &[f32], from: usize, heads: usize| {
        let of_row = |row: &[f32]| row[from * dim..(from + heads) * dim].to_vec();
        rows.chunks_exact(shape.row()).flat_map(of_row).collect::<Vec<f32>>()
    };
    let gradient = |from, heads| HeadValues {
        there: columns(&there[1], from, heads),
        here: columns(&here[1], from, heads),
        heads,
        dim,
    };
    let output = HeadValues { there: there[0].clone(), here: here[0].clone(), heads, dim };
    [
        ("output", output),
        ("dq", gradient(0, heads)),
        ("dk", gradient(heads, kv_heads)),
        ("dv", gradient(heads + kv_heads, kv_heads)),
    ]
}

impl HeadValues {
    /// The largest difference, relative to the largest right value.
    fn error(&self) -> f64 {
        self.error_where(|_| true)
    }
    fn error_where(&self, which: impl Fn(usize) -> bool) -> f64 {
        let most = largest(self.here.iter().map(|x| f64::from(x.abs())));
        let all = self.there.iter().zip(&self.here).enumerate();
        largest(all.filter(|(i, _)| which(*i)).map(|(_, (x, y))| f64::from((x - y).abs()))) / most
    }
    fn details(&self) -> Value {
        let (heads, dim) = (self.heads, self.dim);
        let difference = |i: usize| (self.there[i] - self.here[i]).abs();
        let off = |i: &usize| if difference(*i).is_nan() { f32::INFINITY } else { difference(*i) };
        let at = (0..self.here.len()).max_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or_default();
        let by_head: Vec<f64> = (0..heads).map(|h| self.error_where(|i| i / dim % heads == h)).collect();
        let by_block: Vec<f64> = (0..dim.div_ceil(32)).map(|b| self.error_where(|i| i % dim / 32 == b)).collect();
        let rows = self.here.len() / (heads * dim);
        let by_row: Vec<f64> =
            (0..rows.div_ceil(64)).map(|b| self.error_where(|i| i / (heads * dim) / 64 == b)).collect();
        json!({"row": at / (heads * dim), "head": at / dim % heads, "column": at % dim,
               "gpu": format!("{:e}", self.there[at]), "right": format!("{:e}", self.here[at]),
               "by_head": by_head, "by_32_columns": by_block, "by_64_rows": by_row})
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
    let mut sums = alloc(DType::F32, dev.backward_scratch(&BackwardOf::Attention(*shape), dtype, tokens))?;
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

    /// A value that is wrong is found, with its place; one that is not a number counts as the worst.
    #[test]
    fn details_say_where_attention_is_wrong() {
        let (heads, dim) = (2, 64);
        let here: Vec<f32> = (0..70 * heads * dim).map(|i| (i % 7) as f32).collect();
        let at = (65 * heads + 1) * dim + 40;
        for wrong in [9.0, f32::NAN] {
            let mut there = here.clone();
            there[at] = wrong;
            let values = HeadValues { there, here: here.clone(), heads, dim };
            assert!(values.error() > 0.5, "{}", values.error());
            let said = values.details();
            assert_eq!([&said["row"], &said["head"], &said["column"]], [65, 1, 40]);
            let place = |by: &str| said[by].as_array().unwrap().iter().position(|x| x.as_f64() != Some(0.0)).unwrap();
            assert_eq!(["by_head", "by_32_columns", "by_64_rows"].map(place), [1, 1, 1]);
        }
    }
}
