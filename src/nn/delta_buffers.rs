//! What gated delta nets save for backward, their scratch, and what a sequence that is generated goes on from. Never
//! computes.
use super::spec::{DeltaNet, Spec};
use super::split::Groups;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};
use crate::device::Device;
use crate::device::ops::DeltaShape;

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
        /// (N / DELTA_BLOCK, state) f32
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
    /// What a sequence that is being generated goes on from, block after block; empty otherwise.
    pub struct DeltaCache {
        /// (B, state) f32
        state,
        /// (B (taps - 1), 2 K + V): the last rows in front of the convolution.
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
            states: TensorShape::new(Category::Saved, DType::F32, DeltaShape::kept(n), s.state()),
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
    /// `spec`: this rank's widths. `sequences`: 0 or 1.
    pub fn plan(spec: &Spec, dtype: DType, sequences: usize) -> DeltaCache<TensorShape> {
        let net = spec.delta.unwrap_or(DeltaNet::NONE);
        let blocks = sequences * spec.layers;
        DeltaCache {
            state: TensorShape::new(Category::Saved, DType::F32, blocks, net.shape.state()),
            recent: TensorShape::new(Category::Saved, dtype, blocks * net.taps.saturating_sub(1), net.shape.row()),
        }
    }
    pub fn allocate(&self, dev: &dyn Device, groups: &Groups) -> Result<DeltaCache> {
        self.map(&mut |name, shape: &TensorShape| shape.allocate(name, dev, groups))
    }
}
