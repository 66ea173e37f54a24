//! The calls of a `Collective`: what each checks, keeps alive and asks of its transport. Never waits on the host except
//! in `barrier`.
use super::group::NcclGroup;
use super::work::Work;
use crate::base::{Category, DType, Result};
use crate::comm::seam::received;
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Times};
use crate::device::gpu::driver::{Arg, Driver};
use crate::device::{Buf, View, ViewMut};
use std::ops::Range;
use std::sync::{MutexGuard, PoisonError};

fn range(view: &View) -> std::ops::Range<usize> {
    let start = view.as_ptr() as usize;
    start..start + view.bytes()
}

impl NcclGroup {
    fn token(&self) -> MutexGuard<'_, Buf> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// All-reduces the maximum of all tokens; the host waits for it.
    fn meet(&self, tag: Tag, token: &mut Buf) -> Result<()> {
        let ticket = self.all_reduce(tag, token.view_mut(), Reduce::Max)?;
        self.order(ticket)?;
        self.settle(tag)
    }
    /// The number of the table with these ranges. The first is that of calls that are not deferred: they have read it
    /// when they return. The others stay as they are.
    fn table(&self, sends: &[Range<usize>], recvs: &[Range<usize>]) -> u32 {
        let (pairs, mut tables) = (|| sends.iter().cloned().zip(recvs.iter().cloned()), self.tables());
        if tables.is_empty() {
            tables.push(Vec::with_capacity(sends.len()));
        }
        if !self.graphs.as_ref().is_some_and(|graphs| graphs.defers()) {
            tables[0].clear();
            tables[0].extend(pairs());
            return 0;
        }
        let known = (1..tables.len()).find(|&at| tables[at].iter().cloned().eq(pairs()));
        known.unwrap_or_else(|| {
            tables.push(pairs().collect());
            tables.len() - 1
        }) as u32
    }
    /// Whether it holds on all ranks of the group. The host waits.
    fn all(&self, mine: bool) -> Result<bool> {
        let (mut token, mut not) = (self.token(), if mine { 0f32 } else { 1.0 });
        self.cuda.upload(bytemuck::bytes_of(&not), token.view_mut())?;
        self.meet(Tag::new("registration", 0), &mut token)?;
        self.cuda.download(&mut [(token.view(), bytemuck::bytes_of_mut(&mut not))])?;
        Ok(not == 0.0)
    }
}

impl Collective for NcclGroup {
    fn rank(&self) -> usize {
        self.index
    }
    fn size(&self) -> usize {
        self.channel.ranks.len()
    }
    fn axis(&self) -> Axis {
        self.axis
    }
    fn alloc(&self, dtype: DType, len: usize, _: CommUse, category: Category) -> Result<Buf> {
        let bytes = len * dtype.size();
        let lease = self.meter.lease_of(category, dtype, len, bytes);
        let call = self.call("alloc", Tag::new("bytes", bytes));
        self.channel.transport.alloc(call, (dtype, len), category, lease, &|mine| self.all(mine))
    }
    fn all_gather(&self, tag: Tag, shard: View, full: ViewMut) -> Result<Ticket> {
        let call = self.call("all_gather", tag);
        call.same(shard.dtype(), full.dtype())?;
        call.shards(shard.len(), full.len())?;
        call.overlap(range(&shard), range(&full.as_view()), self.index)?;
        let received = full.bytes() - shard.bytes();
        self.start(call, received, Work::Gather, &mut [Arg::In(shard), Arg::InOut(full)])
    }
    fn reduce_scatter(&self, tag: Tag, full: ViewMut, shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let call = self.call("reduce_scatter", tag);
        call.scattered(full.dtype(), shard.dtype())?;
        call.shards(shard.len(), full.len())?;
        let received = (self.size() - 1) * shard.len() * full.dtype().size();
        self.start(call, received, Work::Scatter { add: accumulate }, &mut [Arg::InOut(full), Arg::InOut(shard)])
    }
    fn all_reduce(&self, tag: Tag, buf: ViewMut, op: Reduce) -> Result<Ticket> {
        let (call, n) = (self.call("all_reduce", tag), self.size());
        call.reducible(buf.dtype(), op)?;
        self.start(call, 2 * buf.bytes() * (n - 1) / n, Work::Reduce(op), &mut [Arg::InOut(buf)])
    }
    fn broadcast(&self, tag: Tag, buf: ViewMut, root: usize) -> Result<Ticket> {
        let call = self.call("broadcast", tag);
        call.rank(root)?;
        let received = if root == self.index { 0 } else { buf.bytes() };
        self.start(call, received, Work::Broadcast { root: root as u32 }, &mut [Arg::InOut(buf)])
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, recv: ViewMut) -> Result<Ticket> {
        let call = self.call("send_recv", tag);
        call.rank(to)?;
        call.rank(from)?;
        call.same(send.dtype(), recv.dtype())?;
        let (received, work) = (recv.bytes(), Work::SendRecv { to: to as u32, from: from as u32 });
        self.start(call, received, work, &mut [Arg::In(send), Arg::InOut(recv)])
    }
    /// Ranges of deferred calls are compared with those of earlier ones, which are few, since only calls of fixed sizes
    /// are deferred.
    fn all_to_all(
        &self,
        tag: Tag,
        send: View,
        sends: &[Range<usize>],
        recv: ViewMut,
        recvs: &[Range<usize>],
    ) -> Result<Ticket> {
        let call = self.call("all_to_all", tag);
        call.same(send.dtype(), recv.dtype())?;
        call.parts(self.index, (send.len(), sends), (recv.len(), recvs))?;
        let bytes = received(self.index, recvs) * recv.dtype().size();
        let table = self.table(sends, recvs);
        self.start(call, bytes, Work::AllToAll { table }, &mut [Arg::In(send), Arg::InOut(recv)])
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        self.meet(tag, &mut self.token())
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.order(ticket)
    }
    /// The next gather into the buffer waits for the compute stream.
    fn release(&self, _: Ticket) -> Result<()> {
        Ok(())
    }
    fn wait_sent(&self, ticket: Ticket) -> Result<()> {
        self.order(ticket)
    }
    fn stats(&self) -> CommStats {
        self.so_far()
    }
    fn times(&self, ticket: Ticket) -> Times {
        self.timed(ticket)
    }
}
