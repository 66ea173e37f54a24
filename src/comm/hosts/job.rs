//! One operation as the worker runs it: raw, checked operands. Never runs anything.
use crate::base::DType;
use crate::comm::seam::Seam;
use crate::comm::shm::{Desc, PairParts, ShmBuffer};
use crate::comm::{Reduce, Tag};
use crate::device::cpu::sum::Sources;
use std::sync::Arc;

/// Pointers are valid as long as `keep` lives; the caller leaves the memory alone until its waits return (see the Note
/// in `comm`).
pub(super) struct HostsJob {
    pub kind: Seam,
    pub tag: Tag,
    /// What all ranks must agree on. Ranks in it are group ranks.
    pub desc: Desc,
    /// Dtypes of the input and of the output.
    pub dtype: DType,
    pub into: DType,
    pub reduce: Reduce,
    pub accumulate: bool,
    pub src: *const u8,
    pub dst: *mut u8,
    /// Elements of the shard, of the buffer, or sent.
    pub len: usize,
    /// The communicated buffer, if all ranks of the host can access it; `None`: staged.
    pub there: Option<Sources>,
    /// The gathered buffer, and the sequence number of its contents.
    pub content: Option<(Arc<ShmBuffer>, u64)>,
    /// All_to_all: one per group rank. A list of the desk, to which it returns.
    pub pairs: Vec<PairParts>,
    pub keep: [Option<Arc<dyn Send + Sync>>; 2],
}

// SAFETY: the pointers stand for buffers kept alive by `keep`, lent to the operation until its waits are done.
unsafe impl Send for HostsJob {}

impl HostsJob {
    pub fn new(kind: Seam, tag: Tag, dtype: DType, len: usize) -> HostsJob {
        HostsJob {
            kind,
            tag,
            desc: Desc::new(kind, tag, dtype, len),
            dtype,
            into: dtype,
            reduce: Reduce::Sum,
            accumulate: false,
            src: std::ptr::null(),
            dst: std::ptr::null_mut(),
            len,
            there: None,
            content: None,
            pairs: Vec::new(),
            keep: [None, None],
        }
    }
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}
