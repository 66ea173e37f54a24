//! What moves the data of a GPU group: NCCL, or copies between processes ([`crate::comm::ipc`]). Never orders its
//! stream against others.
use super::comm::Comm;
use super::slot;
use super::work::{PairRanges, Work};
use crate::base::meter::Lease;
use crate::base::{Category, DType, Result};
use crate::comm::operands::CheckedCall;
use crate::device::Buf;
use crate::device::gpu::Arg;
use crate::device::gpu::cuda::Cuda;
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// An operation that a group enqueues: who asks for it, what, and the ranges of an all_to_all.
pub(in crate::comm) struct TransportCall<'a> {
    pub call: CheckedCall<'a>,
    pub work: Work,
    pub pairs: &'a [PairRanges],
}

pub(in crate::comm) trait Transport: Send + Sync {
    /// Memory for collectives, for `call`. `all` combines a condition over the ranks.
    fn alloc(
        &self,
        call: CheckedCall,
        what: (DType, usize),
        category: Category,
        lease: Lease,
        all: &dyn Fn(bool) -> Result<bool>,
    ) -> Result<Buf>;
    /// Enqueues an operation in `stream`. Its operands have been checked, and are kept until it has finished.
    fn enqueue(&self, asked: TransportCall, operands: &mut [Arg], stream: &Arc<CudaStream>) -> Result<()>;
    /// Why it was aborted, if it was.
    fn failure(&self) -> Option<String>;
    /// An asynchronous error that no call has returned.
    fn trouble(&self) -> Option<String> {
        None
    }
    /// World ranks that operations in flight wait for, if it knows.
    fn missing(&self) -> Option<Vec<usize>> {
        None
    }
    /// Ends operations in flight.
    fn abort(&self, why: &str);
}

/// A communicator of NCCL, and this rank's index in it.
pub(super) struct NcclTransport {
    pub comm: Arc<Comm>,
    pub cuda: Arc<Cuda>,
    pub index: usize,
}

impl Transport for NcclTransport {
    fn alloc(
        &self,
        call: CheckedCall,
        what: (DType, usize),
        category: Category,
        lease: Lease,
        all: &dyn Fn(bool) -> Result<bool>,
    ) -> Result<Buf> {
        slot::alloc(&self.cuda, &self.comm, call, what, category, lease, all)
    }
    fn enqueue(&self, asked: TransportCall, operands: &mut [Arg], stream: &Arc<CudaStream>) -> Result<()> {
        let TransportCall { call, work, pairs } = asked;
        let raw = stream.cu_stream().cast();
        let enqueue = |handle, nccl: &_| work.enqueue(operands, pairs, self.index, nccl, (handle, raw));
        self.comm.run(enqueue).map_err(|what| call.error(what))?;
        work.finish(operands, self.index, &self.cuda, stream)
    }
    fn failure(&self) -> Option<String> {
        self.comm.failure().map(str::to_string)
    }
    fn trouble(&self) -> Option<String> {
        self.comm.trouble()
    }
    fn abort(&self, why: &str) {
        self.comm.abort(why);
    }
}
