//! The CPU device: runs every operation at once, on the caller's thread. `operations` checks lengths and dtypes and chooses the
//! compiled form; the arithmetic is in the files by family. Never allocates after the first step, but for the tiles of
//! attention and the packed panels of the matrix product, which grow to the largest shape seen and stay (uncounted by the
//! [`Meter`]: buffers of the model are not in them).
mod activation;
mod attention;
mod dropout;
mod element;
mod embed;
pub mod gemm;
mod loss;
pub(super) mod memory;
mod norm;
mod operands;
mod operations;
mod optim;
mod reduce;
mod ring;
mod rope;
pub mod simd;
mod tile;

use self::simd::Level;
use super::ops::Attention;
use crate::base::{DType, Error, Meter, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub struct CpuDevice {
    meter: Meter,
    level: Level,
    gemm: Mutex<gemm::Scratch>,
    attention: Mutex<attention::Scratch>,
    /// Buffers are addresses alone. How much scratch attention's backward pass takes where the plan is for.
    unbacked: Option<AttentionSums>,
}

/// As [`crate::device::Device::attention_sums`].
pub type AttentionSums = fn(&Attention, DType, usize) -> usize;

impl CpuDevice {
    /// With the widest vectors that this CPU has.
    pub fn new(meter: Meter) -> CpuDevice {
        CpuDevice { meter, level: Level::best(), gemm: Mutex::default(), attention: Mutex::default(), unbacked: None }
    }
    /// With narrower ones, for tests and comparisons (the matrix product chooses for itself). An error where this CPU lacks
    /// them.
    pub fn with_level(meter: Meter, level: Level) -> Result<CpuDevice> {
        if !level.available() {
            return Err(Error::op("cpu device", format!("this CPU has no {level}, at most {}", Level::best())));
        }
        Ok(CpuDevice { level, ..CpuDevice::new(meter) })
    }
    /// A device to plan with: it allocates addresses without memory, drops what is uploaded, and computes nothing.
    pub fn unbacked(meter: Meter, sums: AttentionSums) -> CpuDevice {
        CpuDevice { unbacked: Some(sums), ..CpuDevice::new(meter) }
    }
    /// With another kernel for matrix products, for tests and comparisons. An error where this machine lacks it.
    pub fn with_kernel(meter: Meter, kernel: gemm::Kernel) -> Result<CpuDevice> {
        Ok(CpuDevice { gemm: Mutex::new(gemm::Scratch::with_kernel(kernel)?), ..CpuDevice::new(meter) })
    }
}

/// Scratch holds nothing between calls, so what a panicking thread left there does no harm.
fn lock<T>(scratch: &Mutex<T>) -> MutexGuard<'_, T> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}
