//! Activations that a block saves for backward, and its scratch buffers. Never computes.
use super::cache::KvCache;
use super::core::{CoreSaved, CoreScratch};
use super::latent_buffers::{LatentSaved, LatentScratch};
use super::per_layer_buffers::{PerLayerSaved, PerLayerScratch};
use super::product_buffers::AdapterScratch;
use super::recurrent_buffers::{RecurrentCache, RecurrentSaved, RecurrentScratch};
use super::shared_kv::SharedKv;
use super::sparse_buffers::SparseScratch;
use super::tensor::{Tensor, table};
use crate::base::Result;
use crate::device::View;

table! {
    /// Saved by the attention branch for backward. Widths here and below are this tp rank's; the R rows of the residual
    /// stream are N, or this rank's share of them.
    pub struct AttentionSaved {
        /// (N, (heads + 2 kv_heads) head_dim), rotated; with head norms, as projected. Empty with Ulysses and no head
        /// norms: `core` has what backward reads.
        qkv,
        /// (R, C): the input of the branch's last norm; empty without one.
        branch,
        /// (N, heads * head_dim): of the outputs; empty without.
        gate,
        ;
        core: CoreSaved,
        latent: LatentSaved,
    }
}
table! {
    /// The outputs of [`crate::device::ops::Route`]; empty without experts.
    pub struct Routing {
        probs,
        chosen,
        weights,
        /// (N, K) f32: the weights times the factors of their experts; empty without.
        scaled,
        offsets,
        order,
        places,
    }
}
impl Routing {
    /// The weights of the experts' outputs.
    pub(super) fn of_rows(&self, n: usize) -> View<'_> {
        if self.scaled.width() > 0 { self.scaled.rows(n) } else { self.weights.rows(n) }
    }
}
table! {
    /// Saved by the feed-forward branch for backward.
    pub struct MlpSaved {
        /// (R, C): its input.
        x,
        /// (N, F), empty without a gate.
        gate,
        /// (N, F)
        up,
        /// (R, C): the input of the branch's last norm; empty without one.
        branch,
        /// (B, F), (B, F): outputs of the experts' gate and up, sorted by expert; empty without experts. If both come
        /// from one matrix: (B, 2 F), and empty.
        experts_gate,
        experts_up,
        /// (R, C): the input of the norm of the experts' output; empty without one.
        experts_out,
        /// (N, S), (N, S), (N, 1) f32: of the shared expert; empty without one.
        shared_gate,
        shared_up,
        shared_weight,
        ;
        /// How the tokens were routed.
        routing: Routing,
    }
}
/// Everything one block saves for backward, besides its input.
pub struct Saved<T = Tensor> {
    /// One of the two is empty, unless blocks of both kinds share it.
    pub attention: AttentionSaved<T>,
    pub recurrent: RecurrentSaved<T>,
    pub mlp: MlpSaved<T>,
    pub per_layer: PerLayerSaved<T>,
}
impl<T> Saved<T> {
    pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Saved<U>> {
        Ok(Saved {
            attention: self.attention.map(f)?,
            recurrent: self.recurrent.map(f)?,
            mlp: self.mlp.map(f)?,
            per_layer: self.per_layer.map(f)?,
        })
    }
}
table! {
    /// Reused by each block and the head in turn. From `masked` on: backward only.
    pub struct Scratch {
        /// (R, C): the normalized input of a branch, or of the head; (N, C) of a sparse branch.
        h,
        /// (R, 1) f32: 1/rms; with LayerNorm (R, 2): mean and 1/deviation.
        stats,
        /// (N, C): this rank's addend of a sum over tp; empty with one tp rank.
        parts,
        /// (N, C): gathered rows of all ranks; empty without sequence parallelism.
        whole,
        /// (1, (heads + 2 kv_heads) head_dim): concatenated biases; empty without biases.
        bias,
        /// (N, (heads + 2 kv_heads) head_dim): normalized and rotated; empty without head norms and Ulysses.
        rotated,
        /// (N, heads + kv_heads) f32: 1/rms of each head; then (N, kv_heads) with norms on values.
        head_stats,
        /// Rows of a projection in another order than attention reads, then their gradients: (N, 2 heads * head_dim),
        /// queries with their gates; or (N, (heads + 2 kv_heads) head_dim), by heads; empty without.
        queries,
        /// (N, heads * head_dim): outputs times their gates.
        gated,
        /// (N, heads) f32, backward with it: the sigmoids of heads' gates, and their gradients; empty without such.
        head_gates,
        d_head_gates,
        /// (N, F): the activation, then the gate's gradient.
        act,
        /// (R, vocab): a chunk of logits, then their gradient.
        logits,
        /// (R, 3) f32: statistics of a chunk of logits over this rank's vocabulary; empty if that is all of it.
        part_stats,
        /// (tp R, 3) f32: the same for all ranks.
        all_stats,
        /// (R, C): the gradient of `h`; of the head, before that, its input in the rows with a target.
        dh,
        /// (R, C): the residual's gradient under a dropout mask or times a factor; empty without.
        masked,
        /// (R, C): the gradient of a parallel block's output, or of the sum of a dense branch and experts; empty
        /// without.
        beside,
        /// (N, heads * head_dim)
        d_o,
        /// (N, (heads + 2 kv_heads) head_dim)
        dqkv,
        /// (1, (heads + 2 kv_heads) head_dim) f32: column sums of `dqkv`; empty without biases.
        bias_grad,
        /// (N, heads * head_dim) or (N, heads): of the outputs' gates; empty without.
        dgate,
        /// (N, F)
        dact,
        /// (N, F)
        dup,
        /// (N, heads * head_dim) each, or less: queries, keys or values apart from their rows; empty unless whole rows
        /// or values are normalized, or blocks share keys and values.
        row,
        normed,
        /// (1, head_dim): 0, for norms without a weight; empty without such.
        zeros,
        /// (2, C) f32, or wider heads: receives the gradients of frozen norms.
        unused,
        ;
        /// Buffers of the current adapter.
        adapter: AdapterScratch,
        /// Buffers of sparse branches.
        sparse: SparseScratch,
        /// Buffers of attention.
        core: CoreScratch,
        /// Buffers of latent attention.
        latent: LatentScratch,
        /// Inputs of the blocks.
        per_layer: PerLayerScratch,
        /// Keys and values that several blocks read.
        shared_kv: SharedKv,
        /// The KV cache: see [`Workspace::remember`].
        cache: KvCache,
        /// Scratch of mixers other than attention, and what a sequence goes on from in them.
        recurrent: RecurrentScratch,
        recurrent_cache: RecurrentCache,
    }
}
