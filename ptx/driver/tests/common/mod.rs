//! A program that uses the driver API, and the same program as a separate process under other settings. Not a test.
#![allow(dead_code)] // each test binary uses its part
use flatshard_simcuda::api::{device::*, event::*, graph::*, launch::*, memory::*, stream::*};
use std::ffi::{CString, c_void};
use std::process::{Command, Output};

/// Adds 1 to n words of 32 bits.
pub const ADD: &str = ".version 8.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 p_x, .param .u32 p_n)
{
    .reg .u64 %x, %at;
    .reg .u32 %i, %n, %v;
    .reg .pred %past;
    ld.param.u64 %x, [p_x];
    ld.param.u32 %n, [p_n];
    mov.u32 %i, %tid.x;
    setp.ge.u32 %past, %i, %n;
    @%past bra DONE;
    mul.wide.u32 %at, %i, 4;
    add.u64 %x, %x, %at;
    ld.global.u32 %v, [%x];
    add.u32 %v, %v, 1;
    st.global.u32 [%x], %v;
DONE:
    ret;
}
";

#[track_caller]
pub fn ok(code: i32) {
    assert_eq!(code, 0);
}
pub fn made<T: Default>(make: impl FnOnce(*mut T) -> i32) -> T {
    let mut value = T::default();
    ok(make(&mut value));
    value
}
pub fn start() {
    // SAFETY: pointers to locals, here and below: each holds what its function writes.
    unsafe {
        ok(cuInit(0));
        ok(cuCtxSetCurrent(made(|to| cuDevicePrimaryCtxRetain(to, 0))));
    }
}
pub fn stream() -> u64 {
    made(|to| unsafe { cuStreamCreate(to, 1) })
}
pub fn event() -> u64 {
    made(|to| unsafe { cuEventCreate(to, 0) })
}
pub fn alloc(words: usize) -> u64 {
    made(|to| unsafe { cuMemAlloc_v2(to, 4 * words) })
}
pub fn set(at: u64, value: u8, words: usize, stream: u64) {
    ok(unsafe { cuMemsetD8Async(at, value, 4 * words, stream) });
}
pub fn copy(to: u64, from: u64, words: usize, stream: u64) {
    ok(unsafe { cuMemcpyDtoDAsync_v2(to, from, 4 * words, stream) });
}
pub fn record(event: u64, stream: u64) {
    ok(unsafe { cuEventRecord(event, stream) });
}
pub fn follow(stream: u64, event: u64) {
    ok(unsafe { cuStreamWaitEvent(stream, event, 0) });
}
pub fn words(at: u64, n: usize, stream: u64) -> Result<Vec<u32>, i32> {
    let mut host = vec![0u32; n];
    match unsafe { cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), at, 4 * n, stream) } {
        0 => Ok(host),
        code => Err(code),
    }
}
pub fn function(ptx: &str, name: &str) -> u64 {
    let (ptx, name) = (CString::new(ptx).unwrap(), CString::new(name).unwrap());
    unsafe {
        let module = made(|to| cuModuleLoadData(to, ptx.as_ptr().cast()));
        made(|to| cuModuleGetFunction(to, module, name.as_ptr()))
    }
}
pub fn add(function: u64, at: u64, n: u32, stream: u64) -> i32 {
    let (mut at, mut n) = (at, n);
    let mut parameters: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut n).cast()];
    let parameters = parameters.as_mut_ptr();
    unsafe { cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, std::ptr::null_mut()) }
}
pub fn begin(stream: u64) {
    ok(unsafe { cuStreamBeginCapture_v2(stream, 1) });
}
/// The graph, instantiated.
pub fn end(stream: u64) -> u64 {
    unsafe {
        let graph = made(|to| cuStreamEndCapture(stream, to));
        let exec = made(|to| cuGraphInstantiateWithFlags(to, graph, 0));
        ok(cuGraphDestroy(graph));
        exec
    }
}

/// Runs one test of this binary as a separate process.
pub fn alone(test: &str, settings: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--include-ignored"]).env("FLATSHARD_SIMCUDA", settings);
    command.env("ALONE", "1").output().unwrap()
}
/// Whether this process was started by [`alone`].
pub fn is_alone() -> bool {
    std::env::var_os("ALONE").is_some()
}
