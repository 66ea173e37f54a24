//! A real GPU: the [`Driver`] over cudarc, whose libraries are loaded when a device is made. Never waits but in `download` and
//! `synchronize` (and in `upload` where 12 MiB are on their way), and takes no memory after it is made but in `alloc`
//! (cuBLASLt's descriptors of a new shape and graphs aside).
//!
//! | file | what |
//! | --- | --- |
//! | `machine` | which GPUs there are, and whether they serve |
//! | `modules` | kernels, compiled by the driver |
//! | `launch` | launches: arguments as words, the kernels launched last |
//! | `maps` | tensor maps |
//! | `marks` | points of streams in time |
//! | `memory` | device memory, pinned memory |
//! | `room` | whether a run fits, and what holds the memory when it did not |
//! | `blas` | matrix products |
//! | `graph` | calls captured and replayed |
//! | `failure` | results of the driver as messages |
//! | `link` | every kernel through the JIT linker, with its words (cargo feature `cust`) |
//!
//! Order: everything of a device runs on its one compute stream; groups of ranks have streams of their own, and order them
//! against it by events ([`Cuda::compute`]). cudarc's own event tracking is off.
mod blas;
mod failure;
mod graph;
mod launch;
#[cfg(feature = "cust")]
pub mod link;
mod machine;
mod maps;
mod marks;
mod memory;
mod modules;
mod room;

pub use blas::WORKSPACE;
pub use machine::{Gpu, Machine};
pub use modules::Compiled;
pub use room::fits;

use super::calls::Calls;
use super::driver::{Arg, Driver, Graph, Kernel, Shape};
use super::kernels::TEXTS;
use crate::base::meter::Lease;
use crate::base::timeline::Mark;
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::buf::Place;
use crate::device::{Buf, Epilogue, Gemm, View, ViewMut};
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use std::ffi::CStr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// What is asked of a GPU when it is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Among the ranks of this host.
    pub local_rank: usize,
    /// More than one for tests on a machine with fewer GPUs than ranks.
    pub ranks_per_gpu: usize,
    /// f32 products through the tensor cores, with 10 bits of mantissa.
    pub tf32: bool,
}

/// A rank's GPU. Fields are dropped in their order: what uses the context first.
pub struct Cuda {
    blas: Mutex<blas::Blas>,
    staging: Mutex<memory::Staging>,
    modules: modules::Modules,
    _workspace: Buf,
    compute: Arc<CudaStream>,
    context: Arc<CudaContext>,
    meter: Meter,
    ordinal: usize,
    name: String,
    arch: u32,
    multiprocessors: u32,
    recent: launch::Recent,
    /// Graphs that were launched.
    replays: AtomicU64,
    /// Set by whoever broke off work in flight: what the GPU computed since is not to be used.
    broken: OnceLock<String>,
    marks: marks::Marks,
}

impl Cuda {
    /// The GPU of this rank with every kernel compiled. Refuses what cannot run before it takes any memory.
    pub fn open(machine: &Machine, options: &Options, meter: &Meter) -> Result<Cuda> {
        let (ordinal, gpu) = machine.choose(options.local_rank, options.ranks_per_gpu)?;
        let name = format!(
            "cuda:{ordinal} ({}, sm_{}, CUDA {}.{})",
            gpu.name,
            gpu.arch,
            machine.cuda / 1000,
            machine.cuda % 1000 / 10
        );
        let failed = |op: &'static str| {
            let name = name.clone();
            move |e: DriverError| failure::explain(&name, op, e.0, "none")
        };
        let context = CudaContext::new(ordinal).map_err(failed("open"))?;
        // SAFETY: no slice of cudarc's is ever made: buffers and their order are this module's.
        unsafe { context.disable_event_tracking() };
        let compute = context.new_stream().map_err(failed("open a stream"))?;
        let attribute = |which| context.attribute(which).map_err(failed("ask for an attribute"));
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let modules = modules::Modules::load(&context, TEXTS, gpu.arch, shared)?;
        let lease = meter.lease(Category::Scratch, blas::WORKSPACE);
        let workspace =
            memory::alloc(&compute, DType::U8, blas::WORKSPACE, lease).map_err(failed("alloc a workspace"))?;
        let blas = blas::Blas::new(workspace.view().as_ptr() as CUdeviceptr, options.tf32)?;
        let staging = memory::Staging::new(&compute).map_err(failed("alloc pinned memory"))?;
        Ok(Cuda {
            blas: Mutex::new(blas),
            staging: Mutex::new(staging),
            modules,
            _workspace: workspace,
            compute,
            context,
            meter: meter.clone(),
            ordinal,
            name,
            arch: gpu.arch,
            multiprocessors,
            recent: launch::Recent::default(),
            replays: AtomicU64::new(0),
            broken: OnceLock::new(),
            marks: marks::Marks::default(),
        })
    }

    /// As the driver calls it: "NVIDIA H100 80GB HBM3".
    pub fn model(&self) -> Result<String> {
        self.context.name().map_err(|e| self.failed("ask for the name", e))
    }
    /// "0000:1b:00.0": the same for every tool.
    pub fn pci_bus_id(&self) -> Result<String> {
        let mut text = [0u8; 32];
        // SAFETY: writes at most that many bytes, and a terminator.
        let asked =
            unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, self.context.cu_device()) };
        asked.result().map_err(|e| self.failed("ask for the bus id", e))?;
        Ok(CStr::from_bytes_until_nul(&text).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default())
    }
    /// Of the machine, as the driver counts.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }
    /// Bytes: free, and all that the GPU has.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.context.mem_get_info().map_err(|e| self.failed("memory", e))
    }
    /// An input error unless `planned` bytes of a rank fit beside those of the ranks that share the GPU. Asked before the
    /// first allocation of the run.
    pub fn require(&self, planned: usize, sharing: usize) -> Result<()> {
        let (free, total) = self.memory()?;
        fits(&self.name, planned, sharing, free, total)
    }
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
    /// The stream of the device's operations.
    pub fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }
    /// A stream of its own, ahead of the compute stream where both want the GPU: communication is short and waited for.
    pub fn stream(&self) -> Result<Arc<CudaStream>> {
        let failed = |e| self.failed("open a stream", e);
        self.context.bind_to_thread().map_err(failed)?;
        let (_, first) = result::stream::get_priority_range().map_err(failed)?;
        self.context.new_stream_with_priority(first).map_err(failed)
    }
    /// An event to order streams by; with `timing`, to measure by too.
    pub fn event(&self, timing: bool) -> Result<CudaEvent> {
        use sys::CUevent_flags as Flags;
        let flags = if timing { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        self.context.new_event(Some(flags)).map_err(|e| self.failed("make an event", e))
    }
    /// Seconds between two passed events. The driver's first function of that job: its successor came with CUDA 12.8.
    pub fn seconds(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> i32;
        // SAFETY: the library is loaded, or there were no events; the signature is that of cuda.h.
        let elapsed = unsafe { sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0") };
        let elapsed = elapsed.map_err(|e| Error::Run(format!("{}: cuEventElapsedTime: {e}", self.name)))?;
        let mut ms = 0f32;
        // SAFETY: writes one float; the events live.
        match unsafe { elapsed(&mut ms, from.cu_event(), to.cu_event()) } {
            0 => Ok(f64::from(ms) / 1e3),
            code => Err(Error::Run(format!("{}: cuEventElapsedTime: CUDA error {code}", self.name))),
        }
    }
    /// What the driver's compiler made of each kernel.
    pub fn kernels(&self) -> Result<Vec<modules::Compiled>> {
        self.modules.report().map_err(|e| self.failed("ask about kernels", e))
    }
    /// What the GPU computed from now on is not to be used: the next download or synchronisation fails with this text.
    pub fn break_off(&self, why: String) {
        let _ = self.broken.set(why); // the first reason is the one that counts
    }
    /// A result of the driver's as an error that names this device.
    pub fn failed(&self, op: &str, e: DriverError) -> Error {
        match failure::code(e) {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => self.out_of_memory(op),
            code => failure::explain(&self.name, op, code, &self.recent()),
        }
    }

    fn out_of_memory(&self, op: &str) -> Error {
        let room = result::mem_get_info().unwrap_or((0, 0));
        room::out_of_memory(&self.name, op, room, &self.meter)
    }
    fn unbroken(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |why| Err(Error::Run(why.clone())))
    }
}

/// Whether cuBLASLt is found; [`no_blas`] says what to do where it is not.
pub fn has_blas() -> bool {
    blas::present()
}
pub fn no_blas() -> Error {
    blas::missing()
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
impl Cuda {
    /// Enqueues a product. `k` is not 0.
    fn product(&self, shape: &Gemm, operands: &blas::Operands) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| self.failed("gemm", e))?;
        lock(&self.blas).gemm(shape, operands, self.compute.cu_stream())
    }
}

fn address(view: View) -> CUdeviceptr {
    view.as_ptr() as CUdeviceptr
}

impl Driver for Cuda {
    fn name(&self) -> String {
        format!("{}, {} kernel variants", self.name, self.modules.len())
    }
    fn arch(&self) -> u32 {
        self.arch
    }
    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category, lease: Lease) -> Result<Buf> {
        memory::alloc(&self.compute, dtype, len, lease).map_err(|e| {
            let op = format!("alloc of {} for {category:?}", room::amount(len * dtype.size()));
            self.failed(&op, e)
        })
    }
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
        memory::alloc_host(&self.compute, dtype, len, lease).map_err(|e| {
            let op = format!("alloc of {} of pinned host memory", room::amount(len * dtype.size()));
            self.failed(&op, e)
        })
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        if dst.place() == Place::Mapped {
            self.synchronize()?; // what was enqueued may read it
            dst.host_bytes_mut("upload")?.copy_from_slice(src);
            return Ok(());
        }
        lock(&self.staging).upload(src, address(dst.as_view())).map_err(|e| self.failed("upload", e))
    }
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        if parts.iter().any(|(src, _)| src.place() == Place::Mapped) {
            self.synchronize()?; // what was enqueued may write it
        }
        let mut of_device = Vec::with_capacity(parts.len());
        for (src, dst) in parts {
            match src.place() {
                Place::Mapped => dst.copy_from_slice(src.host_bytes("download")?),
                _ => of_device.push((address(*src), &mut **dst)),
            }
        }
        lock(&self.staging).download(&mut of_device).map_err(|e| self.failed("download", e))?;
        self.unbroken()
    }
    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        if src.is_empty() {
            return Ok(());
        }
        let failed = |e| self.failed("copy", e);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: both hold `src.bytes()` bytes (checked by the launch layer), of this device or mapped into its address space:
        // the driver tells by the address which.
        let copied =
            unsafe { sys::cuMemcpyAsync(address(dst.as_view()), address(src), src.bytes(), self.compute.cu_stream()) };
        copied.result().map_err(failed)
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        if x.is_empty() {
            return Ok(());
        }
        let failed = |e| self.failed("zero", e);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: `x` holds that many bytes of this device.
        unsafe { result::memset_d8_async(address(x.as_view()), 0, x.bytes(), self.compute.cu_stream()) }.map_err(failed)
    }
    fn launch(&self, kernel: Kernel, shape: Shape, args: &mut [Arg]) -> Result<()> {
        self.launch_on(&self.compute, kernel, shape, args)
    }
    fn gemm(&self, shape: &Gemm, a: View, b: View, c: ViewMut) -> Result<()> {
        if shape.k == 0 {
            // An empty sum: nothing to add, or zeros.
            return match (shape.accumulate, shape.ldc == shape.n) {
                (true, _) => Ok(()),
                (false, true) => self.zero(c.slice(0..shape.m * shape.n)),
                (false, false) => Err(Error::op("gemm", "k is 0 and C has gaps between rows")),
            };
        }
        self.product(shape, &blas::Operands::of(a, b, &c, blas::Then::default()))
    }
    fn fuses(&self, shape: &Gemm, a: View, b: View, c: &ViewMut, then: &Epilogue) -> Result<bool> {
        self.context.bind_to_thread().map_err(|e| self.failed("gemm", e))?;
        // An empty sum is no product.
        Ok(shape.k > 0 && lock(&self.blas).fuses(shape, &blas::Operands::of(a, b, c, blas::Then::of(then)))?)
    }
    fn gemm_then(&self, shape: &Gemm, a: View, b: View, c: ViewMut, then: Epilogue) -> Result<()> {
        self.product(shape, &blas::Operands::of(a, b, &c, blas::Then::of(&then)))
    }
    fn synchronize(&self) -> Result<()> {
        self.compute.synchronize().map_err(|e| self.failed("synchronize", e))?;
        self.unbroken()
    }
    fn begin_marks(&self) -> Result<()> {
        Cuda::begin_marks(self)
    }
    fn end_marks(&self) {
        Cuda::end_marks(self);
    }
    fn mark(&self) -> Result<Mark> {
        Ok(self.mark_on(&self.compute)?.unwrap_or_else(Mark::now))
    }
    fn when(&self, mark: Mark) -> Result<Instant> {
        self.when_marked(mark)
    }
    fn capture(&self, calls: Calls) -> Result<Graph> {
        graph::capture(self, calls)
    }
    fn replay(&self, graph: &mut Graph) -> Result<()> {
        graph::replay(self, graph)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let _ = self.context.synchronize(); // work in flight uses what is dropped now; its failure was reported
    }
}
