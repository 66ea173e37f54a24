//! What a block keeps for its backward pass, and what it works in. Never computes.
use super::cache::Cache;
use super::ring::Ring;
use super::tensor::{Tensor, table};
use crate::base::Result;

table! {
    /// What the attention branch keeps for its backward pass. Widths here and below are this rank's of tp; R rows of
    /// the residual stream are N, or the rank's part of them.
    AttentionSaved {
        /// (N, (heads + 2 kv_heads) head_dim), rotated; as projected where heads are normalised.
        qkv,
        /// (N, heads * head_dim)
        o,
        /// (heads, N) f32
        lse,
        /// (R, C): what the branch's last norm read; empty without one.
        branch,
    }
}
table! {
    /// What the feed-forward branch keeps for its backward pass.
    MlpSaved {
        /// (R, C): its input.
        x,
        /// (N, F), empty without a gate.
        gate,
        /// (N, F)
        up,
        /// (R, C): what the branch's last norm read; empty without one.
        branch,
    }
}
/// What one block keeps for its backward pass, besides its input.
pub struct Saved<T = Tensor> {
    pub attention: AttentionSaved<T>,
    pub mlp: MlpSaved<T>,
}
impl<T> Saved<T> {
    pub(super) fn map<U>(&self, f: &mut dyn FnMut(&'static str, &T) -> Result<U>) -> Result<Saved<U>> {
        Ok(Saved { attention: self.attention.map(f)?, mlp: self.mlp.map(f)? })
    }
}
table! {
    /// What an adapter works in; empty without adapters.
    AdapterScratch {
        /// (N, rank): what it makes of its input.
        low,
        /// (N, rank): the gradient of `low`.
        dlow,
        /// (N, the widest input of an adapter): its input under a dropout mask, then the gradient that goes through the
        /// mask; empty without dropout.
        dropped,
    }
}
table! {
    /// Used within a block or the head, by one after the other. From `masked` on: backward only.
    Scratch {
        /// (R, C): the normalised input of a branch, or of the head.
        h,
        /// (R, 1) f32: 1/rms; with LayerNorm (R, 2): mean and 1/deviation.
        stats,
        /// (N, C): this rank's parts of what ranks of tp sum; empty where there is one.
        parts,
        /// (N, C): the rows of all ranks; empty without sequence parallelism.
        whole,
        /// (1, (heads + 2 kv_heads) head_dim): biases side by side; empty without.
        bias,
        /// (N, (heads + 2 kv_heads) head_dim): normalised and rotated; empty where heads are not normalised.
        rotated,
        /// (N, heads + kv_heads) f32: 1/rms of their heads.
        head_stats,
        /// (N, F): the activation, then the gate's gradient.
        act,
        /// (R, vocab): a chunk of logits, then their gradient.
        logits,
        /// (R, 3) f32: the statistics of a chunk of logits that are this rank's words only; empty where they are all.
        part_stats,
        /// (tp R, 3) f32: the same of all ranks.
        all_stats,
        /// (R, C): the residual's gradient under a dropout mask; empty without dropout.
        masked,
        /// (R, C): the gradient of `h`.
        dh,
        /// (N, heads * head_dim)
        d_o,
        /// (heads, N) f32
        delta,
        /// f32, as many as the device asks for: see [`Device::attention_sums`].
        sums,
        /// (N, (heads + 2 kv_heads) head_dim)
        dqkv,
        /// (1, (heads + 2 kv_heads) head_dim) f32: column sums of `dqkv`; empty without biases.
        bias_grad,
        /// (N, F)
        dact,
        /// (N, F)
        dup,
        /// (2, C) f32, or wider heads: where the gradients of frozen norms go.
        unused,
        ;
        /// Of the adapter at hand.
        adapter: AdapterScratch,
        /// Of the ring of sp.
        ring: Ring,
        /// Of a sequence that goes on: see [`Workspace::remember`].
        cache: Cache,
    }
}
