//! Bandwidth of the collectives compared with a memcpy of the same bytes: two ranks, one thread each. `bytes` is the
//! size of the full buffer. Each rank copies its half for an all-gather; for a reduce-scatter it reads both halves and
//! writes one.
#[path = "../tests/common/worlds.rs"]
#[allow(dead_code)] // only a part is used here
mod worlds;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flatshard::base::{Category, DType};
use flatshard::comm::{Axis, Collective, CommUse, Reduce, Tag};
use flatshard::device::{Buf, Device};
use std::hint::black_box;
use std::time::{Duration, Instant};
use worlds::ranks;

const T: Tag = Tag::new("bench", 0);

/// One rank's buffers for a full size of `len` f32.
struct Rank<'a> {
    group: &'a dyn Collective,
    full: Buf,
    grads: Buf,
    shard: Buf,
}

impl<'a> Rank<'a> {
    fn new(group: &'a dyn Collective, dev: &dyn Device, len: usize) -> Rank<'a> {
        let full = group.alloc(DType::F32, len, CommUse::Gathered, Category::Other).unwrap();
        let grads = group.alloc(DType::F32, len, CommUse::Reduced, Category::Other).unwrap();
        let shard = dev.alloc(DType::F32, len / group.size(), Category::Other).unwrap();
        // All zero, so sums stay zero however often they are computed.
        Rank { group, full, grads, shard }
    }
    fn all_gather(&mut self) {
        let t = self.group.all_gather(T, self.shard.view(), self.full.view_mut()).unwrap();
        self.group.wait(t).unwrap();
        self.group.release(t).unwrap();
    }
    fn reduce_scatter(&mut self) {
        let t = self.group.reduce_scatter(T, self.grads.view_mut(), self.shard.view_mut(), false).unwrap();
        self.group.wait(t).unwrap();
        self.group.wait_sent(t).unwrap();
    }
    fn all_reduce(&mut self) {
        let t = self.group.all_reduce(T, self.grads.view_mut(), Reduce::Sum).unwrap();
        self.group.wait(t).unwrap();
    }
}

type Op = fn(&mut Rank);

/// The time of `n` operations on two concurrent ranks.
fn timed(len: usize, n: u64, op: Op) -> Duration {
    let times = ranks(2, |of| {
        let mut rank = Rank::new(&**of.mesh.group(Axis::Fsdp), &*of.device, len);
        op(&mut rank); // fault the pages in
        of.mesh.group(Axis::Fsdp).barrier(T)?;
        let start = Instant::now();
        (0..n).for_each(|_| op(&mut rank));
        Ok(start.elapsed())
    });
    times.into_iter().max().unwrap()
}

/// Two threads that each copy half of the bytes.
fn memcpy(len: usize, n: u64) -> Duration {
    let copy = || {
        let src = vec![1f32; len / 2];
        let mut dst = src.clone();
        let start = Instant::now();
        for _ in 0..n {
            black_box(&mut dst).copy_from_slice(black_box(&src));
        }
        start.elapsed()
    };
    std::thread::scope(|s| {
        let threads = [s.spawn(copy), s.spawn(copy)];
        threads.into_iter().map(|t| t.join().unwrap()).max().unwrap()
    })
}

fn collectives(c: &mut Criterion) {
    let mut group = c.benchmark_group("two_ranks");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
    for bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20] {
        let len = bytes / 4;
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new("memcpy", bytes), |b| b.iter_custom(|n| memcpy(len, n)));
        let ops: [(&str, Op); 3] = [
            ("all_gather", |rank| rank.all_gather()),
            ("reduce_scatter", |rank| rank.reduce_scatter()),
            ("all_reduce", |rank| rank.all_reduce()),
        ];
        for (name, op) in ops {
            group.bench_function(BenchmarkId::new(name, bytes), |b| b.iter_custom(|n| timed(len, n, op)));
        }
    }
}

criterion_group!(benches, collectives);
criterion_main!(benches);
