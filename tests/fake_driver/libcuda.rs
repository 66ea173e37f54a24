//! A driver that answers what is asked before anything starts, and knows no more: FAKE_CUDA holds what it says, as numbers with commas
//! between: CUDA's version, the result of cuInit, how many GPUs, their architecture, their bytes.
#![crate_type = "cdylib"]
use std::ffi::{c_char, c_int};

fn said(index: usize) -> u64 {
    std::env::var("FAKE_CUDA").unwrap().split(',').nth(index).unwrap().parse().unwrap()
}
/// # Safety
/// `to` can be written.
unsafe fn give<T>(to: *mut T, value: T) -> c_int {
    unsafe { to.write(value) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    unsafe { give(version, said(0) as c_int) }
}
#[unsafe(no_mangle)]
extern "C" fn cuInit(_: u32) -> c_int {
    said(1) as c_int
}
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { give(count, said(2) as c_int) }
}
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    unsafe { give(device, ordinal) }
}
/// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR is 75, .._MINOR 76.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _: c_int) -> c_int {
    let arch = said(3) as c_int;
    unsafe { give(value, if attribute == 75 { arch / 10 } else { arch % 10 }) }
}
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _: c_int) -> c_int {
    let text = c"Pretended GPU".to_bytes_with_nul();
    assert!(len as usize >= text.len());
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
    0
}
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> c_int {
    unsafe { give(bytes, said(4) as usize) }
}
