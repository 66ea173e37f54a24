//! The functions of cublasLt.h that products use, with its names and numbers. Only this file dereferences callers'
//! pointers; the call reads alpha and beta from host memory. Attribute sizes are those of cuBLASLt 13.4.
use super::choose::{DEFAULT, MatrixLayout, OperandsApart, Problem, Refusal, SCALED};
use super::product::LtProduct;
use super::settings::LtSettings;
use crate::{enqueue, node, say};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `cublasStatus_t`.
const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

/// Alignment of the workspace.
const WORKSPACE: u64 = 256;
/// Larger alignments are treated alike.
const ALIGNED: u32 = 256;

/// The object behind a handle.
#[derive(Clone, Copy)]
enum Object {
    Library,
    Operation(ProductOperation),
    Layout(MatrixLayout),
    Preference(ProductPreference),
}
#[derive(Clone, Copy)]
struct ProductOperation {
    compute: c_int,
    scale: c_int,
    pointer_mode: c_int,
    transposed: [c_int; 2],
    epilogue: u32,
    apart: OperandsApart,
    aux_ld: i64,
    scales: [c_int; 2],
}
#[derive(Clone, Copy)]
struct ProductPreference {
    workspace: u64,
    /// Minimum alignments of A, B, C, D.
    aligned: [u32; 4],
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
fn find(handle: *mut c_void) -> Result<Object, c_int> {
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
fn operation(handle: *mut c_void) -> Result<ProductOperation, c_int> {
    if let Object::Operation(operation) = find(handle)? { Ok(operation) } else { Err(INVALID_VALUE) }
}
fn layout(handle: *mut c_void) -> Result<MatrixLayout, c_int> {
    if let Object::Layout(layout) = find(handle)? { Ok(layout) } else { Err(INVALID_VALUE) }
}
fn status(done: Result<(), c_int>) -> c_int {
    done.err().unwrap_or(SUCCESS)
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

/// `cublasLtMatmulAlgo_t`: opaque to the caller. The problem it was chosen for; alignments of A, B, C, D, bias and aux
/// as powers of two; bytes of workspace.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Algorithm {
    mark: u64,
    problem: u64,
    aligned: u64,
    workspace: u64,
    /// Which of the problem's algorithms.
    index: u64,
    rest: [u64; 3],
}
const CHOSEN: u64 = 0x5349_4d4c_545f_3031;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct AlgorithmChoice {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

fn chosen(algorithm: Algorithm) -> AlgorithmChoice {
    let workspace = algorithm.workspace as usize;
    AlgorithmChoice { algorithm, workspace, state: SUCCESS, waves: 1.0, reserved: [0; 4] }
}
fn digest(problem: &Problem) -> u64 {
    let mut hasher = DefaultHasher::new();
    problem.hash(&mut hasher);
    hasher.finish()
}
/// The largest power of two, at most [`ALIGNED`], that divides an address; as an exponent.
fn exponent(address: u64) -> u64 {
    u64::from(address.trailing_zeros().min(ALIGNED.trailing_zeros()))
}
fn packed(exponents: [u64; 6]) -> u64 {
    exponents.iter().rev().fold(0, |word, exponent| word << 8 | exponent)
}

/// The problem that the descriptors define.
fn problem(operation: &ProductOperation, layouts: [*mut c_void; 4]) -> Result<Problem, c_int> {
    let [a, b, c, d] = layouts;
    let layouts = [layout(a)?, layout(b)?, layout(c)?, layout(d)?];
    let mut transposed = [false; 2];
    for (is, code) in transposed.iter_mut().zip(operation.transposed) {
        *is = match code {
            0 => false,
            1 => true,
            _ => return Err(NOT_SUPPORTED),
        };
    }
    if operation.pointer_mode != 0 {
        return Err(NOT_SUPPORTED);
    }
    let ProductOperation { compute, scale, epilogue, aux_ld, scales, .. } = *operation;
    Ok(Problem { compute, scale, transposed, epilogue, aux_ld, scales, layouts })
}

fn allowed(problem: &Problem, operation: &ProductOperation) -> Result<(), c_int> {
    if problem.is_fp8() && crate::arch() != SCALED.0 {
        return Err(NOT_SUPPORTED);
    }
    problem.check(operation.apart).map_err(|refusal| match refusal {
        Refusal::Invalid(why) => {
            say(&format!("cuBLASLt: {why}: {problem:?}"));
            INVALID_VALUE
        }
        Refusal::Unsupported(_) => NOT_SUPPORTED,
    })
}

/// # Safety
/// As in cublasLt.h: `out` holds `wanted` results, `count` an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    library: *mut c_void,
    operation_of: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    preference: *mut c_void,
    wanted: c_int,
    out: *mut AlgorithmChoice,
    count: *mut c_int,
) -> c_int {
    status((|| {
        let Object::Library = find(library)? else { return Err(INVALID_VALUE) };
        let Object::Preference(preference) = find(preference)? else { return Err(INVALID_VALUE) };
        if wanted < 1 || count.is_null() || out.is_null() {
            return Err(INVALID_VALUE);
        }
        let operation = operation(operation_of)?;
        let problem = problem(&operation, [a, b, c, d])?;
        // SAFETY: the caller's int.
        unsafe { *count = 0 };
        allowed(&problem, &operation)?;
        let settings = LtSettings::get();
        if problem.epilogue != DEFAULT && settings.plain {
            return Err(NOT_SUPPORTED);
        }
        if preference.aligned.iter().any(|least| !least.is_power_of_two()) {
            return Err(INVALID_VALUE);
        }
        let [a, b, c, d] = preference.aligned.map(u64::from).map(exponent);
        let aligned = packed([a, b, c, d, exponent(operation.apart.bias), exponent(operation.apart.aux)]);
        let returned = settings.algorithms.min(wanted as usize);
        for index in 0..returned {
            // Every second one needs no workspace.
            let workspace = if index % 2 == 0 { problem.workspace(preference.workspace) } else { 0 };
            let (mark, problem, index_of) = (CHOSEN, digest(&problem), index as u64);
            let algorithm = Algorithm { mark, problem, aligned, workspace, index: index_of, rest: [0; 3] };
            // SAFETY: the caller has space for as many results as it wants.
            unsafe { out.add(index).write(chosen(algorithm)) };
        }
        // SAFETY: the caller's int.
        unsafe { *count = returned as c_int };
        Ok(())
    })())
}

/// # Safety
/// As in cublasLt.h: `algorithm` points to one, `out` holds one result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    library: *mut c_void,
    operation_of: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    algorithm: *const Algorithm,
    out: *mut AlgorithmChoice,
) -> c_int {
    status((|| {
        let Object::Library = find(library)? else { return Err(INVALID_VALUE) };
        if algorithm.is_null() || out.is_null() {
            return Err(INVALID_VALUE);
        }
        let operation = operation(operation_of)?;
        let problem = problem(&operation, [a, b, c, d])?;
        allowed(&problem, &operation)?;
        // SAFETY: the caller's algorithm and result.
        let algorithm = unsafe { *algorithm };
        let known = algorithm.index < LtSettings::get().algorithms as u64;
        if algorithm.mark != CHOSEN || algorithm.problem != digest(&problem) || !known {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: as above.
        unsafe { out.write(chosen(algorithm)) };
        Ok(())
    })())
}

/// # Safety
/// As in cublasLt.h: alpha and beta point to host floats, `algorithm` to one that was chosen.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    library: *mut c_void,
    operation_of: *mut c_void,
    alpha: *const f32,
    a: *const c_void,
    a_layout: *mut c_void,
    b: *const c_void,
    b_layout: *mut c_void,
    beta: *const f32,
    c: *const c_void,
    c_layout: *mut c_void,
    d: *mut c_void,
    d_layout: *mut c_void,
    algorithm: *const Algorithm,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> c_int {
    status((|| {
        let Object::Library = find(library)? else { return Err(INVALID_VALUE) };
        let operation = operation(operation_of)?;
        let problem = problem(&operation, [a_layout, b_layout, c_layout, d_layout])?;
        allowed(&problem, &operation)?;
        if alpha.is_null() || beta.is_null() || algorithm.is_null() {
            return Err(INVALID_VALUE); // the real one would choose an algorithm at each call
        }
        // SAFETY: checked above; the caller's scalars and algorithm.
        let (alpha, beta, algorithm) = unsafe { (*alpha, *beta, *algorithm) };
        let wrong = |what: &str| {
            say(&format!("cuBLASLt: {what}: {problem:?}"));
            Err(INVALID_VALUE)
        };
        if algorithm.mark != CHOSEN || algorithm.problem != digest(&problem) {
            return wrong("the algorithm was chosen for another problem");
        }
        let at = [a as u64, b as u64, c as u64, d as u64];
        for (i, address) in at.into_iter().chain([operation.apart.bias, operation.apart.aux]).enumerate() {
            let used = match i {
                2 => beta != 0.0,
                4 => problem.has_bias(),
                5 => problem.has_aux(),
                _ => true,
            };
            let promised = algorithm.aligned >> (8 * i) & 0xff;
            let promised = if problem.is_fp8() && i < 4 { promised.max(4) } else { promised };
            if used && (address == 0 || exponent(address) < promised) {
                let names = ["A", "B", "C", "D", "bias", "aux"];
                return wrong(&format!(
                    "{} at {address:#x} is not aligned to {} bytes, as promised",
                    names[i],
                    1 << promised
                ));
            }
        }
        let taken = algorithm.workspace as usize;
        if taken > workspace_bytes
            || taken > 0 && (!(workspace as u64).is_multiple_of(WORKSPACE) || workspace.is_null())
        {
            return wrong(&format!(
                "the workspace has {workspace_bytes} bytes at {workspace:?}, but {taken} aligned to {WORKSPACE} are needed"
            ));
        }
        if c as u64 == d as u64 && problem.layouts[2] != problem.layouts[3] {
            return wrong("C and D are one matrix with two layouts");
        }
        let index = algorithm.index as usize;
        let (takes, partial) = (LtSettings::get().time(index), LtSettings::partial(index));
        let workspace = (workspace as u64, taken);
        let apart = operation.apart;
        let product = LtProduct { problem, alpha, beta, at, apart, workspace, partial, takes };
        enqueue(stream as u64, node(move || Box::new(product.run()))).map_err(|_| EXECUTION_FAILED)
    })())
}
