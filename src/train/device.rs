//! The one place where a rank's device comes from: its name in the settings, `auto` resolved, becomes a [`Device`]. Never
//! computes. The plan calls [`choose`] before any rank starts, each rank [`make`].
use super::settings::DeviceName;
use crate::base::{Error, Meter, Result};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::device::gpu::GpuDevice;
use crate::device::gpu::sim::Sim;
use std::sync::Arc;

/// What `auto` means on this machine; any other name as it is.
pub fn choose(name: DeviceName) -> DeviceName {
    match name {
        DeviceName::Auto => DeviceName::Cpu,
        name => name,
    }
}

/// The device of the rank that is this host's `local_rank`th.
pub fn make(name: DeviceName, _local_rank: usize, meter: Meter) -> Result<Arc<dyn Device>> {
    match name {
        DeviceName::Auto | DeviceName::Cpu => Ok(Arc::new(CpuDevice::new(meter))),
        DeviceName::Sim => Ok(Arc::new(GpuDevice::new(Arc::new(Sim::new()), meter)?)),
        DeviceName::Cuda => {
            Err(Error::input("--device cuda needs the CUDA driver's device, which this build does not have"))
        }
    }
}
