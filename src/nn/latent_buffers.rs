//! The buffers of latent attention's projections. Never computes.
use super::spec::Latent;
use super::tensor::{Tensor, TensorShape, table};
use crate::base::{Category, DType, Result};

table! {
    /// The latents; empty without.
    pub struct LatentSaved {
        /// (N, q_rank)
        q,
        /// (N, kv_rank + rope)
        kv,
    }
}
table! {
    /// Empty without latents. H: heads of the tp rank. From `d_o` on: backward only.
    pub struct LatentScratch {
        /// (N, q_rank), (N, kv_rank): normalized.
        q,
        kv,
        /// (N, kv_rank): before the norm, without the rotated part.
        kv_apart,
        /// (N, 1) f32
        stats,
        /// (N, H (nope + rope)), (N, H (nope + value)): of all heads, or their gradients.
        q_heads,
        kv_heads,
        /// (N, H value): attention's output without padding; empty without padding.
        o,
        d_o,
        /// (N, widest rank): gradients of a normalized latent, and of one before its norm.
        d_normed,
        d_latent,
        /// (N, kv_rank + rope): the gradient of the latent of keys and values.
        d_kv,
        /// (N, H rope), (N, rope): the gradients of the heads' rotated keys, and their sum.
        d_turned,
        d_shared,
    }
}

impl LatentSaved<TensorShape> {
    /// Buffers of `tokens` tokens with latents of `shape`, or without latents.
    pub fn plan(shape: Option<&Latent>, tokens: usize, dtype: DType) -> LatentSaved<TensorShape> {
        let Latent { q_rank, kv_rank, rope, .. } = shape.copied().unwrap_or_default();
        let keep = |width| TensorShape::new(Category::Saved, dtype, tokens, width);
        LatentSaved { q: keep(q_rank), kv: keep(kv_rank + rope) }
    }
}
impl LatentScratch<TensorShape> {
    /// The same with `heads` of `head_dim`.
    pub fn plan(
        shape: Option<&Latent>,
        (heads, head_dim): (usize, usize),
        (tokens, dtype, train): (usize, DType, bool),
    ) -> LatentScratch<TensorShape> {
        let Latent { q_rank, kv_rank, nope, rope, value } = shape.copied().unwrap_or_default();
        let scratch = |width| TensorShape::new(Category::Scratch, dtype, tokens, width);
        let back = |width| TensorShape::new(Category::Scratch, dtype, if train { tokens } else { 0 }, width);
        let padded = if shape.is_some() && value < head_dim { heads * value } else { 0 };
        LatentScratch {
            q: scratch(q_rank),
            kv: scratch(kv_rank),
            kv_apart: scratch(kv_rank),
            stats: TensorShape { dtype: DType::F32, ..scratch(usize::from(shape.is_some())) },
            q_heads: scratch(heads * (nope + rope)),
            kv_heads: scratch(heads * (nope + value)),
            o: scratch(padded),
            d_o: back(padded),
            d_normed: back(q_rank.max(kv_rank)),
            d_latent: back(q_rank.max(kv_rank)),
            d_kv: back(kv_rank + rope),
            d_turned: back(heads * rope),
            d_shared: back(rope),
        }
    }
}
