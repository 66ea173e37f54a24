//! What gated delta nets save for backward, their scratch, and what sequences that are generated go on from. Never
//! computes.
use super::context::Cx;
use super::spec::{DeltaNet, Spec};
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::device::ops::DeltaShape;
use crate::device::{Device, ViewMut};

table! {
    /// Saved by a gated delta net for backward; empty in other blocks. K: elements of a token's keys, V: of its values,
    /// H: value heads.
    pub struct DeltaSaved {
        /// (N, 2 K + V): queries, keys and values in front of the convolution.
        mixed,
        /// (N, V)
        z,
        /// (N, H), (N, H)
        a,
        b,
        /// (N, V): the rule's output.
        o,
        /// (N / DELTA_BLOCK, state) f32; empty without backward.
        states,
    }
}
table! {
    /// Scratch of gated delta nets; empty without. From `dmixed` on: backward only.
    pub struct DeltaScratch {
        /// (N, 2 K + 2 V), (N, 2 H): projected rows, head by head, and their gradients; empty unless matrices are
        /// fused.
        fused,
        fused_gates,
        /// (N, 2 K + V): after the convolution.
        convolved,
        /// (N, H) f32: 1/rms of each head's output.
        stats,
        /// (N, V), (N, V): the outputs normalized, then times their gate.
        normed,
        gated,
        /// (N, 2 K + V), (N, 2 K + V): gradients in front of the convolution and after it.
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
    }
}
table! {
    /// What sequences that are being generated go on from; empty otherwise. B: blocks with a gated delta net, S: slots.
    pub struct DeltaCache {
        /// (B S, [`DeltaShape::carried`]) f32
        rule,
        /// (B S (taps - 1), 2 K + V): the last rows in front of the convolution.
        recent,
    }
}

/// What the buffers of a rank depend on.
pub struct DeltaPlan {
    pub net: Option<DeltaNet>,
    pub tokens: usize,
    pub dtype: DType,
    /// Whether to allocate buffers for backward.
    pub train: bool,
}

impl DeltaPlan {
    /// What a block saves that `has` the mixer; others save nothing.
    pub fn saved(&self, has: bool) -> DeltaSaved<TensorShape> {
        let net = self.net.filter(|_| has).unwrap_or(DeltaNet::NONE);
        let (s, n) = (net.shape, self.tokens);
        let keep = |width| TensorShape::new(Category::Saved, self.dtype, n, width);
        DeltaSaved {
            mixed: keep(s.row()),
            z: keep(s.values()),
            a: keep(s.value_heads),
            b: keep(s.value_heads),
            o: keep(s.values()),
            states: TensorShape::new(
                Category::Saved,
                DType::F32,
                if self.train { DeltaShape::kept(n) } else { 0 },
                s.state(),
            ),
        }
    }
    pub fn scratch(&self) -> DeltaScratch<TensorShape> {
        let net = self.net.unwrap_or(DeltaNet::NONE);
        let (s, n) = (net.shape, self.tokens);
        let scratch = |width| TensorShape::new(Category::Scratch, self.dtype, n, width);
        let back = |width| TensorShape::new(Category::Scratch, self.dtype, if self.train { n } else { 0 }, width);
        let fused = |width| scratch(if net.fused { width } else { 0 });
        DeltaScratch {
            fused: fused(s.row() + s.values()),
            fused_gates: fused(2 * s.value_heads),
            convolved: scratch(s.row()),
            stats: TensorShape::new(Category::Scratch, DType::F32, n, s.value_heads),
            normed: scratch(s.values()),
            gated: scratch(s.values()),
            dmixed: back(s.row()),
            dconvolved: back(s.row()),
            dz: back(s.values()),
            dgated: back(s.values()),
            dnormed: back(s.values()),
            d_o: back(s.values()),
            da: back(s.value_heads),
            db: back(s.value_heads),
        }
    }
}

impl DeltaCache<TensorShape> {
    /// `spec`: this rank's widths.
    pub fn plan(spec: &Spec, dtype: DType, slots: usize) -> DeltaCache<TensorShape> {
        let net = spec.delta.unwrap_or(DeltaNet::NONE);
        let (rows, taps) = (spec.mixers()[1] * slots, net.taps.saturating_sub(1));
        DeltaCache {
            rule: TensorShape::new(Category::Saved, DType::F32, rows, net.shape.carried()),
            recent: TensorShape::new(Category::Saved, dtype, rows * taps, net.shape.row()),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<DeltaCache> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}

impl DeltaCache {
    /// What all sequences go on from in this block: for its rule, and for its convolution.
    pub fn of_block(&mut self, cx: &Cx) -> [ViewMut<'_>; 2] {
        let (blocks, place) = (cx.spec.mixers()[1], cx.spec.place_of(cx.layer - 1));
        [&mut self.rule, &mut self.recent].map(|tensor| {
            let rows = tensor.capacity() / blocks;
            tensor.band_mut(&(place * rows..(place + 1) * rows))
        })
    }
    /// Copies what a sequence goes on from to another slot, in all `blocks`.
    pub fn copy_slot(&mut self, dev: &dyn Device, blocks: usize, slots: [usize; 2]) -> Result<()> {
        let all = self.rule.capacity() / blocks.max(1);
        let before = self.recent.capacity().checked_div(self.rule.capacity()).unwrap_or(0);
        for block in 0..blocks {
            let [from, to] = slots.map(|slot| block * all + slot);
            self.rule.copy_rows(dev, [from, to], 1)?;
            self.recent.copy_rows(dev, [from * before, to * before], before)?;
        }
        Ok(())
    }
}
