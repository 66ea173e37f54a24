//! The `Collective` over one communicator: what each call checks, keeps and asks of NCCL. `order` says when it runs. Never waits
//! on the host but in `barrier`.
use super::comm::Comm;
use super::library::{self, IN_PROGRESS, Nccl, SUCCESS};
use super::order::Ring;
use super::slot;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::comm::operands::Call;
use crate::comm::{Axis, Collective, CommStats, CommUse, Reduce, Tag, Ticket, Times};
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::driver::Driver;
use crate::device::{Buf, View, ViewMut};
use cudarc::driver::{CudaStream, DriverError};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// A communicator and its stream: shared by the axes whose groups are the same ranks.
pub(super) struct Channel {
    pub comm: Arc<Comm>,
    pub stream: Arc<CudaStream>,
    /// World ranks.
    pub ranks: Vec<usize>,
}

pub(super) struct Group {
    pub(super) channel: Arc<Channel>,
    pub(super) cuda: Arc<Cuda>,
    meter: Meter,
    axis: Axis,
    /// "fsdp of 4".
    name: String,
    /// World rank, and place in the group.
    pub(super) world_rank: usize,
    index: usize,
    pub(super) id: u64,
    pub(super) ring: Mutex<Ring>,
    /// f32 (1): what a barrier sums.
    token: Mutex<Buf>,
}

impl Group {
    pub(super) fn new(
        cuda: Arc<Cuda>,
        channel: Arc<Channel>,
        axis: Axis,
        rank: usize,
        id: u64,
        meter: Meter,
    ) -> Result<Group> {
        let index = channel.ranks.iter().position(|&r| r == rank);
        let index = index.ok_or_else(|| Error::op("group", format!("rank {rank} is not among {:?}", channel.ranks)))?;
        let ring = Mutex::new(Ring::new(&cuda)?);
        let lease = meter.lease(Category::Other, DType::F32.size());
        let token = cuda.alloc(DType::F32, 1, Category::Other, lease)?;
        Ok(Group {
            name: format!("{} of {}", axis.name(), channel.ranks.len()),
            channel,
            cuda,
            meter,
            axis,
            world_rank: rank,
            index,
            id,
            ring,
            token: Mutex::new(token),
        })
    }
    pub(super) fn call(&self, op: &'static str, tag: Tag) -> Call<'_> {
        Call { rank: self.world_rank, op, group: &self.name, size: self.channel.ranks.len(), tag }
    }
    pub(super) fn failed(&self, e: DriverError) -> Error {
        self.cuda.failed(&self.name, e)
    }

    pub(super) fn abort(&self, why: &str) {
        self.channel.comm.abort(why);
    }
}

/// `ncclDataType_t`.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}
fn reduction(op: Reduce) -> c_int {
    match op {
        Reduce::Sum => library::SUM,
        Reduce::Max => library::MAX,
    }
}
fn range(view: &View) -> std::ops::Range<usize> {
    let start = view.as_ptr() as usize;
    start..start + view.bytes()
}

impl Collective for Group {
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
        let lease = self.meter.lease_of(category, dtype, len, len * dtype.size());
        slot::alloc(&self.cuda, &self.channel.comm, dtype, len, category, lease)
    }
    fn all_gather(&self, tag: Tag, shard: View, mut full: ViewMut) -> Result<Ticket> {
        let call = self.call("all_gather", tag);
        call.same(shard.dtype(), full.dtype())?;
        call.shards(shard.len(), full.len())?;
        call.overlap(range(&shard), range(&full.as_view()), self.index)?;
        let (from, to, count, dtype) = (shard.as_ptr(), full.as_mut_ptr(), shard.len(), data_type(shard.dtype()));
        let received = full.bytes() - shard.bytes();
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: lengths are checked above; both buffers are kept until the operation is over.
            unsafe { (nccl.all_gather)(from.cast(), to.cast(), count, dtype, comm, stream) }
        };
        self.start(call, received, [Some(shard.keep()), Some(full.keep())], enqueue, || Ok(()))
    }
    fn reduce_scatter(&self, tag: Tag, mut full: ViewMut, mut shard: ViewMut, accumulate: bool) -> Result<Ticket> {
        let call = self.call("reduce_scatter", tag);
        call.scattered(full.dtype(), shard.dtype())?;
        call.shards(shard.len(), full.len())?;
        let (count, dtype) = (shard.len(), full.dtype());
        let own = self.index * count..(self.index + 1) * count;
        let keep = [Some(full.keep()), Some(shard.keep())];
        let received = (self.size() - 1) * count * dtype.size();
        let from = full.as_mut_ptr();
        // NCCL assigns, in the dtype that it sums. To add or to widen, the sum is made in place, in this rank's part of the
        // input, and taken from there.
        let straight = !accumulate && shard.dtype() == dtype;
        let to = match straight {
            true => shard.as_mut_ptr(),
            false => from.wrapping_add(own.start * dtype.size()),
        };
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: lengths are checked above; both buffers are kept until the operation is over.
            unsafe {
                (nccl.reduce_scatter)(from.cast(), to.cast(), count, data_type(dtype), library::SUM, comm, stream)
            }
        };
        let take = || match straight {
            true => Ok(()),
            false => self.cuda.take_on(&self.channel.stream, full.as_view().slice(own), shard.reborrow(), accumulate),
        };
        self.start(call, received, keep, enqueue, take)
    }
    fn all_reduce(&self, tag: Tag, mut buf: ViewMut, op: Reduce) -> Result<Ticket> {
        let call = self.call("all_reduce", tag);
        call.reducible(buf.dtype(), op)?;
        let (at, count, dtype, op) = (buf.as_mut_ptr(), buf.len(), data_type(buf.dtype()), reduction(op));
        let n = self.size();
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: in place, over the buffer's own length; it is kept until the operation is over.
            unsafe { (nccl.all_reduce)(at.cast_const().cast(), at.cast(), count, dtype, op, comm, stream) }
        };
        self.start(call, 2 * buf.bytes() * (n - 1) / n, [Some(buf.keep()), None], enqueue, || Ok(()))
    }
    fn broadcast(&self, tag: Tag, mut buf: ViewMut, root: usize) -> Result<Ticket> {
        let call = self.call("broadcast", tag);
        call.rank(root)?;
        let (at, count, dtype) = (buf.as_mut_ptr(), buf.len(), data_type(buf.dtype()));
        let received = if root == self.index { 0 } else { buf.bytes() };
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: as in `all_reduce`.
            unsafe { (nccl.broadcast)(at.cast_const().cast(), at.cast(), count, dtype, root as c_int, comm, stream) }
        };
        self.start(call, received, [Some(buf.keep()), None], enqueue, || Ok(()))
    }
    fn send_recv(&self, tag: Tag, to: usize, send: View, from: usize, mut recv: ViewMut) -> Result<Ticket> {
        let call = self.call("send_recv", tag);
        call.rank(to)?;
        call.rank(from)?;
        call.same(send.dtype(), recv.dtype())?;
        let dtype = data_type(send.dtype());
        let (source, sent) = (send.as_ptr(), send.len());
        let (target, wanted) = (recv.as_mut_ptr(), recv.len());
        let enqueue = |nccl: &Nccl, comm, stream| {
            // SAFETY: lengths are the views' own; both are kept until the operation is over. Grouped, so that neither
            // waits for the other.
            let codes = unsafe {
                [
                    (nccl.group_start)(),
                    (nccl.send)(source.cast(), sent, dtype, to as c_int, comm, stream),
                    (nccl.recv)(target.cast(), wanted, dtype, from as c_int, comm, stream),
                    (nccl.group_end)(),
                ]
            };
            // The group's end says whether all of it is under way; an error of a part comes first.
            let wrong = codes.into_iter().find(|&code| !matches!(code, SUCCESS | IN_PROGRESS));
            wrong.unwrap_or(codes[3])
        };
        self.start(call, recv.bytes(), [Some(send.keep()), Some(recv.keep())], enqueue, || Ok(()))
    }
    fn barrier(&self, tag: Tag) -> Result<()> {
        let mut token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = self.all_reduce(tag, token.view_mut(), Reduce::Max)?;
        self.order(ticket)?;
        self.settle(ticket)
    }
    fn wait(&self, ticket: Ticket) -> Result<()> {
        self.order(ticket)
    }
    /// The next gather into the buffer waits for the compute stream by itself.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Against nccl.h.
    #[test]
    fn dtypes_have_the_numbers_of_nccl() {
        let dtypes = [DType::U8, DType::I32, DType::U32, DType::F16, DType::F32, DType::F64, DType::Bf16];
        assert_eq!(dtypes.map(data_type), [1, 2, 3, 6, 7, 8, 9]);
        assert_eq!([reduction(Reduce::Sum), reduction(Reduce::Max)], [0, 2]);
    }
}
