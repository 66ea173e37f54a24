//! A decoder block: the branch that mixes tokens, then the feed-forward branch, or one of the two. There is one plan
//! per layer, because layers may differ in their branches and in their windows. Never holds a buffer.
//!
//! Saved for backward: what only a matrix product or attention could recompute. Norms and activations take one pass
//! over memory, so backward recomputes them: 6 C + 2 F instead of 8 C + 3 F saved elements per token (C: model width,
//! F: feed-forward width), for 0.3 % of the block's time in f32 and 0.9 % in bf16 (measured at C 768, F 3072, N 1024).
use super::attention::AttentionBranch;
use super::context::Cx;
use super::conv::ConvBranch;
use super::delta::DeltaBranch;
use super::experts::{SharedExpert, SparseBranch};
use super::layout::Layout;
use super::linear::Linear;
use super::lora::Lora;
use super::mlp::MlpBranch;
use super::per_layer::PerLayerBranch;
use super::saved::{Saved, Scratch};
use super::store::{Grads, Weights};
use crate::base::Result;
use crate::device::ops::ScaleBy;
use crate::device::{View, ViewMut};

#[derive(Clone, Debug)]
pub struct DecoderBlock {
    pub mixer: Mixer,
    pub mlp: FeedForward,
    /// A third branch, which reads an input of the block besides the residual stream.
    pub per_layer: Option<PerLayerBranch>,
    /// Segment (1): a factor of the block's output.
    pub scalar: Option<usize>,
    /// Both branches read the block's input: `y = x + attention(x) + mlp(x)` (Wang & Komatsuzaki 2021, GPT-J).
    pub parallel: bool,
    /// The factor of the second branch's output.
    pub mlp_factor: f32,
}

/// The first branch of a block, in which tokens see each other.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // one per block, and never moved
pub enum Mixer {
    Attention(AttentionBranch),
    Delta(DeltaBranch),
    Conv(ConvBranch),
    /// Side by side.
    Both(AttentionBranch, DeltaBranch),
    /// The block has the second branch only.
    None,
}

/// The second branch of a block.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // one per block, and never moved
pub enum FeedForward {
    Dense(MlpBranch),
    Sparse(SparseBranch),
    /// The block has the first branch only.
    None,
}

impl DecoderBlock {
    /// The second branch, if it has experts.
    pub fn sparse(&self) -> Option<&SparseBranch> {
        match &self.mlp {
            FeedForward::Dense(_) | FeedForward::None => None,
            FeedForward::Sparse(sparse) => Some(sparse),
        }
    }
    /// Whether norms follow the experts: then the block goes on after them.
    pub fn goes_on(&self) -> bool {
        self.sparse().is_some_and(SparseBranch::goes_on)
    }
    /// For the second branch.
    pub fn of_mlp<'a>(&self, cx: &Cx<'a>) -> Cx<'a> {
        cx.times(self.mlp_factor)
    }
    /// What the experts read, from the block's input `x (R, C)`: assigns the statistics and `h (N, C)` of scratch.
    pub fn renorm(&self, cx: &Cx, w: Weights, x: View, saved: &Saved, scratch: &mut Scratch) -> Result<()> {
        let x = if self.parallel { x } else { saved.mlp.x.rows(cx.rows()) };
        self.sparse().map_or(Ok(()), |sparse| sparse.renorm(cx, w, x, scratch))
    }
    /// The first branch, if it is attention.
    pub fn attention(&self) -> Option<&AttentionBranch> {
        match &self.mixer {
            Mixer::Attention(attention) | Mixer::Both(attention, _) => Some(attention),
            Mixer::Delta(_) | Mixer::Conv(_) | Mixer::None => None,
        }
    }
    /// Attaches the adapters of block `layer` to their matrices, and appends the hashed names of those with dropout to
    /// `masks`. `kept` counts the adapters whose products with A can be kept until backward. Returns the width of the
    /// widest masked input.
    pub fn adapt(
        &mut self,
        lora: &Lora,
        layouts: &[Layout],
        layer: usize,
        masks: &mut Vec<u64>,
        kept: &mut usize,
    ) -> usize {
        // Backward multiplies the inputs of shared experts by factors first.
        let is_plain = self.sparse().is_none();
        let (keeps, of_mixer): (bool, Vec<&mut Linear>) = match &mut self.mixer {
            Mixer::Attention(attention) => (is_plain && attention.latent.is_none(), attention.linears()),
            Mixer::Both(attention, delta) => (false, attention.linears().into_iter().chain(delta.linears()).collect()),
            Mixer::Delta(delta) => (false, delta.linears()),
            Mixer::Conv(conv) => (false, conv.linears()),
            Mixer::None => (false, Vec::new()),
        };
        let of_mlp: [Option<&mut Linear>; 3] = match &mut self.mlp {
            FeedForward::None => [None, None, None],
            FeedForward::Dense(dense) => dense.linears(),
            FeedForward::Sparse(SparseBranch { experts, shared, beside, .. }) => {
                experts.adapt(lora, &layouts[experts.layer]);
                match (shared, beside) {
                    (Some(SharedExpert { gate, up, down, .. }), _) => [gate.as_mut(), Some(up), Some(down)],
                    (None, Some(beside)) => beside.dense.linears(),
                    (None, None) => [None, None, None],
                }
            }
        };
        let of_third = self.per_layer.iter_mut().flat_map(|PerLayerBranch { gate, out, .. }| [gate, out]);
        let linears = of_mixer.into_iter().chain(of_mlp.into_iter().flatten()).chain(of_third);
        let masked = |linear: &mut Linear| {
            lora.adapt(linear, &layouts[layer], masks);
            if let Some(adapter) = linear.adapter.as_mut().filter(|_| keeps) {
                adapter.kept = Some(*kept);
                *kept += 1;
            }
            linear.adapter.and_then(|adapter| adapter.dropout).map_or(0, |_| linear.inputs)
        };
        linears.map(masked).max().unwrap_or(0)
    }

    /// Assigns `saved`, and `y (R, C)` from `x (R, C)`: this rank's rows of the residual stream. Recomputation for
    /// backward passes no `y`, which skips the last matrix product. A sparse block's `y` is assigned after the experts,
    /// by [`SparseBranch::combine`] or [`DecoderBlock::go_on`].
    pub fn forward(
        &self,
        cx: &Cx,
        w: Weights,
        x: View,
        saved: &mut Saved,
        scratch: &mut Scratch,
        mut y: Option<ViewMut>,
    ) -> Result<()> {
        let after = saved.mlp.x.rows_mut(cx.rows());
        match &self.mixer {
            Mixer::Attention(attention) => attention.forward(cx, w, x, &mut saved.attention, scratch, after)?,
            Mixer::Delta(delta) => delta.forward(cx, w, x, &mut saved.recurrent, scratch, after)?,
            Mixer::Conv(conv) => {
                conv.forward(cx, w, x, &mut saved.recurrent, &mut saved.attention.branch, scratch, after)?
            }
            Mixer::Both(attention, delta) => {
                let [of_attention, of_other] = self.of_mixers(cx);
                let mut after = after;
                attention.forward(&of_attention, w, x, &mut saved.attention, scratch, after.reborrow())?;
                delta.forward(&of_other, w, x, &mut saved.recurrent, scratch, after)?
            }
            Mixer::None => cx.dev.copy(x, after)?,
        }
        let beside = self.parallel.then_some(x);
        match &self.mlp {
            FeedForward::Dense(mlp) => {
                let y = match self.per_layer {
                    Some(_) => Some(saved.per_layer.x.rows_mut(cx.rows())),
                    None => y.as_mut().map(ViewMut::reborrow),
                };
                mlp.forward(&self.of_mlp(cx), w, beside, &mut saved.mlp, scratch, y)?
            }
            FeedForward::Sparse(sparse) => return sparse.forward(cx, w, beside, &mut saved.mlp, scratch, y.is_some()),
            FeedForward::None => {
                if let Some(y) = &mut y {
                    cx.dev.copy(saved.mlp.x.rows(cx.rows()), y.reborrow())?;
                }
            }
        }
        self.end(cx, w, saved, scratch, y)
    }
    /// For attention and for a mixer next to it.
    fn of_mixers<'a>(&self, cx: &Cx<'a>) -> [Cx<'a>; 2] {
        [cx.spec.block_factors.attention, cx.spec.block_factors.other].map(|factor| cx.times(factor))
    }
    /// What follows a dense branch.
    fn end(&self, cx: &Cx, w: Weights, saved: &mut Saved, scratch: &mut Scratch, mut y: Option<ViewMut>) -> Result<()> {
        if let Some(branch) = &self.per_layer {
            branch.forward(cx, w, &mut saved.per_layer, scratch, y.as_mut().map(ViewMut::reborrow))?;
        }
        y.map_or(Ok(()), |y| self.scale(cx, w, y))
    }
    /// After the experts of a block that goes on: assigns `saved`, and `y` if it is given.
    pub fn go_on(
        &self,
        cx: &Cx,
        w: Weights,
        saved: &mut Saved,
        scratch: &mut Scratch,
        mut y: Option<ViewMut>,
    ) -> Result<()> {
        if let FeedForward::Sparse(sparse) = &self.mlp {
            let y = match self.per_layer {
                Some(_) => Some(saved.per_layer.x.rows_mut(cx.rows())),
                None => y.as_mut().map(ViewMut::reborrow),
            };
            sparse.combine_normed(&self.of_mlp(cx), w, &mut saved.mlp, scratch, y)?;
        }
        self.end(cx, w, saved, scratch, y)
    }
    /// Multiplies the block's output, or its gradient, by the block's factor.
    fn scale(&self, cx: &Cx, w: Weights, x: ViewMut) -> Result<()> {
        match self.scalar {
            Some(scalar) => cx.dev.scale_by(ScaleBy { factor: w.get(scalar), x }),
            None => Ok(()),
        }
    }

    /// The backward pass of [`DecoderBlock::end`].
    fn end_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &Saved,
        scratch: &mut Scratch,
        mut dy: ViewMut,
    ) -> Result<()> {
        self.scale(cx, w, dy.reborrow())?;
        match &self.per_layer {
            Some(branch) => branch.backward(cx, w, dw, &saved.per_layer, scratch, dy),
            None => Ok(()),
        }
    }
    /// The backward pass of [`DecoderBlock::go_on`], before that of the experts, whose gradient it leaves in scratch.
    pub fn go_on_backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        saved: &Saved,
        scratch: &mut Scratch,
        mut dy: ViewMut,
    ) -> Result<()> {
        let Some(sparse) = self.sparse() else { return Ok(()) };
        self.end_backward(cx, w, dw, saved, scratch, dy.reborrow())?;
        sparse.normed_backward(&self.of_mlp(cx), w, dw, &saved.mlp, scratch, dy.as_view())
    }
    /// `dy (R, C)` becomes the gradient of `x` in place. Adds to the weights' gradients.
    #[allow(clippy::too_many_arguments)] // a forward's operands and their gradients
    pub fn backward(
        &self,
        cx: &Cx,
        w: Weights,
        dw: &mut Grads,
        x: View,
        saved: &Saved,
        scratch: &mut Scratch,
        mut dy: ViewMut,
    ) -> Result<()> {
        if !self.goes_on() {
            self.end_backward(cx, w, dw, saved, scratch, dy.reborrow())?;
        }
        if self.parallel {
            cx.dev.copy(dy.as_view(), scratch.beside.rows_mut(cx.rows()))?;
        }
        let (of_mlp, beside) = (&self.of_mlp(cx), self.parallel.then_some(x));
        match &self.mlp {
            FeedForward::Dense(mlp) => mlp.backward(of_mlp, w, dw, beside, &saved.mlp, scratch, dy.reborrow())?,
            FeedForward::Sparse(sparse) => {
                sparse.backward(of_mlp, w, dw, beside, &saved.mlp, scratch, dy.reborrow())?
            }
            FeedForward::None => {}
        }
        match &self.mixer {
            Mixer::Attention(attention) => attention.backward(cx, w, dw, x, &saved.attention, scratch, dy),
            Mixer::Delta(delta) => delta.backward(cx, w, dw, x, &saved.recurrent, scratch, dy),
            Mixer::Both(attention, delta) => {
                let [of_attention, of_other] = self.of_mixers(cx);
                cx.dev.copy(dy.as_view(), scratch.beside.rows_mut(cx.rows()))?;
                delta.backward(&of_other, w, dw, x, &saved.recurrent, scratch, dy.reborrow())?;
                attention.backward(&of_attention, w, dw, x, &saved.attention, scratch, dy)
            }
            Mixer::Conv(conv) => conv.backward(cx, w, dw, x, &saved.recurrent, &saved.attention.branch, scratch, dy),
            Mixer::None => Ok(()),
        }
    }
}
