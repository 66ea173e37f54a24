//! Operations of GPU groups as values, so that they can be deferred, compared and captured with the device's own calls;
//! and how NCCL runs them. Never checks operands: the caller has.
use super::library::{self, Handle, IN_PROGRESS, Nccl, SUCCESS, Stream};
use crate::base::{DType, Error, Result};
use crate::comm::Reduce;
use crate::device::gpu::Arg;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::guest::Asked;
use cudarc::driver::CudaStream;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::Arc;

/// What a rank sends to another and what it receives from it, in elements of the operands.
pub(in crate::comm) type PairRanges = (Range<usize>, Range<usize>);

/// An operation with its operands: the input, or the in-place buffer, then the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::comm) enum Work {
    Gather,
    /// To accumulate or widen, the sum is computed in the input and taken from there.
    Scatter {
        add: bool,
    },
    Reduce(Reduce),
    Broadcast {
        root: u32,
    },
    SendRecv {
        to: u32,
        from: u32,
    },
    /// Grouped sends and receives; `table` is where the group keeps the ranges.
    AllToAll {
        table: u32,
    },
    /// No operands: compute waits for the `back`th operation before the one started last.
    Wait {
        back: u32,
    },
}

impl Work {
    pub fn asked(self) -> Asked {
        match self {
            Work::Gather => [0, 0, 0],
            Work::Scatter { add } => [1, u32::from(add), 0],
            Work::Reduce(Reduce::Sum) => [2, 0, 0],
            Work::Reduce(Reduce::Max) => [2, 1, 0],
            Work::Broadcast { root } => [3, root, 0],
            Work::SendRecv { to, from } => [4, to, from],
            Work::Wait { back } => [5, back, 0],
            Work::AllToAll { table } => [6, table, 0],
        }
    }
    pub fn of(asked: Asked) -> Result<Work> {
        Ok(match asked {
            [0, ..] => Work::Gather,
            [1, add, _] => Work::Scatter { add: add != 0 },
            [2, 0, _] => Work::Reduce(Reduce::Sum),
            [2, ..] => Work::Reduce(Reduce::Max),
            [3, root, _] => Work::Broadcast { root },
            [4, to, from] => Work::SendRecv { to, from },
            [5, back, _] => Work::Wait { back },
            [6, table, _] => Work::AllToAll { table },
            other => return Err(Error::op("collective", format!("{other:?} is not an NCCL operation"))),
        })
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

/// An operand's address, elements and type.
type RawOperand = (*mut c_void, usize, DType);

fn at(arg: &Arg) -> RawOperand {
    match arg {
        Arg::In(view) => (view.as_ptr().cast_mut().cast(), view.len(), view.dtype()),
        Arg::InOut(view) | Arg::Out(view) => {
            let view = view.as_view();
            (view.as_ptr().cast_mut().cast(), view.len(), view.dtype())
        }
        _ => (std::ptr::null_mut(), 0, DType::U8),
    }
}

impl Work {
    /// Enqueues the NCCL calls in `stream`. `index`: this rank's index in the group; `pairs`: of an all_to_all.
    pub fn enqueue(
        self,
        operands: &[Arg],
        pairs: &[PairRanges],
        index: usize,
        nccl: &Nccl,
        (comm, stream): (Handle, Stream),
    ) -> c_int {
        let (first, count, dtype) = operands.first().map_or((std::ptr::null_mut(), 0, DType::U8), at);
        let (second, count2, dtype2) = operands.get(1).map_or((first, count, dtype), at);
        let kind = data_type(dtype);
        // SAFETY: the group's calls have checked that both operands hold what the operation needs: one rank's shard is
        // `count2` of a scatter and `count` of a gather. The ring or the graph keeps them alive until it has finished.
        unsafe {
            match self {
                Work::Gather => (nccl.all_gather)(first, second, count, kind, comm, stream),
                Work::Scatter { add } => {
                    let to = if add || dtype2 != dtype { part(first, index, count2, dtype) } else { second };
                    (nccl.reduce_scatter)(first, to, count2, kind, library::SUM, comm, stream)
                }
                Work::Reduce(op) => (nccl.all_reduce)(first, first, count, kind, reduction(op), comm, stream),
                Work::Broadcast { root } => (nccl.broadcast)(first, first, count, kind, root as c_int, comm, stream),
                Work::SendRecv { to, from } => {
                    // Grouped, so that send and receive do not wait for each other.
                    let codes = [
                        (nccl.group_start)(),
                        (nccl.send)(first, count, kind, to as c_int, comm, stream),
                        (nccl.recv)(second, count2, kind, from as c_int, comm, stream),
                        (nccl.group_end)(),
                    ];
                    first_error(codes).unwrap_or(codes[3])
                }
                Work::AllToAll { .. } => {
                    let calls = pairs.iter().zip(0..).flat_map(|((send, recv), peer)| {
                        let from = first.wrapping_byte_add(send.start * dtype.size());
                        let into = second.wrapping_byte_add(recv.start * dtype.size());
                        let sends = || (nccl.send)(from, send.len(), kind, peer, comm, stream);
                        let receives = || (nccl.recv)(into, recv.len(), kind, peer, comm, stream);
                        [(!send.is_empty()).then(sends), (!recv.is_empty()).then(receives)]
                    });
                    let begun = (nccl.group_start)();
                    let wrong = first_error(std::iter::once(begun).chain(calls.flatten()));
                    let end = (nccl.group_end)();
                    wrong.unwrap_or(end)
                }
                Work::Wait { .. } => SUCCESS,
            }
        }
    }
    /// What NCCL cannot do: add or widen the sum, which is in this rank's shard of the input.
    pub fn finish(self, operands: &mut [Arg], index: usize, cuda: &Cuda, stream: &Arc<CudaStream>) -> Result<()> {
        let (Work::Scatter { add }, [Arg::InOut(full), Arg::InOut(shard)]) = (self, operands) else { return Ok(()) };
        if !add && shard.dtype() == full.dtype() {
            return Ok(());
        }
        let own = index * shard.len()..(index + 1) * shard.len();
        cuda.take_on(stream, full.as_view().slice(own), shard.reborrow(), add)
    }
}

/// A group's end returns whether all of it is in progress, but a part's own error takes precedence.
fn first_error(codes: impl IntoIterator<Item = c_int>) -> Option<c_int> {
    codes.into_iter().find(|&code| !matches!(code, SUCCESS | IN_PROGRESS))
}

/// Address of a rank's shard in a full buffer.
fn part(full: *mut c_void, index: usize, count: usize, dtype: DType) -> *mut c_void {
    full.wrapping_byte_add(index * count * dtype.size())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checked against nccl.h.
    #[test]
    fn dtypes_have_the_numbers_of_nccl() {
        let dtypes = [DType::U8, DType::I32, DType::U32, DType::F16, DType::F32, DType::F64, DType::Bf16];
        assert_eq!(dtypes.map(data_type), [1, 2, 3, 6, 7, 8, 9]);
        assert_eq!([reduction(Reduce::Sum), reduction(Reduce::Max)], [0, 2]);
    }

    #[test]
    fn words_say_the_same_work_again() {
        use Work::*;
        let all = [
            Gather,
            Scatter { add: false },
            Scatter { add: true },
            Reduce(super::Reduce::Sum),
            Reduce(super::Reduce::Max),
        ];
        let rest = [Broadcast { root: 3 }, SendRecv { to: 2, from: 1 }, Wait { back: 7 }, AllToAll { table: 4 }];
        for work in all.into_iter().chain(rest) {
            assert_eq!(Work::of(work.asked()).unwrap(), work);
        }
        assert!(Work::of([9, 0, 0]).is_err());
    }
}
