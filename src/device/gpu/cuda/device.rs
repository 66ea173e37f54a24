//! A rank's GPU: the state opened once and shared by the files of this module. Never enqueues work.
use super::blas::Blas;
use super::machine::Machine;
use super::memory::{self, Staging};
use super::modules::{Compiled, Modules};
use super::recent::Recent;
use super::{failure, product, room};
use crate::Buf;
use crate::gpu::kernels::TEXTS;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use flatshard_base::{Category, DType, Error, Meter, Result};
use std::ffi::CStr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Options for opening a GPU.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Index among the ranks of this host.
    pub local_rank: usize,
    /// Above 1 only in tests with fewer GPUs than ranks.
    pub ranks_per_gpu: usize,
    /// Compute f32 products on tensor cores with 10 bits of mantissa.
    pub tf32: bool,
}

/// A rank's GPU. Fields drop in order, users of the context first.
pub struct Cuda {
    pub(super) blas: Mutex<Blas>,
    pub(super) staging: Mutex<Staging>,
    pub(super) modules: Modules,
    _workspace: Buf,
    pub(super) compute: Arc<CudaStream>,
    pub(super) context: Arc<CudaContext>,
    meter: Meter,
    ordinal: usize,
    pub(super) name: String,
    pub(super) arch: u32,
    pub(super) multiprocessors: u32,
    pub(super) recent: Recent,
    /// Number of graph launches.
    pub(super) replays: AtomicU64,
    /// Set by whoever aborted work in flight: later results of the GPU must not be used.
    broken: OnceLock<String>,
    pub(super) marks: Marks,
}

impl Cuda {
    /// Opens this rank's GPU and compiles every kernel. Fails before allocating memory if the GPU cannot run them.
    pub fn open(machine: &Machine, options: &CudaOptions, meter: &Meter) -> Result<Cuda> {
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
        // SAFETY: no cudarc slice is ever created; this module manages buffers and their order.
        unsafe { context.disable_event_tracking() };
        let compute = context.new_stream().map_err(failed("open a stream"))?;
        let attribute = |which| context.attribute(which).map_err(failed("query an attribute"));
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let modules = Modules::load(&context, TEXTS, gpu.arch, shared)?;
        let lease = meter.lease(Category::Scratch, product::WORKSPACE);
        let workspace =
            memory::alloc(&compute, DType::U8, product::WORKSPACE, lease).map_err(failed("alloc a workspace"))?;
        let blas = Blas::new(workspace.view().as_ptr() as CUdeviceptr, options.tf32)?;
        let staging = Staging::new(&compute).map_err(failed("allocate pinned memory"))?;
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
            recent: Recent::default(),
            replays: AtomicU64::new(0),
            broken: OnceLock::new(),
            marks: Marks::default(),
        })
    }

    /// What makes this GPU slower than it could be, with the remedy.
    pub fn warning(&self) -> Option<String> {
        let slow = self.modules.serialized();
        let (_, line) = slow.first()?;
        let variants: Vec<&str> = slow.iter().map(|(variant, _)| *variant).collect();
        Some(format!(
            "{}: the driver's compiler serializes the tensor-core products of {}, so the slower kernels for sm_80 run \
             instead. A driver of CUDA 12.8 or newer (branch 570) does not. It says: {line}",
            self.name,
            variants.join(", ")
        ))
    }
    /// The driver's name for it: "NVIDIA H100 80GB HBM3".
    pub fn model(&self) -> Result<String> {
        self.context.name().map_err(|e| self.failed("query the name", e))
    }
    /// "0000:1b:00.0", an id that all tools agree on.
    pub fn pci_bus_id(&self) -> Result<String> {
        let mut text = [0u8; 32];
        // SAFETY: writes at most that many bytes, including a terminator.
        let asked =
            unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, self.context.cu_device()) };
        asked.result().map_err(|e| self.failed("query the bus id", e))?;
        Ok(CStr::from_bytes_until_nul(&text).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default())
    }
    /// The driver's index of this GPU.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }
    /// Free and total bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.context.mem_get_info().map_err(|e| self.failed("memory", e))
    }
    /// Fails with an input error unless `planned` bytes per rank fit for all ranks that share the GPU. Call before the
    /// run's first allocation.
    pub fn require(&self, planned: usize, sharing: usize) -> Result<()> {
        let (free, total) = self.memory()?;
        room::fits(&self.name, planned, sharing, free, total)
    }
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
    /// The stream of the device's operations.
    pub fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }
    /// A separate stream with priority over the compute stream: communication is short and others wait for it.
    pub fn stream(&self) -> Result<Arc<CudaStream>> {
        let failed = |e| self.failed("open a stream", e);
        self.context.bind_to_thread().map_err(failed)?;
        let (_, first) = result::stream::get_priority_range().map_err(failed)?;
        self.context.new_stream_with_priority(first).map_err(failed)
    }
    /// An event for ordering streams; with `timing`, also for measuring.
    pub fn event(&self, timing: bool) -> Result<CudaEvent> {
        use sys::CUevent_flags as Flags;
        let flags = if timing { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        self.context.new_event(Some(flags)).map_err(|e| self.failed("create an event", e))
    }
    /// Seconds between two completed events. Uses the function's first version, because its successor needs CUDA 12.8.
    pub fn seconds(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> i32;
        // SAFETY: the library is loaded, since there are events; the signature is that of cuda.h.
        let elapsed = unsafe { sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0") };
        let elapsed = elapsed.map_err(|e| Error::Run(format!("{}: cuEventElapsedTime: {e}", self.name)))?;
        let mut ms = 0f32;
        // SAFETY: writes one float; the events are alive.
        match unsafe { elapsed(&mut ms, from.cu_event(), to.cu_event()) } {
            0 => Ok(f64::from(ms) / 1e3),
            code => Err(Error::Run(format!("{}: cuEventElapsedTime: CUDA error {code}", self.name))),
        }
    }
    /// What the driver's compiler produced for each kernel.
    pub fn kernels(&self) -> Result<Vec<Compiled>> {
        self.modules.report().map_err(|e| self.failed("query kernels", e))
    }
    /// Invalidates the GPU's results from now on: the next download or synchronization fails with this text.
    pub fn break_off(&self, why: String) {
        let _ = self.broken.set(why); // only the first reason counts
    }
    /// A driver result as an error that names this device.
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
    pub(super) fn unbroken(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |why| Err(Error::Run(why.clone())))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let _ = self.context.synchronize(); // work in flight uses what is dropped now; failures were reported earlier
    }
}

/// The latest marks of streams in time; empty while marking is off.
#[derive(Default)]
pub(super) struct Marks(Mutex<Option<MarkRing>>);

pub(super) struct MarkRing {
    pub events: Vec<CudaEvent>,
    pub made: u64,
    /// Reference of all times: an event, and the host's time when it completed. Renewed before each step, because
    /// elapsed times are floats of milliseconds.
    pub base: CudaEvent,
    pub at: Instant,
}

impl Marks {
    pub fn lock(&self) -> MutexGuard<'_, Option<MarkRing>> {
        lock(&self.0)
    }
}

/// Ignores poisoning: each of these is changed by a single call, so a panic leaves it consistent.
pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
