//! Operands of matrix products, their epilogues, and biases.
use super::check::{float, read, rows, written};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// `C (m, n) (+)= op(A) op(B)`, row-major. A is stored (m, k), or (k, m) with `ta`; B (k, n), or (n, k) with `tb`.
/// A leading dimension is the distance between stored rows in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
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
    /// C is known to be symmetric, as `x xᵀ` is: a device may compute one half and copy it.
    pub symmetric: bool,
}

impl GemmShape {
    fn new(m: usize, n: usize, k: usize, ta: bool, tb: bool) -> GemmShape {
        let (lda, ldb) = (if ta { m } else { k }, if tb { k } else { n });
        GemmShape { m, n, k, ta, tb, lda, ldb, ldc: n, accumulate: false, symmetric: false }
    }
    /// C = A B: the input gradient of a linear layer with weight (out, in).
    pub fn nn(m: usize, n: usize, k: usize) -> GemmShape {
        GemmShape::new(m, n, k, false, false)
    }
    /// C = A Bᵀ: the forward pass of a linear layer with weight (out, in).
    pub fn nt(m: usize, n: usize, k: usize) -> GemmShape {
        GemmShape::new(m, n, k, false, true)
    }
    /// C = Aᵀ B: a weight gradient.
    pub fn tn(m: usize, n: usize, k: usize) -> GemmShape {
        GemmShape::new(m, n, k, true, false)
    }
    pub fn accumulate(self) -> GemmShape {
        GemmShape { accumulate: true, ..self }
    }
    pub fn symmetric(self) -> GemmShape {
        GemmShape { symmetric: true, ..self }
    }
    pub fn lda(self, lda: usize) -> GemmShape {
        GemmShape { lda, ..self }
    }
    pub fn ldb(self, ldb: usize) -> GemmShape {
        GemmShape { ldb, ..self }
    }
    pub fn ldc(self, ldc: usize) -> GemmShape {
        GemmShape { ldc, ..self }
    }
    /// Whether C has no elements.
    pub fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0
    }
    /// A multiply-add counts as two.
    pub fn flops(&self) -> u64 {
        2 * self.m as u64 * self.n as u64 * self.k as u64
    }
    /// Minimum lengths of A, B and C.
    pub fn extents(&self) -> [usize; 3] {
        let extent = |rows: usize, cols: usize, ld: usize| if rows == 0 { 0 } else { (rows - 1) * ld + cols };
        let (ra, ca) = if self.ta { (self.k, self.m) } else { (self.m, self.k) };
        let (rb, cb) = if self.tb { (self.n, self.k) } else { (self.k, self.n) };
        [extent(ra, ca, self.lda), extent(rb, cb, self.ldb), extent(self.m, self.n, self.ldc)]
    }
}

/// `C (m, n) (+)= op(A) op(B)` with f32 accumulation. Assigns, or adds with [`GemmShape::accumulate`].
pub struct Gemm<'a> {
    pub shape: GemmShape,
    /// f32, bf16 or f16.
    pub a: View<'a>,
    /// Same dtype as A.
    pub b: View<'a>,
    /// A's dtype, or f32.
    pub c: ViewMut<'a>,
}

impl Gemm<'_> {
    /// Checks that every element accessed is within its view, that rows of C do not overlap, and that the dtypes are
    /// supported.
    pub fn check(&self) -> Result<()> {
        check(&self.shape, &self.a, &self.b, &self.c)
    }
}

fn check(shape: &GemmShape, a: &View, b: &View, c: &ViewMut) -> Result<()> {
    const OP: &str = "gemm";
    let wide = [if shape.ta { shape.m } else { shape.k }, if shape.tb { shape.k } else { shape.n }, shape.n];
    let lens = [a.len(), b.len(), c.len()];
    let overlap = [shape.lda, shape.ldb, shape.ldc].iter().zip(wide).any(|(ld, wide)| *ld < wide);
    if overlap || shape.extents().iter().zip(lens).any(|(need, have)| *need > have) {
        return Err(Error::op(OP, format!("{shape:?} needs {:?} elements, got {lens:?}", shape.extents())));
    }
    match (a.dtype(), b.dtype(), c.dtype()) {
        (DType::F32, DType::F32, DType::F32) => Ok(()),
        (DType::Bf16, DType::Bf16, DType::F32 | DType::Bf16) => Ok(()),
        (DType::F16, DType::F16, DType::F32 | DType::F16) => Ok(()),
        (a, b, c) => Err(Error::op(OP, format!("cannot multiply {a} and {b} into {c}"))),
    }
}

/// What is fused after `C (m, n) = A B`, with rows of n elements without gaps.
pub enum Epilogue<'a> {
    /// `C = A B + bias (n) + residual (m, n)`.
    Sum { bias: Option<View<'a>>, residual: Option<View<'a>> },
    /// `z (m, n) = A B + bias (n)`, saved for backward, and `C = gelu(z)`. Assigns both.
    Gelu { bias: Option<View<'a>>, z: ViewMut<'a> },
    /// `C = A B gelu'(z)`. `product` is scratch of C's size.
    GeluBackward { z: View<'a>, product: ViewMut<'a> },
}

impl Epilogue<'_> {
    /// The product alone.
    pub const NONE: Epilogue<'static> = Epilogue::Sum { bias: None, residual: None };

    /// Checks that its operands have the shape and dtype of `c`, whose rows have no gaps.
    pub(super) fn check(&self, op: &'static str, shape: &GemmShape, c: &ViewMut) -> Result<()> {
        if shape.accumulate || shape.ldc != shape.n {
            return Err(Error::op(op, format!("needs rows without gaps and no accumulation, got {shape:?}")));
        }
        let (dtype, len) = (c.dtype(), shape.m * shape.n);
        c.fits(op, "c", dtype, len)?;
        if let Epilogue::Sum { bias: Some(bias), .. } | Epilogue::Gelu { bias: Some(bias), .. } = self {
            bias.fits(op, "bias", dtype, shape.n)?;
        }
        match self {
            Epilogue::Sum { residual, .. } => residual.map_or(Ok(()), |x| x.fits(op, "residual", dtype, len)),
            Epilogue::Gelu { z, .. } => z.fits(op, "z", dtype, len),
            Epilogue::GeluBackward { z, product } => {
                z.fits(op, "z", dtype, len)?;
                product.fits(op, "product", dtype, len)
            }
        }
    }
}

/// `C = A B` with an [`Epilogue`], in one pass if the device can. Assigns.
pub struct GemmThen<'a> {
    pub shape: GemmShape,
    pub a: View<'a>,
    pub b: View<'a>,
    pub c: ViewMut<'a>,
    pub then: Epilogue<'a>,
}

impl GemmThen<'_> {
    /// See [`Gemm`]; the epilogue's operands have C's shape and dtype.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "gemm_then";
        let GemmThen { shape, a, b, c, then } = self;
        check(shape, a, b, c)?;
        then.check(OP, shape, c)
    }
}

/// `y += bias` in every row. Adds.
pub struct Bias<'a> {
    /// (C)
    pub bias: View<'a>,
    /// (N, C)
    pub y: ViewMut<'a>,
}

impl Bias<'_> {
    pub const OP: &'static str = "bias";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        let (dtype, columns) = (float(Self::OP, self.y.dtype())?, self.bias.len());
        read(Self::OP, &[("bias", &self.bias, dtype, columns)])?;
        rows(Self::OP, "y", self.y.len(), columns)
    }
}

/// `db += column sums of dy`. Adds.
pub struct BiasBackward<'a> {
    /// (N, C)
    pub dy: View<'a>,
    /// (C) f32
    pub db: ViewMut<'a>,
}

impl BiasBackward<'_> {
    pub const OP: &'static str = "bias_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        float(Self::OP, self.dy.dtype())?;
        written(Self::OP, &[("db", &self.db, DType::F32, self.db.len())])?;
        rows(Self::OP, "dy", self.dy.len(), self.db.len())
    }
}
