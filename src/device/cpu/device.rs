//! The CPU device: its kernels, vector width and threads. Runs every operation synchronously (`dispatch`), in parts
//! that its threads compute side by side (`parts`). Never computes itself.
//!
//! [Note: threads] An operation has the same bits for any number of threads: parts are rows or columns of the result,
//! and each of its elements is computed as by a single thread. Gradients of weights, which are sums over rows, are
//! divided by columns; losses of rows are summed by the caller, in row order; the sum of squares is exact.
use super::gemm;
use super::pool::Pool;
use super::simd::Level;
use super::tile::AttentionScratch;
use crate::Buf;
use flatshard_base::{Error, Meter, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs `$call` with the type `$T` of an operand. Families check their operands, and thereby that the type is
/// supported.
macro_rules! types {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            flatshard_base::DType::Bf16 => types!(@run $T = half::bf16, $call),
            flatshard_base::DType::F16 => types!(@run $T = half::f16, $call),
            _ => types!(@run $T = f32, $call),
        }
    };
    (@run $T:ident = $type:ty, $call:expr) => {{
        type $T = $type;
        $call
    }};
}

/// Like [`types`], at the device's level.
macro_rules! floats {
    ($dev:ident, $dtype:expr, $T:ident => $call:expr) => {
        types!($dtype, $T => $dev.level.run(
            #[inline(always)]
            || $call,
        ))
    };
}

// Parts of an operation, one per thread.
mod parts;
// Parts of products.
mod products;
// Losses, which are added in row order.
mod losses;
// Dispatch of every operation.
mod dispatch;

pub struct CpuDevice {
    meter: Meter,
    level: Level,
    pool: Pool,
    /// Bytes of an operation's main operand that are worth a thread.
    grain: usize,
    /// For each thread.
    gemm: Vec<Mutex<gemm::GemmScratch>>,
    attention: Vec<Mutex<AttentionScratch>>,
    /// f64: losses of the rows of a call. Grows to the largest one.
    losses: Mutex<Option<Buf>>,
}

/// By default, work of some 5 us is worth a thread: several times what it takes to wake one.
const GRAIN: usize = 32 << 10;

impl CpuDevice {
    /// Bytes of scratch of a thread that computes products, at most, which the meter does not count.
    pub const SCRATCH: usize = 19 << 20;

    /// Uses the widest vectors that this CPU has, and the caller's thread alone.
    pub fn new(meter: Meter) -> CpuDevice {
        CpuDevice::with_scratch(meter, gemm::GemmScratch::new())
    }
    /// Computes on `threads` threads, at least 1: the caller's, and others that live as long as the device and may run
    /// on the same CPUs as the thread that creates it. Results have the same bits for any number.
    pub fn with_threads(self, threads: usize) -> Result<CpuDevice> {
        let (products, tiles) = (lock(&self.gemm[0]).kernel(), lock(&self.attention[0]).kernel);
        let gemm = (0..threads.max(1)).map(|_| gemm::GemmScratch::with_kernel(products).map(Mutex::new));
        let attention = (0..threads.max(1)).map(|_| Mutex::new(AttentionScratch::new(tiles))).collect();
        Ok(CpuDevice { pool: Pool::start(threads)?, gemm: gemm.collect::<Result<_>>()?, attention, ..self })
    }
    /// Gives threads smaller or larger parts, for tests and comparisons: of at least so many bytes of the main operand.
    pub fn with_grain(self, bytes: usize) -> CpuDevice {
        CpuDevice { grain: bytes.max(1), ..self }
    }
    fn with_scratch(meter: Meter, gemm: gemm::GemmScratch) -> CpuDevice {
        CpuDevice {
            meter,
            level: Level::best(),
            pool: Pool::default(),
            grain: GRAIN,
            attention: vec![Mutex::new(AttentionScratch::new(gemm.kernel()))],
            gemm: vec![Mutex::new(gemm)],
            losses: Mutex::default(),
        }
    }
    /// Uses narrower vectors, and f32 products in attention, for tests and comparisons: all levels give the same bits.
    /// The matrix product chooses independently. Fails if this CPU lacks them.
    pub fn with_level(meter: Meter, level: Level) -> Result<CpuDevice> {
        if !level.available() {
            return Err(Error::op("cpu device", format!("this CPU does not support {level}, only {}", Level::best())));
        }
        let attention = vec![Mutex::new(AttentionScratch::new(gemm::GemmKernel::Plain))];
        Ok(CpuDevice { level, attention, ..CpuDevice::new(meter) })
    }
    /// Uses another kernel for matrix products and attention, for tests and comparisons. Fails if this CPU lacks it.
    pub fn with_kernel(meter: Meter, kernel: gemm::GemmKernel) -> Result<CpuDevice> {
        Ok(CpuDevice::with_scratch(meter, gemm::GemmScratch::with_kernel(kernel)?))
    }
}

/// Ignores poisoning: scratch holds nothing between calls, so a panic leaves no invalid state.
fn lock<T>(scratch: &Mutex<T>) -> MutexGuard<'_, T> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}
