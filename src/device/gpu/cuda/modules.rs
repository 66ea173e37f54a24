//! The kernels of this build, compiled by the driver for the current GPU, looked up by name at each launch. Never
//! launches.
//!
//! All are loaded when the device is created, on several threads: the driver compiles PTX on the calling thread, and
//! caches the result on disk, so only the first start of a build takes long.
use crate::gpu::Kernel;
use crate::gpu::kernels::Text;
use cudarc::driver::{CudaContext, result, sys};
use flatshard_base::{Error, Result};
use serde::Serialize;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of the driver compiler's log.
const LOG: usize = 8 << 10;

#[derive(Clone, Copy)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Its index in [`Modules::names`].
    pub index: usize,
}

pub(super) struct Modules {
    functions: HashMap<Kernel, Function>,
    pub names: Vec<Kernel>,
    modules: Vec<sys::CUmodule>,
    /// Variants whose tensor-core products the driver's compiler has serialized, with what it said.
    serialized: Vec<(&'static str, String)>,
    context: Arc<CudaContext>,
}
// SAFETY: handles of the driver, which any thread may use; functions live as long as their modules, which only `drop`
// unloads.
unsafe impl Send for Modules {}
unsafe impl Sync for Modules {}

/// A module, passed from the thread that loaded it.
struct Loaded {
    module: sys::CUmodule,
    entries: Vec<(Kernel, sys::CUfunction)>,
    serialized: Option<(&'static str, String)>,
}
// SAFETY: as for `Modules`.
unsafe impl Send for Loaded {}

impl Modules {
    /// Loads those of `texts` that run on `arch`. `dynamic`: maximum dynamic shared memory per block, in bytes.
    pub(super) fn load(context: &Arc<CudaContext>, texts: &'static [Text], arch: u32, dynamic: i32) -> Result<Modules> {
        let texts: Vec<&'static Text> = texts.iter().filter(|t| runs_on(t.target, arch)).collect();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(texts.len()).max(1);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut loaded = Vec::new();
            while let Some(text) = texts.get(next.fetch_add(1, Relaxed)) {
                loaded.push(load(context, text, dynamic)?);
            }
            Ok(loaded)
        };
        let results: Vec<Result<Vec<Loaded>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let panicked = || Err(Error::Run("loading kernels: a thread panicked".into()));
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panicked())).collect()
        });
        let mut all = Modules {
            functions: HashMap::new(),
            names: vec![],
            modules: vec![],
            serialized: vec![],
            context: context.clone(),
        };
        let mut failed = None;
        for result in results {
            match result {
                // Added even if another thread failed, so that `drop` unloads them.
                Ok(loaded) => loaded.into_iter().for_each(|one| all.add(one)),
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        failed.map_or(Ok(all), Err)
    }
    fn add(&mut self, loaded: Loaded) {
        self.modules.push(loaded.module);
        self.serialized.extend(loaded.serialized);
        for (kernel, handle) in loaded.entries {
            self.functions.insert(kernel, Function { handle, index: self.names.len() });
            self.names.push(kernel);
        }
    }
    pub(super) fn get(&self, kernel: &Kernel) -> Option<Function> {
        self.functions.get(kernel).copied()
    }
    /// Variants that run correctly but slowly: launches choose others where there are any.
    pub(super) fn serialized(&self) -> &[(&'static str, String)] {
        &self.serialized
    }
    pub(super) fn len(&self) -> usize {
        self.modules.len()
    }
}

/// A compiled kernel.
#[derive(Serialize, Clone, Debug)]
pub struct Compiled {
    pub variant: &'static str,
    pub entry: &'static str,
    /// Registers per thread.
    pub registers: i32,
    /// Spills and arrays not kept in registers, in bytes per thread.
    pub local_bytes: i32,
    /// Statically declared; a launch may request more.
    pub shared_bytes: i32,
    /// Maximum threads per block.
    pub threads: i32,
    /// Blocks of that size that fit on a multiprocessor at a time.
    pub blocks: i32,
}

impl Modules {
    pub(super) fn report(&self) -> std::result::Result<Vec<Compiled>, result::DriverError> {
        use sys::CUfunction_attribute as Attribute;
        self.context.bind_to_thread()?;
        let compiled = |kernel: &Kernel| {
            let function = self.functions[kernel].handle;
            // SAFETY: a function of a loaded module.
            let ask = |what| unsafe { result::function::get_function_attribute(function, what) };
            let threads = ask(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
            Ok(Compiled {
                variant: kernel.variant,
                entry: kernel.entry,
                registers: ask(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
                local_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
                shared_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
                threads,
                // SAFETY: as above.
                blocks: unsafe { result::occupancy::max_active_block_per_multiprocessor(function, threads, 0) }?,
            })
        };
        self.names.iter().map(compiled).collect()
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            for &module in &self.modules {
                // SAFETY: loaded by `load`, unloaded once; the device synchronizes before it is dropped.
                let _ = unsafe { result::module::unload(module) };
            }
        }
    }
}

fn load(context: &CudaContext, text: &'static Text, dynamic: i32) -> Result<Loaded> {
    let (file, ptx) = (text.file, text.ptx()?);
    let failed = |what: String| Error::Run(format!("cuda: kernel {} of kernels/{file}: {what}", text.variant));
    let of_driver = |e: result::DriverError| failed(super::failure::name(e.0));
    context.bind_to_thread().map_err(of_driver)?;
    let ptx = CString::new(plain(ptx)).map_err(|e| failed(e.to_string()))?;
    let (module, said) = compile(&ptx).map_err(failed)?;
    let serialized = serialization(&said).map(|line| (text.variant, line));
    let mut loaded = Loaded { module, entries: Vec::new(), serialized };
    let mut entries = || {
        for &entry in text.entries {
            let name = CString::new(entry).map_err(|e| failed(e.to_string()))?;
            // SAFETY: the module was loaded above.
            let handle = unsafe { result::module::get_function(module, name) }.map_err(of_driver)?;
            allow_shared(handle, dynamic).map_err(of_driver)?;
            loaded.entries.push((Kernel { variant: text.variant, entry }, handle));
        }
        Ok(())
    };
    if let Err(e) = entries() {
        // SAFETY: loaded above and unused.
        let _ = unsafe { result::module::unload(module) };
        return Err(e);
    }
    Ok(loaded)
}

/// Allows launches to request all shared memory that a block may have beyond the kernel's declaration.
fn allow_shared(function: sys::CUfunction, most: i32) -> std::result::Result<(), result::DriverError> {
    use sys::CUfunction_attribute as Attribute;
    let declared = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a function of a loaded module.
    let declared = unsafe { result::function::get_function_attribute(function, declared) }?;
    // SAFETY: as above; the sum is within the device's limit.
    unsafe { result::function::set_function_attribute(function, dynamic, (most - declared).max(0)) }
}

/// Runs the driver's compiler; also returns what it remarks, or its errors on failure.
fn compile(ptx: &CStr) -> std::result::Result<(sys::CUmodule, String), String> {
    let mut module = std::ptr::null_mut();
    let (mut errors, mut remarks) = (vec![0u8; LOG], vec![0u8; LOG]);
    use sys::CUjit_option as Jit;
    let mut options = [
        Jit::CU_JIT_ERROR_LOG_BUFFER,
        Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        Jit::CU_JIT_INFO_LOG_BUFFER,
        Jit::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
    ];
    // Option values are passed as pointers: a buffer, and its size.
    let size = std::ptr::without_provenance_mut(LOG);
    let mut values = [errors.as_mut_ptr().cast::<c_void>(), size, remarks.as_mut_ptr().cast(), size];
    // SAFETY: a NUL-terminated text; as many values as options; the logs outlive the call.
    let code = unsafe {
        let (count, options, values) = (options.len() as u32, options.as_mut_ptr(), values.as_mut_ptr());
        sys::cuModuleLoadDataEx(&mut module, ptx.as_ptr().cast(), count, options, values)
    };
    let text = |log: &[u8]| {
        CStr::from_bytes_until_nul(log).map(|s| s.to_string_lossy().trim().to_string()).unwrap_or_default()
    };
    match code.result() {
        Ok(()) => Ok((module, text(&remarks))),
        Err(e) => Err(format!("{}: {}", super::failure::name(e.0), text(&errors))),
    }
}

/// The line of the compiler's log that says that it has serialized asynchronous tensor-core products, which it reports
/// as information.
fn serialization(log: &str) -> Option<String> {
    let serialized = |line: &&str| line.contains("(C75") && line.contains("serialized");
    log.lines().find(serialized).map(|line| line.trim().to_string())
}

/// Strips the expander's `# line "file"` markers, which only the emulator reads. Line numbers are unchanged.
pub(super) fn plain(ptx: &str) -> String {
    let blank = |line| if str::starts_with(line, '#') { "" } else { line };
    ptx.lines().flat_map(|line| [blank(line), "\n"]).collect()
}

/// "sm_80" runs on 80 and later; "sm_90a" on 90 only.
pub(super) fn runs_on(target: &str, arch: u32) -> bool {
    let number = target.trim_start_matches("sm_");
    match number.strip_suffix(['a', 'f']) {
        Some(only) => only.parse() == Ok(arch),
        None => number.parse().is_ok_and(|least: u32| arch >= least),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernels::TEXTS;

    #[test]
    fn variants_are_loaded_where_their_target_runs() {
        assert!(runs_on("sm_80", 80) && runs_on("sm_80", 120) && !runs_on("sm_90", 80));
        assert!(runs_on("sm_90a", 90) && !runs_on("sm_90a", 100) && !runs_on("sm_90a", 80));
    }

    #[test]
    fn a_serialized_kernel_is_recognized_in_the_log() {
        let line = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        assert_eq!(serialization(&format!("ptxas info    : 0 bytes gmem\n{line}\n")).as_deref(), Some(line));
        assert_eq!(serialization("ptxas info    : Used 168 registers"), None);
    }

    #[test]
    fn a_text_loses_its_markers_and_no_line() {
        for text in TEXTS {
            let ptx = text.ptx().unwrap();
            let plain = plain(ptx);
            assert!(!plain.lines().any(|l| l.starts_with('#')), "{}", text.variant);
            assert_eq!(plain.lines().count(), ptx.lines().count());
            assert!(text.entries.iter().all(|entry| plain.contains(&format!(".entry {entry}"))), "{}", text.variant);
        }
    }
}
