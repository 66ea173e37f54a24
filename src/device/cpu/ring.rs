//! The passes of ring attention (Liu et al. 2023): local queries over one block of keys and values, partial results in
//! f32, and their merge. Never communicates, and never depends on a block's owner: row numbers in the packed batch
//! determine which keys a query attends to.
//!
//! Queries and keys are in increasing order, so a query attends to one range of the block's keys. Tiles and arithmetic
//! are those of attention over whole documents.
use super::gemm::panels::{PanelFloat, TokenRows};
use super::simd::Level;
use super::tile::{self, AttentionScratch, Group, GroupGradients, HeadRows, Mask, Shared, To};
use crate::ops::{AttentionMerge, AttentionPass, AttentionPassBackward, AttentionRanges, AttentionShape, CopyColumns};
use flatshard_base::{Error, Result, dtype::Float};
use std::ops::Range;

/// Rows of the packed batch, checked to increase within the documents.
fn check_rows(name: &str, rows: &[u32], cu_seqlens: &[u32]) -> Result<()> {
    let end = cu_seqlens.last().copied().unwrap_or(0);
    if rows.is_sorted_by(|a, b| a < b) && rows.last().is_none_or(|&last| last < end) {
        return Ok(());
    }
    Err(Error::op("attention_ranges", format!("{name} do not increase below {end}, the end of the last document")))
}

pub fn ranges(op: AttentionRanges) -> Result<()> {
    const OP: &str = AttentionRanges::OP;
    op.check()?;
    let (a, cu_seqlens) = (&op.shape, op.cu_seqlens.host::<u32>(OP)?);
    let (q_rows, k_rows) = (op.q_rows.host::<u32>(OP)?, op.k_rows.host::<u32>(OP)?);
    let (of_queries, of_keys) = (op.of_queries.host::<u32>(OP)?, op.of_keys.host::<u32>(OP)?);
    if cu_seqlens.first() != Some(&0) || !cu_seqlens.is_sorted() {
        return Err(Error::op("attention_ranges", format!("cu_seqlens {cu_seqlens:?} does not increase from 0")));
    }
    check_rows("q_rows", q_rows, cu_seqlens)?;
    check_rows("k_rows", k_rows, cu_seqlens)?;
    let window = if a.window == 0 { u32::MAX } else { a.window.min(u32::MAX as usize) as u32 };
    // The end of a row's document is the first boundary after the row.
    let document = |row: u32| cu_seqlens.partition_point(|&c| c <= row);
    let within = |columns: &[u32], seen: Range<u32>| {
        [seen.start, seen.end].map(|end| columns.partition_point(|&c| c < end) as u32)
    };
    for (&row, range) in q_rows.iter().zip(of_queries.as_chunks_mut::<2>().0) {
        let start = cu_seqlens[document(row) - 1].max((row + 1).saturating_sub(window));
        *range = within(k_rows, start..row + 1);
    }
    for (&row, range) in k_rows.iter().zip(of_keys.as_chunks_mut::<2>().0) {
        *range = within(q_rows, row..cu_seqlens[document(row)].min(row.saturating_add(window)));
    }
    Ok(())
}

/// A head's columns of `rows` rows; of none if there are no rows.
fn columns<T>(data: &[T], row: usize, rows: usize, column: usize, dim: usize) -> TokenRows<'_, T> {
    TokenRows { data: data.get(column..).unwrap_or_default(), row, rows, dim }
}

/// A checked pass, for any division by key/value heads.
pub struct PassForward<'a, T> {
    shape: AttentionShape,
    queries: usize,
    keys: usize,
    of_queries: &'a [[u32; 2]],
    qkv: &'a [T],
    kv: &'a [T],
    o: Shared<'a, f32>,
    lse: Shared<'a, f32>,
}

impl<'a, T: PanelFloat> PassForward<'a, T> {
    pub fn new(op: AttentionPass<'a>) -> Result<PassForward<'a, T>> {
        const OP: &str = AttentionPass::OP;
        let (queries, keys) = op.check()?;
        Ok(PassForward {
            shape: op.shape,
            queries,
            keys,
            of_queries: op.of_queries.host::<u32>(OP)?.as_chunks().0,
            qkv: op.qkv.host(OP)?,
            kv: op.kv.host(OP)?,
            o: Shared::new(op.o.host(OP)?),
            lse: Shared::new(op.lse.host(OP)?),
        })
    }
    /// Computes these key/value heads' share.
    ///
    /// # Safety
    /// No other call at the same time has one of these heads.
    pub unsafe fn heads(&self, level: Level, scratch: &mut AttentionScratch, kv_heads: Range<usize>) {
        let &PassForward { shape: ref a, queries: n, keys: nk, of_queries, .. } = self;
        let (dim, group) = (a.head_dim, a.heads / a.kv_heads);
        for kv in kv_heads {
            let [keys, values] = [kv, a.kv_heads + kv].map(|h| columns(self.kv, a.kv_row(), nk, h * dim, dim));
            let group = Group {
                shape: a,
                queries: columns(self.qkv, a.row(), n, kv * group * dim, dim),
                keys,
                values,
                mask: Mask::Ranges { of_queries, of_keys: &[], queries: n, keys: nk },
                out: HeadRows { to: To::AssignF32(&self.o), at: kv * group * dim, row: a.width() },
                lse: &self.lse,
                lse_at: kv * group * n,
                apart: n,
            };
            // SAFETY: only this call has these heads, and they are disjoint.
            unsafe { tile::forward(level, scratch, &group) }
        }
    }
}

/// A checked merge, for any division by rows.
pub struct PassMerge<'a> {
    shape: AttentionShape,
    pub rows: usize,
    o_pass: &'a [f32],
    lse_pass: &'a [f32],
    o: Shared<'a, f32>,
    lse: Shared<'a, f32>,
}

impl<'a> PassMerge<'a> {
    pub fn new(op: AttentionMerge<'a>) -> Result<PassMerge<'a>> {
        const OP: &str = AttentionMerge::OP;
        Ok(PassMerge {
            rows: op.check()?,
            shape: op.shape,
            o_pass: op.o_pass.host(OP)?,
            lse_pass: op.lse_pass.host(OP)?,
            o: Shared::new(op.o.host(OP)?),
            lse: Shared::new(op.lse.host(OP)?),
        })
    }
    /// Merges these rows.
    ///
    /// # Safety
    /// No other call at the same time has one of these rows.
    pub unsafe fn rows(&self, rows: Range<usize>) {
        let (a, o_row) = (&self.shape, self.shape.width());
        for head in 0..a.heads {
            let first = head * self.rows + rows.start;
            // SAFETY: only this call has these rows.
            let lse = unsafe { self.lse.range(first, rows.len()) };
            for ((i, old), &new) in rows.clone().zip(lse).zip(&self.lse_pass[first..]) {
                if new == f32::NEG_INFINITY {
                    continue;
                }
                let max = if new > *old { new } else { *old };
                let (w_new, w_old) = ((new - max).exp(), (*old - max).exp());
                let share = 1.0 / (w_new + w_old);
                *old = max + (w_new + w_old).ln();
                let at = i * o_row + head * a.head_dim;
                // SAFETY: as above.
                let o = unsafe { self.o.range(at, a.head_dim) };
                for (o, x) in o.iter_mut().zip(&self.o_pass[at..]) {
                    *o = *o * (w_old * share) + x * (w_new * share);
                }
            }
        }
    }
}

/// A checked backward pass, for any division by key/value heads.
pub struct PassBackward<'a, T> {
    shape: AttentionShape,
    queries: usize,
    keys: usize,
    of_queries: &'a [[u32; 2]],
    of_keys: &'a [[u32; 2]],
    qkv: &'a [T],
    kv: &'a [T],
    d_o: &'a [T],
    lse: &'a [f32],
    delta: &'a [f32],
    dq: Shared<'a, f32>,
    dkv: Shared<'a, f32>,
}

impl<'a, T: PanelFloat> PassBackward<'a, T> {
    pub fn new(op: AttentionPassBackward<'a>) -> Result<PassBackward<'a, T>> {
        const OP: &str = AttentionPassBackward::OP;
        let (queries, keys) = op.check()?;
        Ok(PassBackward {
            shape: op.shape,
            queries,
            keys,
            of_queries: op.of_queries.host::<u32>(OP)?.as_chunks().0,
            of_keys: op.of_keys.host::<u32>(OP)?.as_chunks().0,
            qkv: op.qkv.host(OP)?,
            kv: op.kv.host(OP)?,
            d_o: op.d_o.host(OP)?,
            lse: op.lse.host(OP)?,
            delta: op.delta.host(OP)?,
            dq: Shared::new(op.dq.host(OP)?),
            dkv: Shared::new(op.dkv.host(OP)?),
        })
    }
    /// Computes these key/value heads' share.
    ///
    /// # Safety
    /// No other call at the same time has one of these heads.
    pub unsafe fn heads(&self, level: Level, scratch: &mut AttentionScratch, kv_heads: Range<usize>) {
        let &PassBackward { shape: ref a, queries: n, keys: nk, of_queries, of_keys, .. } = self;
        let (dim, group) = (a.head_dim, a.heads / a.kv_heads);
        for kv in kv_heads {
            let (first, of_block) = (kv * group, [kv * dim, (a.kv_heads + kv) * dim]);
            let [keys, values] = of_block.map(|column| columns(self.kv, a.kv_row(), nk, column, dim));
            let [d_keys, d_values] = of_block.map(|at| HeadRows { to: To::AddF32(&self.dkv), at, row: a.kv_row() });
            let group = GroupGradients {
                shape: a,
                queries: columns(self.qkv, a.row(), n, first * dim, dim),
                keys,
                values,
                d_out: columns(self.d_o, a.width(), n, first * dim, dim),
                mask: Mask::Ranges { of_queries, of_keys, queries: n, keys: nk },
                lse: &self.lse[first * n..],
                delta: &self.delta[first * n..],
                apart: n,
                d_queries: HeadRows { to: To::AddF32(&self.dq), at: first * dim, row: a.width() },
                d_keys,
                d_values,
            };
            // SAFETY: only this call has these heads, and they are disjoint.
            unsafe { tile::backward(level, scratch, &group) }
        }
    }
}

#[inline(always)]
pub fn copy_columns<S: Float, D: Float>(op: CopyColumns) -> Result<()> {
    const OP: &str = CopyColumns::OP;
    op.check()?;
    let CopyColumns { rows, width, src_row, dst_row, src, dst } = op;
    let (src, dst) = (src.host::<S>(OP)?, dst.host::<D>(OP)?);
    for r in 0..rows {
        let (src, dst) = (&src[r * src_row..][..width], &mut dst[r * dst_row..][..width]);
        dst.iter_mut().zip(src).for_each(|(d, s)| *d = D::from_f32(s.to_f32()));
    }
    Ok(())
}
