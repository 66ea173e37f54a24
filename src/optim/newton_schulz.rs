//! The Newton-Schulz iteration of Muon (Jordan et al. 2024): all singular values of a matrix become about 1. Made of
//! the device's products and one elementwise operation on squares. Never communicates.
//!
//! ```text
//! s = x xᵀ (of the shorter side)        p = a I + b s + c s s        x = p x
//! ```
//!
//! A tall matrix is not transposed: s = xᵀ x, x = x p. s and s s are symmetric, so that a device may compute one half.
//! In f32 everything is f32. Otherwise x, s and p are bf16, as in PyTorch, and products accumulate in f32; s s is
//! rounded only with p.
use crate::base::{Category, DType, Result};
use crate::device::ops::{ClipScale, Gemm, GemmShape, Polynomial, SumSquares};
use crate::device::{Buf, Device, LIMBS, View};

/// Coefficients a, b and c of `torch.optim.Muon`.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// The smallest norm that a matrix is divided by.
const EPS: f32 = 1e-7;

pub(super) struct NewtonSchulz {
    steps: usize,
    /// For the shorter side squared: s, which becomes p, and s s in f32.
    gram: Buf,
    square: Buf,
    /// f64 (LIMBS), and f32 (2): 1 / norm, norm.
    acc: Buf,
    inverse: Buf,
}

impl NewtonSchulz {
    /// For matrices in `dtype`, whose shorter side squared is at most `square`.
    pub fn new(dev: &dyn Device, steps: usize, dtype: DType, square: usize) -> Result<NewtonSchulz> {
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Optimizer);
        Ok(NewtonSchulz {
            steps,
            gram: alloc(dtype, square)?,
            square: alloc(DType::F32, square)?,
            acc: alloc(DType::F64, LIMBS)?,
            inverse: alloc(DType::F32, 2)?,
        })
    }
    /// What Muon reads from device memory, uploaded once: SGD's constants for `w = mu m` and for `w += g`, the bound on
    /// 1 / norm, and 1.
    pub fn constants(momentum: f32) -> [f32; 8] {
        // The input is 1 / (1 - mu) times PyTorch's, so the bound on its norm is that much larger.
        [-momentum, momentum, 0.0, -1.0, 0.0, 0.0, (1.0 - momentum) / EPS, 1.0]
    }

    /// Orthogonalizes `x` (rows, columns) and multiplies it by `factor`; returns whether the result is in `y`, which is
    /// as long. `wide`: f32 scratch of that length, unused in f32. `constants`: [`NewtonSchulz::constants`] on the
    /// device.
    pub fn run(
        &mut self,
        dev: &dyn Device,
        constants: View,
        (rows, columns, factor): (usize, usize, f32),
        [x, y]: [&mut Buf; 2],
        wide: &mut Buf,
    ) -> Result<bool> {
        let (n, short) = (rows * columns, rows.min(columns));
        // x is divided by its norm with the first polynomial.
        let exact = match x.dtype() {
            DType::F32 => x.view().slice(0..n),
            _ => {
                dev.copy(x.view().slice(0..n), wide.view_mut().slice(0..n))?;
                wide.view().slice(0..n)
            }
        };
        dev.zero(self.acc.view_mut())?;
        dev.sum_squares(SumSquares { x: exact, acc: self.acc.view_mut() })?;
        let (acc, unscale) = (self.acc.view(), constants.slice(6..7));
        dev.clip_scale(ClipScale { acc, max_norm: 1.0, unscale, out: self.inverse.view_mut() })?;
        for step in 0..self.steps {
            let (from, to) = if step % 2 == 0 { (&*x, &mut *y) } else { (&*y, &mut *x) };
            let (from, wide_side) = (from.view().slice(0..n), rows <= columns);
            let gram_of = match wide_side {
                true => GemmShape::nt(short, short, columns),
                false => GemmShape::tn(short, short, rows),
            };
            dev.gemm(Gemm { shape: gram_of.symmetric(), a: from, b: from, c: self.gram.view_mut() })?;
            let (s, shape) = (self.gram.view().slice(0..short * short), GemmShape::nn(short, short, short));
            dev.gemm(Gemm { shape: shape.symmetric(), a: s, b: s, c: self.square.view_mut() })?;
            let scale = if step == 0 { self.inverse.view().slice(0..1) } else { constants.slice(7..8) };
            let last = if step + 1 == self.steps { factor } else { 1.0 };
            let (coefficients, square) = (COEFFICIENTS.map(|c| c * last), self.square.view().slice(0..short * short));
            let s = self.gram.view_mut().slice(0..short * short);
            dev.polynomial(Polynomial { coefficients, scale, square, s })?;
            let p = self.gram.view().slice(0..short * short);
            let (a, b) = if wide_side { (p, from) } else { (from, p) };
            dev.gemm(Gemm { shape: GemmShape::nn(rows, columns, short), a, b, c: to.view_mut() })?;
        }
        Ok(self.steps % 2 == 1)
    }
}
