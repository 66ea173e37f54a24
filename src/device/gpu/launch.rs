//! The GPU device and the helpers that launches share: grid sizes, variants, sums over rows, and index checks. Never
//! waits for the GPU, unless its driver is synchronous.
use super::driver::{Arg, Driver, Kernel, LaunchShape};
use super::scratch::{self, CTAS, ITEMS, IndexFaults, Indexed, LaunchScratch};
use crate::{IGNORE, View, ViewMut};
use flatshard_base::{Category, DType, Error, Meter, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Threads per CTA in elementwise and row kernels.
pub const BLOCK: u32 = 256;
/// Warps in it.
pub const WARPS: usize = BLOCK as usize / 32;
/// `.target sm_90a` runs on this architecture only.
pub const SM_90A: u32 = 90;
/// Bytes of a vector access; kernels are fastest when operands are aligned to it.
pub const VECTOR: usize = 16;

/// A size among a kernel's arguments.
pub fn int(value: usize) -> Arg<'static> {
    Arg::U32(value as u32)
}

pub struct GpuDevice {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) meter: Meter,
    pub(super) host_threads: usize,
    scratch: Mutex<LaunchScratch>,
}

impl GpuDevice {
    pub fn new(driver: Arc<dyn Driver>, meter: Meter) -> Result<GpuDevice> {
        let [limbs, words, faults, drawn, tables] = scratch::buffers(driver.multiprocessors()).map(|(dtype, len)| {
            let _for = meter.purpose("of kernels");
            let lease = meter.lease_of(Category::Scratch, dtype, len, len * dtype.size());
            driver.alloc(dtype, len, Category::Scratch, lease)
        });
        let (mut tables, faults) = (tables?, IndexFaults::new(faults?));
        driver.upload(bytemuck::cast_slice(&scratch::tables()), tables.view_mut())?;
        let scratch = LaunchScratch { limbs: limbs?, words: words?, faults, drawn: drawn?, tables };
        Ok(GpuDevice { driver, meter, host_threads: 1, scratch: Mutex::new(scratch) })
    }
    /// With this many host threads per rank.
    pub fn with_host_threads(self, host_threads: usize) -> GpuDevice {
        GpuDevice { host_threads, ..self }
    }
    /// Bytes that `new` allocates on a GPU with that many multiprocessors. Its driver may allocate more
    /// (`cuda::WORKSPACE`).
    pub fn planned(multiprocessors: u32) -> usize {
        scratch::buffers(multiprocessors).iter().map(|(dtype, len)| len * dtype.size()).sum()
    }
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }
    /// Locked for one call. Ignores poisoning, because it holds nothing between calls.
    pub(super) fn scratch(&self) -> MutexGuard<'_, LaunchScratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// CTAs for `parts` work items, each CTA doing one or several; 0 if there are none.
    pub(super) fn ctas(&self, parts: usize) -> u32 {
        parts.min((CTAS * self.driver.multiprocessors()) as usize) as u32
    }
    /// Launches [`BLOCK`] threads per CTA over `parts` work items; nothing if there are none.
    pub(super) fn launch(
        &self,
        variant: &'static str,
        entry: &'static str,
        parts: usize,
        args: &mut [Arg],
    ) -> Result<()> {
        match self.ctas(parts) {
            0 => Ok(()),
            ctas => self.driver.launch(Kernel { variant, entry }, LaunchShape::line(ctas, BLOCK), args),
        }
    }
    /// The same over `n` elements, `V` per thread and step: 16 bytes of `dtype`.
    pub(super) fn each(
        &self,
        variant: &'static str,
        entry: &'static str,
        n: usize,
        dtype: DType,
        args: &mut [Arg],
    ) -> Result<()> {
        self.launch(variant, entry, n.div_ceil(BLOCK as usize * VECTOR / dtype.size()), args)
    }
    /// CTAs of that many threads that give each multiprocessor `resident` threads, capped by the work.
    pub(super) fn resident(&self, parts: usize, threads: u32, resident: u32) -> u32 {
        let most = self.driver.multiprocessors() * (resident / threads).max(1);
        parts.min(most as usize) as u32
    }
    /// Launches that many CTAs of that many threads.
    pub(super) fn line(
        &self,
        variant: &'static str,
        entry: &'static str,
        at: (u32, u32),
        args: &mut [Arg],
    ) -> Result<()> {
        self.driver.launch(Kernel { variant, entry }, LaunchShape::line(at.0, at.1), args)
    }
    /// `y` f32 `+=` the sum of the rows of `x`, 4-byte words that hold f32.
    pub(super) fn sum_rows(&self, x: View, y: ViewMut) -> Result<()> {
        let (rows, columns) = (x.len() / y.len(), y.len());
        let args = &mut [Arg::In(x), Arg::InOut(y), Arg::U32(rows as u32), Arg::U32(columns as u32)];
        self.line("sum_rows", "sum_rows", (columns.div_ceil(32) as u32, 1024), args)
    }
    /// Makes the GPU check for indices from `limit` on (other than [`IGNORE`], where allowed). Kernels that take
    /// `follows` of `faults` do nothing once one is found. A synchronous GPU reports it at once, others at the next
    /// download.
    pub(super) fn check(&self, follows: Indexed, indices: View, limit: usize, faults: &mut IndexFaults) -> Result<()> {
        const ENTRY: &str = "check";
        faults.limits[follows as usize] = limit;
        let n = indices.len();
        if limit == 0 && n > 0 {
            let (op, what) = Indexed::NAMES[follows as usize];
            return Err(Error::op(op, format!("{n} {what}s index an empty table")));
        }
        // If no index may be outside, the exempt value is one that is inside anyway.
        let pass = if Indexed::NAMES[follows as usize].1 == "target" { IGNORE as u32 } else { 0 };
        let fault = faults.of_mut(follows);
        let args =
            &mut [Arg::In(indices), Arg::InOut(fault), Arg::U32(n as u32), Arg::U32(limit as u32), Arg::U32(pass)];
        self.line(ENTRY, ENTRY, (self.resident(n.div_ceil(1024), 1024, 2048), 1024), args)?;
        if self.driver.waits() { self.raise(faults) } else { Ok(()) }
    }
    /// Returns the first fault found, if any, and clears it.
    pub(super) fn raise(&self, faults: &mut IndexFaults) -> Result<()> {
        self.raise_with(faults, &mut [])
    }
    /// The same, downloading `parts` at once.
    pub(super) fn raise_with(&self, faults: &mut IndexFaults, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        if faults.limits == [0; Indexed::COUNT] {
            return self.driver.download(parts);
        }
        let mut found = [0; 8 * Indexed::COUNT];
        let mut all: Vec<(View, &mut [u8])> = vec![(faults.found.view(), &mut found)];
        all.extend(parts.iter_mut().map(|(src, dst)| (*src, &mut **dst)));
        self.driver.download(&mut all)?;
        let Some(at) = found.as_chunks().0.iter().position(|f| *f != [0; 8]) else { return Ok(()) };
        self.driver.zero(faults.found.view_mut())?;
        let fault = u64::from_ne_bytes(found.as_chunks().0[at]);
        let (index, row, limit) = (fault as u32, !((fault >> 32) as u32), faults.limits[at]);
        let (op, what) = Indexed::NAMES[at];
        let what = match what {
            "target" => format!("target {} at row {row} is neither {IGNORE} nor in 0..{limit}", index as i32),
            what => format!("{what} {index} at row {row} is outside the table of {limit} rows"),
        };
        Err(Error::op(op, what))
    }
}

/// A variant's name by dtype: `by_dtype!(OP, x.dtype(), "swiglu")` is "swiglu_f32", "swiglu_bf16" or "swiglu_f16", or
/// an error.
macro_rules! by_dtype {
    ($op:expr, $dtype:expr, $stem:literal) => {
        match $dtype {
            flatshard_base::DType::F32 => Ok(concat!($stem, "_f32")),
            flatshard_base::DType::Bf16 => Ok(concat!($stem, "_bf16")),
            flatshard_base::DType::F16 => Ok(concat!($stem, "_f16")),
            other => Err(flatshard_base::Error::op($op, format!("computes in f32, bf16 or f16, got {other}"))),
        }
    };
}
pub(super) use by_dtype;

/// Threads of a CTA that handles one row: whole warps, at most `most` threads.
pub fn threads(op: &'static str, columns: usize, most: usize) -> Result<u32> {
    let threads = columns.div_ceil(ITEMS).next_multiple_of(32).max(32);
    match threads <= most {
        true => Ok(threads as u32),
        false => {
            let what = format!("rows of {columns} elements exceed this kernel's limit of {}", most * ITEMS);
            Err(Error::op(op, what))
        }
    }
}
