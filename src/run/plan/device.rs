//! Resolves `--device auto` on this machine, and the default number of ranks. Never opens a device.
use crate::base::Result;
use crate::device::gpu::cuda::{self, Machine};
use crate::run::settings::DeviceName;

/// `auto` is CUDA if the GPUs can run this build, else the CPU. Other names are unchanged.
pub fn choose(name: DeviceName) -> DeviceName {
    let usable = || Machine::probe().and_then(|machine| machine.choose(0, 1).map(|_| ())).is_ok() && cuda::has_blas();
    match name {
        DeviceName::Auto if usable() => DeviceName::Cuda,
        DeviceName::Auto => DeviceName::Cpu,
        name => name,
    }
}

/// Default number of ranks per host.
pub fn ranks(name: DeviceName, ranks_per_gpu: usize) -> Result<usize> {
    match name {
        DeviceName::Cuda => Ok(Machine::probe()?.gpus.len().max(1) * ranks_per_gpu),
        _ => Ok(2),
    }
}
