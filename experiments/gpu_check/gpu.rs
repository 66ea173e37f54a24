//! Opens the GPU for the checks. Never runs a kernel.
use flatshard::base::{Meter, Result};
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::cuda::{Cuda, CudaOptions, Machine};
use std::sync::Arc;

/// A rank's GPU, and the device on it.
pub struct OpenGpu {
    pub cuda: Arc<Cuda>,
    pub device: Arc<GpuDevice>,
}

impl OpenGpu {
    pub fn open(local_rank: usize, ranks_per_gpu: usize) -> Result<OpenGpu> {
        OpenGpu::of(&Machine::probe()?, local_rank, ranks_per_gpu)
    }
    /// With the kernels for GPUs of architecture `arch`, which may be older than this one.
    pub fn as_old_as(arch: u32) -> Result<OpenGpu> {
        let mut machine = Machine::probe()?;
        machine.gpus.iter_mut().for_each(|gpu| gpu.arch = gpu.arch.min(arch));
        OpenGpu::of(&machine, 0, 1)
    }
    fn of(machine: &Machine, local_rank: usize, ranks_per_gpu: usize) -> Result<OpenGpu> {
        let options = CudaOptions { local_rank, ranks_per_gpu, tf32: false };
        let meter = Meter::default();
        let cuda = Arc::new(Cuda::open(machine, &options, &meter)?);
        Ok(OpenGpu { device: Arc::new(GpuDevice::new(cuda.clone(), meter)?), cuda })
    }
}
