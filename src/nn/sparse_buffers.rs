//! Scratch of sparse branches. Never computes.
use super::dispatch::{Dispatch, DispatchPlan};
use super::product_buffers::{AdapterScratch, ProductWidths};
use super::spec::Spec;
use super::split::Split;
use super::tensor::{Tensor, TensorShape, table};
use super::windows::capacity;
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, CommUse};

table! {
    /// Scratch of sparse branches; empty without experts. From `drows` on: backward only.
    pub struct SparseScratch {
        /// f64 (sparse blocks + 1, E): rows of each expert in each block, then the sums of its probabilities.
        load,
        /// (R, C): the rows that go to the experts, then what comes back; R = N K.
        rows,
        /// (B, F), with the rows B that a rank holds at most: R, or with ep [`super::windows::capacity`].
        act,
        /// (N, 1) f32: weights of the experts' inputs, sorted by expert; empty without.
        row_weights,
        /// (1, E) f32: the router's bias; empty without.
        router_bias,
        /// (N, S), (N, C): of the shared expert.
        shared_act,
        shared_out,
        /// (R, C): the gradients of the experts' outputs, then of their inputs.
        drows,
        /// (B, F), (B, F); if gate and up come from one matrix, the second is (B, 2 F).
        dact,
        dup,
        /// (N, K) f32
        dweights,
        /// (N, E) f32, and in the compute dtype.
        dlogits,
        dlogits_cast,
        /// (N, S)
        shared_dact,
        shared_dup,
        /// (N, 1) f32, and in the compute dtype.
        shared_dweight,
        shared_cast,
        shared_copy,
        ;
        /// (B, rank), (B, rank): of the experts' current adapter; empty without.
        adapter: AdapterScratch,
        /// With ep.
        dispatch: Dispatch,
    }
}

impl SparseScratch<TensorShape> {
    /// Buffers of a rank's share `spec` of a model.
    pub fn plan(
        spec: &Spec,
        split: &Split,
        widths: &ProductWidths,
        (tokens, dtype, train): (usize, DType, bool),
    ) -> SparseScratch<TensorShape> {
        let none = Default::default();
        let of = spec.experts.as_ref().unwrap_or(&none);
        let (experts, top_k, shared_ff) = (of.count, of.top_k, of.shared_ff);
        let blocks = spec.sparse_blocks();
        let (sparse, one_shared) = (if experts > 0 { blocks + 1 } else { 0 }, usize::from(shared_ff > 0));
        // The gate and up of some families come from one matrix.
        let gate_ff = if of.clamp.is_some() { 2 * of.ff } else { of.ff };
        let (rows, trained) = (tokens * top_k, |rows| if train { rows } else { 0 });
        let most = capacity(rows, split.ep);
        let shape = |dtype, rows, width| TensorShape::new(Category::Scratch, dtype, rows, width);
        let (scratch, back) = (|width| shape(dtype, tokens, width), |width| shape(dtype, trained(tokens), width));
        let wide = |width| shape(DType::F32, trained(tokens), width);
        let sent = |rows| {
            let rows = shape(dtype, rows, spec.dim);
            if split.ep.of > 1 { rows.through(Axis::Ep, CommUse::Reduced) } else { rows }
        };
        SparseScratch {
            load: shape(DType::F64, sparse, experts).through(Axis::Loss, CommUse::Reduced),
            rows: sent(rows),
            act: shape(dtype, most, of.ff),
            row_weights: shape(DType::F32, tokens, usize::from(of.weighs_inputs)),
            router_bias: shape(DType::F32, 1, if of.clamp.is_some() { experts } else { 0 }),
            shared_act: scratch(shared_ff),
            shared_out: scratch(one_shared * spec.dim),
            drows: sent(trained(rows)),
            dact: shape(dtype, trained(most), of.ff),
            dup: shape(dtype, trained(most), gate_ff),
            dweights: wide(top_k),
            dlogits: wide(experts),
            dlogits_cast: back(experts),
            shared_dact: back(shared_ff),
            shared_dup: back(shared_ff),
            shared_dweight: wide(one_shared),
            shared_cast: back(one_shared),
            shared_copy: wide(one_shared),
            adapter: AdapterScratch::of_experts(widths, (most, dtype, train)),
            dispatch: Dispatch::plan(&DispatchPlan {
                rows,
                width: spec.dim,
                experts,
                blocks,
                ep: split.ep,
                overlap: split.moe_overlap,
                dtype,
                train,
            }),
        }
    }
}
