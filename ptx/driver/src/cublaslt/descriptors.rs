//! The functions of cublasLt.h that make what products are described with, with its names and numbers: the library's
//! handle, operations, matrix layouts, preferences. Only this file and `api` dereference callers' pointers. Never
//! computes. Attribute sizes are those of cuBLASLt 13.4.
use super::choose::{DEFAULT, MatrixLayout, OperandsApart, SCALED};
use super::settings::LtSettings;
use crate::say;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `cublasStatus_t`.
pub const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
pub const INVALID_VALUE: c_int = 7;
pub const EXECUTION_FAILED: c_int = 13;
pub const NOT_SUPPORTED: c_int = 15;

/// Larger alignments are treated alike.
pub const ALIGNED: u32 = 256;

/// The object behind a handle.
#[derive(Clone, Copy)]
pub enum Object {
    Library,
    Operation(ProductOperation),
    Layout(MatrixLayout),
    Preference(ProductPreference),
}
#[derive(Clone, Copy)]
pub struct ProductOperation {
    pub compute: c_int,
    pub scale: c_int,
    pub pointer_mode: c_int,
    pub transposed: [c_int; 2],
    pub epilogue: u32,
    pub apart: OperandsApart,
    pub aux_ld: i64,
    pub scales: [c_int; 2],
}
#[derive(Clone, Copy)]
pub struct ProductPreference {
    pub workspace: u64,
    /// Minimum alignments of A, B, C, D.
    pub aligned: [u32; 4],
}

/// Live handles. A handle is a number and is never dereferenced.
static OBJECTS: Mutex<(usize, Option<HashMap<usize, Object>>)> = Mutex::new((0, None));

fn objects() -> MutexGuard<'static, (usize, Option<HashMap<usize, Object>>)> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}
/// # Safety
/// `out` can hold a handle.
unsafe fn make(out: *mut *mut c_void, object: Object) -> c_int {
    let mut objects = objects();
    objects.0 += 1;
    let handle = 0x30_0000 + 64 * objects.0;
    objects.1.get_or_insert_default().insert(handle, object);
    // SAFETY: the caller's handle.
    unsafe { *out = handle as *mut c_void };
    SUCCESS
}
pub fn find(handle: *mut c_void) -> Result<Object, c_int> {
    let object = objects().1.as_ref().and_then(|all| all.get(&(handle as usize)).copied());
    object.ok_or_else(|| {
        say(&format!("cuBLASLt: {handle:?} is not a live handle"));
        INVALID_VALUE
    })
}
fn change(handle: *mut c_void, change: impl FnOnce(&mut Object) -> c_int) -> c_int {
    objects().1.as_mut().and_then(|all| all.get_mut(&(handle as usize))).map_or(INVALID_VALUE, change)
}
fn destroy(handle: *mut c_void, is: fn(&Object) -> bool) -> c_int {
    if handle.is_null() {
        return SUCCESS;
    }
    let mut objects = objects();
    let Some(all) = objects.1.as_mut() else { return INVALID_VALUE };
    match all.get(&(handle as usize)) {
        Some(object) if is(object) => {
            all.remove(&(handle as usize));
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}
pub fn operation(handle: *mut c_void) -> Result<ProductOperation, c_int> {
    if let Object::Operation(operation) = find(handle)? { Ok(operation) } else { Err(INVALID_VALUE) }
}
pub fn layout(handle: *mut c_void) -> Result<MatrixLayout, c_int> {
    if let Object::Layout(layout) = find(handle)? { Ok(layout) } else { Err(INVALID_VALUE) }
}
/// # Safety
/// `out` can hold a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(out: *mut *mut c_void) -> c_int {
    if crate::current_gpu().is_err() {
        return NOT_INITIALIZED;
    }
    // SAFETY: as above.
    unsafe { make(out, Object::Library) }
}
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(handle: *mut c_void) -> c_int {
    if handle.is_null() { INVALID_VALUE } else { destroy(handle, |object| matches!(object, Object::Library)) }
}
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    LtSettings::get().version
}
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: c_int) -> *const c_char {
    let text = match status {
        SUCCESS => c"success",
        NOT_INITIALIZED => c"the library was not initialized",
        INVALID_VALUE => c"an unsupported value or parameter was passed to the function",
        EXECUTION_FAILED => c"the GPU program failed to execute",
        NOT_SUPPORTED => c"the requested functionality is not supported",
        _ => c"<unknown>",
    };
    text.as_ptr()
}

/// # Safety
/// `out` can hold a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(out: *mut *mut c_void, compute: c_int, scale: c_int) -> c_int {
    let (epilogue, transposed) = (DEFAULT, [0; 2]);
    let (apart, scales) = (OperandsApart::default(), [0; 2]);
    let new = ProductOperation { compute, scale, pointer_mode: 0, transposed, epilogue, apart, aux_ld: 0, scales };
    // SAFETY: as above.
    unsafe { make(out, Object::Operation(new)) }
}
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulDescDestroy(handle: *mut c_void) -> c_int {
    destroy(handle, |object| matches!(object, Object::Operation(_)))
}

/// An attribute of `size` bytes, if the caller passes that size; at most a word.
///
/// # Safety
/// `from` holds `bytes` bytes.
unsafe fn value(size: usize, from: *const c_void, bytes: usize) -> Option<u64> {
    if bytes != size || from.is_null() {
        return None;
    }
    let mut word = [0; 8];
    // SAFETY: `bytes` long, as the caller guarantees.
    word[..size].copy_from_slice(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), size) });
    Some(u64::from_le_bytes(word))
}

/// # Safety
/// `from` holds `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    let size = match attribute {
        0..=4 | 7 => 4,
        8 | 10..=12 | 17 | 18 => 8,
        31 | 32 if LtSettings::get().version >= SCALED.1 => 4,
        _ => return INVALID_VALUE,
    };
    // SAFETY: as above.
    let Some(value) = (unsafe { value(size, from, bytes) }) else { return INVALID_VALUE };
    change(handle, |object| {
        let Object::Operation(operation) = object else { return INVALID_VALUE };
        match attribute {
            0 => operation.compute = value as c_int,
            1 => operation.scale = value as c_int,
            2 => operation.pointer_mode = value as c_int,
            3 => operation.transposed[0] = value as c_int,
            4 => operation.transposed[1] = value as c_int,
            7 => operation.epilogue = value as u32,
            8 => operation.apart.bias = value,
            11 => operation.apart.aux = value,
            12 => operation.aux_ld = value as i64,
            17 | 18 => operation.apart.scales[attribute as usize - 17] = value,
            31 | 32 => operation.scales[attribute as usize - 31] = value as c_int,
            _ => {}
        }
        SUCCESS
    })
}

/// # Safety
/// `out` can hold a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    out: *mut *mut c_void,
    dtype: c_int,
    rows: u64,
    columns: u64,
    ld: i64,
) -> c_int {
    // SAFETY: as above.
    unsafe { make(out, Object::Layout(MatrixLayout { dtype, rows, columns, ld })) }
}
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatrixLayoutDestroy(handle: *mut c_void) -> c_int {
    destroy(handle, |object| matches!(object, Object::Layout(_)))
}

/// # Safety
/// `out` can hold a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(out: *mut *mut c_void) -> c_int {
    // SAFETY: as above.
    unsafe { make(out, Object::Preference(ProductPreference { workspace: 0, aligned: [ALIGNED; 4] })) }
}
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmulPreferenceDestroy(handle: *mut c_void) -> c_int {
    destroy(handle, |object| matches!(object, Object::Preference(_)))
}
/// # Safety
/// `from` holds `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    let size = match attribute {
        1 => 8,
        0 | 3 | 5..=9 => 4,
        _ => return INVALID_VALUE,
    };
    // SAFETY: as above.
    let Some(value) = (unsafe { value(size, from, bytes) }) else { return INVALID_VALUE };
    change(handle, |object| {
        let Object::Preference(preference) = object else { return INVALID_VALUE };
        match attribute {
            1 => preference.workspace = value,
            5..=8 => preference.aligned[attribute as usize - 5] = value as u32,
            _ => {}
        }
        SUCCESS
    })
}
