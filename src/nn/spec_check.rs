//! Whether a model's sizes fit one another, with a message for each that does not. Never looks at a split or a device.
use super::arch::Arch;
use super::recurrence::{DeltaNet, Recurrence};
use super::rotary::QueryGrowth;
use super::spec::{Experts, Spec};
use crate::base::{Error, Result};
use crate::device::ops::{DeltaShape, MAX_TAPS, RouteRule, RouteShape, StateRule};

impl Spec {
    /// Checks the relations that every shape relies on.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab),
            ("embed_dim", self.dim),
            ("num_layers", self.layers),
            ("num_heads", self.heads),
            ("num_kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ff_hidden_dim", self.ff),
            ("max_len", self.max_len),
        ];
        for (name, value) in sizes {
            if value == 0 {
                return Err(Error::input(format!("{name} is 0: it must be at least 1")));
            }
        }
        for kv_heads in self.kinds_of_heads().map(|sizes| sizes.kv_heads) {
            if kv_heads == 0 || !self.heads.is_multiple_of(kv_heads) {
                return Err(Error::input(format!(
                    "num_heads {} is not a multiple of num_kv_heads {kv_heads}: each key/value head serves an equal \
                     group of query heads",
                    self.heads
                )));
            }
        }
        let gpt = self.arch == Arch::Gpt;
        if gpt && (self.kv_heads != self.heads || self.head_dim * self.heads != self.dim) {
            return Err(Error::input(format!(
                "arch gpt needs num_kv_heads = num_heads and head_dim = embed_dim / num_heads; got embed_dim {}, \
                 num_heads {}, num_kv_heads {}, head_dim {}",
                self.dim, self.heads, self.kv_heads, self.head_dim
            )));
        }
        if self.arch.learns_positions() != self.rope.is_none() || gpt && self.gated() {
            return Err(Error::input(format!(
                "arch {} with rotary positions {} and {:?}: gpt and others have learned positions, and gpt has GELU",
                self.arch.name(),
                self.rope.is_some(),
                self.activation
            )));
        }
        if let Some(blocks) = self.qkv_blocks.filter(|blocks| !self.heads.is_multiple_of(*blocks)) {
            return Err(Error::input(format!(
                "num_heads {} is not a multiple of {blocks}: the matrix of queries, keys and values of {} has {blocks} \
                 blocks of whole heads",
                self.heads,
                self.arch.name()
            )));
        }
        for head_dim in self.kinds_of_heads().map(|sizes| sizes.head_dim).filter(|_| self.rope.is_some()) {
            if head_dim == 0 || !head_dim.is_multiple_of(2) {
                return Err(Error::input(format!("head_dim {head_dim} is odd: rotary positions pair its halves")));
            }
        }
        self.check_shared_kv()?;
        if let [Some(a), Some(b)] = [&self.rope, &self.local_rope].map(|rope| rope.as_ref()?.original_if_long())
            && a != b
        {
            return Err(Error::input(format!(
                "layers rotate long documents differently from {a} tokens on, and those with a window from {b} on: both \
                 must have one length (original_max_position_embeddings)"
            )));
        }
        if self.query_growth.is_some() && self.long_from().is_some() {
            return Err(Error::input(
                "queries that grow with their position do not go with longrope: use another scaling",
            ));
        }
        if self.has_bare_norms() && self.qk_norm && self.head_dim > self.dim {
            return Err(Error::input(format!(
                "head_dim {} with hidden_size {}: heads with norms without weights must not be wider than the model",
                self.head_dim, self.dim
            )));
        }
        if self.layer_inputs > 0 && self.layer_words < self.vocab {
            return Err(Error::input(format!(
                "vocab_size_per_layer_input {} with vocab_size {}: every token needs a row",
                self.layer_words, self.vocab
            )));
        }
        let turned = self.rotary_dim();
        if self.rope.is_some() && (turned == 0 || !turned.is_multiple_of(2) || turned > self.head_dim) {
            return Err(Error::input(format!(
                "rotary positions of {turned} elements of a head of {}: it must be an even number from 2 to head_dim",
                self.head_dim
            )));
        }
        if !self.rotated.is_empty() && self.rotated.len() != self.layers {
            return Err(Error::input(format!(
                "whether a layer has rotary positions is given for {} layers of {}: each layer needs to know",
                self.rotated.len(),
                self.layers
            )));
        }
        if let Some(QueryGrowth { original, .. }) = self.query_growth
            && (original == 0 || self.local_rope.is_some() || self.transforms_rows() && !self.bare_head_norms)
        {
            return Err(Error::input(format!(
                "queries that grow from position {original} on: this position must be at least 1, and norms or limits of queries, or \
                 a second rotary base, are not supported with it"
            )));
        }
        if !self.windowed.is_empty() && (self.windowed.len() != self.layers || self.window == 0) {
            return Err(Error::input(format!(
                "sliding windows of {} tokens are given for {} layers of {}: each layer needs to know, and a window holds \
                 at least 1 token",
                self.window,
                self.windowed.len(),
                self.layers
            )));
        }
        if self.recurrent.contains(&true) && (self.recurrence.is_none() || self.recurrent.len() != self.layers) {
            return Err(Error::input(format!(
                "mixers other than attention are given for {} layers of {}: each layer needs to know",
                self.recurrent.len(),
                self.layers
            )));
        }
        if self.side_by_side && (self.parallel || !matches!(self.recurrence, Some(Recurrence::Delta(_)))) {
            return Err(Error::input(
                "a mixer next to attention must be Mamba or a gated delta net, followed by the feed-forward layer",
            ));
        }
        if !self.single.is_empty() && self.single.len() != self.layers {
            return Err(Error::input(format!(
                "which branch a layer has is given for {} layers of {}: each layer needs to know",
                self.single.len(),
                self.layers
            )));
        }
        if let Some(Recurrence::Conv { taps, .. }) = self.recurrence
            && !(1..=MAX_TAPS).contains(&taps)
        {
            return Err(Error::input(format!("short convolutions over {taps} tokens: there must be 1 to {MAX_TAPS}")));
        }
        if let Some(mixer @ Recurrence::Delta(DeltaNet { shape, taps, .. })) = &self.recurrence {
            let DeltaShape { key_heads, value_heads, key_dim, value_dim, rule } = *shape;
            let no_size = [key_heads, value_heads, key_dim, value_dim].contains(&0);
            if no_size || !value_heads.is_multiple_of(key_heads) || !(1..=MAX_TAPS).contains(taps) {
                return Err(Error::input(format!(
                    "{} of {value_heads} value heads of {value_dim} with {key_heads} key heads of {key_dim}, convolved over \
                     {taps} tokens: value heads must be a multiple of key heads, sizes at least 1, and the tokens at most \
                     {MAX_TAPS}",
                    mixer.name()
                )));
            }
            if let StateRule::Decay { limits: [least, most] } = rule
                && !(0.0 <= least && least <= most)
            {
                return Err(Error::input(format!(
                    "steps of Mamba layers are limited to {least} to {most}: this must be a range from 0 or more"
                )));
            }
        }
        if let Some(Experts { count, top_k, ff, .. }) = self.experts
            && (top_k == 0 || top_k > count || ff == 0)
        {
            return Err(Error::input(format!(
                "num_experts_per_tok {top_k} of {count} experts of width {ff}: a token needs 1 to {count} experts, of \
                 width 1 or more"
            )));
        }
        if let Some(Experts { top_k, weighs_inputs: true, .. }) = self.experts
            && top_k > 1
        {
            return Err(Error::input(format!(
                "num_experts_per_tok {top_k} with experts whose inputs are weighted: it must be 1"
            )));
        }
        if let Some(Experts { count, top_k, normalize, rule: Some(rule), .. }) = self.experts
            && rule.check("router", &RouteShape { experts: count, top_k, normalize }).is_err()
        {
            return Err(Error::input(format!(
                "num_experts_per_tok {top_k} of {count} experts in {} groups, of which a token uses {}: groups have equally \
                 many experts, at least 2, and a token's groups at least as many as it uses; up to {} groups are possible",
                rule.groups,
                rule.top_groups,
                RouteRule::GROUPS
            )));
        }
        if let Some(latent) = &self.latent
            && (self.kv_heads != self.heads
                || self.head_dim != latent.head_dim()
                || latent.kv_rank == 0
                || latent.value == 0)
        {
            return Err(Error::input(format!(
                "latent attention with num_key_value_heads {} of num_attention_heads {} and {latent:?}: all heads have keys \
                 and values of their own, of width 1 or more",
                self.kv_heads, self.heads
            )));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::input(format!("dropout {} is not in [0, 1)", self.dropout)));
        }
        Ok(())
    }
    /// Layers that use the keys and values of others need such others.
    fn check_shared_kv(&self) -> Result<()> {
        let (shared, layers) = (self.shared_kv, self.layers);
        if shared > 0 && (shared >= layers || (layers - shared..layers).any(|i| self.kv_source(i).is_none())) {
            return Err(Error::input(format!(
                "num_kv_shared_layers {shared} of {layers} layers: each of them needs an earlier layer that sees as many \
                 tokens and has keys and values of its own"
            )));
        }
        Ok(())
    }
}
