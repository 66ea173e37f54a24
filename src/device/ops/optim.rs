//! Operands of the gradient norm and the optimizers' updates, and the constants of an update. n: elements.
use super::check::{float, read, written};
use crate::{View, ViewMut};
use bytemuck::{Pod, Zeroable};
use flatshard_base::dynamic8::BLOCK;
use flatshard_base::{DType, Error, Result};

/// Alignment of segments and shard boundaries in elements, 512 bytes in bf16: so they lie between the blocks of the
/// exact gradient norm, and of optimizer state in 8 bits, whose bits then do not depend on the sharding.
pub const ALIGN: usize = BLOCK;

/// Elements that [`SumSquares`] adds before it adds exactly. A divisor of [`ALIGN`].
pub const NORM_BLOCK: usize = 128;

/// Limbs of [`SumSquares`]'s exact accumulator: each holds an integer below 2^32 as an f64, so that limbs of up to 2^20
/// ranks add without rounding.
pub const LIMBS: usize = 68;

/// Adds the sum of squares of `x` to the exact accumulator. Blocks of [`NORM_BLOCK`] elements, counted from the start
/// of `x`, are summed in f64 in a fixed order; block sums are added exactly. So splitting at any multiple of
/// [`NORM_BLOCK`] gives the same limbs. A NaN or infinity makes the result non-finite.
pub struct SumSquares<'a> {
    /// (n) f32
    pub x: View<'a>,
    /// ([`LIMBS`]) f64
    pub acc: ViewMut<'a>,
}

impl SumSquares<'_> {
    pub const OP: &'static str = "sum_squares";
    pub fn check(&self) -> Result<()> {
        read(Self::OP, &[("x", &self.x, DType::F32, self.x.len())])?;
        written(Self::OP, &[("acc", &self.acc, DType::F64, LIMBS)])
    }
}

/// The clip scale and the norm, from the (reduced) accumulator of a gradient that was scaled by 1 / `unscale`. Assigns
/// `out`. If the norm is not finite, neither is the scale.
pub struct ClipScale<'a> {
    /// ([`LIMBS`]) f64
    pub acc: View<'a>,
    /// 0 disables clipping.
    pub max_norm: f32,
    /// f32 (1)
    pub unscale: View<'a>,
    /// f32 (2) = [scale, norm]: norm of the unscaled gradient, scale = unscale * min(1, max_norm / (norm + 1e-6)) as in
    /// `torch.nn.utils.clip_grad_norm_`; `unscale` without clipping.
    pub out: ViewMut<'a>,
}

impl ClipScale<'_> {
    pub const OP: &'static str = "clip_scale";
    pub fn check(&self) -> Result<()> {
        read(Self::OP, &[("acc", &self.acc, DType::F64, LIMBS), ("unscale", &self.unscale, DType::F32, 1)])?;
        written(Self::OP, &[("out", &self.out, DType::F32, 2)])
    }
}

/// One fused pass (Loshchilov & Hutter 2019, decoupled decay). If `scale[0]` is not finite, nothing changes.
/// Arithmetic is in f32; what is stored in bf16 is rounded stochastically. Moments in u8 are blocks of
/// [`flatshard_base::dynamic8`], the first one signed.
pub struct AdamW<'a> {
    /// f32: [`AdamWScalars`].
    pub h: View<'a>,
    /// f32 (at least 1): `scale[0]` multiplies `g`.
    pub scale: View<'a>,
    /// (n) f32
    pub g: View<'a>,
    /// (n) f32, bf16 or, with `absmax`, u8; updated.
    pub m: ViewMut<'a>,
    /// (n) as `m`, updated.
    pub v: ViewMut<'a>,
    /// (n) f32 or bf16: master weights, updated.
    pub p: ViewMut<'a>,
    /// (n): a copy of `p` in the compute dtype, if there is one.
    pub out: Option<ViewMut<'a>>,
    /// f32: the largest magnitude of each [`BLOCK`] elements of `m` and of `v`, where these are u8. Updated.
    pub absmax: Option<[ViewMut<'a>; 2]>,
    /// Where the elements are in their tensor. Unused if everything is f32.
    pub at: TensorPart,
}

impl AdamW<'_> {
    pub const OP: &'static str = "adamw";
    pub fn check(&self) -> Result<()> {
        let Self { h, scale, g, m, v, p, out, .. } = self;
        let n = g.len();
        let stored = |x: &ViewMut| if x.dtype() == DType::Bf16 { DType::Bf16 } else { DType::F32 };
        check_update(Self::OP, (h, AdamWScalars::LEN), scale, g, (p, stored(p)), out.as_ref())?;
        let Some([of_m, of_v]) = &self.absmax else {
            return written(Self::OP, &[("m", m, stored(m), n), ("v", v, stored(m), n)]);
        };
        let (blocks, f32) = (n.div_ceil(BLOCK), DType::F32);
        written(Self::OP, &[("absmax of m", of_m, f32, blocks), ("absmax of v", of_v, f32, blocks)])?;
        written(Self::OP, &[("m", m, DType::U8, n), ("v", v, DType::U8, n)])
    }
    /// Whether anything is rounded stochastically.
    pub fn rounds(&self) -> bool {
        self.m.dtype() == DType::Bf16 || self.p.dtype() == DType::Bf16
    }
}

/// Where the operands of an update are in the whole tensor, for random numbers that do not depend on the sharding.
///
/// [Note: stochastic rounding] A value x between neighbors a < b of bf16 becomes b with probability (x - a) / (b - a),
/// so that its expectation is x: 16 random bits are added to the f32 below the bits that bf16 keeps. They are the upper
/// halves of the words 0 (weight), 1 (first moment) and 2 (second moment) of philox(key, [element, step]), with the
/// tensor's key and the element's index in the whole tensor. A value that bf16 has stays.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct TensorPart {
    /// [`flatshard_base::rng::Rng::key`] of the tensor.
    pub key: u64,
    /// Index of the first element in this rank's part of the tensor, and what to add in the whole tensor.
    pub first: u64,
    pub before: u64,
    /// If a part is cut along its columns, elements of a row, and those of the other ranks between two rows. 0 is any
    /// number: the part is contiguous.
    pub row: u64,
    pub skip: u64,
}

impl TensorPart {
    /// The same from element `n` on.
    pub fn from(self, n: usize) -> TensorPart {
        TensorPart { first: self.first + n as u64, ..self }
    }
    /// The index in the whole tensor of element `i`, and the number of elements from there that are contiguous.
    pub fn place(&self, i: usize) -> (u64, usize) {
        let at = self.first + i as u64;
        match self.row {
            0 => (at + self.before, usize::MAX),
            row => (at + at / row * self.skip + self.before, (row - at % row) as usize),
        }
    }
}

/// SGD with momentum (PyTorch's form: `m = momentum * m + g + decay * p; p -= lr * m`). If `scale[0]` is not finite,
/// nothing changes.
pub struct Sgd<'a> {
    /// f32: [`SgdScalars`].
    pub h: View<'a>,
    /// f32 (at least 1): `scale[0]` multiplies `g`.
    pub scale: View<'a>,
    /// (n) f32
    pub g: View<'a>,
    /// (n) f32, updated; absent without momentum.
    pub m: Option<ViewMut<'a>>,
    /// (n) f32: master weights, updated.
    pub p: ViewMut<'a>,
    /// (n): a copy of `p` in the compute dtype, if there is one.
    pub out: Option<ViewMut<'a>>,
}

impl Sgd<'_> {
    pub const OP: &'static str = "sgd";
    pub fn check(&self) -> Result<()> {
        let Self { h, scale, g, m, p, out } = self;
        check_update(Self::OP, (h, SgdScalars::LEN), scale, g, (p, DType::F32), out.as_ref())?;
        m.as_ref().map_or(Ok(()), |m| m.fits(Self::OP, "m", DType::F32, g.len()))
    }
}

/// A step of Newton-Schulz in place (Jordan et al. 2024): `s = a z I + b z³ s + c z⁵ s s` of a square matrix, with
/// `z = scale[0]`: the polynomial of z² s, times z.
pub struct Polynomial<'a> {
    /// a, b and c.
    pub coefficients: [f32; 3],
    /// f32 (at least 1)
    pub scale: View<'a>,
    /// (n, n) f32: s s.
    pub square: View<'a>,
    /// (n, n) f32 or bf16, updated.
    pub s: ViewMut<'a>,
}

impl Polynomial<'_> {
    pub const OP: &'static str = "polynomial";
    /// Returns n.
    pub fn check(&self) -> Result<usize> {
        let Self { scale, square, s, .. } = self;
        let (n, stored) = (s.len().isqrt(), if s.dtype() == DType::Bf16 { DType::Bf16 } else { DType::F32 });
        if scale.is_empty() || n * n != s.len() {
            let what = format!("scale holds {} elements and s {}, needs 1 and a square", scale.len(), s.len());
            return Err(Error::op(Self::OP, what));
        }
        let f32 = DType::F32;
        read(Self::OP, &[("scale", scale, f32, scale.len()), ("square", square, f32, n * n)])?;
        written(Self::OP, &[("s", s, stored, n * n)])?;
        Ok(n)
    }
}

/// Checks the operands of both updates: scalars, scale, gradient, weights and their copy.
fn check_update(
    op: &'static str,
    (h, len): (&View, usize),
    scale: &View,
    g: &View,
    (p, stored): (&ViewMut, DType),
    out: Option<&ViewMut>,
) -> Result<()> {
    if scale.is_empty() {
        return Err(Error::op(op, "scale holds 0 elements, needs at least 1"));
    }
    let n = g.len();
    read(op, &[("h", h, DType::F32, len), ("scale", scale, DType::F32, scale.len()), ("g", g, DType::F32, n)])?;
    written(op, &[("p", p, stored, n)])?;
    out.map_or(Ok(()), |out| out.fits(op, "out", float(op, out.dtype())?, n))
}

/// One step of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// Counts from 1; used for bias correction.
    pub step: u64,
}

/// Constants of one [`AdamW`] step, in their memory layout.
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
    /// The low word of the step, for stochastic rounding.
    pub step: u32,
}

impl AdamWScalars {
    /// Length in f32.
    pub const LEN: usize = size_of::<AdamWScalars>() / 4;
}

impl AdamWStep {
    /// Computed in f64 and rounded once, as in PyTorch.
    pub fn scalars(&self) -> AdamWScalars {
        let (lr, beta1, beta2, steps) = (self.lr as f64, self.beta1 as f64, self.beta2 as f64, self.step as f64);
        AdamWScalars {
            keep: (1.0 - lr * self.weight_decay as f64) as f32,
            new_m: (1.0 - beta1) as f32,
            beta2: self.beta2,
            new_v: (1.0 - beta2) as f32,
            size: (lr / (1.0 - beta1.powf(steps))) as f32,
            root: (1.0 / (1.0 - beta2.powf(steps)).sqrt()) as f32,
            eps: self.eps,
            step: self.step as u32,
        }
    }
}

/// Constants of one [`Sgd`] step, in their memory layout.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SgdScalars {
    pub lr: f32,
    pub momentum: f32,
    pub weight_decay: f32,
}

impl SgdScalars {
    /// Length in f32.
    pub const LEN: usize = size_of::<SgdScalars>() / 4;
}
