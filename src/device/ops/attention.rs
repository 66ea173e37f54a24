//! Operands of attention, whole and in passes of ring attention. N: rows (tokens); Nq and Nk: rows of queries and of
//! keys.
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    pub heads: usize,
    /// Divides `heads`: query head h reads key/value head h / (heads / kv_heads).
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor of the scores; usually 1/sqrt(head_dim).
    pub scale: f32,
    /// Query i attends to key j of its document if i - window < j <= i: `sliding_window` of transformers. 0: all j <=
    /// i.
    pub window: usize,
    /// Scores become cap * tanh(scale * q k / cap) (Gemma 2). 0 disables it.
    pub softcap: f32,
}

impl AttentionShape {
    /// Elements in a row of `qkv`.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// Elements in a row of the output.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
    /// Elements in a row of a block's keys and values.
    pub fn kv_row(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }
    /// Rows of queries in `qkv` and of keys in `kv`.
    pub fn block(&self, op: &'static str, qkv: usize, kv: usize) -> Result<(usize, usize)> {
        let queries = self.rows(op, qkv)?;
        match kv.is_multiple_of(self.kv_row()) {
            true => Ok((queries, kv / self.kv_row())),
            false => Err(Error::op(op, format!("kv holds {kv} elements, not whole rows of {}", self.kv_row()))),
        }
    }
    /// Rows of a `qkv` of `len` elements.
    pub fn rows(&self, op: &'static str, len: usize) -> Result<usize> {
        let divides =
            self.head_dim > 0 && self.kv_heads > 0 && self.heads > 0 && self.heads.is_multiple_of(self.kv_heads);
        if !divides || !len.is_multiple_of(self.row()) {
            return Err(Error::op(op, format!("qkv holds {len} elements, which do not fit {self:?}")));
        }
        Ok(len / self.row())
    }
}

/// For each row of packed documents, the first row of its document and the one after its last: made once per batch, so
/// that no launch looks for a row's document among boundaries, of which a packed batch has one per token.
pub fn documents_of_rows(cu_seqlens: &[u32]) -> impl Iterator<Item = u32> {
    cu_seqlens.windows(2).flat_map(|of| (of[0]..of[1]).flat_map(|_| [of[0], of[1]]))
}

/// Flash-style attention (Dao et al. 2022): causal within each document, limited to the window if there is one, without
/// a T x T matrix. Assigns `o` and `lse`.
pub struct Attention<'a> {
    pub shape: AttentionShape,
    /// (N, 2) u32, from [`documents_of_rows`]
    pub documents: View<'a>,
    /// (N, (heads + 2 kv_heads) * head_dim)
    pub qkv: View<'a>,
    /// (N, heads * head_dim)
    pub o: ViewMut<'a>,
    /// (heads, N) f32: log of the sum of exp(scores).
    pub lse: ViewMut<'a>,
}

impl Attention<'_> {
    pub const OP: &'static str = "attention";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, documents, qkv, o, lse } = self;
        let (dtype, n) = (float(Self::OP, qkv.dtype())?, shape.rows(Self::OP, qkv.len())?);
        read(Self::OP, &[("documents", documents, DType::U32, 2 * n)])?;
        written(Self::OP, &[("o", o, dtype, n * shape.width()), ("lse", lse, DType::F32, shape.heads * n)])?;
        Ok(n)
    }
}

/// Backward of [`Attention`]. Assigns `dqkv`.
pub struct AttentionBackward<'a> {
    pub shape: AttentionShape,
    /// (N, 2) u32, from [`documents_of_rows`]
    pub documents: View<'a>,
    /// (N, (heads + 2 kv_heads) * head_dim)
    pub qkv: View<'a>,
    /// (N, heads * head_dim), from the forward pass.
    pub o: View<'a>,
    /// (heads, N) f32, from the forward pass.
    pub lse: View<'a>,
    /// (N, heads * head_dim)
    pub d_o: View<'a>,
    /// (heads, N) f32: scratch.
    pub delta: ViewMut<'a>,
    /// f32, [`Device::backward_scratch`](crate::Device::backward_scratch) or more: scratch.
    pub sums: ViewMut<'a>,
    /// Same shape as `qkv`.
    pub dqkv: ViewMut<'a>,
}

impl AttentionBackward<'_> {
    pub const OP: &'static str = "attention_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, documents, qkv, o, lse, d_o, delta, dqkv, .. } = self;
        let (dtype, n) = (float(Self::OP, qkv.dtype())?, shape.rows(Self::OP, qkv.len())?);
        let (out, stats) = (n * shape.width(), shape.heads * n);
        read(Self::OP, &[("documents", documents, DType::U32, 2 * n)])?;
        read(Self::OP, &[("o", o, dtype, out), ("lse", lse, DType::F32, stats), ("d_o", d_o, dtype, out)])?;
        written(Self::OP, &[("delta", delta, DType::F32, stats), ("dqkv", dqkv, dtype, qkv.len())])?;
        Ok(n)
    }
}

/// The attention ranges of a pass of ring attention (Liu et al. 2023). Any sharding of any batch is described the same
/// way: zigzag chunks of dense sequences, or documents split anywhere. Since all rows are in increasing order, each
/// query attends to one range of the block's keys, and one range of queries attends to each key. Assigns both ranges.
pub struct AttentionRanges<'a> {
    pub shape: AttentionShape,
    /// (documents + 1) u32: the documents of the packed batch.
    pub cu_seqlens: View<'a>,
    /// (Nq) u32, increasing: the queries' rows of the packed batch.
    pub q_rows: View<'a>,
    /// (Nk) u32, increasing: the keys' rows of the packed batch.
    pub k_rows: View<'a>,
    /// (Nq, 2) u32
    pub of_queries: ViewMut<'a>,
    /// (Nk, 2) u32
    pub of_keys: ViewMut<'a>,
}

impl AttentionRanges<'_> {
    pub const OP: &'static str = "attention_ranges";
    pub fn check(&self) -> Result<()> {
        let Self { cu_seqlens, q_rows, k_rows, of_queries, of_keys, .. } = self;
        let (queries, keys) = (q_rows.len(), k_rows.len());
        read(Self::OP, &[("cu_seqlens", cu_seqlens, DType::U32, cu_seqlens.len().max(1))])?;
        read(Self::OP, &[("q_rows", q_rows, DType::U32, queries), ("k_rows", k_rows, DType::U32, keys)])?;
        let ranges = [("of_queries", of_queries, DType::U32, 2 * queries), ("of_keys", of_keys, DType::U32, 2 * keys)];
        written(Self::OP, &ranges)
    }
}

/// Attention of queries over one block of keys and values. Assigns `o` and `lse`.
pub struct AttentionPass<'a> {
    pub shape: AttentionShape,
    /// (Nq, 2) u32: the range of the block's keys that each query attends to, from [`AttentionRanges`].
    pub of_queries: View<'a>,
    /// (Nq, (heads + 2 kv_heads) * head_dim); only the queries are read.
    pub qkv: View<'a>,
    /// (Nk, 2 kv_heads * head_dim): keys before values in a row.
    pub kv: View<'a>,
    /// (Nq, heads * head_dim) f32; 0 where a query attends to nothing.
    pub o: ViewMut<'a>,
    /// (heads, Nq) f32; -inf where a query attends to nothing.
    pub lse: ViewMut<'a>,
}

impl AttentionPass<'_> {
    pub const OP: &'static str = "attention_pass";
    /// Returns Nq and Nk.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, of_queries, qkv, kv, o, lse } = self;
        let dtype = float(Self::OP, qkv.dtype())?;
        let (queries, keys) = shape.block(Self::OP, qkv.len(), kv.len())?;
        read(Self::OP, &[("of_queries", of_queries, DType::U32, 2 * queries), ("kv", kv, dtype, kv.len())])?;
        let stats = ("lse", lse, DType::F32, shape.heads * queries);
        written(Self::OP, &[("o", o, DType::F32, queries * shape.width()), stats])?;
        Ok((queries, keys))
    }
}

/// Rows of one sequence, and the pages that hold its keys and values.
#[derive(Clone, Copy, Debug)]
pub struct PagedRows<'a> {
    /// The first of the rows, and how many there are.
    pub first: usize,
    pub rows: usize,
    /// Tokens of the sequence before them.
    pub past: usize,
    /// In the order of its tokens, up to the last of these rows.
    pub pages: &'a [u32],
    /// Where its state is, for mixers that carry one.
    pub slot: usize,
}

/// Stores the keys and values of rows of many sequences in their pages; then each row attends to all earlier tokens of
/// its sequence and itself. Assigns `o` and `lse`: the bits of a row do not depend on the other rows, and on the CPU
/// are those of [`Attention`].
pub struct AttentionPaged<'a> {
    pub shape: AttentionShape,
    /// All rows, each once.
    pub runs: &'a [PagedRows<'a>],
    /// The same in the device's memory, as [`paged_table`] writes it.
    pub table: View<'a>,
    /// (N, (heads + 2 kv_heads) * head_dim)
    pub qkv: View<'a>,
    /// (pages, [`PAGE`], 2 kv_heads * head_dim): keys before values in a row.
    pub kv: ViewMut<'a>,
    /// (N, heads * head_dim)
    pub o: ViewMut<'a>,
    /// (heads, N) f32
    pub lse: ViewMut<'a>,
}

/// Tokens in a page of keys and values.
pub const PAGE: usize = 32;

/// Entries of a row in [`paged_table`].
const ENTRIES: usize = 4;

/// The most words of a table of `rows` rows over sequences of up to `longest` tokens.
pub fn most_of_paged_table(rows: usize, longest: usize) -> usize {
    rows * (ENTRIES + longest.div_ceil(PAGE))
}

/// Words of the table of these rows.
pub fn paged_words(runs: &[PagedRows]) -> usize {
    runs.iter().map(|run| ENTRIES * run.rows + (run.past + run.rows).div_ceil(PAGE)).sum()
}

/// The numbers of each row: its place among the tokens of all pages, how many tokens it sees, where in the table the
/// pages of its sequence start, and its slot; then the pages of each run.
pub fn paged_table(runs: &[PagedRows]) -> Vec<u32> {
    let mut table = Vec::with_capacity(paged_words(runs));
    let mut pages = ENTRIES * runs.iter().map(|run| run.rows).sum::<usize>();
    for run in runs {
        for at in run.past..run.past + run.rows {
            let place = run.pages[at / PAGE] as usize * PAGE + at % PAGE;
            table.extend([place as u32, at as u32 + 1, pages as u32, run.slot as u32]);
        }
        pages += (run.past + run.rows).div_ceil(PAGE);
    }
    for run in runs {
        table.extend_from_slice(&run.pages[..(run.past + run.rows).div_ceil(PAGE)]);
    }
    table
}

impl AttentionPaged<'_> {
    pub const OP: &'static str = "attention_paged";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, runs, table, qkv, kv, o, lse } = self;
        let (dtype, (n, tokens)) = (float(Self::OP, qkv.dtype())?, shape.block(Self::OP, qkv.len(), kv.len())?);
        read(Self::OP, &[("table", table, DType::U32, table.len())])?;
        let stats = ("lse", lse, DType::F32, shape.heads * n);
        written(Self::OP, &[("kv", kv, dtype, kv.len()), ("o", o, dtype, n * shape.width()), stats])?;
        let mut next = 0;
        for run in *runs {
            let fits = run.first == next
                && run.rows > 0
                && run.past + run.rows <= run.pages.len() * PAGE
                && run.pages.iter().all(|&at| (at as usize + 1) * PAGE <= tokens);
            if !fits {
                return Err(Error::op(Self::OP, format!("{run:?} of {n} rows does not fit {tokens} tokens")));
            }
            next += run.rows;
        }
        let (words, length) = (paged_words(runs), table.len());
        match (next == n, words == length) {
            (true, true) => Ok(n),
            (false, _) => Err(Error::op(Self::OP, format!("runs of {next} rows for {n}"))),
            _ => Err(Error::op(Self::OP, format!("a table of {length} words where the runs need {words}"))),
        }
    }
}

/// Merges one more pass into `o` and `lse` of earlier passes: o = sum of exp(lse_i - lse) o_i, without overflow.
pub struct AttentionMerge<'a> {
    pub shape: AttentionShape,
    /// (N, heads * head_dim) f32
    pub o_pass: View<'a>,
    /// (heads, N) f32
    pub lse_pass: View<'a>,
    /// (N, heads * head_dim) f32
    pub o: ViewMut<'a>,
    /// (heads, N) f32
    pub lse: ViewMut<'a>,
}

impl AttentionMerge<'_> {
    pub const OP: &'static str = "attention_merge";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, o_pass, lse_pass, o, lse } = self;
        let n = rows(Self::OP, "o", o.len(), shape.width())?;
        let stats = shape.heads * n;
        read(Self::OP, &[("o_pass", o_pass, DType::F32, o.len()), ("lse_pass", lse_pass, DType::F32, stats)])?;
        written(Self::OP, &[("o", o, DType::F32, o.len()), ("lse", lse, DType::F32, stats)])?;
        Ok(n)
    }
}

/// `delta` = row sums of `d_o * o`, for the backward passes. Assigns `delta`, and what the device keeps in `sums`.
pub struct AttentionDelta<'a> {
    pub shape: AttentionShape,
    /// (N, heads * head_dim)
    pub o: View<'a>,
    /// (N, heads * head_dim)
    pub d_o: View<'a>,
    /// (heads, N) f32: merged, as the passes get it.
    pub lse: View<'a>,
    /// (heads, N) f32
    pub delta: ViewMut<'a>,
    /// See [`AttentionBackward`]. The passes need it as this leaves it, and keep it so.
    pub sums: ViewMut<'a>,
}

impl AttentionDelta<'_> {
    pub const OP: &'static str = "attention_delta";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let Self { shape, o, d_o, lse, delta, .. } = self;
        let (dtype, n) = (float(Self::OP, o.dtype())?, rows(Self::OP, "o", o.len(), shape.width())?);
        read(Self::OP, &[("d_o", d_o, dtype, o.len()), ("lse", lse, DType::F32, shape.heads * n)])?;
        written(Self::OP, &[("delta", delta, DType::F32, shape.heads * n)])?;
        Ok(n)
    }
}

/// Backward of [`AttentionPass`], from the merged `lse` of all passes. Adds to `dq` and to `dkv`, which is sent along
/// with its block.
pub struct AttentionPassBackward<'a> {
    pub shape: AttentionShape,
    /// (Nq, 2) u32
    pub of_queries: View<'a>,
    /// (Nk, 2) u32
    pub of_keys: View<'a>,
    /// (Nq, (heads + 2 kv_heads) * head_dim); only the queries are read.
    pub qkv: View<'a>,
    /// (Nk, 2 kv_heads * head_dim)
    pub kv: View<'a>,
    /// (heads, Nq) f32
    pub lse: View<'a>,
    /// (heads, Nq) f32, from [`AttentionDelta`].
    pub delta: View<'a>,
    /// (Nq, heads * head_dim)
    pub d_o: View<'a>,
    /// From [`AttentionDelta`].
    pub sums: ViewMut<'a>,
    /// (Nq, heads * head_dim) f32
    pub dq: ViewMut<'a>,
    /// (Nk, 2 kv_heads * head_dim) f32
    pub dkv: ViewMut<'a>,
}

impl AttentionPassBackward<'_> {
    pub const OP: &'static str = "attention_pass_backward";
    /// Returns Nq and Nk.
    pub fn check(&self) -> Result<(usize, usize)> {
        let Self { shape, of_queries, of_keys, qkv, kv, lse, delta, d_o, dq, dkv, .. } = self;
        let dtype = float(Self::OP, qkv.dtype())?;
        let (queries, keys) = shape.block(Self::OP, qkv.len(), kv.len())?;
        let (out, stats) = (queries * shape.width(), shape.heads * queries);
        let ranges = [("of_queries", of_queries, DType::U32, 2 * queries), ("of_keys", of_keys, DType::U32, 2 * keys)];
        read(Self::OP, &ranges)?;
        read(Self::OP, &[("kv", kv, dtype, kv.len()), ("d_o", d_o, dtype, out)])?;
        read(Self::OP, &[("lse", lse, DType::F32, stats), ("delta", delta, DType::F32, stats)])?;
        written(Self::OP, &[("dq", dq, DType::F32, out), ("dkv", dkv, DType::F32, kv.len())])?;
        Ok((queries, keys))
    }
}

/// Copies columns of `src` to columns of `dst`, cast if the dtypes (f32; bf16 or f16) differ; both views start at the
/// first copied column. Other columns are unchanged.
pub struct CopyColumns<'a> {
    pub rows: usize,
    /// Number of columns to copy.
    pub width: usize,
    /// Elements from one row to the next.
    pub src_row: usize,
    pub dst_row: usize,
    pub src: View<'a>,
    pub dst: ViewMut<'a>,
}

impl CopyColumns<'_> {
    pub const OP: &'static str = "copy_columns";
    /// Fails unless `src` and `dst` hold the rows.
    pub fn check(&self) -> Result<()> {
        let &Self { rows, width, src_row, dst_row, .. } = self;
        let (src, dst) = (self.src.len(), self.dst.len());
        let extent = |row: usize| if rows == 0 { 0 } else { (rows - 1) * row + width };
        float(Self::OP, self.src.dtype())?;
        if width <= src_row && width <= dst_row && extent(src_row) <= src && extent(dst_row) <= dst {
            return Ok(());
        }
        let rows = format!("{rows} rows of {width}, {src_row} apart in src and {dst_row} in dst");
        Err(Error::op(Self::OP, format!("src of {src} and dst of {dst} elements cannot hold {rows}")))
    }
}
