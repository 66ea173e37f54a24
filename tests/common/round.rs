//! Every operation of a group once, in flight together as in a training step; allocation tests repeat it.
use flatshard::base::{Category, DType, Meter};
use flatshard::comm::{Collective, CommUse, Reduce, Tag};
use flatshard::device::{Buf, Device, cpu::CpuDevice};
use std::ops::Range;

/// Elements of a rank's shard.
const SHARD: usize = 64;

pub struct Round<'a> {
    group: &'a dyn Collective,
    full: Buf,
    grads: Buf,
    shard: Buf,
    values: Buf,
    /// Parts of `full` and of `shard`, one for each rank.
    parts: Vec<Range<usize>>,
}

impl Round<'_> {
    pub fn new(group: &dyn Collective) -> Round<'_> {
        let all = SHARD * group.size();
        let plain = |dtype, len| CpuDevice::new(Meter::default()).alloc(dtype, len, Category::Other).unwrap();
        Round {
            group,
            full: group.alloc(DType::F32, all, CommUse::Gathered, Category::Slots).unwrap(),
            grads: group.alloc(DType::F32, all, CommUse::Reduced, Category::Slots).unwrap(),
            shard: plain(DType::F32, SHARD),
            values: plain(DType::F64, 5),
            parts: (0..group.size()).map(|r| r * (SHARD / group.size())..(r + 1) * (SHARD / group.size())).collect(),
        }
    }
    /// The `i`-th round.
    pub fn run(&mut self, i: usize) {
        let Round { group: g, full, grads, shard, values, parts } = self;
        let (to, from) = ((g.rank() + 1) % g.size(), (g.rank() + g.size() - 1) % g.size());
        let sent = grads.view().slice(0..SHARD);
        let d = g.send_recv(Tag::new("shift", i), to, sent, from, shard.view_mut()).unwrap();
        g.wait(d).unwrap();
        g.wait_sent(d).unwrap();
        let e = g.all_to_all(Tag::new("trade", i), grads.view(), parts, shard.view_mut(), parts).unwrap();
        g.wait(e).unwrap();
        g.wait_sent(e).unwrap();
        let a = g.all_gather(Tag::new("gather", i), shard.view(), full.view_mut()).unwrap();
        let c = g.all_reduce(Tag::new("values", i), values.view_mut(), Reduce::Sum).unwrap();
        g.wait(a).unwrap();
        g.release(a).unwrap();
        let b = g.reduce_scatter(Tag::new("reduce", i), grads.view_mut(), shard.view_mut(), true).unwrap();
        g.wait(b).unwrap();
        g.wait_sent(b).unwrap();
        g.wait(c).unwrap();
        g.barrier(Tag::new("end", i)).unwrap();
    }
}
