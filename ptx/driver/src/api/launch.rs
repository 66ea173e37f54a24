//! Modules, functions, launches, tensor maps.
use super::call::{bound, call, give, number};
use crate::code::say;
use crate::code::{Code, CuResult};
use crate::kernels::{GridShape, compile, remarks, shared_most};
use crate::state::{DriverState, lock, wait};
use flatshard_ptx::emulate::{Swizzle, TensorMap};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `CUjit_option`.
const INFO_LOG: c_int = 3;
const ERROR_LOG: c_int = 5;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_void) -> c_int {
    unsafe { cuModuleLoadDataEx(module, image, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}
/// Takes PTX text; of the options, uses the log buffers for errors and for information.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut u64,
    image: *const c_void,
    count: c_uint,
    options: *mut c_int,
    values: *mut *mut c_void,
) -> c_int {
    let code = bound(|state| state.uncaptured());
    if code != 0 {
        return code;
    }
    if image.is_null() || module.is_null() {
        return Code::INVALID_VALUE.0;
    }
    // SAFETY: NUL-terminated text, as cuda.h requires of PTX.
    let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
    let Ok(text) = text.to_str() else { return Code::INVALID_PTX.0 };
    let settings = lock().settings.clone();
    let log = |buffer: c_int, text: String| {
        let option = |wanted: c_int| {
            // SAFETY: one option per value.
            let at = (0..count as usize).find(|&i| unsafe { *options.add(i) } == wanted)?;
            Some(unsafe { *values.add(at) })
        };
        // A log's size is the option after its buffer.
        if let (Some(buffer), Some(room)) = (option(buffer), option(buffer + 1)) {
            let mut text = text.into_bytes();
            text.truncate((room as usize).saturating_sub(1));
            text.push(0);
            // SAFETY: the buffer has the size given by the option.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len().min(room as usize)) };
        }
    };
    // Without the lock, because programs compile on several threads.
    match compile(&settings, text) {
        Ok(kernels) => {
            log(INFO_LOG, remarks(&settings, text));
            call(|state| {
                let handle = state.handle();
                state.kernels.add(handle, kernels);
                unsafe { give(module, handle) }
            })
        }
        Err((code, errors)) => {
            log(ERROR_LOG, errors);
            code.0
        }
    }
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: u64) -> c_int {
    bound(|state| {
        state.uncaptured()?;
        state.kernels.remove(module)
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> c_int {
    bound(|state| {
        if name.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: a NUL-terminated string, as cuda.h requires.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::NOT_FOUND)?;
        let fresh = state.handle();
        let handle = state.kernels.function(module, name, fresh)?;
        unsafe { give(function, handle) }
    })
}
/// `CUfunction_attribute`: maximum threads per block, static shared bytes, registers, and the dynamic shared bytes
/// allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: u64) -> c_int {
    bound(|state| {
        let function = state.kernels.get(function)?;
        let answer = match attribute {
            0 => function.threads(),
            1 => function.shared(),
            2 | 3 => 0, // constants and local memory, which the emulator lacks
            4 => function.registers(),
            8 => function.dynamic,
            _ => return Err(Code::INVALID_VALUE),
        };
        unsafe { give(value, answer as c_int) }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(function: u64, attribute: c_int, value: c_int) -> c_int {
    bound(|state| {
        let most = shared_most(state.settings.arch);
        let function = state.kernels.get_mut(function)?;
        let value = usize::try_from(value).map_err(|_| Code::INVALID_VALUE)?;
        match attribute {
            8 if function.shared() + value <= most => {
                function.dynamic = value;
                Ok(())
            }
            _ => Err(Code::INVALID_VALUE),
        }
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: u64,
    threads: c_int,
    dynamic: usize,
) -> c_int {
    bound(|state| {
        let arch = state.settings.arch;
        let function = state.kernels.get(function)?;
        let threads = usize::try_from(threads).ok().filter(|&n| n > 0).ok_or(Code::INVALID_VALUE)?;
        unsafe { give(blocks, function.blocks(arch, threads, dynamic) as c_int) }
    })
}

/// # Safety
/// As in cuda.h: one pointer per parameter of the function, each to that parameter's bytes.
unsafe fn launch(
    state: &mut DriverState,
    function: u64,
    shape: GridShape,
    stream: u64,
    parameters: *mut *mut c_void,
) -> CuResult {
    let function = state.kernels.get(function)?.clone();
    let mut arguments = vec![];
    for (i, bytes) in function.parameters().into_iter().enumerate() {
        // SAFETY: upheld by the caller.
        let at = if parameters.is_null() { std::ptr::null_mut() } else { unsafe { *parameters.add(i) } };
        if at.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: upheld by the caller; the call reads the parameters before it returns, as in CUDA.
        arguments.push(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), bytes) }.to_vec());
    }
    state.launches += 1;
    let planted = state.settings.fault == Some(state.launches);
    if state.settings.trace {
        let maps = arguments.iter().filter(|bytes| bytes.len() == size_of::<[u8; 128]>()).count();
        say(&format!("launch {} of {} with {maps} tensor maps", state.launches, function.kernel().name));
    }
    let node = function.launch(shape, &arguments)?;
    state.enqueue(stream, if planted { function.faulty() } else { node })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: u64,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> c_int {
    let mut mark = None;
    let code = bound(|state| {
        if !extra.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        unsafe { launch(state, function, GridShape { grid, block, shared: shared as usize }, stream, parameters) }?;
        if state.settings.blocking && state.capture_of(stream)?.is_none() {
            mark = Some(state.streams.mark(stream));
        }
        Ok(())
    });
    if code != 0 { code } else { number(wait(mark.as_slice())) }
}

/// `CUtensorMap` must be aligned to 64 bytes.
const MAP_ALIGNED: usize = 64;

/// Writes the emulator's own 128 bytes. What a real driver refuses is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut [u8; 128],
    data_type: c_int,
    rank: c_uint,
    address: *mut c_void,
    sizes: *const u64,
    strides: *const u64,
    tile: *const c_uint,
    steps: *const c_uint,
    interleave: c_int,
    swizzle: c_int,
    promotion: c_int,
    fill: c_int,
) -> c_int {
    let encode = || {
        let element = match data_type {
            0 => 1,
            1 | 6 | 9 => 2,
            2 | 3 | 7 | 10 | 11 | 12 => 4,
            4 | 5 | 8 => 8,
            _ => return Err(Code::INVALID_VALUE),
        };
        let swizzle = match swizzle {
            0 => Swizzle::None,
            1 => Swizzle::B32,
            2 => Swizzle::B64,
            3 => Swizzle::B128,
            _ => return Err(Code::INVALID_VALUE),
        };
        let missing = sizes.is_null() || strides.is_null() && rank > 1 || tile.is_null() || steps.is_null();
        if missing || !(1..=5).contains(&rank) || !(map as usize).is_multiple_of(MAP_ALIGNED) {
            return Err(Code::INVALID_VALUE);
        }
        if interleave != 0 || fill != 0 || !(0..=3).contains(&promotion) {
            return Err(Code::INVALID_VALUE);
        }
        let rank = rank as usize;
        // SAFETY: `rank` entries each, one less for strides, as in cuda.h.
        let (sizes, tile, steps) = unsafe {
            let of = |from: *const c_uint| std::slice::from_raw_parts(from, rank).to_vec();
            (std::slice::from_raw_parts(sizes, rank).to_vec(), of(tile), of(steps))
        };
        // SAFETY: as above.
        let strides = if rank > 1 { unsafe { std::slice::from_raw_parts(strides, rank - 1) }.to_vec() } else { vec![] };
        if steps.iter().any(|&step| step != 1) {
            return Err(Code::NOT_SUPPORTED); // the emulator has no element strides
        }
        let encoded = TensorMap { address: address as u64, element, sizes, strides, tile, swizzle }.encode();
        let bytes = encoded.map_err(|what| {
            say(&what);
            Code::INVALID_VALUE
        })?;
        unsafe { give(map, bytes) }
    };
    call(|_| encode())
}
