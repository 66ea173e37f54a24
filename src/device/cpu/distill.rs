//! Knowledge distillation over rows of logits: sums over a rank's columns, then loss and gradient together. Never holds
//! more than a row.
use super::loss::{capped, column};
use super::simd::{exp, tanh};
use crate::ops::{CrossEntropyShape, DistillPart, DistillTerms, IGNORE, VocabPart};
use flatshard_base::{Result, dtype::Float};

type RowStats = [f32; DistillTerms::STATS];

/// The teacher's logit for what is stored.
#[inline(always)]
fn taught<T: Float>(cap: f32) -> impl Fn(&T) -> f32 + Copy {
    move |x| if cap == 0.0 { x.to_f32() } else { cap * tanh(x.to_f32() / cap).0 }
}

/// After the check of the targets.
#[inline(always)]
pub fn part<T: Float>(op: DistillPart) -> Result<()> {
    const OP: &str = DistillPart::OP;
    op.check()?;
    let DistillPart { shape, part, terms, targets, teacher, logits, stats } = op;
    let (targets, teacher, t) = (targets.host::<i32>(OP)?, teacher.host::<T>(OP)?, terms.temperature);
    let taught = taught::<T>(terms.teacher_cap);
    let stats = stats.host::<f32>(OP)?.as_chunks_mut::<{ DistillTerms::STATS }>().0;
    let rows = logits.host::<T>(OP)?.chunks_exact(shape.vocab).zip(teacher.chunks_exact(shape.vocab));
    capped!(shape.softcap, logit, _slope => for (((row, teacher), &target), stats) in rows.zip(targets).zip(stats) {
        *stats = [0.0; DistillTerms::STATS];
        if target == IGNORE {
            continue;
        }
        // Maxima start finite, so that minus infinities add 0 and not a NaN.
        let max = row.iter().fold(f32::MIN, |max, &x| max.max(logit(x)));
        let top = teacher.iter().fold(f32::MIN, |top, y| top.max(taught(y)));
        let mut sums = [0f64; 4];
        for (&x, y) in row.iter().zip(teacher) {
            let (z, y) = (logit(x) - max, taught(y) - top);
            let (q, p) = (exp(z / t), exp(y / t));
            // A word that the weighting model never says adds nothing.
            let (weight, apart) = if terms.reverse { (q, z - y) } else { (p, y - z) };
            let apart = if weight > 0.0 { weight * (apart / t) } else { 0.0 };
            for (sum, x) in sums.iter_mut().zip([exp(z), q, p, apart]) {
                *sum += x as f64;
            }
        }
        let [total, total_t, total_p, apart] = sums.map(|sum| sum as f32);
        let at_target = column(&shape, &part, target).map_or(0.0, |target| logit(row[target]));
        *stats = [max, total, total_t, at_target, top, total_p, apart];
    });
    Ok(())
}

/// [`crate::ops::DistillFinish`] of one of its rows, after its check and that of the targets.
#[derive(Clone, Copy)]
pub struct DistillRow<'a> {
    pub shape: CrossEntropyShape,
    pub part: VocabPart,
    pub terms: DistillTerms,
    pub target: i32,
    /// The row's statistics in the first part, and those of the others, [`DistillRow::apart`] further each.
    pub stats: &'a [RowStats],
    pub apart: usize,
    pub scale: f32,
}

/// The statistics of the whole vocabulary.
#[inline(always)]
fn merge(parts: impl Iterator<Item = RowStats> + Clone, t: f32, reverse: bool) -> RowStats {
    let max = parts.clone().fold(f32::MIN, |max, part| max.max(part[0]));
    let top = parts.clone().fold(f32::MIN, |top, part| top.max(part[4]));
    let mut all = [max, 0.0, 0.0, 0.0, top, 0.0, 0.0];
    for [part_max, total, total_t, at_target, part_top, total_p, apart] in parts {
        let (down, below) = (part_max - max, part_top - top);
        let (of_student, of_teacher) = (exp(down / t), exp(below / t));
        all[1] += total * exp(down);
        all[2] += total_t * of_student;
        all[3] += at_target;
        all[5] += total_p * of_teacher;
        all[6] += match reverse {
            true => of_student * (apart + total_t * ((down - below) / t)),
            false => of_teacher * (apart + total_p * ((below - down) / t)),
        };
    }
    all
}

/// Replaces the row by its gradient and returns its loss.
#[inline(always)]
pub fn finish<T: Float>(of: &DistillRow, row: &mut [T], teacher: &[T]) -> f64 {
    if of.target == IGNORE {
        row.fill(T::from_f32(0.0));
        return 0.0;
    }
    let DistillTerms { alpha, temperature: t, teacher_cap, reverse } = of.terms;
    let parts = of.stats.iter().step_by(of.apart).copied();
    let [max, total, total_t, at_target, top, total_p, apart] = merge(parts, t, reverse);
    let (hot, taught) = (column(&of.shape, &of.part, of.target), taught::<T>(teacher_cap));
    let (own, both) = ((1.0 - alpha) / total, [alpha * t / total_t, alpha * t / total_p]);
    let mean = apart / total_t;
    capped!(of.shape.softcap, _logit, with_slope => for (at, (x, y)) in row.iter_mut().zip(teacher).enumerate() {
        let (z, slope) = with_slope(*x);
        let (z, y) = (z - max, taught(y) - top);
        let hot = if hot == Some(at) { 1.0 - alpha } else { 0.0 };
        let q = both[0] * exp(z / t);
        let pull = match (reverse, q > 0.0) {
            (false, _) => q - both[1] * exp(y / t),
            (true, true) => q * ((z - y) / t - mean),
            (true, false) => 0.0,
        };
        let gradient = own * exp(z) - hot + pull;
        *x = T::from_f32(of.scale * slope * gradient);
    });
    let [total, total_t, total_p, apart] = [total, total_t, total_p, apart].map(f64::from);
    let entropy = total.ln() + (max - at_target) as f64;
    let divergence = match reverse {
        true => apart / total_t + total_p.ln() - total_t.ln(),
        false => apart / total_p + total_t.ln() - total_p.ln(),
    };
    (1.0 - alpha) as f64 * entropy + (alpha * t * t) as f64 * divergence
}
