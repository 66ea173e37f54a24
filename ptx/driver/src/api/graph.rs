//! Capture of streams, and graphs.
use super::call::{bound, give};
use crate::capture::{Capture, CapturedCall, Exec, RELAXED, launch};
use crate::code::Code;
use crate::queue::{NodeProgress, NodeRun, PER_THREAD, StreamMark};
use crate::state::{DriverState, MODE};
use std::ffi::c_int;
use std::sync::Arc;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(stream: u64, mode: c_int) -> c_int {
    bound(|state| {
        if !(0..=RELAXED).contains(&mode) {
            return Err(Code::INVALID_VALUE);
        }
        if stream <= PER_THREAD {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let id = state.handle();
        let known = state.streams.get_mut(stream).ok_or(Code::INVALID_HANDLE)?;
        if known.capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        known.capture = Some(id);
        state.captures.insert(id, Capture::begin(stream, mode));
        Ok(())
    })
}
/// Ends the capture, unless called for another stream or thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: u64, graph: *mut u64) -> c_int {
    bound(|state| {
        let Some((id, capture)) = state.capture_of(stream)? else { return Err(Code::ILLEGAL_STATE) };
        if capture.origin != stream {
            capture.invalid = true;
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let (ended, streams): (_, Vec<u64>) = (capture.end(), capture.streams().collect());
        for stream in streams {
            if let Some(stream) = state.streams.get_mut(stream) {
                stream.capture = None;
            }
        }
        state.captures.remove(&id);
        let handle = state.handle();
        let made = ended.map(|made| state.graphs.insert(handle, made)).map(|_| handle);
        unsafe { give(graph, made.unwrap_or(0)) }?;
        made.map(|_| ())
    })
}
/// # Safety
/// As in cuda.h.
unsafe fn status(state: &mut DriverState, stream: u64, status: *mut c_int, id: *mut u64) -> Result<(), Code> {
    let capture = state.capture_of(stream)?.map(|(id, capture)| (id, capture.invalid));
    if !id.is_null() {
        unsafe { give(id, capture.map_or(0, |(id, _)| id)) }?;
    }
    let number = match capture {
        None => 0,
        Some((_, false)) => 1,
        Some((_, true)) => 2,
    };
    unsafe { give(status, number) }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: u64, to: *mut c_int) -> c_int {
    bound(|state| unsafe { status(state, stream, to, std::ptr::null_mut()) })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    bound(|_| {
        // SAFETY: the caller's pointer, as in cuda.h.
        let wanted = unsafe { mode.as_ref() }.copied().filter(|mode| (0..=RELAXED).contains(mode));
        let before = MODE.replace(wanted.ok_or(Code::INVALID_VALUE)?);
        unsafe { give(mode, before) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(exec: *mut u64, graph: u64, _flags: u64) -> c_int {
    bound(|state| {
        let graph = state.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?.clone();
        let handle = state.handle();
        state.execs.insert(handle, Exec { graph, last: None });
        unsafe { give(exec, handle) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut usize) -> c_int {
    bound(|state| {
        let known = state.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?;
        // Nodes have no handles here, so only their number can be queried.
        if nodes.is_null() { unsafe { give(count, known.len()) } } else { Err(Code::NOT_SUPPORTED) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphUpload(exec: u64, stream: u64) -> c_int {
    bound(|state| {
        state.capture_of(stream)?;
        state.execs.get(&exec).map(|_| ()).ok_or(Code::INVALID_VALUE)
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(exec: u64) -> c_int {
    bound(|state| state.execs.remove(&exec).map(|_| ()).ok_or(Code::INVALID_VALUE))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: u64) -> c_int {
    bound(|state| state.graphs.remove(&graph).map(|_| ()).ok_or(Code::INVALID_VALUE))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(exec: u64, stream: u64) -> c_int {
    bound(|state| {
        if state.capture_of(stream)?.is_some() {
            return Err(Code::NOT_SUPPORTED); // nested graphs are not simulated
        }
        let known = state.execs.get(&exec).ok_or(Code::INVALID_VALUE)?;
        let (graph, last) = (known.graph.clone(), known.last.clone());
        let runs = graph.iter().map(|vertex| start(state, &vertex.step)).collect::<Result<Vec<NodeRun>, Code>>()?;
        last.into_iter().for_each(|mark| state.streams.wait(stream, mark));
        let draw = state.streams.draw();
        state.streams.run(stream, launch(graph, runs, draw));
        let mark = state.streams.mark(stream);
        if let Some(exec) = state.execs.get_mut(&exec) {
            exec.last = Some(mark);
        }
        Ok(())
    })
}
/// Starts one vertex of one launch. An event counts as recorded from the launch on.
fn start(state: &mut DriverState, step: &CapturedCall) -> Result<NodeRun, Code> {
    let event = |state: &mut DriverState, event: &u64| {
        let event = state.events.get_mut(event).ok_or(Code::INVALID_HANDLE)?;
        Ok(event.mark.clone())
    };
    Ok(match step {
        CapturedCall::Node(node) => node(),
        CapturedCall::Record(of) => {
            event(state, of)?;
            let mark = Arc::new(StreamMark::default());
            if let Some(event) = state.events.get_mut(of) {
                (event.mark, event.captured) = (Some(mark.clone()), None);
            }
            Box::new(move |memory| {
                mark.pass(memory.spent());
                Ok(NodeProgress::Done)
            })
        }
        CapturedCall::Await(of) => {
            let mark = event(state, of)?;
            let passed = move || mark.as_ref().is_none_or(|mark| mark.passed().is_some());
            Box::new(move |_| Ok(if passed() { NodeProgress::Done } else { NodeProgress::Waits }))
        }
    })
}
