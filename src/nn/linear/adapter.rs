//! The low-rank adapter of a matrix (LoRA, Hu et al. 2021): what it adds to a product and its gradients. Never touches
//! the frozen matrix.
use super::super::context::{AdapterDropout, Cx};
use super::super::product_buffers::AdapterScratch;
use super::super::store::{Grads, Weights};
use super::super::tensor::Tensor;
use crate::base::Result;
use crate::device::ops::{Gemm, GemmShape};
use crate::device::{Device, View, ViewMut};
use std::ops::Range;

/// What the adapted matrix reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Sides {
    pub inputs: usize,
    pub outputs: usize,
    /// First output used, when the segments hold more.
    pub first: usize,
    /// Elements in a row of `y`, and the first one written.
    pub row: usize,
    pub column: usize,
}

/// A low-rank adapter of a matrix: segments `a` (rank, inputs) and `b` (outputs, rank).
#[derive(Clone, Copy, Debug)]
pub struct Adapter {
    pub a: usize,
    pub b: usize,
    pub rank: usize,
    pub scale: f32,
    /// Dropout of the adapter's input, in training.
    pub dropout: Option<AdapterDropout>,
    /// Its number among those whose products with A are kept until backward.
    pub kept: Option<usize>,
}

impl Adapter {
    /// The range of B for the outputs of `of`.
    fn held(&self, of: Sides) -> Range<usize> {
        of.first * self.rank..(of.first + of.outputs) * self.rank
    }
    /// The input of A: `x`, or in training with dropout a masked copy in `dropped`.
    fn input<'a>(&self, cx: &Cx, of: Sides, x: View<'a>, dropped: &'a mut Tensor) -> Result<View<'a>> {
        let Some(mask) = self.dropout.as_ref().filter(|_| cx.adapter_keys.is_some()) else { return Ok(x) };
        let n = x.len() / of.inputs;
        cx.drop_channels(mask, of.inputs, x, dropped.rows_mut(n).slice(0..x.len()), false)?;
        Ok(dropped.rows(n).slice(0..x.len()))
    }
    /// The rows of the product with A in `kept`, if it is kept; `low` has a row per token.
    fn place(&self, n: usize, low: &Tensor, kept: &Tensor) -> Option<Range<usize>> {
        let first = self.kept.filter(|_| kept.len() > 0)? * low.capacity();
        Some(first..first + n)
    }
    /// Assigns `low (N, rank) = scale x Aᵀ`.
    fn project(&self, dev: &dyn Device, w: Weights, of: Sides, x: View, mut low: ViewMut) -> Result<()> {
        let shape = GemmShape::nt(x.len() / of.inputs, self.rank, of.inputs);
        dev.gemm(Gemm { shape, a: x, b: w.get(self.a), c: low.reborrow() })?;
        dev.scale(self.scale, low)
    }
    /// `y += scale dropout(x) Aᵀ Bᵀ`, in the columns of `of`. Adds.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        of: Sides,
        x: View,
        work: &mut AdapterScratch,
        y: ViewMut,
    ) -> Result<()> {
        let (dev, n, AdapterScratch { low, kept, dropped, .. }) = (cx.dev, x.len() / of.inputs, work);
        let (low, at) = match self.place(n, low, kept) {
            Some(at) => (kept, at),
            None => (low, 0..n),
        };
        self.project(dev, w, of, self.input(cx, of, x, dropped)?, low.band_mut(&at))?;
        let band = of.column..y.len();
        let shape = GemmShape::nt(n, of.outputs, self.rank).ldc(of.row).accumulate();
        dev.gemm(Gemm { shape, a: low.band(&at), b: w.get(self.b).slice(self.held(of)), c: y.slice(band) })
    }
    /// Assigns `dlow` of `work`, and adds to `dx`, which already holds the frozen matrix's contribution.
    pub(super) fn input_grad(
        &self,
        cx: &Cx,
        w: Weights,
        of: Sides,
        dy: View,
        work: &mut AdapterScratch,
        dx: ViewMut,
    ) -> Result<()> {
        let (dev, n, AdapterScratch { dlow, dropped, .. }) = (cx.dev, dx.len() / of.inputs, work);
        let (dy, b) = (dy.slice(of.column..dy.len()), w.get(self.b).slice(self.held(of)));
        let shape = GemmShape::nn(n, self.rank, of.outputs).lda(of.row);
        dev.gemm(Gemm { shape, a: dy, b, c: dlow.rows_mut(n) })?;
        dev.scale(self.scale, dlow.rows_mut(n))?;
        let (shape, a, b) = (GemmShape::nn(n, of.inputs, self.rank), dlow.rows(n), w.get(self.a));
        let Some(mask) = self.dropout.as_ref().filter(|_| cx.adapter_keys.is_some()) else {
            return dev.gemm(Gemm { shape: shape.accumulate(), a, b, c: dx });
        };
        let all = 0..dx.len();
        dev.gemm(Gemm { shape, a, b, c: dropped.rows_mut(n).slice(all.clone()) })?;
        cx.drop_channels(mask, of.inputs, dropped.rows(n).slice(all), dx, true)
    }
    /// After it: adds to the gradients of A and B.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub(super) fn weight_grad(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        of: Sides,
        x: View,
        dy: View,
        work: &mut AdapterScratch,
    ) -> Result<()> {
        let (dev, n, AdapterScratch { low, kept, dlow, dropped, .. }) = (cx.dev, x.len() / of.inputs, work);
        let (dy, read) = (dy.slice(of.column..dy.len()), self.input(cx, of, x, dropped)?);
        if let Some((db, accumulate)) = dw.product(self.b, self.held(of))? {
            let low = match self.place(n, low, kept) {
                Some(at) => kept.band(&at),
                None => {
                    self.project(dev, w, of, read, low.rows_mut(n))?;
                    low.rows(n)
                }
            };
            let shape = GemmShape { accumulate, ..GemmShape::tn(of.outputs, self.rank, n).lda(of.row) };
            dev.gemm(Gemm { shape, a: dy, b: low, c: db })?;
        }
        let Some((da, accumulate)) = dw.product(self.a, 0..self.rank * of.inputs)? else { return Ok(()) };
        let shape = GemmShape { accumulate, ..GemmShape::tn(self.rank, of.inputs, n) };
        dev.gemm(Gemm { shape, a: dlow.rows(n), b: read, c: da })
    }
}
