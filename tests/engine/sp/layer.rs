//! One layer's attention, forward and backward, with its rows distributed over 2 to 8 ranks.
use crate::common::ranks_on;
use crate::common::reference::{self, Heads};
use flatshard::base::rng::Rng;
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::comm::delayed::Delayed;
use flatshard::comm::seam::Seam;
use flatshard::comm::{Axis, Collective};
use flatshard::data::MicroBatch;
use flatshard::data::zigzag::ZigzagCut;
use flatshard::device::cpu::CpuDevice;
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::{Attention, AttentionBackward, AttentionShape, BackwardOf, documents_of_rows};
use flatshard::device::{Buf, Device};
use flatshard::nn::core::{CoreAttention, CorePlan};
use flatshard::nn::{Groups, Slice, SpImpl, Split};
use half::bf16;
use std::sync::Arc;
use std::time::Duration;

pub type Wrap<'a> = dyn Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync + 'a;
/// Data of one rank.
pub type MakeDevice<'a> = dyn Fn(usize, Meter) -> Result<Arc<dyn Device>> + Sync + 'a;

pub fn cpu(_: usize, meter: Meter) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(CpuDevice::new(meter)))
}
fn sim(_: usize, meter: Meter) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(GpuDevice::new(Arc::new(Sim::new()), meter)?))
}
pub fn bare(group: Arc<dyn Collective>) -> Arc<dyn Collective> {
    group
}

#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub heads: Heads,
    pub cu: &'a [u32],
    pub dtype: DType,
}

/// Data of the whole batch.
#[derive(PartialEq)]
pub struct Made {
    o: Vec<f64>,
    dqkv: Vec<f64>,
}

impl Case<'_> {
    fn rows(&self) -> usize {
        *self.cu.last().unwrap() as usize
    }
    fn attention(&self) -> AttentionShape {
        let Heads { q, kv, d, scale, window, cap } = self.heads;
        AttentionShape { heads: q, kv_heads: kv, head_dim: d, scale: scale as f32, window, softcap: cap as f32 }
    }
    /// Queries, keys and values of the batch, or the gradient of its outputs, row by row, for any rank.
    fn given(&self, seed: u64, row: usize, width: usize) -> Vec<f64> {
        let rng = Rng::new(seed, row as u64);
        let rounded = |x: f32| if self.dtype == DType::Bf16 { bf16::from_f32(x).to_f64() } else { f64::from(x) };
        (0..width as u64).map(|i| rounded(rng.normal(i))).collect()
    }
    fn qkv(&self, rows: impl Iterator<Item = usize>) -> Vec<f64> {
        rows.flat_map(|row| self.given(1, row, self.attention().row())).collect()
    }
    /// Rows after the end of the batch are padding: they have no gradient.
    fn d_o(&self, rows: impl Iterator<Item = usize>) -> Vec<f64> {
        let width = self.heads.q * self.heads.d;
        let weight = |row| if row < self.rows() { 1.0 } else { 0.0 };
        rows.flat_map(|row| self.given(2, row, width).into_iter().map(move |x| x * weight(row))).collect()
    }

    fn exact(&self) -> Made {
        let rows = || 0..self.rows();
        let (qkv, d_o) = (self.qkv(rows()), self.d_o(rows()));
        let forward = reference::attention::<f64>(self.heads, self.cu, &qkv);
        let mut dqkv =
            reference::attention_backward::<f64>(self.heads, self.cu, [&qkv, &forward[0], &forward[1], &d_o]);
        Made { o: forward[0].clone(), dqkv: dqkv.swap_remove(0) }
    }
    /// Plain attention on one rank.
    fn flash(&self) -> Made {
        let (dev, a, n) = (CpuDevice::new(Meter::default()), self.attention(), self.rows());
        let (qkv, d_o) = (upload(&dev, self.dtype, &self.qkv(0..n)), upload(&dev, self.dtype, &self.d_o(0..n)));
        let documents = upload(&dev, DType::U32, &documents_of_rows(self.cu).map(f64::from).collect::<Vec<_>>());
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other).unwrap();
        let (mut o, mut lse) = (alloc(self.dtype, d_o.len()), alloc(DType::F32, a.heads * n));
        dev.attention(Attention {
            shape: a,
            documents: documents.view(),
            qkv: qkv.view(),
            o: o.view_mut(),
            lse: lse.view_mut(),
        })
        .unwrap();
        let (mut delta, mut dqkv) = (alloc(DType::F32, a.heads * n), alloc(self.dtype, qkv.len()));
        let mut sums = alloc(DType::F32, dev.backward_scratch(&BackwardOf::Attention(a), self.dtype, n));
        let (d, s, dq) = (delta.view_mut(), sums.view_mut(), dqkv.view_mut());
        dev.attention_backward(AttentionBackward {
            shape: a,
            documents: documents.view(),
            qkv: qkv.view(),
            o: o.view(),
            lse: lse.view(),
            d_o: d_o.view(),
            delta: d,
            sums: s,
            dqkv: dq,
        })
        .unwrap();
        Made { o: download(&dev, &o), dqkv: download(&dev, &dqkv) }
    }
    /// Attention on `world` ranks.
    pub fn shared(&self, world: usize, sp_impl: SpImpl, device: &MakeDevice, wrap: &Wrap) -> Made {
        let a = self.attention();
        let parts = ranks_on(world, device, |rank| {
            let dev = rank.device;
            let group = wrap(rank.mesh.group(Axis::Fsdp).clone());
            let batch =
                MicroBatch { tokens: vec![0; self.rows()], cu_seqlens: self.cu.to_vec(), ..MicroBatch::default() };
            let split = Split { sp: Slice { index: group.rank(), of: world }, sp_impl, ..Split::NONE };
            let mut cut = ZigzagCut::new(rank.rank, world, split.grid(a.heads).ulysses.of, self.rows());
            cut.fill(&batch);
            let n = cut.part.tokens.len();
            let u32s =
                |values: &[u32]| upload(&*dev, DType::U32, &values.iter().map(|&v| v.into()).collect::<Vec<_>>());
            let (cu, rows) = (u32s(&cut.part.cu_seqlens), u32s(&cut.rows));
            let documents = u32s(&documents_of_rows(&cut.part.cu_seqlens).collect::<Vec<_>>());
            let mine = || cut.rows[rank.rank * n..][..n].iter().map(|&row| row as usize);
            // Allocated for more rows than there are, as for the longest batch.
            let groups = Groups { sp: group.clone(), ..Groups::solo(&dev) };
            let sights = [a.window == 0, a.window > 0];
            let plan = CorePlan {
                heads: &a,
                keys: &a,
                narrow: &a,
                sights,
                split: &split,
                tokens: n + 3,
                dtype: self.dtype,
                train: true,
            };
            let (mut saved, mut scratch) =
                (plan.saved().allocate(&*dev, &groups)?, plan.scratch().allocate(&*dev, &groups)?);
            let (cu_seqlens, documents) = (cu.view(), documents.view());
            let attention = CoreAttention {
                dev: &*dev,
                group: &*group,
                split,
                shape: &a,
                cu_seqlens,
                documents,
                layer: 3,
                sinks: None,
            };
            attention.begin(&mut scratch, [a.window], rows.view())?;

            let (qkv, d_o) =
                (upload(&*dev, self.dtype, &self.qkv(mine())), upload(&*dev, self.dtype, &self.d_o(mine())));
            let alloc = |len| dev.alloc(self.dtype, len, Category::Other);
            let (mut o, mut dqkv) = (alloc(d_o.len())?, alloc(qkv.len())?);
            // Twice: what one layer leaves behind must not affect the next.
            for _ in 0..2 {
                attention.forward(&mut scratch, qkv.view(), &mut saved, false)?;
                dev.copy(saved.outputs(n), o.view_mut())?;
                attention.backward(&mut scratch, qkv.view(), &saved, d_o.view(), dqkv.view_mut())?;
            }
            Ok((mine().collect::<Vec<usize>>(), download(&*dev, &o), download(&*dev, &dqkv)))
        });
        let (inner, row) = (a.heads * a.head_dim, a.row());
        let (mut o, mut dqkv) = (vec![f64::NAN; self.rows() * inner], vec![f64::NAN; self.rows() * row]);
        for (rows, part_o, part_dqkv) in &parts {
            for (i, &at) in rows.iter().enumerate() {
                if at < self.rows() {
                    o[at * inner..][..inner].copy_from_slice(&part_o[i * inner..][..inner]);
                    dqkv[at * row..][..row].copy_from_slice(&part_dqkv[i * row..][..row]);
                } else {
                    assert!(part_dqkv[i * row..][..row].iter().all(|&x| x == 0.0), "padding has a gradient");
                }
            }
        }
        Made { o, dqkv }
    }
}

fn upload(dev: &dyn Device, dtype: DType, values: &[f64]) -> Buf {
    let mut buf = dev.alloc(dtype, values.len(), Category::Other).unwrap();
    let bytes: Vec<u8> = match dtype {
        DType::U32 => values.iter().flat_map(|&x| (x as u32).to_ne_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|&x| bf16::from_f64(x).to_ne_bytes()).collect(),
        _ => values.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect(),
    };
    dev.upload(&bytes, buf.view_mut()).unwrap();
    buf
}
fn download(dev: &dyn Device, buf: &Buf) -> Vec<f64> {
    let mut bytes = vec![0u8; buf.len() * buf.dtype().size()];
    dev.download(buf.view(), &mut bytes).unwrap();
    match buf.dtype() {
        DType::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes([b[0], b[1]]).to_f64()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]).into()).collect(),
    }
}

/// The largest error of outputs, and of gradients.
fn errors(made: &Made, exact: &Made) -> [f64; 2] {
    let worst = |a: &[f64], b: &[f64]| {
        let far = |(a, b): (&f64, &f64)| if a.is_nan() { f64::INFINITY } else { (a - b).abs() };
        a.iter().zip(b).map(far).fold(0.0, f64::max)
    };
    [worst(&made.o, &exact.o), worst(&made.dqkv, &exact.dqkv)]
}

pub fn heads(q: usize, kv: usize, d: usize) -> Heads {
    Heads { q, kv, d, scale: f64::from(1.0 / (d as f32).sqrt()), window: 0, cap: 0.0 }
}
fn scaled(heads: Heads) -> Heads {
    // Rounded as on the device.
    Heads { scale: f64::from(heads.scale as f32), cap: f64::from(heads.cap as f32), ..heads }
}
const RINGS: [SpImpl; 2] = [SpImpl::Ring, SpImpl::AllGather];
pub const ALL: [SpImpl; 3] = [SpImpl::Ring, SpImpl::AllGather, SpImpl::Ulysses];

/// Heads and documents: dense ones that all ranks divide; packed ones of odd lengths, some shorter than the ranks,
/// empty or a single token; Gemma's windows and softcaps; grouped heads, of which ranks of Ulysses have shares of
/// different sizes, or read the same keys and values, or which are fewer than the ranks.
fn cases() -> Vec<(Heads, Vec<u32>)> {
    vec![
        (heads(2, 2, 16), vec![0, 256]),
        (heads(4, 2, 8), vec![0, 64, 128, 192]),
        (heads(3, 1, 10), vec![0, 5, 5, 6, 83, 150, 151, 197]),
        (Heads { window: 24, ..heads(4, 2, 8) }, vec![0, 160]),
        (Heads { window: 9, cap: 0.8, ..heads(4, 1, 8) }, vec![0, 1, 60, 77, 141]),
        (heads(1, 1, 8), vec![0, 3]),
        (heads(9, 3, 8), vec![0, 37, 90]),
        (heads(14, 2, 6), vec![0, 96, 101]),
        (Heads { window: 11, ..heads(8, 8, 8) }, vec![0, 70, 71, 133]),
    ]
}

/// The tolerance of the reference library: 2.5 times the error of plain attention plus 2e-3, for any number of ranks.
#[test]
fn errors_do_not_grow_with_the_ranks() {
    for (heads, cu) in cases() {
        for dtype in [DType::F32, DType::Bf16] {
            let case = Case { heads: scaled(heads), cu: &cu, dtype };
            let (exact, flash) = (case.exact(), case.flash());
            let plain = errors(&flash, &exact);
            for world in [1, 2, 3, 4, 8] {
                for sp_impl in ALL {
                    let made = case.shared(world, sp_impl, &cpu, &bare);
                    // A rank of Ulysses attends as one rank does, with fewer heads.
                    if world == 1 || sp_impl == SpImpl::Ulysses && world <= heads.q {
                        assert!(made.o == flash.o, "{heads:?} {cu:?} in {dtype} on {world}: other bits than one rank");
                    }
                    let made = errors(&made, &exact);
                    for (what, made, plain) in [("outputs", made[0], plain[0]), ("gradients", made[1], plain[1])] {
                        let label = format!("{what} of {heads:?} {cu:?} in {dtype}, {sp_impl:?} of {world}");
                        assert!(made <= 2.5 * plain + 2e-3, "{label}: off by {made:.2e}, plain by {plain:.2e}");
                        // In f32 an allowance of 2e-3 would hide anything.
                        assert!(dtype != DType::F32 || made <= 8.0 * plain + 1e-6, "{label}: {made:.2e} {plain:.2e}");
                    }
                }
            }
        }
    }
}

#[test]
fn both_rings_give_the_same_outputs() {
    for (heads, cu) in cases() {
        let case = Case { heads: scaled(heads), cu: &cu, dtype: DType::Bf16 };
        let [ring, gathered] = RINGS.map(|ring| case.shared(4, ring, &cpu, &bare));
        assert!(ring.o == gathered.o, "{heads:?} {cu:?}");
    }
}

/// Whichever rank is late, sums are computed in the same order.
#[test]
fn delays_change_no_bit() {
    let case = Case { heads: heads(4, 2, 8), cu: &[0, 61, 150], dtype: DType::Bf16 };
    for sp_impl in ALL {
        let calm = case.shared(4, sp_impl, &cpu, &bare);
        for seed in 0..4 {
            let delayed = move |group: Arc<dyn Collective>| -> Arc<dyn Collective> {
                Arc::new(Delayed::new(group, seed, &Seam::ALL, Duration::from_millis(2)))
            };
            assert!(case.shared(4, sp_impl, &cpu, &delayed) == calm, "{sp_impl:?}, seed {seed}");
        }
    }
}

#[test]
fn simulated_gpus_agree_too() {
    for (heads, cu) in [(Heads { window: 9, cap: 0.8, ..heads(2, 1, 16) }, [0, 5, 44]), (heads(2, 2, 16), [0, 17, 48])]
    {
        for (dtype, within) in [(DType::F32, 2e-6), (DType::Bf16, 3e-2)] {
            let case = Case { heads: scaled(heads), cu: &cu, dtype };
            let exact = case.exact();
            for sp_impl in ALL {
                let far = errors(&case.shared(2, sp_impl, &sim, &bare), &exact);
                assert!(far.iter().all(|&far| far < within), "{heads:?} {dtype} {sp_impl:?}: {far:?}");
            }
        }
    }
}
