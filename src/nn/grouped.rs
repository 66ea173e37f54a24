//! One matrix per expert: rows that are sorted by expert, times the matrices of their experts, and the adapters of
//! these matrices. One call multiplies the rows of all experts. Never routes, and never mixes rows.
use super::context::Cx;
use super::layout::Layout;
use super::product_buffers::AdapterScratch;
use super::store::{Grads, Stride, Weights};
use super::windows::Held;
use crate::base::{Error, Result};
use crate::device::ops::{Grouped, GroupedGemm};
use crate::device::{View, ViewMut};

/// `y (N, outputs) = x (N, inputs) W`, with the W of each row's expert.
#[derive(Clone, Debug)]
pub struct GroupedLinear {
    /// Segments (outputs, inputs).
    pub(super) weight: Stride,
    inputs: usize,
    outputs: usize,
    /// Segments are (inputs, outputs).
    transposed: bool,
    pub(super) adapter: Option<GroupedAdapter>,
}

/// Low-rank adapters: segments `a` (rank, inputs) and `b` (outputs, rank) of each expert.
#[derive(Clone, Debug)]
pub(super) struct GroupedAdapter {
    pub a: Stride,
    pub b: Stride,
    pub rank: usize,
    pub scale: f32,
}

/// Operands of a product, but the matrices.
struct GroupedRows<'a> {
    form: Grouped,
    /// Widths of the result and of the operand.
    n: usize,
    k: usize,
    a: View<'a>,
    c: ViewMut<'a>,
    accumulate: bool,
}

impl GroupedLinear {
    pub fn new(weight: Stride, outputs: usize, inputs: usize) -> GroupedLinear {
        GroupedLinear { weight, inputs, outputs, transposed: false, adapter: None }
    }
    /// The same of segments (inputs, outputs).
    pub fn transposed(self) -> GroupedLinear {
        GroupedLinear { transposed: true, ..self }
    }
    /// The forms of products with the matrices, and with their transposes.
    fn forms(&self) -> [Grouped; 2] {
        if self.transposed { [Grouped::Input, Grouped::Forward] } else { [Grouped::Forward, Grouped::Input] }
    }
    /// Checks that an operation can find the tensors of a kind at equal distances.
    pub fn check(&self, layout: &Layout) -> Result<()> {
        let adapters = self.adapter.iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        for kind in [&self.weight].into_iter().chain(adapters) {
            let trainable = |e: usize| layout.segments[kind.segment(e)].is_trained();
            if let Some(e) = (0..kind.count).find(|&e| trainable(e) != trainable(0)) {
                return Err(Error::input(format!(
                    "freeze: {} is trained and {} is not; freeze all experts of a block or none",
                    layout.segments[kind.segment(if trainable(0) { 0 } else { e })].name,
                    layout.segments[kind.segment(if trainable(0) { e } else { 0 })].name
                )));
            }
        }
        Ok(())
    }

    /// Assigns `y`. `work` is scratch for the adapter.
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        of: Held,
        x: View,
        work: &mut AdapterScratch,
        mut y: ViewMut,
    ) -> Result<()> {
        let (form, inputs, n) = (Grouped::Forward, self.inputs, self.outputs);
        let base = GroupedRows { form: self.forms()[0], n, k: inputs, a: x, c: y.reborrow(), accumulate: false };
        product(cx, w, &self.weight, of, base)?;
        let Some(adapter) = self.adapter.as_ref().filter(|_| cx.adapted) else { return Ok(()) };
        adapter.project(cx, w, of, inputs, x, work)?;
        let a = work.low.rows(of.0);
        product(cx, w, &adapter.b, of, GroupedRows { form, n, k: adapter.rank, a, c: y, accumulate: true })
    }
    /// Assigns `dx` from `dy`, or adds to it with `accumulate`.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn input_grad(
        &self,
        cx: &Cx,
        w: Weights,
        of: Held,
        dy: View,
        work: &mut AdapterScratch,
        mut dx: ViewMut,
        accumulate: bool,
    ) -> Result<()> {
        let (form, n, outputs) = (Grouped::Input, self.inputs, self.outputs);
        let base = GroupedRows { form: self.forms()[1], n, k: outputs, a: dy, c: dx.reborrow(), accumulate };
        product(cx, w, &self.weight, of, base)?;
        let Some(adapter) = &self.adapter else { return Ok(()) };
        adapter.project_grad(cx, w, of, outputs, dy, work)?;
        let a = work.dlow.rows(of.0);
        product(cx, w, &adapter.a, of, GroupedRows { form, n, k: adapter.rank, a, c: dx, accumulate: true })
    }
    /// Adds to the gradients of the matrices and their adapters, unless they are frozen. Rows of `x` may have been
    /// multiplied by factors since forward.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn weight_grad(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        of: Held,
        x: View,
        dy: View,
        work: &mut AdapterScratch,
    ) -> Result<()> {
        let (inputs, outputs) = (self.inputs, self.outputs);
        match self.transposed {
            true => gradient(cx, dw, &self.weight, of, (inputs, x), (outputs, dy))?,
            false => gradient(cx, dw, &self.weight, of, (outputs, dy), (inputs, x))?,
        }
        let Some(adapter) = &self.adapter else { return Ok(()) };
        adapter.project(cx, w, of, inputs, x, work)?;
        adapter.project_grad(cx, w, of, outputs, dy, work)?;
        gradient(cx, dw, &adapter.b, of, (outputs, dy), (adapter.rank, work.low.rows(of.0)))?;
        gradient(cx, dw, &adapter.a, of, (adapter.rank, work.dlow.rows(of.0)), (inputs, x))
    }
}

impl GroupedAdapter {
    /// Assigns `low (N, rank) = scale x Aᵀ`.
    fn project(&self, cx: &Cx, w: Weights, of: Held, k: usize, a: View, work: &mut AdapterScratch) -> Result<()> {
        let (form, c) = (Grouped::Forward, work.low.rows_mut(of.0));
        product(cx, w, &self.a, of, GroupedRows { form, n: self.rank, k, a, c, accumulate: false })?;
        cx.dev.scale(self.scale, work.low.rows_mut(of.0))
    }
    /// Assigns `dlow (N, rank) = scale dy B`. [`GroupedLinear::weight_grad`] repeats it: between the two, the buffer
    /// serves other rows and other matrices.
    fn project_grad(&self, cx: &Cx, w: Weights, of: Held, k: usize, a: View, work: &mut AdapterScratch) -> Result<()> {
        let (form, c) = (Grouped::Input, work.dlow.rows_mut(of.0));
        product(cx, w, &self.b, of, GroupedRows { form, n: self.rank, k, a, c, accumulate: false })?;
        cx.dev.scale(self.scale, work.dlow.rows_mut(of.0))
    }
}

/// One product per expert with its matrix of `kind`.
fn product(cx: &Cx, w: Weights, kind: &Stride, of: Held, rows: GroupedRows) -> Result<()> {
    let (b, stride) = w.strided(kind)?;
    let GroupedRows { form: kind, n, k, a, c, accumulate } = rows;
    // A group's rows are those of several ranks with ep, or of any texts in generation, which must change no bit.
    let (offsets, alike) = (of.1, true);
    cx.dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate, alike })
}
/// Adds `dyᵀ x` of each expert's rows, given with their widths, to the gradients of its matrix of `kind`, unless it is
/// frozen.
fn gradient(
    cx: &Cx,
    dw: &mut Grads,
    kind: &Stride,
    of: Held,
    (n, a): (usize, View),
    (k, b): (usize, View),
) -> Result<()> {
    let Some((c, stride, accumulate)) = dw.strided(kind)? else { return Ok(()) };
    let (kind, offsets, alike) = (Grouped::Weight, of.1, false);
    cx.dev.grouped_gemm(GroupedGemm { kind, n, k, offsets, a, b, c, stride, accumulate, alike })
}
