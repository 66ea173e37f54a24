//! Which device `auto` is on this machine, and how many ranks it has. Never opens one.
use crate::base::Result;
use crate::device::gpu::cuda::{self, Machine};
use crate::run::settings::DeviceName;

/// What `auto` means on this machine: its GPUs where they can run this build, else the CPU. Any other name as it is.
pub fn choose(name: DeviceName) -> DeviceName {
    let usable = || Machine::probe().and_then(|machine| machine.choose(0, 1).map(|_| ())).is_ok() && cuda::has_blas();
    match name {
        DeviceName::Auto if usable() => DeviceName::Cuda,
        DeviceName::Auto => DeviceName::Cpu,
        name => name,
    }
}

/// Ranks that a host runs when nobody says how many.
pub fn ranks(name: DeviceName, ranks_per_gpu: usize) -> Result<usize> {
    match name {
        DeviceName::Cuda => Ok(Machine::probe()?.gpus.len().max(1) * ranks_per_gpu),
        _ => Ok(2),
    }
}
