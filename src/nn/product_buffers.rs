//! Scratch of products whose operands are not in the compute dtype or that have adapters. Never computes.
use super::layout::Layout;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::fp8::BLOCK;
use crate::base::{Category, DType, Result};
use crate::device::ops::Fp8Work;

/// Elements of a packed weight that are expanded at a time, at most; more than a column of any matrix.
const TILE: usize = 1 << 22;

table! {
    /// [`Fp8Work`] of products in FP8; empty without.
    pub struct Fp8Scratch {
        /// (1, S) u8 and f32: of the operand that is cast; of both.
        bytes,
        scales,
        /// (N, widest): activations or gradients, after the casts.
        rows,
        /// (1, T): the weight, after the casts.
        weight,
    }
}
impl Fp8Scratch {
    pub(super) fn work(&mut self) -> Fp8Work<'_> {
        let Fp8Scratch { bytes, scales, rows, weight } = self;
        let [bytes, scales, rows, weight] = [bytes, scales, rows, weight].map(Tensor::all_mut);
        Fp8Work { bytes, scales, rows, weight }
    }
}
table! {
    /// Scratch of a product: of its adapter, and of operands that are not in the compute dtype.
    pub struct AdapterScratch {
        /// (N, rank): the output of A.
        low,
        /// (adapters N, rank): the same of each adapter whose input does not change before backward; empty if
        /// activations are recomputed.
        kept,
        /// (N, rank): the gradient of `low`.
        dlow,
        /// (N, widest adapter input): the input under a dropout mask, then the gradient through the mask; empty without
        /// dropout.
        dropped,
        /// (1, T): a part of a packed weight, expanded; empty without packed weights.
        tile,
        ;
        fp8: Fp8Scratch,
    }
}
/// Sizes of the scratch of products; 0 without adapters, packed weights or FP8.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductWidths {
    pub rank: usize,
    /// The widest input that dropout masks.
    pub dropped: usize,
    /// Elements of a tile of packed weights.
    pub tile: usize,
    /// Adapters whose products with A can be kept until backward.
    pub kept: usize,
    /// The rank of the adapters of experts.
    pub experts: usize,
    /// Matrices in FP8: the longest side, and the elements of the largest and the scales that a product needs for it.
    pub side: usize,
    pub weight: usize,
    pub scales: usize,
}

impl ProductWidths {
    /// The widths of a model with these weights, without adapters.
    pub fn of(layouts: &[Layout]) -> ProductWidths {
        let mut of = ProductWidths::default();
        for matrix in layouts.iter().flat_map(|l| &l.segments) {
            if matrix.is_packed() {
                of.tile = of.tile.max(matrix.extent().min(TILE));
            }
            if matrix.fp8 {
                let shape = matrix.fp8_shape();
                of.side = of.side.max(shape.rows.max(shape.columns));
                of.weight = of.weight.max(shape.len());
                of.scales = of.scales.max(Fp8Work::scales(&shape));
            }
        }
        of
    }
    pub fn without_adapters(self) -> ProductWidths {
        ProductWidths { rank: 0, dropped: 0, kept: 0, experts: 0, ..self }
    }
}

impl AdapterScratch<TensorShape> {
    /// Buffers of products with `tokens` rows. `keeps`: adapters keep what they can until backward.
    pub fn plan(widths: &ProductWidths, (tokens, dtype, train): (usize, DType, bool), keeps: bool) -> Self {
        let ProductWidths { rank, dropped, tile, kept, side, weight, scales, .. } = *widths;
        let shape = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        let back = |width| shape(dtype, if train { tokens } else { 0 }, width);
        AdapterScratch {
            low: shape(dtype, tokens, rank),
            kept: shape(dtype, if keeps { kept * tokens } else { 0 }, rank),
            dlow: back(rank),
            dropped: back(dropped),
            tile: shape(dtype, 1, tile),
            fp8: Fp8Scratch {
                bytes: shape(DType::U8, 1, weight.max(tokens * side)),
                scales: shape(DType::F32, 1, scales + tokens * side.div_ceil(BLOCK)),
                rows: shape(dtype, tokens, side),
                weight: shape(dtype, 1, weight),
            },
        }
    }
    /// Buffers of products of experts, which have at most `rows` rows and plain weights.
    pub fn of_experts(widths: &ProductWidths, (rows, dtype, train): (usize, DType, bool)) -> Self {
        let plain = ProductWidths { rank: widths.experts, ..ProductWidths::default() };
        AdapterScratch::plan(&plain, (rows, dtype, train), false)
    }
}
