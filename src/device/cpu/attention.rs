//! Attention over whole documents, forward and backward. Never multiplies or sums over keys itself (`tile`).
//!
//! Documents and key/value heads are independent, so threads take pairs of both, each with its own scratch: results do
//! not depend on how they are divided.
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

/// Parts of a call, if it has so many: enough for all threads of a rank.
const PARTS: usize = 64;

/// Where a document's tokens and their heads are in `qkv`.
struct HeadLayout<'a> {
    shape: AttentionShape,
    documents: &'a [[u32; 2]],
    n: usize,
}

impl HeadLayout<'_> {
    /// First row and length of each document.
    fn documents(&self) -> impl Iterator<Item = (usize, usize)> {
        let first = std::iter::successors(self.documents.first(), |of| self.documents.get(of[1] as usize));
        first.map(|&[start, end]| (start as usize, (end - start) as usize))
    }
    /// Pairs of a document and a key/value head.
    fn pairs(&self) -> usize {
        self.documents().count() * self.shape.kv_heads
    }
    /// Parts that threads take: pairs, or runs of them where there are so many that finding each would take long.
    fn parts(&self) -> usize {
        self.pairs().min(PARTS)
    }
    /// The pairs of a part: documents, as in `documents`, and heads.
    fn part(&self, part: usize) -> impl Iterator<Item = ((usize, usize), usize)> {
        let (pairs, parts, heads) = (self.pairs(), self.parts(), self.shape.kv_heads);
        let own = part * pairs / parts..(part + 1) * pairs / parts;
        let first = own.start / heads;
        let all = self.documents().skip(first).flat_map(move |of| (0..heads).map(move |head| (of, head)));
        all.skip(own.start - first * heads).take(own.len())
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
    /// Parts that threads take.
    pub fn parts(&self) -> usize {
        self.layout.parts()
    }
    /// Computes one of them.
    ///
    /// # Safety
    /// No other call at the same time has this part.
    pub unsafe fn part(&self, level: Level, scratch: &mut AttentionScratch, part: usize) {
        let (l, a) = (&self.layout, &self.layout.shape);
        for ((start, len), kv) in l.part(part) {
            let columns = l.columns(kv);
            let [queries, keys, values] = columns.map(|column| l.rows(self.qkv, a.row(), (start, len), column));
            let out = HeadRows { to: To::Assign(&self.o), at: start * a.width() + columns[0], row: a.width() };
            let (mask, lse_at) = (l.mask(len), kv * l.group() * l.n + start);
            let group = Group { shape: a, queries, keys, values, mask, out, lse: &self.lse, lse_at, apart: l.n };
            // SAFETY: only this call has this document's rows of these heads.
            unsafe { tile::forward(level, scratch, &group) }
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
        let a = &self.shape;
        for (i, head) in rows.flat_map(|i| (0..a.heads).map(move |head| (i, head))) {
            let at = i * a.width() + head * a.head_dim;
            let (o, d_o) = (&self.o[at..][..a.head_dim], &self.d_o[at..][..a.head_dim]);
            // SAFETY: upheld by the caller.
            let delta = unsafe { &mut self.delta.range(head * self.rows + i, 1)[0] };
            *delta = sum(
                [o, d_o],
                #[inline(always)]
                |[o, d_o]| o * d_o,
            );
        }
    }
}

/// A checked backward pass, for any division by pairs of a document and a key/value head, after [`DeltaRows`].
pub struct WholeBackward<'a, T> {
    layout: HeadLayout<'a>,
    qkv: &'a [T],
    d_o: &'a [T],
    lse: &'a [f32],
    delta: &'a [f32],
    dqkv: Shared<'a, T>,
}

impl<'a, T: PanelFloat> WholeBackward<'a, T> {
    pub fn new(op: &'a mut AttentionBackward<'_>) -> Result<WholeBackward<'a, T>> {
        const OP: &str = AttentionBackward::OP;
        let n = op.check()?;
        Ok(WholeBackward {
            layout: HeadLayout { shape: op.shape, documents: documents(OP, op.documents, n)?, n },
            qkv: op.qkv.host(OP)?,
            d_o: op.d_o.host(OP)?,
            lse: op.lse.host(OP)?,
            delta: op.delta.as_view().host(OP)?,
            dqkv: Shared::new(op.dqkv.reborrow().host(OP)?),
        })
    }
    /// Parts that threads take.
    pub fn parts(&self) -> usize {
        self.layout.parts()
    }
    /// Computes one of them.
    ///
    /// # Safety
    /// No other call at the same time has this part.
    pub unsafe fn part(&self, level: Level, scratch: &mut AttentionScratch, part: usize) {
        let (l, a) = (&self.layout, &self.layout.shape);
        for ((start, len), kv) in l.part(part) {
            let columns = l.columns(kv);
            let [queries, keys, values] = columns.map(|column| l.rows(self.qkv, a.row(), (start, len), column));
            let [d_queries, d_keys, d_values] = columns.map(|column| HeadRows {
                to: To::Assign(&self.dqkv),
                at: start * a.row() + column,
                row: a.row(),
            });
            let stats = kv * l.group() * l.n + start;
            let group = GroupGradients {
                shape: a,
                queries,
                keys,
                values,
                d_out: l.rows(self.d_o, a.width(), (start, len), columns[0]),
                mask: l.mask(len),
                lse: &self.lse[stats..],
                delta: &self.delta[stats..],
                apart: l.n,
                d_queries,
                d_keys,
                d_values,
            };
            // SAFETY: only this call has this document's rows of these heads.
            unsafe { tile::backward(level, scratch, &group) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More pairs than parts, as many, and fewer.
    #[test]
    fn parts_have_each_pair_once_and_in_order() {
        for (count, kv_heads) in [(41, 3), (64, 1), (2, 8), (1, 1)] {
            let lengths: Vec<usize> = (0..count).map(|i| 1 + i % 7).collect();
            let starts = lengths.iter().scan(0, |next, len| Some(std::mem::replace(next, *next + len)));
            let all: Vec<(usize, usize)> = starts.zip(lengths.iter().copied()).collect();
            let rows = all.iter().flat_map(|&(start, len)| vec![[start as u32, (start + len) as u32]; len]);
            let documents: Vec<[u32; 2]> = rows.collect();
            let shape =
                AttentionShape { heads: 2 * kv_heads, kv_heads, head_dim: 4, scale: 1.0, window: 0, softcap: 0.0 };
            let layout = HeadLayout { shape, n: documents.len(), documents: &documents };
            let parts: Vec<_> = (0..layout.parts()).flat_map(|part| layout.part(part)).collect();
            let pairs: Vec<_> = all.iter().flat_map(|&of| (0..kv_heads).map(move |head| (of, head))).collect();
            assert_eq!(parts, pairs, "{count} documents, {kv_heads} heads");
            assert!((0..layout.parts()).all(|part| layout.part(part).count() > 0));
        }
    }
}
