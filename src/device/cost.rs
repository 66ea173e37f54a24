//! The cost of one device operation: its FLOPs and the bytes it moves. Never knows how fast a machine is.
use super::ops::{AttentionShape, DeltaShape, GemmShape, GroupedGemm};
use flatshard_base::DType;

/// Which rate of a machine bounds an operation, apart from memory bandwidth.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rate {
    /// Matrix products.
    Product,
    /// Fused attention, forward and backward.
    Attention,
    AttentionBackward,
    /// Memory alone.
    Memory,
}

/// One device call. Equal costs take equal time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpCost {
    pub name: &'static str,
    pub dtype: DType,
    pub rate: Rate,
    /// Multiply-adds count twice.
    pub flops: u64,
    /// Bytes read and written, counting each operand once per pass.
    pub bytes: u64,
    /// For a product m, n, k and which operands are transposed, on which its speed depends apart from its size.
    pub shape: [usize; 4],
}

impl OpCost {
    pub fn moves(name: &'static str, dtype: DType, bytes: usize) -> OpCost {
        OpCost { name, dtype, rate: Rate::Memory, flops: 0, bytes: bytes as u64, shape: [0; 4] }
    }
    /// `into`: the dtype of the result.
    pub fn product(g: &GemmShape, dtype: DType, into: DType) -> OpCost {
        let read = (g.m * g.k + g.k * g.n) * dtype.size();
        let written = g.m * g.n * into.size() * if g.accumulate { 2 } else { 1 };
        let turned = g.ta as usize | (g.tb as usize) << 1 | (g.accumulate as usize) << 2;
        OpCost {
            rate: Rate::Product,
            flops: g.flops(),
            shape: [g.m, g.n, g.k, turned],
            ..OpCost::moves("gemm", dtype, read + written)
        }
    }
    /// All groups; the rows are those of all experts together.
    pub fn grouped(op: &GroupedGemm) -> OpCost {
        let bytes = op.a.bytes() + op.b.bytes() + op.c.bytes() * if op.accumulate { 2 } else { 1 };
        let shape = [op.a.len(), op.n, op.k, op.kind as usize];
        OpCost { rate: Rate::Product, flops: op.flops(), shape, ..OpCost::moves(GroupedGemm::OP, op.a.dtype(), bytes) }
    }
    /// `pairs`: (query, key) pairs per head. `products`: products of (1, head_dim) by head_dim per pair: 2 forward, 5
    /// backward (Dao 2023, "FlashAttention-2").
    pub fn attention(name: &'static str, shape: &AttentionShape, dtype: DType, pairs: u64, bytes: usize) -> OpCost {
        let (rate, products) = match name.ends_with("backward") {
            false => (Rate::Attention, 2),
            true => (Rate::AttentionBackward, 5),
        };
        let flops = products * 2 * pairs * (shape.heads * shape.head_dim) as u64;
        let shape = [shape.heads, shape.kv_heads, shape.head_dim, shape.window];
        OpCost { rate, flops, shape, ..OpCost::moves(name, dtype, bytes) }
    }
    pub fn delta_rule(name: &'static str, shape: &DeltaShape, dtype: DType, elements: usize, bytes: usize) -> OpCost {
        let backward = name.ends_with("backward");
        let rate = if backward { Rate::AttentionBackward } else { Rate::Attention };
        let flops = (elements / shape.row().max(1) * shape.flops(backward)) as u64;
        let shape = [shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim];
        OpCost { rate, flops, shape, ..OpCost::moves(name, dtype, bytes) }
    }
}

/// Number of (query, key) pairs of causal attention within each row's document, limited to `window` (0: unlimited).
/// Takes one step per document: a planned step may have millions of rows.
pub fn causal_pairs(documents: &[u32], window: usize) -> u64 {
    let most = if window == 0 { u64::MAX } else { window as u64 };
    // What the first rows of a document see.
    let pairs = |rows: u64| {
        let growing = rows.min(most);
        growing * (growing + 1) / 2 + (rows - growing) * most
    };
    let (rows, mut row, mut sum) = (documents.len() as u64 / 2, 0, 0);
    while row < rows {
        let [start, end] = [0, 1].map(|i| u64::from(documents[2 * row as usize + i]));
        let next = end.clamp(row + 1, rows);
        sum += pairs(next.saturating_sub(start)) - pairs(row.saturating_sub(start));
        row = next;
    }
    sum
}

/// The same for a subset of the rows as queries and keys: one pass of ring attention.
pub fn pass_pairs(cu_seqlens: &[u32], q_rows: &[u32], k_rows: &[u32], window: usize) -> u64 {
    let before = |row: u32| k_rows.partition_point(|&k| k < row) as u64;
    let seen = |&q: &u32| {
        let document = cu_seqlens.partition_point(|&start| start <= q);
        let start = cu_seqlens[document.saturating_sub(1)];
        let first = if window == 0 { start } else { start.max((q + 1).saturating_sub(window as u32)) };
        before(q + 1) - before(first)
    };
    q_rows.iter().map(seen).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::documents_of_rows;

    #[test]
    fn pairs_are_counted_as_in_attention() {
        let causal_pairs = |cu: &[u32], window| causal_pairs(&documents_of_rows(cu).collect::<Vec<_>>(), window);
        assert_eq!(causal_pairs(&[0, 4], 0), 10);
        assert_eq!(causal_pairs(&[0, 4, 4, 7], 0), 16);
        assert_eq!(causal_pairs(&[0, 4], 2), 1 + 2 + 2 + 2);
        assert_eq!(causal_pairs(&[0, 4], 9), 10);
        let rows: Vec<u32> = (0..7).collect();
        for window in [0, 1, 2, 9] {
            assert_eq!(pass_pairs(&[0, 4, 7], &rows, &rows, window), causal_pairs(&[0, 4, 7], window), "{window}");
        }
        // The passes of a ring add up to what one rank computes: rows 0, 3 on one rank and 1, 2 on the other.
        let (a, b) = ([0, 3], [1, 2]);
        let passes = [(a, a), (a, b), (b, a), (b, b)];
        assert_eq!(passes.iter().map(|(q, k)| pass_pairs(&[0, 4], q, k, 0)).sum::<u64>(), 10);
    }
}
