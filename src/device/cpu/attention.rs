//! Attention over whole documents, forward and backward. Never multiplies or sums over keys itself (`tile`).
//!
//! Documents and key/value heads are independent, so threads may share a call by ranges of key/value heads, each with
//! its own scratch: results do not depend on how they are divided.
use super::gemm::panels::{PanelFloat, TokenRows};
use super::simd::{Level, sum};
use super::tile::{self, AttentionScratch, Group, GroupGradients, HeadRows, Mask, Shared, To};
use crate::View;
use crate::ops::{Attention, AttentionBackward, AttentionDelta, AttentionShape};
use flatshard_base::{Error, Result, dtype::Float};
use std::ops::Range;

/// Each row's document, checked to follow one another up to `n`.
pub(super) fn documents<'a>(op: &'static str, documents: View<'a>, n: usize) -> Result<&'a [[u32; 2]]> {
    let documents = documents.host::<u32>(op)?.as_chunks().0;
    let mut before = [0; 2];
    for (row, &of) in documents.iter().enumerate() {
        let follows = if before[1] as usize > row { of == before } else { of[0] as usize == row };
        if !follows || row >= of[1] as usize || of[1] as usize > n {
            let [start, end] = of;
            let what = format!("documents has rows {start}..{end} for row {row} of {n}, which follow no document");
            return Err(Error::op(op, what));
        }
        before = of;
    }
    Ok(documents)
}

/// Where a document's tokens and their heads are in `qkv`.
struct HeadLayout<'a> {
    shape: AttentionShape,
    documents: &'a [[u32; 2]],
    n: usize,
}

impl HeadLayout<'_> {
    /// First row and length of each document.
    fn documents(&self) -> impl Iterator<Item = (usize, usize)> {
        let first = self.documents.iter().enumerate().filter(|(row, of)| of[0] as usize == *row);
        first.map(|(row, of)| (row, of[1] as usize - row))
    }
    fn mask(&self, len: usize) -> Mask<'_> {
        Mask::Causal { past: 0, len, window: if self.shape.window == 0 { usize::MAX } else { self.shape.window } }
    }
    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }
    /// The first column of a key/value head's queries, keys and values.
    fn columns(&self, kv: usize) -> [usize; 3] {
        let a = &self.shape;
        [kv * self.group() * a.head_dim, (a.heads + kv) * a.head_dim, (a.heads + a.kv_heads + kv) * a.head_dim]
    }
    fn rows<'a, T>(&self, data: &'a [T], row: usize, (start, rows): (usize, usize), column: usize) -> TokenRows<'a, T> {
        TokenRows { data: &data[start * row + column..], row, rows, dim: self.shape.head_dim }
    }
}

/// A checked forward pass, for any division by key/value heads.
pub struct WholeForward<'a, T> {
    layout: HeadLayout<'a>,
    qkv: &'a [T],
    o: Shared<'a, T>,
    lse: Shared<'a, f32>,
}

impl<'a, T: PanelFloat> WholeForward<'a, T> {
    pub fn new(op: Attention<'a>) -> Result<WholeForward<'a, T>> {
        const OP: &str = Attention::OP;
        let n = op.check()?;
        Ok(WholeForward {
            layout: HeadLayout { shape: op.shape, documents: documents(OP, op.documents, n)?, n },
            qkv: op.qkv.host(OP)?,
            o: Shared::new(op.o.host(OP)?),
            lse: Shared::new(op.lse.host(OP)?),
        })
    }
    /// Computes these key/value heads' share.
    ///
    /// # Safety
    /// No other call at the same time has one of these heads.
    pub unsafe fn heads(&self, level: Level, scratch: &mut AttentionScratch, kv_heads: Range<usize>) {
        let (l, a) = (&self.layout, &self.layout.shape);
        for (start, len) in l.documents() {
            for kv in kv_heads.clone() {
                let columns = l.columns(kv);
                let [queries, keys, values] = columns.map(|column| l.rows(self.qkv, a.row(), (start, len), column));
                let out = HeadRows { to: To::Assign(&self.o), at: start * a.width() + columns[0], row: a.width() };
                let (mask, lse_at) = (l.mask(len), kv * l.group() * l.n + start);
                let group = Group { shape: a, queries, keys, values, mask, out, lse: &self.lse, lse_at, apart: l.n };
                // SAFETY: only this call has these heads, and they are disjoint.
                unsafe { tile::forward(level, scratch, &group) }
            }
        }
    }
}

/// Checked row sums of `d_o * o`, for any division by rows.
pub struct DeltaRows<'a, T> {
    shape: AttentionShape,
    pub rows: usize,
    o: &'a [T],
    d_o: &'a [T],
    delta: Shared<'a, f32>,
}

impl<'a, T: Float> DeltaRows<'a, T> {
    pub fn new(op: AttentionDelta<'a>) -> Result<DeltaRows<'a, T>> {
        const OP: &str = AttentionDelta::OP;
        Ok(DeltaRows {
            rows: op.check()?,
            shape: op.shape,
            o: op.o.host(OP)?,
            d_o: op.d_o.host(OP)?,
            delta: Shared::new(op.delta.host(OP)?),
        })
    }
    /// Computes these rows.
    ///
    /// # Safety
    /// No other call at the same time has one of these rows.
    #[inline(always)]
    pub unsafe fn rows(&self, rows: Range<usize>) {
        let heads = 0..self.shape.heads;
        // SAFETY: upheld by the caller.
        unsafe { row_sums(&self.shape, heads, rows, self.rows, self.o, self.d_o, &self.delta) }
    }
}

/// `delta` = row sums of `d_o * o`, for these heads of these of `n` rows.
///
/// # Safety
/// Nothing else accesses these elements of `delta`.
#[inline(always)]
unsafe fn row_sums<T: Float>(
    a: &AttentionShape,
    heads: Range<usize>,
    rows: Range<usize>,
    n: usize,
    o: &[T],
    d_o: &[T],
    delta: &Shared<f32>,
) {
    for i in rows {
        for head in heads.clone() {
            let at = i * a.width() + head * a.head_dim;
            let (o, d_o) = (&o[at..][..a.head_dim], &d_o[at..][..a.head_dim]);
            // SAFETY: upheld by the caller.
            let delta = unsafe { &mut delta.range(head * n + i, 1)[0] };
            *delta = sum(
                [o, d_o],
                #[inline(always)]
                |[o, d_o]| o * d_o,
            );
        }
    }
}

/// A checked backward pass, for any division by key/value heads.
pub struct WholeBackward<'a, T> {
    layout: HeadLayout<'a>,
    qkv: &'a [T],
    o: &'a [T],
    d_o: &'a [T],
    lse: &'a [f32],
    delta: Shared<'a, f32>,
    dqkv: Shared<'a, T>,
}

impl<'a, T: PanelFloat> WholeBackward<'a, T> {
    pub fn new(op: AttentionBackward<'a>) -> Result<WholeBackward<'a, T>> {
        const OP: &str = AttentionBackward::OP;
        let n = op.check()?;
        Ok(WholeBackward {
            layout: HeadLayout { shape: op.shape, documents: documents(OP, op.documents, n)?, n },
            qkv: op.qkv.host(OP)?,
            o: op.o.host(OP)?,
            d_o: op.d_o.host(OP)?,
            lse: op.lse.host(OP)?,
            delta: Shared::new(op.delta.host(OP)?),
            dqkv: Shared::new(op.dqkv.host(OP)?),
        })
    }
    /// Computes these key/value heads' share.
    ///
    /// # Safety
    /// No other call at the same time has one of these heads.
    pub unsafe fn heads(&self, level: Level, scratch: &mut AttentionScratch, kv_heads: Range<usize>) {
        let (l, a) = (&self.layout, &self.layout.shape);
        let (group, first) = (l.group(), kv_heads.start);
        let heads = first * group..kv_heads.end * group;
        // SAFETY: only this call accesses these heads' elements.
        let delta = unsafe {
            level.run(
                #[inline(always)]
                || row_sums(a, heads.clone(), 0..l.n, l.n, self.o, self.d_o, &self.delta),
            );
            &*self.delta.range(heads.start * l.n, heads.len() * l.n)
        };
        for (start, len) in l.documents() {
            for kv in kv_heads.clone() {
                let columns = l.columns(kv);
                let [queries, keys, values] = columns.map(|column| l.rows(self.qkv, a.row(), (start, len), column));
                let [d_queries, d_keys, d_values] = columns.map(|column| HeadRows {
                    to: To::Assign(&self.dqkv),
                    at: start * a.row() + column,
                    row: a.row(),
                });
                let group = GroupGradients {
                    shape: a,
                    queries,
                    keys,
                    values,
                    d_out: l.rows(self.d_o, a.width(), (start, len), columns[0]),
                    mask: l.mask(len),
                    lse: &self.lse[kv * group * l.n + start..],
                    delta: &delta[(kv - first) * group * l.n + start..],
                    apart: l.n,
                    d_queries,
                    d_keys,
                    d_values,
                };
                // SAFETY: only this call has these heads, and they are disjoint.
                unsafe { tile::backward(level, scratch, &group) }
            }
        }
    }
}
