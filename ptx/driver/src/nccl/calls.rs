//! The collectives, send/recv and groups of nccl.h: checks the arguments, then enqueues. Never moves data: `work` does.
use super::api::{code, find};
use super::code::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, UNHANDLED_CUDA_ERROR};
use super::comm::{NcclComm, complain, lock};
use super::sums::{self, NcclOperation};
use super::work::{CallGroup, NcclCall, NcclCallKind};
use crate::{Node, capturing, enqueue, node};
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// How long a non-blocking call may take before its work is in the stream.
const LATE: Duration = Duration::from_micros(300);

thread_local! {
    /// Nesting depth of open groups on this thread, and their calls.
    static GROUP: RefCell<(usize, Vec<(NcclCall, u64)>)> = const { RefCell::new((0, Vec::new())) };
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let calls = GROUP.with_borrow_mut(|(depth, calls)| match *depth {
        0 => None,
        1 => {
            *depth = 0;
            Some(std::mem::take(calls))
        }
        _ => {
            *depth -= 1;
            Some(Vec::new())
        }
    });
    match calls {
        Some(calls) => start(calls),
        None => {
            complain("ncclGroupEnd: not in a group call.");
            INVALID_USAGE
        }
    }
}

/// Runs one call now, or at the end of its group.
fn ask(call: Result<(NcclCall, u64), c_int>) -> c_int {
    code(call.map(|asked| {
        let single = GROUP.with_borrow_mut(|(depth, calls)| match *depth {
            0 => Some(vec![asked]),
            _ => {
                calls.push(asked);
                None
            }
        });
        single.map_or(SUCCESS, start)
    }))
}

/// Enqueues calls, those of one communicator and stream together.
fn start(mut calls: Vec<(NcclCall, u64)>) -> c_int {
    let mut result = SUCCESS;
    while let Some((first, stream)) = calls.first().cloned() {
        let of = |(call, on): &(NcclCall, u64)| Arc::ptr_eq(&call.comm, &first.comm) && *on == stream;
        let (together, rest): (Vec<_>, Vec<_>) = calls.into_iter().partition(of);
        calls = rest;
        let together: Vec<NcclCall> = together.into_iter().map(|(call, _)| call).collect();
        match give(&first.comm, together, stream) {
            SUCCESS => {}
            code => result = code,
        }
    }
    result
}

/// While a stream captures, keeps the communicator referenced by the graph.
struct GraphHold(Arc<NcclComm>);
impl Drop for GraphHold {
    fn drop(&mut self) {
        self.0.nodes.fetch_sub(1, SeqCst);
    }
}

fn give(comm: &Arc<NcclComm>, calls: Vec<NcclCall>, stream: u64) -> c_int {
    let captured = capturing(stream).unwrap_or(false);
    let held = captured.then(|| {
        comm.nodes.fetch_add(1, SeqCst);
        GraphHold(comm.clone())
    });
    let work: Node = node(move || {
        let _held = &held;
        let mut together = CallGroup::new(&calls);
        Box::new(move |memory| together.step(memory))
    });
    let late = move |_: &Arc<NcclComm>| {
        enqueue(stream, work.clone())
            .map_err(|e| (UNHANDLED_CUDA_ERROR, format!("the stream takes no work: CUDA error {}", e.0)))
    };
    match comm.config.blocking || captured {
        true => match late(comm) {
            Ok(()) => SUCCESS,
            Err((code, why)) => {
                comm.fail(code, &why);
                code
            }
        },
        // Like the real library, on its own thread, while the caller already has the stream.
        false => {
            comm.in_background(move |comm| {
                std::thread::sleep(LATE);
                late(comm)
            });
            IN_PROGRESS
        }
    }
}

/// Refuses what `ArgsCheck` refuses, and buffers that overlap other than in place.
fn collective(
    operation: NcclOperation,
    [source, target]: [u64; 2],
    count: usize,
    [dtype, reduction, root]: [c_int; 3],
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    ask((|| {
        let comm = find(handle)?;
        comm.ready()?;
        let Some(seat) = comm.seat() else { return Err(INVALID_USAGE) };
        let wrong = |what: String| {
            complain(&format!("{operation:?} : {what}"));
            Err(INVALID_ARGUMENT)
        };
        let Some(width) = sums::size(dtype as u64) else { return wrong(format!("invalid type {dtype}")) };
        if !(0..seat.size as c_int).contains(&root) {
            return wrong(format!("invalid root {root} (root should be in the 0..{} range)", seat.size));
        }
        if !(0..5).contains(&reduction) {
            return wrong(format!("invalid reduction operation {reduction}"));
        }
        let (given, got) = operation.elements(count, seat.size);
        let (from, to) = (source..source + (given * width) as u64, target..target + (got * width) as u64);
        let own = (seat.rank * count * width) as u64;
        let in_place = match operation {
            NcclOperation::AllGather => source == target + own,
            NcclOperation::ReduceScatter => target == source + own,
            _ => source == target,
        };
        if !in_place && from.start < to.end && to.start < from.end {
            return wrong(format!("{from:x?} and {to:x?} overlap, but not in place"));
        }
        let known = |at: u64| {
            let all = lock(&comm.registered);
            all.iter().find(|of| (of.start..of.start + of.bytes as u64).contains(&at)).copied()
        };
        let registered = u64::from(known(source).is_some()) << 8 | u64::from(known(target).is_some()) << 9;
        // What peers access must have the same offset in the windows of all ranks, so ranks compare it: 0 is none.
        let accessed = if operation == NcclOperation::ReduceScatter { source } else { target };
        let offset = known(accessed).filter(|of| of.window).map_or(0, |of| (accessed - of.start + 1) << 10);
        let reduction = reduction as u64 | registered | offset;
        let what = NcclCallKind::Collective { operation, reduction, root: root as u64 };
        let comm = comm.clone();
        Ok((NcclCall { comm, what, source, target, count, dtype: dtype as u64 }, stream as u64))
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    collective(NcclOperation::AllGather, [source as u64, target as u64], count, [dtype, 0, 0], comm, stream)
}
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    reduction: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    collective(NcclOperation::ReduceScatter, [source as u64, target as u64], count, [dtype, reduction, 0], comm, stream)
}
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    reduction: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    collective(NcclOperation::AllReduce, [source as u64, target as u64], count, [dtype, reduction, 0], comm, stream)
}
#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    collective(NcclOperation::Broadcast, [source as u64, target as u64], count, [dtype, 0, root], comm, stream)
}

fn post(
    sends: bool,
    at: u64,
    count: usize,
    dtype: c_int,
    peer: c_int,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    ask((|| {
        let comm = find(handle)?;
        comm.ready()?;
        let Some(seat) = comm.seat() else { return Err(INVALID_USAGE) };
        if sums::size(dtype as u64).is_none() || !(0..seat.size as c_int).contains(&peer) {
            complain(&format!("{} : invalid type {dtype} or peer {peer}", if sends { "Send" } else { "Recv" }));
            return Err(INVALID_ARGUMENT);
        }
        let peer = peer as usize;
        let what = if sends { NcclCallKind::Send { to: peer } } else { NcclCallKind::Receive { from: peer } };
        let comm = comm.clone();
        Ok((NcclCall { comm, what, source: at, target: at, count, dtype: dtype as u64 }, stream as u64))
    })())
}
#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    source: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    post(true, source as u64, count, dtype, peer, comm, stream)
}
#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    target: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    post(false, target as u64, count, dtype, peer, comm, stream)
}
