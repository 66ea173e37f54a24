//! What mixers other than attention save for backward, their scratch, and what sequences that are generated go on from.
//! Never computes.
use super::context::Cx;
use super::recurrence::{DeltaForm, DeltaNet, Recurrence};
use super::spec::Spec;
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::device::ops::{BackwardOf, ConvKind, DeltaShape};
use crate::device::{Device, ViewMut};

table! {
    /// Saved by a gated delta net or Mamba 2 for backward, or by a short convolution of C channels; empty in other
    /// blocks. K: elements of a token's keys, V: of its values, H: value heads.
    pub struct RecurrentSaved {
        /// (N, 2 K + V): queries, keys and values in front of the convolution; (N, 3 C): the convolution's operands.
        mixed,
        /// (N, V); from here on empty without a gated delta net.
        z,
        /// (N, H), (N, H); the second is empty with Mamba 2.
        a,
        b,
        /// (N, V): the rule's output.
        o,
        /// (N / DELTA_BLOCK, state) f32; empty without backward.
        states,
    }
}
table! {
    /// Scratch of the same; without gated delta nets, all but `convolved`, `dmixed` and `dconvolved` are empty. From
    /// `dmixed` on: backward only.
    pub struct RecurrentScratch {
        /// (N, 2 K + 2 V), (N, 2 H): projected rows, head by head, and their gradients; empty unless matrices are
        /// fused.
        fused,
        fused_gates,
        /// (1, (2 K + V) taps) and f32: filters of three convolutions or with factors, and their gradients; empty of
        /// others.
        filters,
        dfilters,
        /// (N, 2 K + V), (N, C): after the convolution.
        convolved,
        /// (N, H) f32: 1/rms of each head's output.
        stats,
        /// (N, V), (N, V): the outputs normalized, then times their gate; or the other way around.
        normed,
        gated,
        /// (2 N, V): groups of columns one below the other, in front of their norm and after it; empty without groups.
        by_group,
        /// Gradients in front of the convolution and after it.
        dmixed,
        dconvolved,
        /// (N, V) each
        dz,
        dgated,
        dnormed,
        d_o,
        /// (N, H), (N, H)
        da,
        db,
        /// (1, H), (1, 2 K + V) f32: of the factors of skipped values, and of the convolution's biases, of which
        /// operations have no room in the layer's gradient; empty without.
        dskip,
        dconv_bias,
        /// f32, with the size that [`Device::backward_scratch`] requests.
        walked,
    }
}
table! {
    /// What sequences that are being generated go on from; empty otherwise. B: blocks with such a mixer, S: slots.
    pub struct RecurrentCache {
        /// (B S, [`DeltaShape::carried`]) f32; empty without gated delta nets.
        rule,
        /// (B S (taps - 1), channels): the last rows that the convolution's filters multiply.
        recent,
    }
}

/// What the buffers of a rank depend on.
pub struct RecurrentPlan {
    pub mixer: Option<Recurrence>,
    pub tokens: usize,
    pub dtype: DType,
    /// Whether to allocate buffers for backward.
    pub train: bool,
}

impl RecurrentPlan {
    /// The gated delta net if there is one, and elements of a row in front of the convolution and after it.
    fn widths(&self) -> (DeltaNet, [usize; 2]) {
        match self.mixer {
            None => (DeltaNet::NONE, [0, 0]),
            Some(Recurrence::Delta(net)) => (net, [net.shape.row(); 2]),
            Some(Recurrence::Conv { channels, .. }) => (DeltaNet::NONE, [ConvKind::Gated.parts() * channels, channels]),
        }
    }
    /// What a block saves that `has` the mixer; others save nothing.
    pub fn saved(&self, has: bool) -> RecurrentSaved<TensorShape> {
        let own = RecurrentPlan { mixer: self.mixer.filter(|_| has), ..*self };
        let (net, [mixed, _]) = own.widths();
        let (s, n) = (net.shape, self.tokens);
        let keep = |width| TensorShape::new(Category::Saved, self.dtype, n, width);
        RecurrentSaved {
            mixed: keep(mixed),
            z: keep(s.values()),
            a: keep(s.value_heads),
            b: keep(s.betas()),
            o: keep(s.values()),
            states: TensorShape::new(
                Category::Saved,
                DType::F32,
                if self.train { DeltaShape::kept(n) } else { 0 },
                s.state(),
            ),
        }
    }
    pub fn scratch(&self) -> RecurrentScratch<TensorShape> {
        let (net, [mixed, convolved]) = self.widths();
        let (s, n) = (net.shape, self.tokens);
        let dtype = self.dtype;
        let scratch = |width| TensorShape::new(Category::Scratch, dtype, n, width);
        let back = |width| TensorShape::new(Category::Scratch, self.dtype, if self.train { n } else { 0 }, width);
        let fused = |width| scratch(if net.form == DeltaForm::Fused { width } else { 0 });
        let filters = if net.has_own_filters() { net.taps * s.row() } else { 0 };
        let one = |dtype, width| TensorShape::new(Category::Scratch, dtype, 1, width);
        RecurrentScratch {
            fused: fused(s.row() + s.values()),
            fused_gates: fused(2 * s.value_heads),
            filters: one(dtype, filters),
            dfilters: one(DType::F32, if self.train { filters } else { 0 }),
            convolved: scratch(convolved),
            by_group: TensorShape::new(
                Category::Scratch,
                dtype,
                2 * n,
                if net.groups().is_some_and(|groups| groups > 1) { s.values() } else { 0 },
            ),
            stats: TensorShape::new(Category::Scratch, DType::F32, n, s.value_heads),
            normed: scratch(s.values()),
            gated: scratch(s.values()),
            dmixed: back(mixed),
            dconvolved: back(convolved),
            dz: back(s.values()),
            dgated: back(s.values()),
            dnormed: back(s.values()),
            d_o: back(s.values()),
            da: back(s.value_heads),
            db: back(s.betas()),
            dskip: one(DType::F32, if self.train && !s.rule.replaces() { s.value_heads } else { 0 }),
            dconv_bias: one(DType::F32, if self.train && net.has_bias() { s.row() } else { 0 }),
            walked: TensorShape {
                scratch_of: [self.train.then_some(BackwardOf::DeltaRule(s)), None],
                ..TensorShape::new(Category::Scratch, dtype, n, 0)
            },
        }
    }
}

impl RecurrentCache<TensorShape> {
    /// `spec`: this rank's widths.
    pub fn plan(spec: &Spec, dtype: DType, slots: usize) -> RecurrentCache<TensorShape> {
        let (rows, of) = (spec.mixers()[1] * slots, spec.recurrence.as_ref());
        let carried = match of {
            Some(Recurrence::Delta(net)) => net.shape.carried(),
            _ => 0,
        };
        let before = of.map_or(0, Recurrence::taps).saturating_sub(1);
        RecurrentCache {
            rule: TensorShape::new(Category::Saved, DType::F32, rows, carried),
            recent: TensorShape::new(Category::Saved, dtype, rows * before, of.map_or(0, Recurrence::channels)),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<RecurrentCache> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}

impl RecurrentCache {
    /// What all sequences go on from in this block: for its rule, and for its convolution.
    pub fn of_block(&mut self, cx: &Cx) -> [ViewMut<'_>; 2] {
        let (blocks, place) = (cx.spec.mixers()[1], cx.spec.place_of(cx.layer - 1));
        [&mut self.rule, &mut self.recent].map(|tensor| {
            let rows = tensor.capacity() / blocks;
            tensor.band_mut(&(place * rows..(place + 1) * rows))
        })
    }
    /// Copies what a sequence goes on from to another slot, in all blocks.
    pub fn copy_slot(&mut self, dev: &dyn Device, spec: &Spec, slots: [usize; 2]) -> Result<()> {
        let before = spec.recurrence.as_ref().map_or(0, Recurrence::taps).saturating_sub(1);
        let blocks = spec.mixers()[1];
        let rows = self.rule.capacity().max(self.recent.capacity() / before.max(1));
        let all = rows / blocks.max(1);
        for block in 0..blocks {
            let [from, to] = slots.map(|slot| block * all + slot);
            self.rule.copy_rows(dev, [from, to], 1)?;
            self.recent.copy_rows(dev, [from * before, to * before], before)?;
        }
        Ok(())
    }
}
