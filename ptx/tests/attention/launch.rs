//! Launches the kernels of a family as the device does: buffers, arguments, grids. Never checks results.
use super::reference::{Inputs, Outputs, Shape, Sight};
use flatshard_ptx::emulate::{self, Argument, GlobalMemory, KernelLaunch, LaunchCounts, LaunchReport, parse};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention::{AttentionFamily, AttentionKernel};
use half::{bf16, f16};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DType {
    F32,
    Bf16,
    F16,
}
impl DType {
    pub fn name(self) -> &'static str {
        ["f32", "bf16", "f16"][self as usize]
    }
    pub fn size(self) -> u64 {
        if self == DType::F32 { 4 } else { 2 }
    }
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F32 => x as f32 as f64,
            DType::Bf16 => bf16::from_f64(x).to_f64(),
            DType::F16 => f16::from_f64(x).to_f64(),
        }
    }
    pub fn encode(self, values: &[f64]) -> Vec<u8> {
        let each = |x: &f64| match self {
            DType::F32 => (*x as f32).to_le_bytes().to_vec(),
            DType::Bf16 => bf16::from_f64(*x).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f64(*x).to_le_bytes().to_vec(),
        };
        values.iter().flat_map(each).collect()
    }
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        match self {
            DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) as f64).collect(),
            DType::Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
            DType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
        }
    }
}

/// Changes the expanded text of an entry point, to plant a fault.
pub type Plant<'a> = &'a dyn Fn(&str, String) -> String;

/// The entry points of a variant's text, parsed once if nothing is planted.
fn entries(variant: &'static str, entry: &str, plant: Option<Plant>) -> Arc<Vec<emulate::PtxKernel>> {
    type Parsed = HashMap<&'static str, Arc<Vec<emulate::PtxKernel>>>;
    static PARSED: Mutex<Option<Parsed>> = Mutex::new(None);
    let found = Variant::by_name(variant).unwrap_or_else(|| panic!("no variant {variant}"));
    let parsed = |text: &str| Arc::new(parse(found.file, text).unwrap_or_else(|e| panic!("{variant}: {e}")));
    let text = || found.expand().unwrap_or_else(|e| panic!("{e}"));
    if let Some(plant) = plant {
        let (right, planted) = (text(), plant(entry, text()));
        if planted != right {
            return parsed(&planted);
        }
    }
    let mut known = PARSED.lock().unwrap_or_else(|e| e.into_inner());
    known.get_or_insert_default().entry(variant).or_insert_with(|| parsed(&text())).clone()
}

/// `width` columns of rows of `row` elements.
fn columns(x: &[f64], row: usize, at: usize, width: usize) -> Vec<f64> {
    x.chunks(row).flat_map(|r| r[at..at + width].to_vec()).collect()
}
fn beside(parts: [(&[f64], usize); 3]) -> Vec<f64> {
    let n = parts[0].0.len() / parts[0].1.max(1);
    (0..n).flat_map(|i| parts.iter().flat_map(move |(x, w)| x[i * w..(i + 1) * w].to_vec())).collect()
}

pub struct Run<'a> {
    pub family: &'a AttentionFamily,
    pub dtype: DType,
    pub shape: &'a Shape,
    pub schedule: u64,
    pub plant: Option<Plant<'a>>,
    /// Launches only the kernel with this entry point and those that compute its inputs; the gradients of others are
    /// zeros.
    pub alone: Option<&'a str>,
}

/// The kernels' costs, in launch order.
pub type Costs = Vec<(AttentionKernel, LaunchCounts)>;

impl Run<'_> {
    fn launch(
        &self,
        kernel: &AttentionKernel,
        (rows, heads): (usize, usize),
        arguments: &[Argument],
        memory: &mut GlobalMemory,
        costs: &mut Costs,
    ) -> Result<(), LaunchReport> {
        let inputs = [self.family.forward.entry, self.family.delta.entry];
        if self.alone.is_some_and(|alone| alone != kernel.entry && !inputs.contains(&kernel.entry)) {
            return Ok(());
        }
        let parsed = entries(kernel.variant, kernel.entry, self.plant);
        let entry = parsed.iter().find(|k| k.name == kernel.entry).unwrap();
        let grid = [(rows as u32).div_ceil(kernel.rows), heads as u32, 1];
        let (block, dynamic_shared) = ([kernel.threads, 1, 1], kernel.shared as usize);
        let launch = KernelLaunch { kernel: entry, grid, block, dynamic_shared, arguments, schedule: self.schedule };
        costs.push((*kernel, launch.run(memory)?));
        Ok(())
    }
    /// A pass adds its gradients to `before`.
    pub fn run(&self, x: &Inputs, before: f64) -> Result<(Outputs, Costs), LaunchReport> {
        let Shape { heads, kv_heads, head_dim, .. } = *self.shape;
        let (queries, keys) = self.shape.rows();
        let (nq, nk) = (queries.len(), keys.len());
        let (wq, wk) = (heads * head_dim, kv_heads * head_dim);
        let packed = matches!(self.shape.sight, Sight::Packed(_));
        let size = self.dtype.size();
        let (mut memory, mut costs) = (GlobalMemory::new(), vec![]);

        // Fused rows; in a pass, keys and values have a buffer of their own.
        let unused = vec![f64::NAN; nq * wk];
        let (k_part, v_part) = if packed { (&x.k, &x.v) } else { (&unused, &unused) };
        let qkv = self.dtype.encode(&beside([(&x.q, wq), (k_part, wk), (v_part, wk)]));
        let row = wq + 2 * wk;
        let q = memory.upload("qkv", &qkv);
        let (k, kv_row) = if packed {
            (q + wq as u64 * size, row)
        } else {
            let kv = self.dtype.encode(&beside([(&x.k, wk), (&x.v, wk), (&[], 0)]));
            (memory.upload("kv", &kv), 2 * wk)
        };
        let table = |of: usize| {
            let ranges = &self.shape.tables()[of];
            ranges.iter().flat_map(|r| [r.start, r.end]).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        };
        let bounds = match packed {
            true => {
                let documents = self.shape.documents();
                [memory.upload("documents", &documents.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>()); 2]
            }
            false => [0, 1].map(|of| memory.upload("ranges", &table(of))),
        };
        let tail = |turned: usize, out_row: usize| {
            let n = [packed as usize, self.shape.window, nq, nk, row, kv_row, out_row, heads, kv_heads, head_dim];
            let mut arguments = vec![Argument::Pointer(bounds[turned])];
            arguments.extend(n.map(|n| Argument::U32(n as u32)));
            arguments.extend([self.shape.scale(), self.shape.softcap].map(|x| Argument::F32(x as f32)));
            arguments
        };
        let all = |head: &[u64], tail: Vec<Argument>| -> Vec<Argument> {
            head.iter().map(|&p| Argument::Pointer(p)).chain(tail).collect()
        };

        let out = if packed { self.dtype } else { DType::F32 };
        let o = memory.alloc("o", nq * wq * out.size() as usize);
        let lse = memory.alloc("lse", 4 * heads * nq);
        self.launch(&self.family.forward, (nq, heads), &all(&[q, k, o, lse], tail(0, 0)), &mut memory, &mut costs)?;
        let forward = memory.download(o).unwrap().to_vec();
        let lses = memory.download(lse).unwrap().to_vec();
        if self.alone == Some(self.family.forward.entry) {
            let (o, lse) = (out.decode(&forward), DType::F32.decode(&lses));
            return Ok((Outputs { o, lse, ..Outputs::default() }, costs));
        }

        let o = if packed { o } else { memory.upload("o", &self.dtype.encode(&out.decode(&forward))) };
        let d_o = memory.upload("d_o", &self.dtype.encode(&x.d_o));
        let delta = memory.alloc("delta", 4 * heads * nq);
        // Without exponents, which only the kernels of sm_90a need.
        let mut arguments = all(&[o, d_o, 0, delta, 0], vec![]);
        arguments.extend([nq, heads, head_dim].map(|n| Argument::U32(n as u32)));
        self.launch(&self.family.delta, (nq, heads), &arguments, &mut memory, &mut costs)?;

        let mut gradient = |name: &str, n: usize| match packed {
            true if self.alone.is_some() => memory.upload(name, &vec![0; n * size as usize]),
            true => memory.alloc(name, n * size as usize),
            false => memory.upload(name, &DType::F32.encode(&vec![before; n])),
        };
        let (dq, dk) = if packed {
            let dqkv = gradient("dqkv", nq * row);
            (dqkv, dqkv + wq as u64 * size)
        } else {
            (gradient("dq", nq * wq), gradient("dkv", nk * 2 * wk))
        };
        let (q_out, kv_out) = if packed { (row, row) } else { (wq, 2 * wk) };
        let dq_arguments = all(&[q, k, d_o, lse, delta, dq], tail(0, q_out));
        self.launch(&self.family.dq, (nq, heads), &dq_arguments, &mut memory, &mut costs)?;
        let dkv_arguments = all(&[q, k, d_o, lse, delta, dk], tail(1, kv_out));
        for kernel in self.family.dkv {
            self.launch(kernel, (nk, kv_heads), &dkv_arguments, &mut memory, &mut costs)?;
        }
        let (dq, dkv) = if packed {
            let rows = out.decode(memory.download(dq).unwrap());
            (columns(&rows, row, 0, wq), columns(&rows, row, wq, 2 * wk))
        } else {
            (out.decode(memory.download(dq).unwrap()), out.decode(memory.download(dk).unwrap()))
        };
        let (dk, dv) = (columns(&dkv, 2 * wk, 0, wk), columns(&dkv, 2 * wk, wk, wk));
        let (o, lse) = (out.decode(&forward), DType::F32.decode(&lses));
        Ok((Outputs { o, lse, dq, dk, dv }, costs))
    }
}
