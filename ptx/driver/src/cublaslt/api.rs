//! The functions of cublasLt.h that choose an algorithm and multiply, with its names and numbers. Only this file and
//! `descriptors` dereference callers' pointers; the call reads alpha and beta from host memory.
use super::choose::{DEFAULT, Problem, Refusal, SCALED};
use super::descriptors::{
    ALIGNED, EXECUTION_FAILED, INVALID_VALUE, NOT_SUPPORTED, Object, ProductOperation, SUCCESS, find, layout, operation,
};
use super::product::LtProduct;
use super::settings::LtSettings;
use crate::{enqueue, node, say};
use std::ffi::{c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Alignment of the workspace.
const WORKSPACE: u64 = 256;
fn status(done: Result<(), c_int>) -> c_int {
    done.err().unwrap_or(SUCCESS)
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
