//! Attention of rows of many sequences over pages of keys and values. Never multiplies or sums over keys itself
//! (`tile`).
//!
//! Each sequence and key/value head is independent, so threads share a call by ranges of these pairs. What a head sees
//! is gathered from its pages first: from the block of keys on in which the window begins, so that sums are in the
//! order of attention over whole documents. A single row reads its keys and values where they are, with the same bits.
use super::gemm::panels::{PanelFloat, TokenRows};
use super::simd::Level;
#[cfg(target_arch = "x86_64")]
use super::tile::SingleToken;
use super::tile::{self, ACROSS, AttentionScratch, Group, HeadRows, Mask, Shared, To};
use crate::ops::{AttentionPaged, AttentionShape, PAGE, PagedRows};
use flatshard_base::Result;
use std::ops::Range;

/// What has a path for single rows, on some CPUs.
pub trait PagedFloat: PanelFloat {
    /// Whether it was computed.
    ///
    /// # Safety
    /// As for [`tile::single`], if the CPU has it.
    #[cfg(target_arch = "x86_64")]
    unsafe fn single(_: &mut AttentionScratch, _: &SingleToken<Self>, _: impl Fn(usize) -> usize + Copy) -> bool {
        false
    }
}
impl PagedFloat for half::f16 {}
macro_rules! single_floats {
    ($($type:ty),*) => { $(impl PagedFloat for $type {
        #[cfg(target_arch = "x86_64")]
        unsafe fn single(
            scratch: &mut AttentionScratch,
            x: &SingleToken<Self>,
            row: impl Fn(usize) -> usize + Copy,
        ) -> bool {
            let takes = tile::takes(scratch.kernel, <Self as flatshard_base::Elem>::DTYPE, x.shape);
            if takes {
                // SAFETY: upheld by the caller; the kernel is available.
                unsafe { tile::single(scratch, x, row) }
            }
            takes
        }
    })* };
}
single_floats!(f32, half::bf16);

/// A checked call whose keys and values are stored, for any division by sequences and key/value heads.
pub struct PagedForward<'a, T> {
    shape: AttentionShape,
    runs: &'a [PagedRows<'a>],
    n: usize,
    qkv: &'a [T],
    kv: &'a [T],
    o: Shared<'a, T>,
    lse: Shared<'a, f32>,
}

impl<'a, T: PagedFloat> PagedForward<'a, T> {
    pub fn new(op: AttentionPaged<'a>) -> Result<PagedForward<'a, T>> {
        const OP: &str = AttentionPaged::OP;
        let n = op.check()?;
        let (row, c): (usize, usize) = (op.shape.row(), op.shape.kv_row());
        let (qkv, kv): (&[T], &mut [T]) = (op.qkv.host(OP)?, op.kv.host(OP)?);
        for run in op.runs {
            for (at, end) in (run.past..run.past + run.rows).zip(run.first + 1..) {
                let to = run.pages[at / PAGE] as usize * PAGE + at % PAGE;
                kv[to * c..(to + 1) * c].copy_from_slice(&qkv[end * row - c..end * row]);
            }
        }
        Ok(PagedForward {
            n,
            shape: op.shape,
            runs: op.runs,
            qkv,
            kv,
            o: Shared::new(op.o.host(OP)?),
            lse: Shared::new(op.lse.host(OP)?),
        })
    }
    /// Pairs of a sequence and a key/value head, and bytes that they read.
    pub fn pairs(&self) -> (usize, usize) {
        let tokens: usize = self.runs.iter().map(|run| run.past + run.rows).sum();
        (self.runs.len() * self.shape.kv_heads, tokens * self.shape.kv_row() * size_of::<T>())
    }
    /// Computes these pairs' share.
    ///
    /// # Safety
    /// No other call at the same time has one of these pairs.
    pub unsafe fn compute(&self, level: Level, scratch: &mut AttentionScratch, pairs: Range<usize>) {
        let (a, n) = (&self.shape, self.n);
        let (dim, group, kv_row) = (a.head_dim, a.heads / a.kv_heads, a.kv_row());
        let window = if a.window == 0 { usize::MAX } else { a.window };
        for pair in pairs {
            let (run, kv) = (&self.runs[pair / a.kv_heads], pair % a.kv_heads);
            let end = run.past + run.rows;
            #[cfg(target_arch = "x86_64")]
            if run.rows == 1 {
                let first = kv * group;
                let of = SingleToken {
                    shape: a,
                    queries: &self.qkv[run.first * a.row() + first * dim..][..group * dim],
                    kv: self.kv,
                    apart: a.kv_heads * dim,
                    visible: end.saturating_sub(window)..end,
                    out: HeadRows { to: To::Assign(&self.o), at: run.first * a.width() + first * dim, row: a.width() },
                    lse: &self.lse,
                    lse_at: first * n + run.first,
                    lse_apart: n,
                };
                let row = |t: usize| (run.pages[t / PAGE] as usize * PAGE + t % PAGE) * kv_row + kv * dim;
                // SAFETY: rows are within the pages; only this call has this head of this row.
                if unsafe { T::single(scratch, &of, row) } {
                    continue;
                }
            }
            let from = (run.past + 1).saturating_sub(window) / ACROSS * ACROSS;
            let mut lines = std::mem::take(&mut scratch.gathered);
            let gathered = lines.take::<T>(2 * (end - from) * dim);
            let (keys, values) = gathered.split_at_mut((end - from) * dim);
            for (to, head) in [(&mut *keys, kv), (&mut *values, a.kv_heads + kv)] {
                for (t, to) in (from..end).zip(to.chunks_exact_mut(dim)) {
                    let at = run.pages[t / PAGE] as usize * PAGE + t % PAGE;
                    to.copy_from_slice(&self.kv[at * kv_row + head * dim..][..dim]);
                }
            }
            let rows = |data| TokenRows { data, row: dim, rows: end - from, dim };
            let first = kv * group;
            let group = Group {
                shape: a,
                queries: TokenRows {
                    data: &self.qkv[run.first * a.row() + first * dim..],
                    row: a.row(),
                    rows: run.rows,
                    dim,
                },
                keys: rows(&*keys),
                values: rows(&*values),
                mask: Mask::Causal { past: run.past - from, len: run.rows, window },
                out: HeadRows { to: To::Assign(&self.o), at: run.first * a.width() + first * dim, row: a.width() },
                lse: &self.lse,
                lse_at: first * n + run.first,
                apart: n,
            };
            // SAFETY: only this call has this head of these rows.
            unsafe { tile::forward(level, scratch, &group) }
            scratch.gathered = lines;
        }
    }
}
