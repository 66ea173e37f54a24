//! Launches the attention kernels for sm_90a as the device does: forward, or the gradients. Never compares.
use super::reference::{Inputs, Outputs, Shape, Sight};
use flatshard_ptx::emulate::{
    Argument, GlobalMemory, KernelLaunch, LaunchCounts, LaunchReport, Swizzle, TensorMap, parse,
};
use flatshard_ptx::kernels::Variant;
use flatshard_ptx::kernels::attention::AttentionKernel;
use flatshard_ptx::kernels::attention_hopper::{BOX, Backward, Fused, HopperFamily, TiledKernel, sm_90a_family};
use half::{bf16, f16};
use std::cell::RefCell;

fn encode(dtype: &str, values: &[f64]) -> Vec<u8> {
    let each =
        |x: &f64| if dtype == "bf16" { bf16::from_f64(*x).to_le_bytes() } else { f16::from_f64(*x).to_le_bytes() };
    values.iter().flat_map(each).collect()
}
fn decode(dtype: &str, bytes: &[u8]) -> Vec<f64> {
    let wide = |b: &[u8; 4]| f32::from_le_bytes(*b) as f64;
    let half =
        |b: &[u8; 2]| if dtype == "bf16" { bf16::from_le_bytes(*b).to_f64() } else { f16::from_le_bytes(*b).to_f64() };
    if dtype == "f32" {
        bytes.as_chunks().0.iter().map(wide).collect()
    } else {
        bytes.as_chunks().0.iter().map(half).collect()
    }
}
/// Number of CTAs for that many rows.
fn blocks(rows: usize, kernel: &AttentionKernel) -> usize {
    rows.div_ceil(kernel.rows as usize)
}
/// A planted fault: the variant, and the change to its text.
pub type Plant<'a> = Option<(&'a str, &'a dyn Fn(String) -> String)>;

/// Costs of the variants' launches, in order.
pub type Costs = Vec<(&'static str, LaunchCounts)>;

pub struct Bench<'a> {
    pub dtype: &'a str,
    pub shape: &'a Shape,
    pub family: HopperFamily,
    pub schedule: u64,
    pub plant: Plant<'a>,
    /// At most this many CTAs share the tiles of a forward launch.
    pub ctas: usize,
    /// For launches that leave outputs partly unwritten, which then start as zeros: the tickets and turns before a
    /// backward launch, which start as zeros otherwise, and after it.
    pub turns: Option<&'a RefCell<Vec<u32>>>,
    /// Launches only this variant of a backward pass in several kernels; the gradients of others are zeros.
    pub alone: Option<&'a str>,
}
impl<'a> Bench<'a> {
    pub fn new(dtype: &'a str, shape: &'a Shape, schedule: u64) -> Bench<'a> {
        let family = *sm_90a_family(dtype, shape.head_dim, shape.softcap as f32).unwrap();
        Bench { dtype, shape, family, schedule, plant: None, ctas: 1, turns: None, alone: None }
    }
    /// A grid of `grid` CTAs per head.
    fn launch(
        &self,
        kernel: &AttentionKernel,
        (grid, heads): (usize, usize),
        arguments: &[Argument],
        memory: &mut GlobalMemory,
    ) -> Result<(&'static str, LaunchCounts), LaunchReport> {
        let AttentionKernel { variant, entry, threads, shared, .. } = *kernel;
        let variant = Variant::by_name(variant).unwrap();
        let mut text = variant.expand().unwrap_or_else(|e| panic!("{e}"));
        if let Some((_, change)) = self.plant.filter(|(name, _)| *name == variant.name) {
            text = change(text);
        }
        let kernels = parse(variant.file, &text).unwrap_or_else(|e| panic!("{e}"));
        let kernel = kernels.iter().find(|k| k.name == entry).unwrap();
        let grid = [grid as u32, heads as u32, 1];
        let (block, dynamic_shared) = ([threads, 1, 1], shared as usize);
        KernelLaunch { kernel, grid, block, dynamic_shared, arguments, schedule: self.schedule }
            .run(memory)
            .map(|counts| (variant.name, counts))
    }
    /// Forward, or backward with its inputs, and the cost of each launch. A ring pass adds its gradients to `before`.
    pub fn run(
        &self,
        x: &Inputs,
        lse_and_delta: Option<[&[f64]; 2]>,
        before: f64,
    ) -> Result<(Outputs, Costs), LaunchReport> {
        let Bench { dtype, shape, family, .. } = *self;
        let Shape { heads, kv_heads, head_dim, .. } = *shape;
        let (queries, keys) = shape.rows();
        let (nq, nk, wq, wk) = (queries.len(), keys.len(), heads * head_dim, kv_heads * head_dim);
        let packed = matches!(shape.sight, Sight::Packed(_));
        let mut memory = GlobalMemory::new();
        // Fused rows; in a pass, keys and values have a buffer of their own.
        let rows = |parts: &[(&[f64], usize)], n: usize| -> Vec<f64> {
            (0..n).flat_map(|i| parts.iter().flat_map(move |(x, w)| x[i * w..(i + 1) * w].to_vec())).collect()
        };
        let (q, k, q_row, kv_row);
        if packed {
            (q_row, kv_row) = (wq + 2 * wk, wq + 2 * wk);
            q = memory.upload("qkv", &encode(dtype, &rows(&[(&x.q, wq), (&x.k, wk), (&x.v, wk)], nq)));
            k = q + 2 * wq as u64;
        } else {
            (q_row, kv_row) = (wq, 2 * wk);
            q = memory.upload("q", &encode(dtype, &x.q));
            k = memory.upload("kv", &encode(dtype, &rows(&[(&x.k, wk), (&x.v, wk)], nk)));
        }
        let v = k + 2 * wk as u64;
        let d_o = memory.upload("d_o", &encode(dtype, &x.d_o));
        let map = |address: u64, heads: usize, rows: usize, row: usize, side: u32| {
            let sizes = [head_dim, heads, rows].map(|n| n as u64).to_vec();
            let strides = [head_dim, row].map(|n| 2 * n as u64).to_vec();
            let map =
                TensorMap { address, element: 2, sizes, strides, tile: vec![BOX, 1, side], swizzle: Swizzle::B128 };
            Argument::TensorMap(map.encode().unwrap())
        };
        let tables = shape.tables();
        let bounds = match packed {
            true => {
                let documents = shape.documents();
                [memory.upload("documents", &documents.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>()); 2]
            }
            false => [0, 1].map(|of: usize| {
                let ends = tables[of].iter().flat_map(|r| [r.start, r.end]).flat_map(u32::to_le_bytes);
                memory.upload("ranges", &ends.collect::<Vec<u8>>())
            }),
        };
        let tail = |of: usize, out_row: usize| {
            let n = [packed as usize, shape.window, nq, nk, q_row, kv_row, out_row, heads, kv_heads, head_dim];
            let mut tail = vec![Argument::Pointer(bounds[of])];
            tail.extend(n.map(|n| Argument::U32(n as u32)));
            tail.extend([shape.scale(), shape.softcap].map(|x| Argument::F32(x as f32)));
            tail
        };
        let room = |memory: &mut GlobalMemory, name: &str, bytes: usize| match (self.turns, self.alone) {
            (None, None) => memory.alloc(name, bytes),
            _ => memory.upload(name, &vec![0; bytes]),
        };
        let (out, size) = if packed { (dtype, 2) } else { ("f32", 4) };
        let mut costs = vec![];
        let Some([lse, delta]) = lse_and_delta else {
            let o = room(&mut memory, "o", nq * wq * size);
            let lse = room(&mut memory, "lse", 4 * heads * nq);
            let (&TiledKernel { kernel, columns }, cluster) = family.forward_of(heads, kv_heads);
            let mut arguments = vec![map(q, heads, nq, q_row, kernel.rows)];
            arguments.extend([k, v].map(|at| map(at, kv_heads, nk, kv_row, columns)));
            let drawn = memory.upload("drawn", &[0; 4]);
            arguments.extend([o, lse, drawn].map(Argument::Pointer));
            arguments.extend(tail(0, 0));
            let ctas = self.ctas.min(blocks(nq, &kernel) * heads).next_multiple_of(cluster as usize);
            costs.push(self.launch(&kernel, (ctas, 1), &arguments, &mut memory)?);
            let ready = memory.download(drawn).unwrap() == [0; 4];
            assert!(ready || self.plant.is_some(), "the next launch would skip tiles");
            let o = decode(out, memory.download(o).unwrap());
            let lse = decode("f32", memory.download(lse).unwrap());
            return Ok((Outputs { o, lse, ..Outputs::default() }, costs));
        };
        let single = |x: &[f64]| x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect::<Vec<u8>>();
        // As attention_delta.ptx computes them, each head at a multiple of four.
        let exponents: Vec<f64> =
            lse.iter().map(|x| (-std::f32::consts::LOG2_E * *x as f32).min(f32::MAX) as f64).collect();
        let pitch = nq.next_multiple_of(4);
        let padded = |of: &[f64]| {
            let head = |head: &[f64]| head.iter().copied().chain(vec![0.0; pitch - nq]).collect::<Vec<f64>>();
            of.chunks(nq).flat_map(head).collect::<Vec<f64>>()
        };
        let numbers = [("exponents", &exponents[..]), ("delta", delta)]
            .map(|(name, of)| memory.upload(name, &single(&padded(of))));
        let mut gradient = |name: &str, n: usize| match packed {
            true => room(&mut memory, name, 2 * n),
            false => memory.upload(name, &single(&vec![before; n])),
        };
        let (dq, dkv, dq_row, dkv_row);
        if packed {
            dq = gradient("dqkv", nq * q_row);
            (dkv, dq_row, dkv_row) = (dq + 2 * wq as u64, q_row, q_row);
        } else {
            (dq, dkv, dq_row, dkv_row) = (gradient("dq", nq * wq), gradient("dkv", nk * 2 * wk), wq, 2 * wk);
        }
        let of_keys = |TiledKernel { kernel, columns }: &TiledKernel| {
            let mut arguments: Vec<Argument> = [k, v].map(|at| map(at, kv_heads, nk, kv_row, kernel.rows)).to_vec();
            arguments.extend([map(q, heads, nq, q_row, *columns), map(d_o, heads, nq, wq, *columns)]);
            arguments.extend(numbers.map(|address| {
                let (sizes, strides) = (vec![(heads * pitch) as u64, 1, 1], vec![(4 * heads * pitch) as u64; 2]);
                let tile = vec![*columns, 1, 1];
                let map = TensorMap { address, element: 4, sizes, strides, tile, swizzle: Swizzle::None };
                Argument::TensorMap(map.encode().unwrap())
            }));
            arguments.push(Argument::Pointer(dkv));
            arguments
        };
        match family.backward {
            Backward::Fused(Fused { tiles, finish, sum }) => {
                let fused = Fused { tiles, finish, sum };
                let words = self.turns.map_or_else(|| vec![0; fused.turns(heads, nq)], |turns| turns.borrow().clone());
                let turns = memory.upload("turns", &words.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
                let sums = room(&mut memory, "sums", 4 * fused.sums(heads, nq));
                let mut arguments = of_keys(&tiles);
                arguments.extend([sums, turns].map(Argument::Pointer));
                arguments.extend(tail(1, dkv_row));
                let grid = (blocks(nk, &tiles.kernel) * kv_heads, 1);
                costs.push(self.launch(&tiles.kernel, grid, &arguments, &mut memory)?);
                if let Some(after) = self.turns {
                    let bytes = memory.download(turns).unwrap().as_chunks().0;
                    *after.borrow_mut() = bytes.iter().map(|b| u32::from_le_bytes(*b)).collect();
                }
                let mut arguments = [sums, turns, dq].map(Argument::Pointer).to_vec();
                arguments.extend(tail(0, dq_row));
                let grid = (2 * nq.div_ceil(tiles.columns as usize), heads);
                costs.push(self.launch(&finish, grid, &arguments, &mut memory)?);
            }
            Backward::Apart { dq: TiledKernel { kernel, columns }, dkv: parts } => {
                let mut arguments = vec![map(q, heads, nq, q_row, kernel.rows)];
                arguments.extend([k, v].map(|at| map(at, kv_heads, nk, kv_row, columns)));
                arguments.push(map(d_o, heads, nq, wq, kernel.rows));
                arguments.extend([numbers[0], numbers[1], dq].map(Argument::Pointer));
                arguments.extend(tail(0, dq_row));
                let is_wanted = |kernel: &AttentionKernel| self.alone.is_none_or(|name| name == kernel.variant);
                if is_wanted(&kernel) {
                    costs.push(self.launch(&kernel, (blocks(nq, &kernel), heads), &arguments, &mut memory)?);
                }
                for tiles in parts.iter().filter(|tiles| is_wanted(&tiles.kernel)) {
                    let mut arguments = of_keys(tiles);
                    arguments.extend(tail(1, dkv_row));
                    let grid = (blocks(nk, &tiles.kernel), kv_heads);
                    costs.push(self.launch(&tiles.kernel, grid, &arguments, &mut memory)?);
                }
            }
        }
        let bytes = |at: u64| memory.download(at).map(|bytes| decode(out, bytes));
        let part = |x: &[f64], row: usize, at: usize, w: usize| {
            x.chunks(row).flat_map(|r| r[at..at + w].to_vec()).collect::<Vec<f64>>()
        };
        let mut outputs = Outputs::default();
        let (dq, dkv) = if packed {
            let all = bytes(dq).unwrap();
            (part(&all, q_row, 0, wq), part(&all, q_row, wq, 2 * wk))
        } else {
            (bytes(dq).unwrap(), bytes(dkv).unwrap())
        };
        outputs.dq = dq;
        outputs.dk = part(&dkv, 2 * wk, 0, wk);
        outputs.dv = part(&dkv, 2 * wk, wk, wk);
        Ok((outputs, costs))
    }
}
