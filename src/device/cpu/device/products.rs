//! How threads share a product: by rows of the result, or by columns where it has more of them, so that the larger
//! operand is read and packed once by all threads together. Never multiplies.
use super::{CpuDevice, lock};
use crate::cpu::divide::{Columns, Divisible, LowerHalf};
use crate::cpu::gemm::{self, GemmScratch, panels::COLUMNS};
use crate::epilogue;
use crate::ops::{Gemm, GemmShape, GemmThen, Grouped, GroupedGemm};
use flatshard_base::{Error, Result};

impl CpuDevice {
    /// `run(scratch, part)` for parts of a product: of rows, or with `columns` of columns.
    fn shared<O>(&self, columns: bool, op: O, run: &(dyn Fn(&mut GemmScratch, O) -> Result<()> + Sync)) -> Result<()>
    where
        O: Divisible + Sync,
        Columns<O>: Divisible + Sync,
    {
        let run = |thread: usize, op| run(&mut lock(&self.gemm[thread]), op);
        match columns {
            true => self.rows_on(COLUMNS, Columns(op), &|thread, Columns(op)| run(thread, op)),
            false => self.rows_on(self.panel(), op, &run),
        }
    }
    /// Rows that the kernel multiplies at a time.
    fn panel(&self) -> usize {
        lock(&self.gemm[0]).kernel().panel()
    }

    pub(super) fn product(&self, op: Gemm) -> Result<()> {
        op.check()?;
        let GemmShape { m, n, ta, symmetric, .. } = op.shape;
        if lock(&self.gemm[0]).is_narrow(&op.shape, op.a.dtype()) {
            return self.shared(ta && n > m, op, &gemm::gemm_narrow);
        }
        if symmetric && lock(&self.gemm[0]).fuses() {
            return self.symmetric(op);
        }
        let columns = lock(&self.gemm[0]).by_columns(&op.shape);
        self.shared(columns, op, &gemm::gemm)
    }
    pub(super) fn product_then(&self, op: GemmThen) -> Result<()> {
        op.check()?;
        let (fuses, columns) = {
            let scratch = lock(&self.gemm[0]);
            (scratch.fuses(), scratch.by_columns(&op.shape))
        };
        match fuses {
            // SAFETY: checked.
            true => self.shared(columns, op, &|scratch, op| unsafe { gemm::gemm_then(scratch, op) }),
            false => epilogue::in_passes(self, op),
        }
    }
    /// The lower half, and a copy of it. The kernel has blocks.
    fn symmetric(&self, op: Gemm) -> Result<()> {
        let (mut c, shape) = (op.c, op.shape);
        let half = LowerHalf { op: Gemm { c: c.reborrow(), ..op }, first: 0 };
        self.rows_on(self.panel(), half, &|thread, LowerHalf { op, first }| {
            gemm::gemm_lower(&mut lock(&self.gemm[thread]), op, first)
        })?;
        floats!(self, c.dtype(), T => gemm::mirror::<T>(&shape, c))
    }

    /// Group by group: each product is divided over the threads as any other.
    pub(super) fn grouped(&self, op: GroupedGemm) -> Result<()> {
        let (_, rows) = op.check()?;
        let GroupedGemm { kind, n, k, offsets, a, b, mut c, stride, accumulate, alike } = op;
        let bytes = c.bytes();
        let offsets = offsets.host::<u32>(GroupedGemm::OP)?;
        for (e, of) in offsets.windows(2).enumerate() {
            let (from, to) = (of[0] as usize, of[1] as usize);
            if from > to || to > rows {
                return Err(Error::op(GroupedGemm::OP, format!("group {e} has rows {from} to {to} of {rows}")));
            }
            let (m, matrix) = (to - from, e * stride..e * stride + n * k);
            let (shape, of_a, of_b, of_c) = match kind {
                Grouped::Forward => (GemmShape::nt(m, n, k), from * k..to * k, matrix, from * n..to * n),
                Grouped::Input => (GemmShape::nn(m, n, k), from * k..to * k, matrix, from * n..to * n),
                Grouped::Weight => (GemmShape::tn(n, k, m), from * n..to * n, from * k..to * k, matrix),
            };
            let (shape, c) = (GemmShape { accumulate, ..shape }, c.reborrow().slice(of_c));
            let product = Gemm { shape, a: a.slice(of_a), b: b.slice(of_b), c };
            match alike || kind == Grouped::Weight {
                true => {
                    let columns = lock(&self.gemm[0]).by_columns(&shape);
                    self.shared(columns, product, &|scratch, op| gemm::gemm_among(scratch, op, bytes))?
                }
                false => self.product(product)?,
            }
        }
        Ok(())
    }
}
