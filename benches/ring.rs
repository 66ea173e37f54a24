//! One layer's attention, forward and backward, over a ring of two ranks, one thread each: block by block, all at once,
//! and `plain`, half the time of a single rank, which the ring would take if communication and merging were free. bf16;
//! the number in a name is the length of the single dense sequence. `gqa`: 12 heads of 64 with 2 key/value heads
//! instead of 12.
#[path = "../tests/common/worlds.rs"]
#[allow(dead_code)] // only a part is used here
mod worlds;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use flatshard::base::{Category, DType, Meter};
use flatshard::comm::{Collective, Tag};
use flatshard::data::MicroBatch;
use flatshard::data::zigzag::ZigzagCut;
use flatshard::device::ops::{Attention, AttentionBackward, AttentionShape};
use flatshard::device::{Buf, Device, cpu::CpuDevice};
use flatshard::nn::ring::{Ring, RingAttention};
use flatshard::nn::{Groups, RingImpl, Slice, Split};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worlds::ranks;

const RANKS: usize = 2;

/// Queries, keys, values and their gradients, and attention outputs: zeros, which take as long as other values.
struct Rows {
    qkv: Buf,
    dqkv: Buf,
    o: Buf,
    lse: Buf,
    delta: Buf,
}

impl Rows {
    fn new(dev: &dyn Device, a: &AttentionShape, n: usize) -> Rows {
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other).unwrap();
        let (row, inner) = (n * a.row(), n * a.heads * a.head_dim);
        let [qkv, dqkv, o] = [row, row, inner].map(|len| alloc(DType::Bf16, len));
        let [lse, delta] = [(); 2].map(|()| alloc(DType::F32, n * a.heads));
        Rows { qkv, dqkv, o, lse, delta }
    }
}

fn u32s(dev: &dyn Device, values: &[u32]) -> Buf {
    let mut buf = dev.alloc(DType::U32, values.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}

/// Times `rounds` repetitions on a rank that has half of a sequence of `len`. None: one rank with the whole sequence,
/// whose time is halved.
fn rank(group: Arc<dyn Collective>, a: &AttentionShape, len: usize, ring: Option<RingImpl>, rounds: u64) -> Duration {
    let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(Meter::default()));
    let n = len / RANKS;
    let mut rows = Rows::new(&*dev, a, if ring.is_some() { n } else { len });
    let batch = MicroBatch { tokens: vec![0; len], cu_seqlens: vec![0, len as u32], ..MicroBatch::default() };
    let mut cut = ZigzagCut::new(group.rank(), RANKS, len);
    cut.fill(&batch);
    let (documents, dealt) = (u32s(&*dev, &batch.cu_seqlens), u32s(&*dev, &cut.rows));
    let groups = Groups { sp: group.clone(), ..Groups::solo(&dev) };
    let kind = ring.unwrap_or_default();
    let split = Split { sp: Slice { index: group.rank(), of: RANKS }, ring: kind, ..Split::NONE };
    let mut buffers = Ring::plan(a, [true, false], &split, n, DType::Bf16, true).allocate(&*dev, &groups).unwrap();
    buffers.set_ranges(&*dev, &*group, a, [0], documents.view(), dealt.view()).unwrap();
    let attention = RingAttention { dev: &*dev, group: &*group, ring: kind, shape: a, layer: 0 };
    let mut sums = dev.alloc(DType::F32, dev.attention_sums(a, DType::Bf16, len), Category::Other).unwrap();
    let mut once = || {
        let Rows { qkv, dqkv, o, lse, delta } = &mut rows;
        if ring.is_some() {
            attention.forward(&mut buffers, qkv.view(), o.view_mut(), lse.view_mut()).unwrap();
            let (delta, dqkv, d_o) = (delta.view_mut(), dqkv.view_mut(), o.view());
            attention
                .backward(&mut buffers, qkv.view(), o.view(), lse.view(), d_o, [delta, sums.view_mut()], dqkv)
                .unwrap();
        } else {
            let cu = documents.view();
            dev.attention(Attention {
                shape: *a,
                cu_seqlens: cu,
                qkv: qkv.view(),
                o: o.view_mut(),
                lse: lse.view_mut(),
            })
            .unwrap();
            let (delta, dqkv, d_o) = (delta.view_mut(), dqkv.view_mut(), o.view());
            let sums = sums.view_mut();
            dev.attention_backward(AttentionBackward {
                shape: *a,
                cu_seqlens: cu,
                qkv: qkv.view(),
                o: o.view(),
                lse: lse.view(),
                d_o,
                delta,
                sums,
                dqkv,
            })
            .unwrap();
        }
    };
    once();
    group.barrier(Tag::new("bench", 0)).unwrap();
    let start = Instant::now();
    (0..rounds).for_each(|_| once());
    // A single rank did the work of both.
    start.elapsed() / if ring.is_some() { 1 } else { RANKS as u32 }
}

fn timed(a: AttentionShape, len: usize, ring: Option<RingImpl>, rounds: u64) -> Duration {
    ranks(RANKS, |of| Ok(rank(of.mesh.fsdp, &a, len, ring, rounds))).into_iter().max().unwrap()
}

fn layers(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (heads, kv_heads) in [("mha", 12), ("gqa", 2)] {
        let a = AttentionShape { heads: 12, kv_heads, head_dim: 64, scale: 0.125, window: 0, softcap: 0.0 };
        for len in [512, 2048, 8192] {
            let ways = [("plain", None), ("ring", Some(RingImpl::Ring)), ("allgather", Some(RingImpl::AllGather))];
            for (name, ring) in ways {
                let id = BenchmarkId::new(format!("{heads}/{name}"), len);
                group.bench_function(id, |b| b.iter_custom(|n| timed(a, len, ring, n)));
            }
        }
    }
    group.finish();
}

criterion_group!(benches, layers);
criterion_main!(benches);
