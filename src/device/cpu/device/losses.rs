//! How threads share the losses of rows: by rows, whose losses are added in row order. Never computes a loss.
use super::{CpuDevice, lock};
use crate::cpu::operands::first;
use crate::cpu::{distill, loss, memory};
use crate::ops::{CrossEntropy, CrossEntropyFinish, DistillFinish};
use crate::{View, ViewMut};
use flatshard_base::{Category, DType, Meter, Result};

impl CpuDevice {
    /// Runs `run(thread, row, logits, loss)` for each of `n` rows, and adds the losses, which start at 0, in row order;
    /// `by_row` assigns them instead.
    fn row_losses(
        &self,
        n: usize,
        by_row: bool,
        logits: ViewMut,
        loss: ViewMut,
        run: &(dyn Fn(usize, usize, ViewMut, ViewMut) -> Result<()> + Sync),
    ) -> Result<()> {
        let Some(width) = logits.len().checked_div(n) else { return Ok(()) };
        let mut held = lock(&self.losses);
        let losses = match held.take().filter(|losses| losses.len() >= n) {
            Some(losses) => losses,
            None => memory::alloc(DType::F64, n, Meter::default().lease(Category::Scratch, 0))?,
        };
        let losses = held.insert(losses).view_mut().slice(0..n);
        self.parts((n, 1, logits.bytes()), &|thread, mut rows| {
            rows.try_for_each(|row| {
                // SAFETY: `parts` makes parts that do not overlap.
                let (logits, mut loss) =
                    unsafe { (logits.part(row * width..(row + 1) * width), losses.part(row..row + 1)) };
                memory::zero(loss.reborrow())?;
                run(thread, row, logits, loss)
            })
        })?;
        let (sums, losses) = (loss.host::<f64>(CrossEntropy::OP)?, losses.host::<f64>(CrossEntropy::OP)?);
        match by_row {
            true => sums.copy_from_slice(losses),
            false => losses.iter().for_each(|loss| sums[0] += loss),
        }
        Ok(())
    }
    pub(super) fn token_losses(&self, op: CrossEntropy) -> Result<()> {
        if self.worth(op.logits.bytes()) == 1 {
            let scratch = &mut lock(&self.gemm[0]);
            return floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op, scratch));
        }
        let (n, CrossEntropy { shape, targets, by_row, scale, logits, loss }) = (op.check()?, op);
        loss::check(CrossEntropy::OP, targets.host(CrossEntropy::OP)?, shape.vocab)?;
        self.row_losses(n, by_row, logits, loss, &|thread, row, logits, loss| {
            let (targets, scale) = (targets.slice(row..row + 1), scale.map(|scale| of_row(scale, by_row, row)));
            let op = CrossEntropy { shape, targets, by_row, scale, logits, loss };
            let scratch = &mut lock(&self.gemm[thread]);
            floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op, scratch))
        })
    }
    pub(super) fn finish_token_losses(&self, op: CrossEntropyFinish) -> Result<()> {
        const OP: &str = CrossEntropyFinish::OP;
        let ((n, _), CrossEntropyFinish { shape, part, targets, stats, by_row, scale, logits, loss }) =
            (op.check()?, op);
        let (targets, stats) = (targets.host::<i32>(OP)?, stats.host::<f32>(OP)?.as_chunks().0);
        loss::check(OP, targets, part.of)?;
        self.row_losses(n, by_row, logits, loss, &|_, row, logits, loss| {
            let scale = scale.map(|scale| first(OP, of_row(scale, by_row, row))).transpose()?;
            let of_row = loss::FinishRow { shape, part, target: targets[row], stats: &stats[row..], apart: n, scale };
            let loss = &mut loss.host::<f64>(OP)?[0];
            floats!(self, logits.dtype(), T => {
                *loss = loss::finish(&of_row, logits.host::<T>(OP)?);
                Ok(())
            })
        })
    }
    pub(super) fn finish_distillation(&self, op: DistillFinish) -> Result<()> {
        const OP: &str = DistillFinish::OP;
        let ((n, _), DistillFinish { shape, part, terms, targets, teacher, stats, scale, logits, loss }) =
            (op.check()?, op);
        let (targets, stats) = (targets.host::<i32>(OP)?, stats.host::<f32>(OP)?.as_chunks().0);
        loss::check(OP, targets, part.of)?;
        let scale = first(OP, scale)?;
        self.row_losses(n, false, logits, loss, &|_, row, logits, loss| {
            let (target, stats) = (targets[row], &stats[row..]);
            let of_row = distill::DistillRow { shape, part, terms, target, stats, apart: n, scale };
            let (teacher, loss) =
                (teacher.slice(row * shape.vocab..(row + 1) * shape.vocab), &mut loss.host::<f64>(OP)?[0]);
            floats!(self, logits.dtype(), T => {
                *loss = distill::finish::<T>(&of_row, logits.host(OP)?, teacher.host(OP)?);
                Ok(())
            })
        })
    }
}

/// The scale of a row, which is that of all rows unless each has its own.
fn of_row(scale: View, by_row: bool, row: usize) -> View {
    if by_row { scale.slice(row..row + 1) } else { scale }
}
