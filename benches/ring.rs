//! One layer's attention, forward and backward, over two ranks, one thread each: a ring block by block, all at once,
//! Ulysses, and `plain`, half the time of a single rank, which they would take if communication were free. bf16;
//! the number in a name is the length of the single dense sequence. `gqa`: 12 heads of 64 with 2 key/value heads
//! instead of 12.
#[path = "../tests/common/worlds.rs"]
#[allow(dead_code)] // only a part is used here
mod worlds;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use flatshard::base::{Category, DType, Meter};
use flatshard::comm::{Axis, Collective, Tag};
use flatshard::data::MicroBatch;
use flatshard::data::zigzag::ZigzagCut;
use flatshard::device::ops::{AttentionShape, documents_of_rows};
use flatshard::device::{Buf, Device, cpu::CpuDevice};
use flatshard::nn::core::{CoreAttention, CorePlan};
use flatshard::nn::{Groups, Slice, SpImpl, Split};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worlds::ranks;

const RANKS: usize = 2;

fn u32s(dev: &dyn Device, values: &[u32]) -> Buf {
    let mut buf = dev.alloc(DType::U32, values.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}

/// Times `rounds` repetitions on a rank that has half of a sequence of `len`. None: one rank with the whole sequence,
/// whose time is halved. Data are zeros, which take as long as other values.
fn rank(group: Arc<dyn Collective>, a: &AttentionShape, len: usize, way: Option<SpImpl>, rounds: u64) -> Duration {
    let dev: Arc<dyn Device> = Arc::new(CpuDevice::new(Meter::default()));
    let sp = if way.is_some() { Slice { index: group.rank(), of: RANKS } } else { Slice::WHOLE };
    let (n, split) = (len / sp.of, Split { sp, sp_impl: way.unwrap_or_default(), ..Split::NONE });
    let groups = Groups { sp: group.clone(), ..Groups::solo(&dev) };
    let plan = CorePlan {
        heads: a,
        keys: a,
        narrow: a,
        sights: [true, false],
        split: &split,
        tokens: n,
        dtype: DType::Bf16,
        train: true,
    };
    let mut saved = plan.saved().allocate(&*dev, &groups).unwrap();
    let mut scratch = plan.scratch().allocate(&*dev, &groups).unwrap();
    let batch = MicroBatch { tokens: vec![0; len], cu_seqlens: vec![0, len as u32], ..MicroBatch::default() };
    let mut cut = ZigzagCut::new(sp.index, sp.of, split.grid(a.heads).ulysses.of, len);
    cut.fill(&batch);
    let (borders, dealt) = (u32s(&*dev, &batch.cu_seqlens), u32s(&*dev, &cut.rows));
    let documents = u32s(&*dev, &documents_of_rows(&batch.cu_seqlens).collect::<Vec<_>>());
    let (cu_seqlens, documents) = (borders.view(), documents.view());
    let attention =
        CoreAttention { dev: &*dev, group: &*group, split, shape: a, cu_seqlens, documents, sinks: None, layer: 0 };
    attention.begin(&mut scratch, [0], dealt.view()).unwrap();
    let alloc = |len| dev.alloc(DType::Bf16, len, Category::Other).unwrap();
    let [qkv, d_o, mut dqkv] = [a.row(), a.width(), a.row()].map(|width| alloc(n * width));
    let mut once = || {
        attention.forward(&mut scratch, qkv.view(), &mut saved, false).unwrap();
        attention.backward(&mut scratch, qkv.view(), &saved, d_o.view(), dqkv.view_mut()).unwrap();
    };
    once();
    group.barrier(Tag::new("bench", 0)).unwrap();
    let start = Instant::now();
    (0..rounds).for_each(|_| once());
    // A single rank did the work of both.
    start.elapsed() * sp.of as u32 / RANKS as u32
}

fn timed(a: AttentionShape, len: usize, way: Option<SpImpl>, rounds: u64) -> Duration {
    ranks(RANKS, |of| Ok(rank(of.mesh.group(Axis::Fsdp).clone(), &a, len, way, rounds))).into_iter().max().unwrap()
}

fn layers(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (heads, kv_heads) in [("mha", 12), ("gqa", 2)] {
        let a = AttentionShape { heads: 12, kv_heads, head_dim: 64, scale: 0.125, window: 0, softcap: 0.0 };
        for len in [512, 2048, 8192] {
            let ways = [
                ("plain", None),
                ("ring", Some(SpImpl::Ring)),
                ("allgather", Some(SpImpl::AllGather)),
                ("ulysses", Some(SpImpl::Ulysses)),
            ];
            for (name, way) in ways {
                let id = BenchmarkId::new(format!("{heads}/{name}"), len);
                group.bench_function(id, |b| b.iter_custom(|n| timed(a, len, way, n)));
            }
        }
    }
    group.finish();
}

criterion_group!(benches, layers);
criterion_main!(benches);
