//! Events: recorded in a stream, waited for by streams and by the host; the time between two.
use super::call::{bound, give, waiting};
use crate::capture::CapturedCall;
use crate::code::{Code, CuResult};
use crate::queue::{PER_THREAD, StreamMark};
use crate::state::{DriverEvent, DriverState};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

/// CU_EVENT_DISABLE_TIMING; CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL.
const NO_TIMING: c_uint = 2;
const EXTERNAL: c_uint = 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(to: *mut u64, flags: c_uint) -> c_int {
    bound(|state| {
        let handle = state.handle();
        state.events.insert(handle, DriverEvent { timing: flags & NO_TIMING == 0, ..DriverEvent::default() });
        unsafe { give(to, handle) }
    })
}
/// Waits that were already enqueued still proceed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    bound(|state| state.events.remove(&event).map(|_| ()).ok_or(Code::INVALID_HANDLE))
}

fn known(state: &mut DriverState, event: u64) -> CuResult<&mut DriverEvent> {
    state.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)
}

fn record(state: &mut DriverState, event: u64, stream: u64, flags: c_uint) -> CuResult {
    known(state, event)?;
    if let Some((id, capture)) = state.capture_of(stream)? {
        if flags & EXTERNAL != 0 {
            return capture.add(stream, CapturedCall::Record(event));
        }
        if capture.invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let front = capture.front(stream);
        *known(state, event)? =
            DriverEvent { captured: Some((id, front)), mark: None, timing: known(state, event)?.timing };
        return Ok(());
    }
    let mark = state.streams.mark(stream);
    let event = known(state, event)?;
    (event.mark, event.captured) = (Some(mark), None);
    Ok(())
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    bound(|state| record(state, event, stream, 0))
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecordWithFlags(event: u64, stream: u64, flags: c_uint) -> c_int {
    bound(|state| record(state, event, stream, flags))
}

fn wait(state: &mut DriverState, stream: u64, event: u64, flags: c_uint) -> CuResult {
    let DriverEvent { mark, captured, .. } = known(state, event)?;
    let (mark, captured) = (mark.clone(), captured.clone());
    if state.forgets_wait() {
        return Ok(());
    }
    let own = state.capture_of(stream)?.map(|(id, _)| id);
    match (own, captured) {
        (None, None) => {
            mark.into_iter().for_each(|mark| state.streams.wait(stream, mark));
            Ok(())
        }
        // The stream joins the capture, or adds dependencies in it.
        (_, Some((id, front))) if own.is_none_or(|own| own == id) => {
            let capture = state.captures.get_mut(&id).ok_or(Code::CAPTURED_EVENT)?;
            if capture.invalid {
                return Err(Code::STREAM_CAPTURE_INVALIDATED);
            }
            if stream <= PER_THREAD {
                capture.invalid = true;
                return Err(Code::STREAM_CAPTURE_IMPLICIT);
            }
            capture.join(stream, &front);
            let stream = state.streams.get_mut(stream).ok_or(Code::INVALID_HANDLE)?;
            stream.capture = Some(id);
            Ok(())
        }
        (Some(own), captured) => {
            let capture = state.captures.get_mut(&own).ok_or(Code::INVALID_HANDLE)?;
            if captured.is_none() && flags & EXTERNAL != 0 {
                return capture.add(stream, CapturedCall::Await(event));
            }
            capture.invalid = true;
            Err(if captured.is_some() { Code::STREAM_CAPTURE_MERGE } else { Code::STREAM_CAPTURE_ISOLATION })
        }
        (None, Some(_)) => Err(Code::CAPTURED_EVENT),
    }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) -> c_int {
    bound(|state| wait(state, stream, event, flags))
}

/// The event's last record. Without one, it counts as completed. A captured record cannot be queried.
fn last(state: &mut DriverState, event: u64) -> CuResult<Option<Arc<StreamMark>>> {
    let event = known(state, event)?;
    let (captured, mark) = (event.captured.is_some(), event.mark.clone());
    if captured {
        return Err(Code::CAPTURED_EVENT);
    }
    state.uncaptured()?;
    Ok(mark)
}
/// Runs a step, because a caller that queries gives others time: see [Note: progress] of `state`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: u64) -> c_int {
    bound(|state| {
        let Some(mark) = last(state, event)? else { return Ok(()) };
        if mark.passed().is_none() {
            state.step()?;
        }
        mark.passed().map(|_| ()).ok_or(Code::NOT_READY)
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: u64) -> c_int {
    waiting(|state| Ok(last(state, event)?.into_iter().collect()))
}
/// # Safety
/// As in cuda.h.
unsafe fn elapsed(ms: *mut f32, from: u64, to: u64) -> c_int {
    bound(|state| {
        let mut times = [None; 2];
        for (time, event) in times.iter_mut().zip([from, to]) {
            let event = known(state, event)?;
            if !event.timing {
                return Err(Code::INVALID_HANDLE);
            }
            let mark = event.mark.as_ref().ok_or(Code::INVALID_HANDLE)?;
            *time = Some(mark.passed().ok_or(Code::NOT_READY)?);
        }
        let [Some(from), Some(to)] = times else { return Err(Code::NOT_READY) };
        let seconds =
            to.saturating_duration_since(from).as_secs_f64() - from.saturating_duration_since(to).as_secs_f64();
        unsafe { give(ms, (seconds * 1e3) as f32) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(ms: *mut f32, from: u64, to: u64) -> c_int {
    unsafe { elapsed(ms, from, to) }
}
/// The name since CUDA 12.8.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(ms: *mut f32, from: u64, to: u64) -> c_int {
    unsafe { elapsed(ms, from, to) }
}
