//! Forward of attention for one query per head, as in generating tokens: keys and values are read once, where they
//! are. Never packs, and never multiplies in tiles.
use super::super::gemm::panels::TokenRows;
use super::super::simd::{LANES, lane_sum, prefetch, sum_with, tanh};
use super::lanes::{exp_below, larger};
use super::operands::Group;
use super::scratch::AttentionScratch;
use flatshard_base::dtype::Float;
use std::ops::Range;

/// These rows of one head. They are far apart, where no prefetcher of the CPU sees ahead.
#[inline(always)]
fn rows<'a, T>(x: &TokenRows<'a, T>, range: Range<usize>) -> impl Iterator<Item = &'a [T]> {
    const AHEAD: usize = 16;
    let (dim, apart, from) = (x.dim, x.row, range.start * x.row);
    x.data.get(from..).unwrap_or_default().chunks(apart).take(range.len()).map(
        #[inline(always)]
        move |row| {
            let next = row.as_ptr().wrapping_add(AHEAD * apart);
            (0..dim).step_by(64 / size_of::<T>()).for_each(|at| prefetch(next.wrapping_add(at)));
            &row[..dim]
        },
    )
}

/// `x.queries` has one row.
///
/// # Safety
/// As for [`super::forward()`].
#[inline(always)]
pub(super) unsafe fn single<T: Float>(scratch: &mut AttentionScratch, x: &Group<T>) {
    let (a, seen) = (x.shape, x.mask.keys(0));
    let [query, weights, sums] = scratch.take([a.head_dim, seen.len(), a.head_dim]);
    for g in 0..a.heads / a.kv_heads {
        let row = x.queries.head(g).data.iter();
        query.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_f32());
        let mut max = f32::MIN;
        for (score, key) in weights.iter_mut().zip(rows(&x.keys, seen.clone())) {
            let product = sum_with(
                [key],
                [&*query],
                #[inline(always)]
                |[k], [q]| k * q,
            );
            *score = match a.softcap > 0.0 {
                true => a.softcap * tanh(product * (a.scale / a.softcap)).0,
                false => product * a.scale,
            };
            max = larger(*score, max);
        }
        let mut total = [0.0; LANES];
        for run in weights.chunks_mut(LANES) {
            for (weight, total) in run.iter_mut().zip(&mut total) {
                *weight = exp_below(*weight - max);
                *total += *weight;
            }
        }
        let total = lane_sum(total);
        sums.fill(0.0);
        for (weight, value) in weights.iter().zip(rows(&x.values, seen.clone())) {
            sums.iter_mut().zip(value).for_each(|(sum, x)| *sum = weight.mul_add(x.to_f32(), *sum));
        }
        let nothing = total == 0.0;
        let share = if nothing { 0.0 } else { 1.0 / total };
        sums.iter_mut().for_each(|x| *x *= share);
        // SAFETY: upheld by the caller.
        unsafe {
            x.out.write(g, 0, sums);
            x.lse.range(x.lse_at + g * x.apart, 1)[0] = if nothing { f32::NEG_INFINITY } else { max + total.ln() };
        }
    }
}
