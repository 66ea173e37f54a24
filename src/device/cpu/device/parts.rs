//! How the device runs one operation: in parts, on the threads that it is worth. Never knows which operation.
use super::{CpuDevice, lock};
use crate::cpu::divide::{Divisible, LINE};
use crate::cpu::gemm;
use crate::cpu::tile::AttentionScratch;
use crate::pages::{self, HUGE};
use crate::{Buf, ViewMut};
use flatshard_base::Result;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Bytes of a buffer whose pages are put in place when it is allocated: fewer faults take less than the call.
const WORTH_TOUCHING: usize = 64 << 10;

impl CpuDevice {
    /// Threads that an operation is worth, by the bytes of its main operand.
    pub(super) fn worth(&self, bytes: usize) -> usize {
        self.pool.threads().min(bytes / self.grain).max(1)
    }
    /// Runs `run(thread, part)` for parts of `0..n` that start at multiples of `step`, one per thread that `bytes` of
    /// work are worth.
    pub(super) fn parts(
        &self,
        (n, step, bytes): (usize, usize, usize),
        run: &(dyn Fn(usize, Range<usize>) -> Result<()> + Sync),
    ) -> Result<()> {
        let mut each = n.div_ceil(self.worth(bytes)).next_multiple_of(step);
        if each >= n {
            return run(0, 0..n);
        }
        // Products of few rows have loops of their own: a product of many leaves no part with few.
        while step > 1 && (1..=gemm::FEW_ROWS).contains(&(n % each)) {
            each += step;
        }
        let failed = Mutex::new(None);
        self.pool.run(n.div_ceil(each), &|thread, part| {
            if let Err(e) = run(thread, part * each..n.min((part + 1) * each)) {
                lock(&failed).get_or_insert(e);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
    /// A new buffer with its pages in place.
    pub(super) fn touched(&self, mut buf: Buf) -> Result<Buf> {
        let (at, bytes) = (BufferStart(buf.view_mut().as_mut_ptr()), buf.bytes());
        if bytes >= WORTH_TOUCHING {
            self.parts((bytes, HUGE, bytes), &|_, part| {
                // SAFETY: the buffer was mapped for this many bytes, and parts start at multiples of huge pages.
                unsafe { pages::touch(at.get().add(part.start), part.len()) };
                Ok(())
            })?;
        }
        Ok(buf)
    }
    /// Runs an operation in parts.
    pub(super) fn rows<O: Divisible + Sync>(&self, op: O, run: &(dyn Fn(O) -> Result<()> + Sync)) -> Result<()> {
        self.rows_on(O::STEP, op, &|_, op| run(op))
    }
    pub(super) fn rows_on<O: Divisible + Sync>(
        &self,
        step: usize,
        op: O,
        run: &(dyn Fn(usize, O) -> Result<()> + Sync),
    ) -> Result<()> {
        if self.pool.threads() == 1 {
            return run(0, op);
        }
        let (n, bytes) = op.rows()?;
        if self.worth(bytes) == 1 || n <= step {
            return run(0, op);
        }
        // SAFETY: `parts` makes parts that do not overlap.
        self.parts((n, step, bytes), &|thread, rows| run(thread, unsafe { op.part(&rows, n) }))
    }
    /// Runs an elementwise operation in parts: which elements, and the result's.
    pub(super) fn elements(
        &self,
        x: &ViewMut,
        run: &(dyn Fn(Range<usize>, ViewMut) -> Result<()> + Sync),
    ) -> Result<()> {
        // SAFETY: `parts` makes parts that do not overlap.
        self.parts((x.len(), LINE, x.bytes()), &|_, part| run(part.clone(), unsafe { x.part(part) }))
    }
    /// Runs attention for `0..n` one by one. A thread that is done with one takes the next, since their sizes differ.
    pub(super) fn each(&self, n: usize, bytes: usize, run: &(dyn Fn(&mut AttentionScratch, usize) + Sync)) {
        let run = |thread: usize, number| run(&mut lock(&self.attention[thread]), number);
        match self.worth(bytes) {
            1 => (0..n).for_each(|number| run(0, number)),
            _ => self.pool.run(n, &run),
        }
    }
    /// Runs attention for parts of the key/value heads.
    pub(super) fn heads(
        &self,
        n: usize,
        bytes: usize,
        run: &(dyn Fn(&mut AttentionScratch, Range<usize>) + Sync),
    ) -> Result<()> {
        self.parts((n, 1, bytes), &|thread, heads| {
            run(&mut lock(&self.attention[thread]), heads);
            Ok(())
        })
    }
}

/// Where threads touch pages.
#[derive(Clone, Copy)]
struct BufferStart(*mut u8);
// SAFETY: threads touch disjoint parts.
unsafe impl Sync for BufferStart {}
impl BufferStart {
    fn get(&self) -> *mut u8 {
        self.0
    }
}
