//! Knowledge distillation over rows of logits, loss and gradient together. Never holds more than a row.
use super::loss::capped;
use super::operands::first;
use super::simd::{exp, tanh};
use crate::base::{Result, dtype::Float};
use crate::device::ops::{Distill, IGNORE};

/// max(x / t) and the logarithm of the sum of exp(x / t - max).
#[inline(always)]
fn log_sum(row: impl Iterator<Item = f32> + Clone, t: f32) -> (f32, f32) {
    let max = row.clone().fold(f32::MIN, f32::max) / t;
    (max, row.map(|x| exp(x / t - max) as f64).sum::<f64>().ln() as f32)
}

/// Of one row.
#[inline(always)]
pub fn distill<T: Float>(op: Distill) -> Result<()> {
    const OP: &str = Distill::OP;
    op.check()?;
    let Distill { shape, terms, targets, scale, teacher, logits, loss } = op;
    let (targets, scale, teacher) = (targets.host::<i32>(OP)?, first(OP, scale)?, teacher.host::<T>(OP)?);
    let (logits, sum) = (logits.host::<T>(OP)?, &mut loss.host::<f64>(OP)?[0]);
    let (alpha, t, cap) = (terms.alpha, terms.temperature, terms.teacher_cap);
    let taught = |x: &T| if cap == 0.0 { x.to_f32() } else { cap * tanh(x.to_f32() / cap).0 };
    let rows = logits.chunks_exact_mut(shape.vocab).zip(teacher.chunks_exact(shape.vocab)).zip(targets);
    capped!(shape.softcap, logit, with_slope => for ((row, teacher), &target) in rows {
        if target == IGNORE {
            row.fill(T::from_f32(0.0));
            continue;
        }
        let target = target as usize;
        let student = row.iter().map(|&x| logit(x));
        let ((max, log), (max_t, log_t)) = (log_sum(student.clone(), 1.0), log_sum(student, t));
        let (top, log_top) = log_sum(teacher.iter().map(taught), t);
        let entropy = (log + max - logit(row[target])) as f64;
        let mut divergence = 0.0;
        for (at, (x, y)) in row.iter_mut().zip(teacher).enumerate() {
            let (z, slope) = with_slope(*x);
            let (log_q, log_p) = (z / t - max_t - log_t, taught(y) / t - top - log_top);
            let p = exp(log_p);
            // A word that the teacher never says.
            divergence += if p > 0.0 { (p * (log_p - log_q)) as f64 } else { 0.0 };
            let hot = if at == target { 1.0 } else { 0.0 };
            let own = (1.0 - alpha) * (exp(z - max - log) - hot);
            *x = T::from_f32(scale * slope * (own + alpha * t * (exp(log_q) - p)));
        }
        *sum += (1.0 - alpha) as f64 * entropy + (alpha * t * t) as f64 * divergence;
    });
    Ok(())
}
