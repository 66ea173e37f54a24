//! Faults are reported and persist: addresses, sizes, shapes, exhausted memory. Faults that lose the context run in
//! separate processes.
use crate::common::*;
use flatshard_simcuda::api::{device::*, launch::*, memory::*, stream::*};
use std::ffi::CString;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

/// Runs in a process of its own, which must lose the context with these messages.
#[track_caller]
fn loses(test: &str, settings: &str, words: &[&str]) {
    let out = alone(&format!("faults::{test}"), settings);
    let (said, results) = (String::from_utf8_lossy(&out.stderr), String::from_utf8_lossy(&out.stdout));
    assert!(out.status.success(), "{results}{said}");
    for words in words {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}
/// The code of this wait and of everything after it.
fn lost(stream: u64, code: i32) {
    assert_eq!(unsafe { cuStreamSynchronize(stream) }, code);
    assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 16) }, code);
    assert_eq!(unsafe { cuCtxSynchronize() }, code);
    ok(unsafe { cuCtxGetCurrent(&mut 0) }); // as the real one: needs nothing from the GPU
}

#[test]
fn a_kernel_that_runs_off_its_memory_loses_the_context() {
    if !is_alone() {
        let words = ["out of bounds: add at add.ptx:", "bytes 64..68 of 'allocation 1 (64 bytes)'"];
        return loses("a_kernel_that_runs_off_its_memory_loses_the_context", "", &words);
    }
    start();
    let (s, x) = (stream(), alloc(16));
    set(x, 0, 16, s);
    ok(add(function(ADD, "add"), x, 32, s));
    lost(s, ILLEGAL_ADDRESS);
}
#[test]
fn memory_that_nothing_has_written_is_not_read() {
    if !is_alone() {
        let words = ["uninitialized read: add", "'allocation 1 (128 bytes)'"];
        return loses("memory_that_nothing_has_written_is_not_read", "", &words);
    }
    start();
    let (s, x) = (stream(), alloc(32));
    set(x, 0, 8, s);
    ok(add(function(ADD, "add"), x, 32, s));
    lost(s, 719);
}
#[test]
fn memory_that_was_freed_is_known_as_such() {
    if !is_alone() {
        return loses("memory_that_was_freed_is_known_as_such", "", &["'allocation 1 (128 bytes), freed'"]);
    }
    start();
    let (s, x) = (stream(), alloc(32));
    set(x, 0, 32, s);
    ok(unsafe { cuMemFree_v2(x) });
    assert_eq!(unsafe { cuMemFree_v2(x) }, INVALID_VALUE);
    assert_eq!(unsafe { cuMemsetD8Async(x, 0, 4, s) }, INVALID_VALUE);
    assert!(alloc(32) > x);
    ok(add(function(ADD, "add"), x, 32, s));
    lost(s, ILLEGAL_ADDRESS);
}
#[test]
fn a_planted_fault_is_one() {
    if !is_alone() {
        return loses("a_planted_fault_is_one", "fault=2", &["planted fault: out of bounds: add"]);
    }
    start();
    let (s, x, add_one) = (stream(), alloc(32), function(ADD, "add"));
    set(x, 0, 32, s);
    ok(add(add_one, x, 32, s));
    ok(unsafe { cuStreamSynchronize(s) });
    ok(add(add_one, x, 32, s));
    lost(s, ILLEGAL_ADDRESS);
}
#[test]
fn with_launch_blocking_the_launch_itself_says_so() {
    if !is_alone() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "faults::with_launch_blocking_the_launch_itself_says_so"]);
        command.envs([("ALONE", "1"), ("CUDA_LAUNCH_BLOCKING", "1"), ("FLATSHARD_SIMCUDA", "fault=1")]);
        return assert!(command.output().unwrap().status.success());
    }
    start();
    assert_eq!(add(function(ADD, "add"), alloc(32), 32, stream()), ILLEGAL_ADDRESS);
}
#[test]
fn memory_ends_where_the_machine_says() {
    if !is_alone() {
        return loses("memory_ends_where_the_machine_says", "bytes=4096,oom=4", &[]);
    }
    start();
    let x = alloc(512);
    assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 4096) }, OUT_OF_MEMORY);
    let (mut free, mut total) = (0, 0);
    ok(unsafe { cuMemGetInfo_v2(&mut free, &mut total) });
    assert_eq!((free, total, x % 256, x % 512), (2048, 4096, 0, 256));
    alloc(4);
    assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 16) }, OUT_OF_MEMORY, "the fourth allocation is planted to fail");
    alloc(4);
}

#[test]
fn shapes_that_cannot_be_launched_are_refused_at_the_call() {
    start();
    let (add_one, x, s) = (function(ADD, "add"), alloc(32), stream());
    let launch = |grid: [u32; 3], block: [u32; 3], shared| {
        let (mut x, mut n) = (x, 32u32);
        let mut parameters = [(&raw mut x).cast(), (&raw mut n).cast()];
        let ([gx, gy, gz], [bx, by, bz], at) = (grid, block, parameters.as_mut_ptr());
        unsafe { cuLaunchKernel(add_one, gx, gy, gz, bx, by, bz, shared, s, at, std::ptr::null_mut()) }
    };
    assert_eq!(launch([0, 1, 1], [32, 1, 1], 0), INVALID_VALUE);
    assert_eq!(launch([1, 65536, 1], [32, 1, 1], 0), INVALID_VALUE);
    assert_eq!(launch([1, 1, 1], [1025, 1, 1], 0), INVALID_VALUE);
    assert_eq!(launch([1, 1, 1], [32, 1, 1], 49 << 10), INVALID_VALUE, "without asking for more than 48 KiB");
    ok(unsafe { cuFuncSetAttribute(add_one, 8, 100 << 10) });
    set(x, 0, 32, s);
    ok(launch([1, 1, 1], [32, 1, 1], 49 << 10));
    assert_eq!(words(x, 32, s), Ok(vec![1; 32]));
    assert_eq!(unsafe { cuFuncSetAttribute(add_one, 8, 164 << 10) }, INVALID_VALUE, "an sm_80 has 163 KiB");
}

/// The compiler's message is written to the requested log.
#[test]
fn what_does_not_compile_says_why() {
    start();
    let load = |ptx: &str| {
        let (ptx, mut module, mut log) = (CString::new(ptx).unwrap(), 0, [1u8; 200]);
        let (mut options, mut values) = ([5, 6], [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(200)]);
        let at = (options.as_mut_ptr(), values.as_mut_ptr());
        let code = unsafe { cuModuleLoadDataEx(&mut module, ptx.as_ptr().cast(), 2, at.0, at.1) };
        let end = log.iter().position(|&b| b == 0).unwrap_or(0);
        (code, String::from_utf8_lossy(&log[..end]).into_owned())
    };
    assert_eq!(load(&ADD.replace("sm_80", "sm_90a")).0, 209);
    assert_eq!(load(&ADD.replace(".version 8.0", ".version 9.9")).0, 222);
    let (code, log) = load(&ADD.replace("mul.wide.u32", "mul.wild.u32"));
    assert!(code == 218 && log.contains("mul.wild.u32"), "{code}: {log}");
}

#[test]
fn tensor_maps_hold_to_the_drivers_limits() {
    #[repr(C, align(64))]
    struct Map([u8; 129]);
    let mut map = Map([0; 129]);
    start();
    let x = alloc(64 * 64);
    let mut encode = |offset: usize, address: u64, stride: u64, tile: u32| {
        let (sizes, tile) = ([64u64, 64], [tile, 8]);
        let to = map.0[offset..].as_mut_ptr().cast();
        let at = std::ptr::without_provenance_mut(address as usize);
        unsafe {
            cuTensorMapEncodeTiled(to, 9, 2, at, sizes.as_ptr(), &stride, tile.as_ptr(), [1u32; 2].as_ptr(), 0, 3, 3, 0)
        }
    };
    ok(encode(0, x, 128, 64));
    assert_eq!(encode(1, x, 128, 64), INVALID_VALUE, "the map must be aligned to 64 bytes");
    assert_eq!(encode(0, x + 8, 128, 64), INVALID_VALUE, "the tensor must be aligned to 16 bytes");
    assert_eq!(encode(0, x, 120, 64), INVALID_VALUE, "strides must be multiples of 16 bytes");
    assert_eq!(encode(0, x, 128, 72), INVALID_VALUE, "a row of the box must fit the swizzle's 128 bytes");
}
