//! The Newton-Schulz iteration of Muon (Jordan et al. 2024): all singular values of a matrix become about 1. Made of
//! the device's products and elementwise operations. Never communicates.
//!
//! ```text
//! s = x xᵀ (of the shorter side)        p = b s + c s s        x = a x + p x
//! ```
//!
//! A tall matrix is not transposed: s = xᵀ x, x = a x + x p. In f32 everything is f32. Otherwise products read bf16,
//! and x and p are accumulated in f32 and rounded once per iteration.
use crate::base::{Category, DType, Result};
use crate::device::ops::{ClipScale, Gemm, GemmShape, Sgd, SumSquares};
use crate::device::{Buf, Device, LIMBS, View};

/// Coefficients a, b and c of `torch.optim.Muon`.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// The smallest norm that a matrix is divided by.
const EPS: f32 = 1e-7;

pub(super) struct NewtonSchulz {
    steps: usize,
    /// f32, for the shorter side squared: s and p.
    gram: Buf,
    poly: Buf,
    /// bf16 copies of x, s and p, unless computing in f32.
    narrow: Option<[Buf; 3]>,
    /// f64 (LIMBS), and f32 (2): 1 / norm, norm.
    acc: Buf,
    inverse: Buf,
}

impl NewtonSchulz {
    /// For matrices of at most `largest` elements whose shorter side squared is at most `square`.
    pub fn new(dev: &dyn Device, steps: usize, dtype: DType, largest: usize, square: usize) -> Result<NewtonSchulz> {
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Optimizer);
        let narrow = || -> Result<[Buf; 3]> {
            Ok([alloc(DType::Bf16, largest)?, alloc(DType::Bf16, square)?, alloc(DType::Bf16, square)?])
        };
        Ok(NewtonSchulz {
            steps,
            gram: alloc(DType::F32, if dtype == DType::F32 { square } else { 0 })?,
            poly: alloc(DType::F32, square)?,
            narrow: (dtype != DType::F32).then(narrow).transpose()?,
            acc: alloc(DType::F64, LIMBS)?,
            inverse: alloc(DType::F32, 2)?,
        })
    }
    /// What Muon reads from device memory, uploaded once: SGD's constants for `w = mu m` and for `w += g`, and the
    /// bound on 1 / norm.
    pub fn constants(momentum: f32) -> [f32; 7] {
        // The input is 1 / (1 - mu) times PyTorch's, so the bound on its norm is that much larger.
        [-momentum, momentum, 0.0, -1.0, 0.0, 0.0, (1.0 - momentum) / EPS]
    }

    /// Orthogonalizes `x` (rows, columns) in place. `y` is scratch of its length. `constants`:
    /// [`NewtonSchulz::constants`] on the device.
    pub fn run(
        &mut self,
        dev: &dyn Device,
        constants: View,
        (rows, columns): (usize, usize),
        x: &mut Buf,
        y: &mut Buf,
    ) -> Result<()> {
        let n = rows * columns;
        // y = x / max(|x|, eps)
        dev.zero(self.acc.view_mut())?;
        dev.sum_squares(SumSquares { x: x.view().slice(0..n), acc: self.acc.view_mut() })?;
        let (acc, unscale) = (self.acc.view(), constants.slice(6..7));
        dev.clip_scale(ClipScale { acc, max_norm: 1.0, unscale, out: self.inverse.view_mut() })?;
        dev.zero(y.view_mut().slice(0..n))?;
        let (h, scale, g) = (constants.slice(3..6), self.inverse.view().slice(0..1), x.view().slice(0..n));
        dev.sgd(Sgd { h, scale, g, m: None, p: y.view_mut().slice(0..n), out: None })?;
        let in_x = match &self.narrow {
            None => self.in_f32(dev, (rows, columns), x, y)?,
            Some(_) => self.in_bf16(dev, (rows, columns), y).map(|()| false)?,
        };
        if in_x { Ok(()) } else { dev.copy(y.view().slice(0..n), x.view_mut().slice(0..n)) }
    }

    /// Begins in `y`, and alternates. Returns whether it ends in `x`.
    fn in_f32(&mut self, dev: &dyn Device, (rows, columns): (usize, usize), x: &mut Buf, y: &mut Buf) -> Result<bool> {
        let (n, short) = (rows * columns, rows.min(columns));
        let NewtonSchulz { gram, poly, .. } = self;
        for step in 0..self.steps {
            let (from, to) = if step % 2 == 0 { (&*y, &mut *x) } else { (&*x, &mut *y) };
            let from = from.view().slice(0..n);
            dev.gemm(Gemm { shape: gram_of(rows, columns), a: from, b: from, c: gram.view_mut() })?;
            polynomial(dev, short, gram.view(), gram.view(), poly)?;
            dev.copy(from, to.view_mut().slice(0..n))?;
            let (a, b) = ordered(rows <= columns, poly.view(), from);
            advance(dev, (rows, columns), a, b, to)?;
        }
        Ok(self.steps % 2 == 1)
    }

    /// In place.
    fn in_bf16(&mut self, dev: &dyn Device, (rows, columns): (usize, usize), x: &mut Buf) -> Result<()> {
        let (n, short) = (rows * columns, rows.min(columns));
        let Some([narrow, gram, factor]) = &mut self.narrow else { return Ok(()) };
        for _ in 0..self.steps {
            dev.copy(x.view().slice(0..n), narrow.view_mut().slice(0..n))?;
            let from = narrow.view().slice(0..n);
            dev.gemm(Gemm { shape: gram_of(rows, columns), a: from, b: from, c: gram.view_mut() })?;
            let square = gram.view().slice(0..short * short);
            polynomial(dev, short, square, square, &mut self.poly)?;
            dev.copy(self.poly.view().slice(0..short * short), factor.view_mut().slice(0..short * short))?;
            let (a, b) = ordered(rows <= columns, factor.view(), from);
            advance(dev, (rows, columns), a, b, x)?;
        }
        Ok(())
    }
}

/// `x xᵀ`, or `xᵀ x` if that is smaller.
fn gram_of(rows: usize, columns: usize) -> GemmShape {
    if rows <= columns { GemmShape::nt(rows, rows, columns) } else { GemmShape::tn(columns, columns, rows) }
}
/// The factors of `p x` or `x p`.
fn ordered<'a>(wide: bool, poly: View<'a>, x: View<'a>) -> (View<'a>, View<'a>) {
    if wide { (poly, x) } else { (x, poly) }
}
/// `poly = b s + c s s`, of `n` rows.
fn polynomial(dev: &dyn Device, n: usize, s: View, again: View, poly: &mut Buf) -> Result<()> {
    let [_, b, c] = COEFFICIENTS;
    dev.copy(s.slice(0..n * n), poly.view_mut().slice(0..n * n))?;
    dev.scale(b / c, poly.view_mut().slice(0..n * n))?;
    dev.gemm(Gemm { shape: GemmShape::nn(n, n, n).accumulate(), a: s, b: again, c: poly.view_mut() })?;
    dev.scale(c, poly.view_mut().slice(0..n * n))
}
/// `x = a x + left right`.
fn advance(dev: &dyn Device, (rows, columns): (usize, usize), left: View, right: View, x: &mut Buf) -> Result<()> {
    let shape = GemmShape::nn(rows, columns, rows.min(columns)).accumulate();
    dev.scale(COEFFICIENTS[0], x.view_mut().slice(0..rows * columns))?;
    dev.gemm(Gemm { shape, a: left, b: right, c: x.view_mut() })
}
