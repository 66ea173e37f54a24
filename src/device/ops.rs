//! Shapes and hyper-parameters of the operations: plain values, no buffers.
use super::{View, ViewMut};
use crate::base::{DType, Error, Result};
use bytemuck::{Pod, Zeroable};

/// `C (m, n) (+)= op(A) op(B)`, row-major. A is stored (m, k), or (k, m) with `ta`; B (k, n), or (n, k) with `tb`.
/// A leading dimension is the distance between stored rows in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub ta: bool,
    pub tb: bool,
    pub lda: usize,
    pub ldb: usize,
    pub ldc: usize,
    /// Adds to C instead of assigning.
    pub accumulate: bool,
}

impl Gemm {
    fn new(m: usize, n: usize, k: usize, ta: bool, tb: bool) -> Gemm {
        let (lda, ldb) = (if ta { m } else { k }, if tb { k } else { n });
        Gemm { m, n, k, ta, tb, lda, ldb, ldc: n, accumulate: false }
    }
    /// C = A B: the input gradient of a linear layer with weight (out, in).
    pub fn nn(m: usize, n: usize, k: usize) -> Gemm {
        Gemm::new(m, n, k, false, false)
    }
    /// C = A Bᵀ: the forward pass of a linear layer with weight (out, in).
    pub fn nt(m: usize, n: usize, k: usize) -> Gemm {
        Gemm::new(m, n, k, false, true)
    }
    /// C = Aᵀ B: a weight gradient.
    pub fn tn(m: usize, n: usize, k: usize) -> Gemm {
        Gemm::new(m, n, k, true, false)
    }
    pub fn accumulate(self) -> Gemm {
        Gemm { accumulate: true, ..self }
    }
    pub fn lda(self, lda: usize) -> Gemm {
        Gemm { lda, ..self }
    }
    pub fn ldb(self, ldb: usize) -> Gemm {
        Gemm { ldb, ..self }
    }
    pub fn ldc(self, ldc: usize) -> Gemm {
        Gemm { ldc, ..self }
    }
    /// Multiply-adds count twice.
    pub fn flops(&self) -> u64 {
        2 * self.m as u64 * self.n as u64 * self.k as u64
    }
    /// Elements that A, B and C must at least hold.
    pub fn extents(&self) -> [usize; 3] {
        let extent = |rows: usize, cols: usize, ld: usize| if rows == 0 { 0 } else { (rows - 1) * ld + cols };
        let (ra, ca) = if self.ta { (self.k, self.m) } else { (self.m, self.k) };
        let (rb, cb) = if self.tb { (self.n, self.k) } else { (self.k, self.n) };
        [extent(ra, ca, self.lda), extent(rb, cb, self.ldb), extent(self.m, self.n, self.ldc)]
    }
    /// Every element that the product touches lies within its view, rows of C do not overlap, and there is such a product:
    /// A, B and C are f32, or A and B are bf16 (f16) and C bf16 (f16) or f32.
    pub fn check(&self, a: &View, b: &View, c: &ViewMut) -> Result<()> {
        let (wide_a, wide_b) = (if self.ta { self.m } else { self.k }, if self.tb { self.k } else { self.n });
        let rows = [(self.lda, wide_a), (self.ldb, wide_b), (self.ldc, self.n)];
        let lens = [a.len(), b.len(), c.len()];
        let overlap = rows.iter().any(|(ld, wide)| ld < wide);
        if overlap || self.extents().iter().zip(lens).any(|(need, have)| *need > have) {
            let what = format!("{self:?} needs {:?} elements, got {lens:?}", self.extents());
            return Err(Error::op("gemm", what));
        }
        match (a.dtype(), b.dtype(), c.dtype()) {
            (DType::F32, DType::F32, DType::F32) => Ok(()),
            (DType::Bf16, DType::Bf16, DType::F32 | DType::Bf16) => Ok(()),
            (DType::F16, DType::F16, DType::F32 | DType::F16) => Ok(()),
            (a, b, c) => Err(Error::op("gemm", format!("no product of {a} and {b} into {c}"))),
        }
    }
}

/// Of `C (m, n) = A B`, rows of n elements without gaps.
pub enum Epilogue<'a> {
    /// `C = A B + bias (n) + residual (m, n)`.
    Sum { bias: Option<View<'a>>, residual: Option<View<'a>> },
    /// `z (m, n) = A B + bias (n)`, kept for backward, and `C = gelu(z)`. Assigns both.
    Gelu { bias: Option<View<'a>>, z: ViewMut<'a> },
    /// `C = A B gelu'(z)`. `product` is scratch like C.
    GeluBackward { z: View<'a>, product: ViewMut<'a> },
}

impl Epilogue<'_> {
    /// Operands of the product's own shape and of C's type.
    pub fn check(&self, shape: &Gemm, a: &View, b: &View, c: &ViewMut) -> Result<()> {
        const OP: &str = "gemm_then";
        shape.check(a, b, c)?;
        if shape.accumulate || shape.ldc != shape.n {
            return Err(Error::op(OP, format!("assigns rows without gaps, got {shape:?}")));
        }
        let (dtype, len) = (c.dtype(), shape.m * shape.n);
        let bias = |bias: &Option<View>| bias.map_or(Ok(()), |b| b.fits(OP, "bias", dtype, shape.n));
        c.fits(OP, "c", dtype, len)?;
        match self {
            Epilogue::Sum { bias: b, residual } => {
                bias(b)?;
                residual.map_or(Ok(()), |x| x.fits(OP, "residual", dtype, len))
            }
            Epilogue::Gelu { bias: b, z } => {
                bias(b)?;
                z.fits(OP, "z", dtype, len)
            }
            Epilogue::GeluBackward { z, product } => {
                z.fits(OP, "z", dtype, len)?;
                product.fits(OP, "product", dtype, len)
            }
        }
    }
}

/// Which heads of a row of `qkv` are rotated: the first `heads` (queries, then keys).
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Query plus key heads.
    pub heads: usize,
    pub head_dim: usize,
    /// Elements in a row of `qkv`.
    pub row: usize,
}

/// A row becomes x / sqrt(mean(x^2) + eps) * (w + offset).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    pub eps: f32,
    /// 0; 1 where weights are kept as their difference from 1 (Gemma).
    pub offset: f32,
}

/// Heads of a row of `qkv` that are normalised one by one and rotated: queries, then keys. Values follow.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm: RmsNorm,
}

impl QkNormRope {
    /// Elements in a row of `qkv`.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub heads: usize,
    /// Divides `heads`: query head h reads key/value head h / (heads / kv_heads).
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Multiplies the scores; usually 1/sqrt(head_dim).
    pub scale: f32,
    /// Query i sees key j of its document where i - window < j <= i: the `sliding_window` of transformers. 0: all j <= i.
    pub window: usize,
    /// Scores become cap * tanh(scale * q k / cap) (Gemma 2). 0: they stay.
    pub softcap: f32,
}

impl Attention {
    /// Elements in a row of `qkv`.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// Elements in a row of the keys and values of a block.
    pub fn kv_row(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }
    /// Rows of queries in `qkv` and of keys in `kv`.
    pub fn block(&self, op: &'static str, qkv: usize, kv: usize) -> Result<(usize, usize)> {
        let queries = self.rows(op, qkv)?;
        match kv.is_multiple_of(self.kv_row()) {
            true => Ok((queries, kv / self.kv_row())),
            false => Err(Error::op(op, format!("kv holds {kv} elements, no whole rows of {}", self.kv_row()))),
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

/// See [`super::Device::copy_columns`].
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    pub rows: usize,
    /// Columns that are copied.
    pub width: usize,
    /// Elements from a row to the next.
    pub src_row: usize,
    pub dst_row: usize,
}

impl Columns {
    /// An error unless `src` and `dst` hold the rows.
    pub fn check(&self, src: usize, dst: usize) -> Result<()> {
        let Columns { rows, width, src_row, dst_row } = *self;
        let extent = |row: usize| if rows == 0 { 0 } else { (rows - 1) * row + width };
        if width <= src_row && width <= dst_row && extent(src_row) <= src && extent(dst_row) <= dst {
            return Ok(());
        }
        Err(Error::op("copy_columns", format!("src of {src} and dst of {dst} elements do not hold {self:?}")))
    }
}

/// See [`super::Device::embed`].
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// Of the whole table.
    pub rows: usize,
    /// The operand holds the table's rows from this one on.
    pub first: usize,
    /// Multiplies what is looked up.
    pub scale: f32,
}

impl Embed {
    /// The operand holds the whole table.
    pub fn whole(rows: usize, scale: f32) -> Embed {
        Embed { rows, first: 0, scale }
    }
    /// Columns of an operand of `table` elements whose rows fill `out` elements, one a token; nothing where there is no token.
    pub fn columns(&self, op: &'static str, tokens: usize, out: usize, table: usize) -> Result<Option<usize>> {
        if tokens == 0 && out == 0 {
            return Ok(None);
        }
        let c = out.checked_div(tokens).unwrap_or(0);
        if c == 0 || c * tokens != out || !table.is_multiple_of(c) || self.first + table / c > self.rows {
            let what = format!("{tokens} tokens, {out} elements and a table of {table} do not agree on {self:?}");
            return Err(Error::op(op, what));
        }
        Ok(Some(c))
    }
}

/// Logits of a part of the vocabulary, where ranks have one each. See [`super::Device::cross_entropy_part`].
#[derive(Clone, Copy, Debug)]
pub struct VocabPart {
    /// What the first column stands for.
    pub first: usize,
    /// The whole vocabulary.
    pub of: usize,
}

impl VocabPart {
    /// f32 that a part says of a row: the largest logit, the sum of exp(logit - that), and the target's logit, 0 where it is
    /// another part's. An ignored row says 0 thrice.
    pub const SAID: usize = 3;
}

#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    /// Columns of the logits.
    pub vocab: usize,
    /// The loss is of cap * tanh(logits / cap) (Gemma 2's `final_logit_softcapping`), the gradient that of the logits. 0:
    /// of the logits themselves.
    pub softcap: f32,
}

#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// Counts from 1: bias correction.
    pub step: u64,
}

/// What one step of AdamW shares between elements, as [`super::Device::adamw`] finds it in memory.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AdamWScalars {
    /// 1 - lr * weight_decay.
    pub keep: f32,
    /// 1 - beta1.
    pub new_m: f32,
    pub beta2: f32,
    /// 1 - beta2.
    pub new_v: f32,
    /// lr / (1 - beta1^step).
    pub size: f32,
    /// 1 / sqrt(1 - beta2^step).
    pub root: f32,
    pub eps: f32,
}

impl AdamWScalars {
    /// f32 that they are.
    pub const LEN: usize = size_of::<AdamWScalars>() / 4;
}
impl Sgd {
    pub const LEN: usize = size_of::<Sgd>() / 4;
}

impl AdamW {
    /// Prepared in f64 and rounded once, as PyTorch does.
    pub fn scalars(&self) -> AdamWScalars {
        let (lr, beta1, beta2, step) = (self.lr as f64, self.beta1 as f64, self.beta2 as f64, self.step as f64);
        AdamWScalars {
            keep: (1.0 - lr * self.weight_decay as f64) as f32,
            new_m: (1.0 - beta1) as f32,
            beta2: self.beta2,
            new_v: (1.0 - beta2) as f32,
            size: (lr / (1.0 - beta1.powf(step))) as f32,
            root: (1.0 / (1.0 - beta2.powf(step)).sqrt()) as f32,
            eps: self.eps,
        }
    }
}

/// As [`super::Device::sgd`] finds it in memory.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Sgd {
    pub lr: f32,
    pub momentum: f32,
    pub weight_decay: f32,
}
