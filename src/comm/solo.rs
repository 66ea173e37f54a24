//! A group of one rank, on any device: a collective is a copy on the compute stream. Never communicates.
use super::operands::CheckedCall;
use super::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket};
use crate::base::{Category, DType, Result};
use crate::device::{Buf, Device, View, ViewMut};
use std::ops::Range;
use std::sync::Arc;

pub struct Solo {
    device: Arc<dyn Device>,
    /// World rank.
    rank: usize,
    axis: Axis,
}

/// The work is ordered in the compute stream, so there is nothing to wait for.
const DONE: Ticket = Ticket(u64::MAX);

impl Solo {
    pub fn new(device: Arc<dyn Device>, axis: Axis, rank: usize) -> Solo {
        Solo { device, rank, axis }
    }
    fn call(&self, op: &'static str, tag: Tag) -> CheckedCall<'static> {
        CheckedCall { rank: self.rank, op, group: self.axis.name(), size: 1, tag }
    }
    /// Copies unless source and destination are the same.
    fn copy(&self, from: View, mut to: ViewMut) -> Result<Ticket> {
        if from.as_ptr() != to.as_mut_ptr().cast_const() {
            self.device.copy(from, to)?;
        }
        Ok(DONE)
    }
}

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn axis(&self) -> Axis {
        self.axis
    }
    fn alloc(&self, dtype: DType, len: usize, _: CommUse, category: Category) -> Result<Buf> {
        self.device.alloc(dtype, len, category)
    }
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket> {
        let call = self.call("all_gather", tag);
        call.same(shard.dtype(), full.dtype())?;
        call.shards(shard.len(), full.len())?;
        self.copy(shard, full)
    }
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let call = self.call("reduce_scatter", tag);
        call.scattered(full.dtype(), shard.dtype())?;
        call.shards(shard.len(), full.len())?;
        if accumulate {
            self.device.add(full.as_view(), shard)?;
            return Ok(DONE);
        }
        self.copy(full.as_view(), shard)
    }
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket> {
        self.call("all_reduce", tag).reducible(buf.dtype(), op)?;
        Ok(DONE)
    }
    fn broadcast(&self, tag: Tag, _: ViewMut, root: usize) -> Result<Ticket> {
        self.call("broadcast", tag).rank(root)?;
        Ok(DONE)
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket> {
        let call = self.call("send_recv", tag);
        call.rank(to)?;
        call.rank(from)?;
        call.same(send.dtype(), recv.dtype())?;
        call.shards(send.len(), recv.len())?;
        self.copy(send, recv)
    }
    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        mut recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket> {
        let call = self.call("all_to_all", tag);
        call.same(send.dtype(), recv.dtype())?;
        call.parts(0, (send.len(), sends), (recv.len(), recvs))?;
        self.copy(send.slice(sends[0].clone()), recv.reborrow().slice(recvs[0].clone()))
    }
    fn barrier(&self, _: Tag) -> Result<()> {
        Ok(())
    }
    fn wait(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn release(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn wait_sent(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Meter;
    use crate::device::cpu::CpuDevice;

    #[test]
    fn a_rank_alone_gathers_reduces_and_sends_to_itself() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(Meter::default()));
        let group = Solo::new(device.clone(), Axis::Fsdp, 0);
        let alloc = |values: &[f32]| {
            let mut buf = group.alloc(DType::F32, values.len(), CommUse::Gathered, Category::Other).unwrap();
            device.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
            buf
        };
        let read = |buf: &Buf| buf.view().host::<f32>("test").unwrap().to_vec();
        let (mut a, mut b, mut c) = (alloc(&[1.0, 2.0]), alloc(&[0.0, 0.0]), alloc(&[0.0; 3]));
        let tag = Tag::new("test", 0);
        group.wait(group.all_gather(tag, a.view(), b.view_mut()).unwrap()).unwrap();
        assert_eq!(read(&b), [1.0, 2.0]);
        group.wait(group.reduce_scatter(tag, b.view_mut(), a.view_mut(), true).unwrap()).unwrap();
        assert_eq!(read(&a), [2.0, 4.0]);
        group.wait(group.reduce_scatter(tag, b.view_mut(), a.view_mut(), false).unwrap()).unwrap();
        group.wait(group.all_reduce(tag, a.view_mut(), Reduce::Max).unwrap()).unwrap();
        assert_eq!(read(&a), [1.0, 2.0]);
        assert!(group.all_gather(tag, a.view(), c.view_mut()).unwrap_err().to_string().contains("3 elements"));
        assert!(group.broadcast(tag, a.view_mut(), 1).is_err());
        assert!(group.send_recv(tag, 0, a.view(), 0, c.view_mut()).is_err());
        group.wait(group.send_recv(tag, 0, a.view(), 0, b.view_mut()).unwrap()).unwrap();
        assert_eq!(read(&b), [1.0, 2.0]);
    }
}
