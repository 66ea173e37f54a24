//! How operations are divided into parts that threads compute separately: by rows, or by elements. A part is an
//! operation on its own rows, so that kernels know of no threads. Never divides a sum, so results have the same bits
//! for any number of parts.
use super::loss;
use super::operands::within;
use crate::ops::{
    AdamW, Bias, Clamp, ClampBackward, ClampedGlu, ClampedGluBackward, CopyColumns, CrossEntropyPart, Dequantize,
    DistillPart, DropoutRows, Embed, EmbedBackward, EmbedShape, Encode, Epilogue, Expand, Gelu, GeluBackward, Gemm,
    GemmShape, GemmThen, Glu, GluBackward, LayerNorm, LayerNormBackward, QkNormRope, QkNormRopeBackward, Quantize,
    RaiseScales, RmsNorm, RmsNormBackward, Rope, Sgd, SigmoidGate, SigmoidGateBackward, VocabPart, Xielu,
    XieluBackward,
};
use crate::{View, ViewMut};
use flatshard_base::Result;
use flatshard_base::dynamic8::BLOCK;
use flatshard_base::fp8::Fp8Shape;
use std::ops::Range;

/// Elements of a cache line in the narrowest dtype: elementwise parts start at multiples of it, so that no two threads
/// write one line (buffers start at pages).
pub(super) const LINE: usize = 64;

/// Multiplications that take about as long as an elementwise operation on one byte.
const FLOPS_OF_A_BYTE: usize = 16;

/// An operation that can be divided into rows.
pub(super) trait Divisible: Sized {
    /// Parts start at multiples of this.
    const STEP: usize = 1;
    /// Number of rows and bytes of the main operand, after checking the operands.
    fn rows(&self) -> Result<(usize, usize)>;
    /// The operation on some of `of` rows.
    ///
    /// # Safety
    /// Parts that run at the same time have different rows.
    unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self;
}

/// An operand with the same number of elements in every row.
trait Cut {
    unsafe fn cut(&self, rows: &Range<usize>, of: usize) -> Self;
}
impl Cut for View<'_> {
    unsafe fn cut(&self, rows: &Range<usize>, of: usize) -> Self {
        let width = self.len() / of;
        self.slice(rows.start * width..rows.end * width)
    }
}
impl Cut for ViewMut<'_> {
    unsafe fn cut(&self, rows: &Range<usize>, of: usize) -> Self {
        let width = self.len() / of;
        // SAFETY: upheld by the caller.
        unsafe { self.part(rows.start * width..rows.end * width) }
    }
}
impl<T: Cut> Cut for Option<T> {
    unsafe fn cut(&self, rows: &Range<usize>, of: usize) -> Self {
        // SAFETY: upheld by the caller.
        self.as_ref().map(|x| unsafe { x.cut(rows, of) })
    }
}

/// Indices are checked before anything is written: those of all parts, with the number of the row in the message.
fn positions((n, rows): (usize, usize), positions: View, op: &'static str) -> Result<usize> {
    within(op, "position", positions.host(op)?, rows).map(|()| n)
}
fn tokens<'a>(columns: Option<usize>, tokens: View<'a>, shape: &EmbedShape) -> Result<&'a [u32]> {
    let tokens = tokens.host(Embed::OP)?;
    within(Embed::OP, "token", tokens, shape.rows)?;
    Ok(if columns.is_some() { tokens } else { &[] })
}
fn targets(op: &'static str, n: usize, (targets, part): (View, &VocabPart)) -> Result<usize> {
    loss::check(op, targets.host(op)?, part.of).map(|()| n)
}

/// Operation, what its parts share, which operands are cut; then its rows and main operand.
macro_rules! by_rows {
    ($($op:ident: share [$($shared:ident)*] cut [$($cut:ident)*], |$it:ident| $rows:expr, $main:ident;)*) => {$(
        impl Divisible for $op<'_> {
            fn rows(&self) -> Result<(usize, usize)> {
                let $it = self;
                Ok(($rows, self.$main.bytes()))
            }
            unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
                // SAFETY: upheld by the caller.
                unsafe { $op { $($shared: self.$shared,)* $($cut: self.$cut.cut(rows, of),)* } }
            }
        }
    )*};
}
by_rows! {
    RmsNorm: share [shape w] cut [x y rstd], |op| op.check()?, x;
    LayerNorm: share [eps w b] cut [x y stats], |op| op.check()?, x;
    Bias: share [bias] cut [y], |op| op.check()?, y;
    Rope: share [shape table inverse] cut [positions qkv], |op| positions(op.check()?, op.positions, Rope::OP)?, qkv;
    QkNormRope: share [shape table wq wk] cut [positions qkv out rstd], |op| positions(op.check()?, op.positions, QkNormRope::OP)?, qkv;
    Embed: share [shape w accumulate] cut [tokens y], |op| tokens(op.check()?, op.tokens, &op.shape)?.len(), y;
    CrossEntropyPart: share [shape part] cut [targets logits stats], |op| targets(CrossEntropyPart::OP, op.check()?, (op.targets, &op.part))?, logits;
    DistillPart: share [shape part terms] cut [targets teacher logits stats], |op| targets(DistillPart::OP, op.check()?, (op.targets, &op.part))?, logits;
}

/// The same for elementwise operations, with the check.
macro_rules! by_elements {
    ($($op:ident: share [$($shared:ident)*] cut [$($cut:ident)*], |$it:ident| $check:expr, $main:ident;)*) => {$(
        impl Divisible for $op<'_> {
            const STEP: usize = LINE;
            fn rows(&self) -> Result<(usize, usize)> {
                let $it = self;
                $check?;
                Ok((self.$main.len(), self.$main.bytes()))
            }
            unsafe fn part(&self, rows: &Range<usize>, _: usize) -> Self {
                // SAFETY: upheld by the caller.
                unsafe { $op { $($shared: self.$shared,)* $($cut: self.$cut.cut(rows, self.$main.len()),)* } }
            }
        }
    )*};
}
by_elements! {
    Glu: share [] cut [gate up y], |op| op.check("glu"), gate;
    GluBackward: share [] cut [gate up dy dgate dup], |op| op.check("glu_backward"), gate;
    ClampedGlu: share [clamp] cut [gate_up y], |op| op.check(), y;
    ClampedGluBackward: share [clamp] cut [gate_up dy dgate_up], |op| op.check(), dy;
    Gelu: share [] cut [x y], |op| op.check(), x;
    GeluBackward: share [] cut [x dy dx], |op| op.check(), x;
    Clamp: share [limits] cut [x], |op| op.check(), x;
    ClampBackward: share [limits] cut [x dx], |op| op.check(), x;
    Xielu: share [curve] cut [x y], |op| op.check(), x;
    XieluBackward: share [curve] cut [x dy dx], |op| op.check(), x;
    SigmoidGate: share [] cut [gate x y], |op| op.check(), x;
    SigmoidGateBackward: share [] cut [gate x dy dgate], |op| op.check(), x;
    Sgd: share [h scale] cut [g m p out], |op| op.check(), g;
}

impl Divisible for AdamW<'_> {
    const STEP: usize = BLOCK;
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.g.len(), self.g.bytes()))
    }
    unsafe fn part(&self, rows: &Range<usize>, _: usize) -> Self {
        let (AdamW { h, scale, g, m, v, p, out, absmax, at }, of) = (self, self.g.len());
        let blocks = rows.start / BLOCK..rows.end.div_ceil(BLOCK);
        // SAFETY: likewise, since parts start with a block.
        let absmax = absmax.as_ref().map(|of| unsafe { [of[0].part(blocks.clone()), of[1].part(blocks)] });
        // SAFETY: upheld by the caller.
        let (g, m, v) = unsafe { (g.cut(rows, of), m.cut(rows, of), v.cut(rows, of)) };
        // SAFETY: likewise.
        let (p, out) = unsafe { (p.cut(rows, of), out.cut(rows, of)) };
        AdamW { h: *h, scale: *scale, g, m, v, p, out, absmax, at: at.from(rows.start) }
    }
}

/// The rows of backward passes of norms give the gradient of the input. Parts share the gradients of the weights, which
/// are summed over rows: a part must not access them.
macro_rules! backward_by_rows {
    ($($op:ident: share [$($shared:ident)*] cut [$($cut:ident)*] sum [$($sum:ident)*], |$it:ident| $rows:expr, $main:ident;)*) => {$(
        impl Divisible for $op<'_> {
            fn rows(&self) -> Result<(usize, usize)> {
                let $it = self;
                Ok(($rows, self.$main.bytes()))
            }
            unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
                // SAFETY: upheld by the caller.
                unsafe {
                    $op {
                        $($shared: self.$shared,)*
                        $($cut: self.$cut.cut(rows, of),)*
                        $($sum: self.$sum.part(0..self.$sum.len()),)*
                    }
                }
            }
        }
    )*};
}
backward_by_rows! {
    RmsNormBackward: share [shape w] cut [x rstd dy dx] sum [dw], |op| op.check()?, x;
    LayerNormBackward: share [w] cut [x stats dy dx] sum [dw db], |op| op.check()?, x;
    QkNormRopeBackward: share [shape table wq wk] cut [positions qkv rstd dqkv] sum [dwq dwk], |op| positions(op.check()?, op.positions, QkNormRopeBackward::OP)?, qkv;
}

/// By rows of the table: a part adds the gradients of its own words, in the order of the tokens.
impl Divisible for EmbedBackward<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        let columns = self.check()?;
        within(EmbedBackward::OP, "token", self.tokens.host(EmbedBackward::OP)?, self.shape.rows)?;
        Ok((columns.map_or(0, |columns| self.dw.len() / columns), self.dy.bytes()))
    }
    unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
        let shape = EmbedShape { first: self.shape.first + rows.start, ..self.shape };
        // SAFETY: upheld by the caller.
        EmbedBackward { shape, tokens: self.tokens, dy: self.dy, dw: unsafe { self.dw.cut(rows, of) } }
    }
}

impl Divisible for Expand<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.rows.len(), self.y.bytes()))
    }
    unsafe fn part(&self, part: &Range<usize>, of: usize) -> Self {
        let rows = self.rows.start + part.start..self.rows.start + part.end;
        // SAFETY: upheld by the caller.
        Expand { from: self.from, rows, columns: self.columns.clone(), y: unsafe { self.y.cut(part, of) } }
    }
}

impl Divisible for Quantize<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.shape.rows, self.x.bytes()))
    }
    unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
        let ((shape, scales), x) = (self.shape.part(rows), self.x.slice(rows.start * self.ld..self.x.len()));
        // SAFETY: upheld by the caller; parts start at multiples of a block's rows.
        unsafe { Quantize { shape, x, ld: self.ld, bytes: self.bytes.cut(rows, of), scales: self.scales.part(scales) } }
    }
}

impl Divisible for Dequantize<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.shape.rows, self.y.bytes()))
    }
    unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
        let ((shape, scales), bytes) = (self.shape.part(rows), self.bytes);
        // SAFETY: upheld by the caller.
        unsafe {
            Dequantize { shape, bytes: bytes.cut(rows, of), scales: self.scales.slice(scales), y: self.y.cut(rows, of) }
        }
    }
}

/// The elements among `at..at + len` of a matrix that are in some of its rows: their range among them, and the place of
/// the first from the first of the rows on.
fn within_rows(shape: &Fp8Shape, at: usize, len: usize, rows: &Range<usize>) -> (Range<usize>, usize) {
    let [start, end] = [rows.start, rows.end].map(|row| (row * shape.columns).clamp(at, at + len));
    (start - at..end - at, start.saturating_sub(rows.start * shape.columns).min(rows.len() * shape.columns))
}

impl Divisible for RaiseScales<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.shape.rows, self.x.bytes()))
    }
    unsafe fn part(&self, rows: &Range<usize>, _: usize) -> Self {
        let (shape, scales) = self.shape.part(rows);
        let (own, at) = within_rows(&self.shape, self.at, self.x.len(), rows);
        // SAFETY: upheld by the caller; parts start at multiples of a block's rows.
        unsafe { RaiseScales { shape, at, x: self.x.slice(own), scales: self.scales.part(scales) } }
    }
}

impl Divisible for Encode<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.shape.rows, self.x.bytes()))
    }
    unsafe fn part(&self, rows: &Range<usize>, _: usize) -> Self {
        let (shape, scales) = self.shape.part(rows);
        let (own, at) = within_rows(&self.shape, self.at, self.x.len(), rows);
        let (x, scales) = (self.x.slice(own.clone()), self.scales.slice(scales));
        // SAFETY: upheld by the caller.
        unsafe { Encode { shape, at, x, scales, bytes: self.bytes.part(own) } }
    }
}

impl Divisible for DropoutRows<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        Ok((self.check()?, self.x.bytes()))
    }
    unsafe fn part(&self, part: &Range<usize>, of: usize) -> Self {
        let DropoutRows { p, key, width, first, accumulate, .. } = *self;
        // SAFETY: upheld by the caller.
        let (rows, x, y) = unsafe { (self.rows.cut(part, of), self.x.cut(part, of), self.y.cut(part, of)) };
        DropoutRows { p, key, rows, width, first, x, y, accumulate }
    }
}

impl Divisible for CopyColumns<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        Ok((self.rows, self.rows * self.width * self.src.dtype().size()))
    }
    unsafe fn part(&self, rows: &Range<usize>, _: usize) -> Self {
        let &CopyColumns { width, src_row, dst_row, .. } = self;
        let extent = |row: usize| rows.start * row..(rows.end - 1) * row + width;
        // SAFETY: upheld by the caller.
        let dst = unsafe { self.dst.part(extent(dst_row)) };
        CopyColumns { rows: rows.len(), width, src_row, dst_row, src: self.src.slice(extent(src_row)), dst }
    }
}

/// Rows of C. Sums run along k, so this changes no bit.
impl Divisible for Gemm<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        let GemmShape { m, n, k, .. } = self.shape;
        Ok((m, m * n * k / FLOPS_OF_A_BYTE))
    }
    unsafe fn part(&self, rows: &Range<usize>, _: usize) -> Self {
        let (shape, len) = (self.shape, self.c.len());
        let at = rows.start * if shape.ta { 1 } else { shape.lda };
        let a = self.a.slice(self.a.len().min(at)..self.a.len());
        // SAFETY: upheld by the caller.
        let c = unsafe { self.c.part(rows.start * shape.ldc..len.min(rows.end * shape.ldc)) };
        Gemm { shape: GemmShape { m: rows.len(), ..shape }, a, b: self.b, c }
    }
}

/// A product divided into columns. Parts of C overlap, but not what is written.
pub(super) struct Columns<T>(pub T);

/// Work of a product, in bytes of an elementwise operation: with the fewest rows, to read B takes longer than to
/// multiply it. Without rows, as of an expert that no token chose, there is none to divide.
fn work(&GemmShape { m, n, k, .. }: &GemmShape, b: &View) -> usize {
    if m == 0 { 0 } else { n * k * b.dtype().size().max(m / FLOPS_OF_A_BYTE) }
}
/// The shape of some columns of a product, their part of B, and the range of C that they are within.
fn columns_of<'a>(shape: &GemmShape, b: &View<'a>, columns: &Range<usize>) -> (GemmShape, View<'a>, Range<usize>) {
    let at = columns.start * if shape.tb { shape.ldb } else { 1 };
    let within = columns.start..(shape.m - 1) * shape.ldc + columns.end;
    (GemmShape { n: columns.len(), ..*shape }, b.slice(b.len().min(at)..b.len()), within)
}

impl Divisible for Columns<Gemm<'_>> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.0.check()?;
        Ok((self.0.shape.n, work(&self.0.shape, &self.0.b)))
    }
    unsafe fn part(&self, columns: &Range<usize>, _: usize) -> Self {
        let Gemm { shape, a, b, c } = &self.0;
        let (shape, b, within) = columns_of(shape, b, columns);
        // SAFETY: upheld by the caller.
        Columns(Gemm { shape, a: *a, b, c: unsafe { c.part(within) } })
    }
}

impl<'a> Divisible for Columns<GemmThen<'a>> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.0.check()?;
        Ok((self.0.shape.n, work(&self.0.shape, &self.0.b)))
    }
    unsafe fn part(&self, columns: &Range<usize>, _: usize) -> Self {
        let GemmThen { shape, a, b, c, then } = &self.0;
        let (shape, b, within) = columns_of(shape, b, columns);
        let of = |bias: &Option<View<'a>>| bias.map(|x| x.slice(columns.clone()));
        // SAFETY: upheld by the caller.
        let part = |x: &ViewMut<'a>| unsafe { x.part(within.clone()) };
        let then = match then {
            Epilogue::Sum { bias, residual } => {
                Epilogue::Sum { bias: of(bias), residual: residual.map(|x| x.slice(within.clone())) }
            }
            Epilogue::Gelu { bias, z } => Epilogue::Gelu { bias: of(bias), z: part(z) },
            Epilogue::GeluBackward { z, product } => {
                Epilogue::GeluBackward { z: z.slice(within.clone()), product: part(product) }
            }
        };
        Columns(GemmThen { shape, a: *a, b, c: part(c), then })
    }
}

/// Rows of the lower half of a symmetric product; `first` is the number of the first.
pub(super) struct LowerHalf<'a> {
    pub op: Gemm<'a>,
    pub first: usize,
}

impl Divisible for LowerHalf<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.op.rows()
    }
    unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
        // SAFETY: upheld by the caller.
        LowerHalf { op: unsafe { self.op.part(rows, of) }, first: self.first + rows.start }
    }
}

/// Rows of C and of what the epilogue reads and writes.
impl Divisible for GemmThen<'_> {
    fn rows(&self) -> Result<(usize, usize)> {
        self.check()?;
        let GemmShape { m, n, k, .. } = self.shape;
        Ok((m, m * n * k / FLOPS_OF_A_BYTE))
    }
    unsafe fn part(&self, rows: &Range<usize>, of: usize) -> Self {
        let at = rows.start * if self.shape.ta { 1 } else { self.shape.lda };
        let a = self.a.slice(self.a.len().min(at)..self.a.len());
        let shape = GemmShape { m: rows.len(), ..self.shape };
        // SAFETY: upheld by the caller.
        unsafe {
            let then = match &self.then {
                Epilogue::Sum { bias, residual } => Epilogue::Sum { bias: *bias, residual: residual.cut(rows, of) },
                Epilogue::Gelu { bias, z } => Epilogue::Gelu { bias: *bias, z: z.cut(rows, of) },
                Epilogue::GeluBackward { z, product } => {
                    Epilogue::GeluBackward { z: z.cut(rows, of), product: product.cut(rows, of) }
                }
            };
            GemmThen { shape, a, b: self.b, c: self.c.cut(rows, of), then }
        }
    }
}
