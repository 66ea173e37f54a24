//! For the cargo feature `cust`: runs every kernel through the driver's JIT linker with verbose compiler output, and
//! reports registers, spills and occupancy. `gpu_check link` prints it. Never used by training, whose kernels are
//! loaded without a linker (`modules`), so that the build needs no toolkit.
use super::modules::{plain, runs_on};
use crate::gpu::kernels::{TEXTS, Text};
use cust::context::Context;
use cust::device::{Device, DeviceAttribute};
use cust::error::{CudaError, CudaResult};
use cust::function::{BlockSize, Function, FunctionAttribute};
use cust::module::Module;
use cust::sys::{self, CUjit_option as Jit};
use flatshard_base::{Error, Result};
use serde::Serialize;
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

const LOG: usize = 32 << 10;

/// A linked kernel.
#[derive(Serialize, Clone, Debug)]
pub struct Linked {
    pub variant: &'static str,
    pub entry: &'static str,
    pub registers: i32,
    /// Spills and arrays not kept in registers, in bytes per thread.
    pub local_bytes: i32,
    pub shared_bytes: i32,
    /// Maximum threads per block, and blocks of that size per multiprocessor.
    pub threads: i32,
    pub blocks: u32,
    /// The compiler's log for the whole variant.
    pub log: String,
}

/// Links every kernel that the first GPU can run.
pub fn link() -> Result<Vec<Linked>> {
    let unusable = |e: CudaError| Error::input(format!("linking needs a driver and a GPU: {e}"));
    cust::init(cust::CudaFlags::empty()).map_err(unusable)?;
    let device = Device::get_device(0).map_err(unusable)?;
    let major = device.get_attribute(DeviceAttribute::ComputeCapabilityMajor).map_err(unusable)?;
    let minor = device.get_attribute(DeviceAttribute::ComputeCapabilityMinor).map_err(unusable)?;
    let _context = Context::new(device).map_err(unusable)?;
    let arch = (major * 10 + minor) as u32;
    let mut all = Vec::new();
    for text in TEXTS.iter().filter(|text| runs_on(text.target, arch)) {
        let (cubin, log) = compile(text)?;
        let failed = |e: CudaError| Error::Run(format!("{}: cannot load the linked kernel: {e}", text.variant));
        let module = Module::from_cubin(&cubin, &[]).map_err(failed)?;
        for &entry in text.entries {
            let function = module.get_function(entry).map_err(failed)?;
            all.push(describe(text.variant, entry, &function, log.clone()).map_err(failed)?);
        }
    }
    Ok(all)
}

fn describe(variant: &'static str, entry: &'static str, function: &Function, log: String) -> CudaResult<Linked> {
    let threads = function.get_attribute(FunctionAttribute::MaxThreadsPerBlock)?;
    Ok(Linked {
        variant,
        entry,
        registers: function.get_attribute(FunctionAttribute::NumRegisters)?,
        local_bytes: function.get_attribute(FunctionAttribute::LocalSizeBytes)?,
        shared_bytes: function.get_attribute(FunctionAttribute::SharedMemorySizeBytes)?,
        threads,
        blocks: function.max_active_blocks_per_multiprocessor(BlockSize::x(threads as u32), 0)?,
        log,
    })
}

/// The driver's linker with log buffers: cust's own accepts no options.
struct Linker {
    state: sys::CUlinkState,
    said: Box<[u8; LOG]>,
    wrong: Box<[u8; LOG]>,
}

impl Linker {
    fn new() -> std::result::Result<Linker, String> {
        let (mut said, mut wrong) = (Box::new([0; LOG]), Box::new([0; LOG]));
        let number = |n: usize| std::ptr::without_provenance_mut::<c_void>(n);
        let mut options = [
            Jit::CU_JIT_LOG_VERBOSE,
            Jit::CU_JIT_INFO_LOG_BUFFER,
            Jit::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            Jit::CU_JIT_ERROR_LOG_BUFFER,
            Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // Numbers are passed as pointers.
        let mut values = [number(1), said.as_mut_ptr().cast(), number(LOG), wrong.as_mut_ptr().cast(), number(LOG)];
        let mut state = null_mut();
        // SAFETY: five options with five values; both buffers outlive the state, which `drop` destroys first.
        checked(unsafe { sys::cuLinkCreate_v2(5, options.as_mut_ptr(), values.as_mut_ptr(), &mut state) })?;
        Ok(Linker { state, said, wrong })
    }
    fn run(&mut self, name: &CStr, ptx: &CStr) -> std::result::Result<Vec<u8>, String> {
        let bytes = ptx.to_bytes_with_nul();
        let (mut cubin, mut size) = (null_mut(), 0);
        // SAFETY: the call reads the text; no options.
        let added = unsafe {
            sys::cuLinkAddData_v2(
                self.state,
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                bytes.as_ptr().cast_mut().cast(),
                bytes.len(),
                name.as_ptr(),
                0,
                null_mut(),
                null_mut(),
            )
        };
        checked(added)?;
        // SAFETY: writes a pointer and a size.
        checked(unsafe { sys::cuLinkComplete(self.state, &mut cubin, &mut size) })?;
        // SAFETY: `size` bytes that live as long as the state; copied out.
        Ok(unsafe { std::slice::from_raw_parts(cubin.cast::<u8>(), size) }.to_vec())
    }
}
impl Drop for Linker {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { sys::cuLinkDestroy(self.state) };
    }
}

fn checked(code: sys::CUresult) -> std::result::Result<(), String> {
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{code:?}")) }
}

fn words(log: &[u8; LOG]) -> String {
    CStr::from_bytes_until_nul(log).map(|s| s.to_string_lossy().trim().to_string()).unwrap_or_default()
}

fn compile(text: &'static Text) -> Result<(Vec<u8>, String)> {
    let no_nul = |e: std::ffi::NulError| Error::op("link", e.to_string());
    let (file, ptx) = (text.file, text.ptx()?);
    let (name, ptx) = (CString::new(text.variant).map_err(no_nul)?, CString::new(plain(ptx)).map_err(no_nul)?);
    let mut linker = Linker::new().map_err(|e| Error::Run(format!("the driver's linker: {e}")))?;
    match linker.run(&name, &ptx) {
        Ok(cubin) => Ok((cubin, words(&linker.said))),
        Err(e) => Err(Error::Run(format!("{} of kernels/{file}: {e}: {}", text.variant, words(&linker.wrong)))),
    }
}
