//! A matrix product with one of the layer's weights. Never decides where its output is summed or stored.
mod adapter;

pub(super) use self::adapter::Adapter;
use self::adapter::Sides;
use super::context::{Cx, DropoutSite};
use super::product_buffers::AdapterScratch;
use super::store::{Grads, WeightMatrix, Weights};
use super::tensor::Tensor;
use crate::base::fp8::Fp8;
use crate::base::{Error, Result};
use crate::device::ops::{
    Bias, BiasBackward, Epilogue, Expand, Fp8Gemm, Gelu, GeluBackward, Gemm, GemmShape, GemmThen,
};
use crate::device::{View, ViewMut};
use std::ops::Range;

/// Tiles have a multiple of this many columns, if they have as many: no product is cut into slivers.
const TILE_COLUMNS: usize = 128;

/// How the weight is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// (out, in): `nn.Linear`, Llama.
    OutIn,
    /// (in, out): the `Conv1D` of GPT-2.
    InOut,
}

/// `y (N, outputs) = x (N, inputs) W [+ b]`. `y` may be a band of columns of wider rows.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    pub(super) weight: usize,
    bias: Option<usize>,
    pub(super) inputs: usize,
    outputs: usize,
    form: Form,
    /// Elements in a row of `y`, and the first one written here.
    row: usize,
    column: usize,
    /// First output used, when the segments hold more: tp ranks may share key/value heads.
    first: usize,
    /// The trainable adapter of the frozen weight.
    pub(super) adapter: Option<Adapter>,
}

impl Linear {
    /// Segment `weight` holds (outputs, inputs).
    pub fn new(weight: usize, outputs: usize, inputs: usize) -> Linear {
        Linear {
            weight,
            bias: None,
            inputs,
            outputs,
            form: Form::OutIn,
            row: outputs,
            column: 0,
            first: 0,
            adapter: None,
        }
    }
    /// Segment `weight` holds (inputs, outputs), segment `bias` (outputs).
    pub fn conv1d(weight: usize, bias: usize, inputs: usize, outputs: usize) -> Linear {
        Linear { bias: Some(bias), form: Form::InOut, ..Linear::new(weight, outputs, inputs) }
    }
    /// Adds segment `bias` (outputs).
    pub fn bias(self, bias: usize) -> Linear {
        Linear { bias: Some(bias), ..self }
    }
    /// Writes to columns from `column` on of rows of `row` elements. Without bias.
    pub fn within(self, row: usize, column: usize) -> Linear {
        Linear { row, column, ..self }
    }

    /// Uses the outputs from `first` on of a segment that holds more. Without bias.
    pub fn from(self, first: usize) -> Linear {
        Linear { first, ..self }
    }

    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }
    /// Columns of its outputs.
    pub fn outputs(&self) -> usize {
        self.outputs
    }
    fn sides(&self) -> Sides {
        let Linear { inputs, outputs, first, row, column, .. } = *self;
        Sides { inputs, outputs, first, row, column }
    }
    fn adapter(&self, cx: &Cx) -> Option<Adapter> {
        self.adapter.filter(|_| cx.adapted)
    }
    /// Whether the product can have an epilogue: it is one call, and its result is complete. A matrix with an adapter
    /// is not alone where adapters are off either: the base rounds its sums where the adapted model does, so that both
    /// are one function, bit for bit, while the adapter adds nothing.
    fn is_alone(&self, w: Weights) -> bool {
        self.adapter.is_none() && !w.is_packed(self.weight)
    }

    /// Assigns `y`. `work` is scratch.
    pub fn forward(&self, cx: &Cx, w: Weights, x: View, work: &mut AdapterScratch, mut y: ViewMut) -> Result<()> {
        match self.bias.filter(|_| self.is_alone(w)) {
            Some(bias) => {
                let then = Epilogue::Sum { bias: Some(w.get(bias)), residual: None };
                self.product_then(cx, w, x, work, y, then)
            }
            None => {
                self.product(cx, w, x, work, y.reborrow())?;
                self.add_bias(cx, w, y)
            }
        }
    }
    /// `y = x W + b + residual`. Assigns. Bias and residual are fused into the product where it is alone.
    pub fn forward_onto(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        work: &mut AdapterScratch,
        residual: View,
        mut y: ViewMut,
    ) -> Result<()> {
        if self.is_alone(w) {
            let bias = self.bias.map(|bias| w.get(bias));
            return self.product_then(cx, w, x, work, y, Epilogue::Sum { bias, residual: Some(residual) });
        }
        self.forward(cx, w, x, work, y.reborrow())?;
        cx.dev.add(residual, y)
    }
    /// The last product of a branch without a norm after it: assigns `y`, this rank's rows of the residual stream with
    /// the branch added. `x` are its inputs; `cut`, whether ranks of tp sum their products, staged in `parts`.
    #[allow(clippy::too_many_arguments)] // a product's operands and where it goes
    pub fn onto_residual(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        work: &mut AdapterScratch,
        (cut, parts): (bool, &mut Tensor),
        place: DropoutSite,
        residual: View,
        mut y: ViewMut,
    ) -> Result<()> {
        if cx.straight(cut) {
            return self.forward_onto(cx, w, x, work, residual, y);
        }
        self.summed(cx, w, x, work, (cut, parts), y.reborrow())?;
        cx.leave(place, y.reborrow())?;
        cx.dev.add(residual, y)
    }
    /// `y = x W + b`, where ranks of tp sum their products if the work is `cut`. Assigns this rank's rows.
    pub fn summed(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        work: &mut AdapterScratch,
        (cut, parts): (bool, &mut Tensor),
        mut y: ViewMut,
    ) -> Result<()> {
        cx.sum(cut, parts, y.reborrow(), |y| self.product(cx, w, x, work, y))?;
        self.add_bias(cx, w, y)
    }
    /// `z = x W + b`, saved for backward, and `y = gelu(z)`. Assigns both.
    pub fn forward_gelu(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        work: &mut AdapterScratch,
        mut z: ViewMut,
        y: ViewMut,
    ) -> Result<()> {
        if self.is_alone(w) {
            let bias = self.bias.map(|bias| w.get(bias));
            return self.product_then(cx, w, x, work, y, Epilogue::Gelu { bias, z });
        }
        self.forward(cx, w, x, work, z.reborrow())?;
        cx.dev.gelu(Gelu { x: z.as_view(), y })
    }
    /// The product of whole rows with epilogue `then`.
    fn product_then(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        work: &mut AdapterScratch,
        y: ViewMut,
        then: Epilogue,
    ) -> Result<()> {
        let shape = self.shape(x.len() / self.inputs);
        self.multiply(cx, w, shape, (Fp8::E4m3, x), work, y, Some(then))
    }
    fn shape(&self, n: usize) -> GemmShape {
        match self.form {
            Form::OutIn => GemmShape::nt(n, self.outputs, self.inputs),
            Form::InOut => GemmShape::nn(n, self.outputs, self.inputs),
        }
    }
    /// `y += b`. Adds.
    pub fn add_bias(&self, cx: &Cx, w: Weights, y: ViewMut) -> Result<()> {
        match self.bias {
            Some(bias) => cx.dev.bias(Bias { bias: w.get(bias), y }),
            None => Ok(()),
        }
    }
    /// `forward` without the bias, which is added once after ranks have summed their products. Assigns.
    pub fn product(&self, cx: &Cx, w: Weights, x: View, work: &mut AdapterScratch, mut y: ViewMut) -> Result<()> {
        let (shape, band) = (self.shape(x.len() / self.inputs).ldc(self.row), self.column..y.len());
        self.multiply(cx, w, shape, (Fp8::E4m3, x), work, y.reborrow().slice(band), None)?;
        match self.adapter(cx) {
            Some(adapter) => adapter.forward(cx, w, self.sides(), x, work, y),
            None => Ok(()),
        }
    }
    /// `c (+)= a B`, B the weight or its transpose; `a` rounded in `format` if that is in FP8. `then` only where the
    /// weight is not packed: that is expanded tile by tile, columns of B, with all of the sum, so that the bits are
    /// those of one product.
    #[allow(clippy::too_many_arguments)] // a product's operands and its epilogue
    fn multiply(
        &self,
        cx: &Cx,
        w: Weights,
        shape: GemmShape,
        (format, a): (Fp8, View),
        work: &mut AdapterScratch,
        mut c: ViewMut,
        then: Option<Epilogue>,
    ) -> Result<()> {
        let from = match (w.matrix(self.weight, self.held()), then) {
            (WeightMatrix::Fp8(b), then) => {
                return cx.dev.fp8_gemm(Fp8Gemm { shape, format, a, b, c, then, work: work.fp8.work() });
            }
            (WeightMatrix::Plain(b), Some(then)) => return cx.dev.gemm_then(GemmThen { shape, a, b, c, then }),
            (WeightMatrix::Plain(b), None) => return cx.dev.gemm(Gemm { shape, a, b, c }),
            (WeightMatrix::Nf4(from), None) => from,
            (WeightMatrix::Nf4(_), Some(_)) => return Err(Error::op("product", "a packed weight has no epilogue")),
        };
        let tile = &mut work.tile;
        let wide = match tile.len() / shape.k.max(1) {
            few @ ..TILE_COLUMNS => few.max(1),
            many => many - many % TILE_COLUMNS,
        };
        for at in (0..shape.n).step_by(wide) {
            let n = wide.min(shape.n - at);
            let (rows, columns) = if shape.tb { (at..at + n, 0..shape.k) } else { (0..shape.k, at..at + n) };
            let (rows, ldb) = (self.first + rows.start..self.first + rows.end, columns.len());
            let y = tile.all_mut().slice(0..rows.len() * ldb);
            cx.dev.expand(Expand { from, rows, columns, y })?;
            let (b, end) = (tile.all().slice(0..n * shape.k), c.len());
            let part = GemmShape { n, ldb, ..shape };
            cx.dev.gemm(Gemm { shape: part, a, b, c: c.reborrow().slice(at..end) })?;
        }
        Ok(())
    }
    /// The range of the weight's segment that is used.
    fn held(&self) -> Range<usize> {
        self.first * self.inputs..(self.first + self.outputs) * self.inputs
    }

    /// Backward from `dy`: adds to the gradients of the weight, the bias and the adapter; assigns `dx`, or adds to it
    /// with `accumulate`. `work` is scratch.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        dy: View,
        work: &mut AdapterScratch,
        dx: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        self.input_grad(cx, w, dy, work, dx, accumulate)?;
        self.weight_grad(cx, w, dw, x, dy, work)
    }

    /// Backward of a GELU followed by this product: assigns `dx`, the gradient of GELU's input `z`. `product`, of the
    /// same size, is scratch.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward_gelu(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        dy: View,
        work: &mut AdapterScratch,
        z: View,
        mut product: ViewMut,
        dx: ViewMut,
    ) -> Result<()> {
        if !self.is_alone(w) {
            self.backward(cx, w, dw, x, dy, work, product.reborrow(), false)?;
            return cx.dev.gelu_backward(GeluBackward { x: z, dy: product.as_view(), dx });
        }
        self.weight_grad(cx, w, dw, x, dy, work)?;
        let (shape, a) = (self.input_shape(dx.len() / self.inputs), dy.slice(self.column..dy.len()));
        self.multiply(cx, w, shape, (Fp8::E5m2, a), work, dx, Some(Epilogue::GeluBackward { z, product }))
    }

    /// `dx = dy Wᵀ`. Assigns, or adds with `accumulate`; and assigns what [`Linear::weight_grad`] needs of `work`.
    pub(super) fn input_grad(
        &self,
        cx: &Cx,
        w: Weights,
        dy: View,
        work: &mut AdapterScratch,
        mut dx: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        let shape = GemmShape { accumulate, ..self.input_shape(dx.len() / self.inputs) };
        self.multiply(cx, w, shape, (Fp8::E5m2, dy.slice(self.column..dy.len())), work, dx.reborrow(), None)?;
        match &self.adapter {
            Some(adapter) => adapter.input_grad(cx, w, self.sides(), dy, work, dx),
            None => Ok(()),
        }
    }
    fn input_shape(&self, n: usize) -> GemmShape {
        let shape = match self.form {
            Form::OutIn => GemmShape::nn(n, self.inputs, self.outputs),
            Form::InOut => GemmShape::nt(n, self.inputs, self.outputs),
        };
        shape.lda(self.row)
    }

    /// After [`Linear::input_grad`] with the same `dy`, if there is an adapter: adds `dyᵀ x` to the weight's gradient,
    /// the column sums of `dy` to the bias's, and to the adapter's. Skips frozen tensors. Rows of `x` may have been
    /// multiplied by factors since forward.
    pub(super) fn weight_grad(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        dy: View,
        work: &mut AdapterScratch,
    ) -> Result<()> {
        let n = x.len() / self.inputs;
        let band = dy.slice(self.column..dy.len());
        if let Some((dw, accumulate)) = dw.product(self.weight, self.held())? {
            let (shape, a, b) = match self.form {
                Form::OutIn => (GemmShape::tn(self.outputs, self.inputs, n).lda(self.row), band, x),
                Form::InOut => (GemmShape::tn(self.inputs, self.outputs, n).ldb(self.row), x, band),
            };
            cx.dev.gemm(Gemm { shape: GemmShape { accumulate, ..shape }, a, b, c: dw })?;
        }
        if let Some(db) = self.bias.map(|bias| dw.get(bias)).transpose()?.flatten() {
            cx.dev.bias_backward(BiasBackward { dy, db })?;
        }
        match &self.adapter {
            Some(adapter) => adapter.weight_grad(cx, w, dw, self.sides(), x, dy, work),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
