//! What a model's spec says about its blocks, one by one or together. Never checks it.
use super::arch::Arch;
use super::recurrence::Recurrence;
use super::rotary::Rotary;
use super::spec::{Activation, BlockFactors, Branch, Experts, HeadSizes, Spec};

impl Spec {
    /// The sizes of heads of all layers.
    pub fn kinds_of_heads(&self) -> impl Iterator<Item = HeadSizes> {
        let &Spec { kv_heads, head_dim, global_heads, .. } = self;
        [HeadSizes { kv_heads, head_dim }].into_iter().chain(global_heads)
    }
    /// The heads of block `i`.
    pub fn heads_of(&self, i: usize) -> HeadSizes {
        let &Spec { kv_heads, head_dim, global_heads, .. } = self;
        global_heads.filter(|_| self.window_of(i) == 0).unwrap_or(HeadSizes { kv_heads, head_dim })
    }
    /// The model with the widths of block `i` in place of those that differ among blocks.
    pub fn of_block(&self, i: usize) -> Spec {
        let HeadSizes { kv_heads, head_dim } = self.heads_of(i);
        let ff = if self.wide_shared && self.kv_source(i).is_some() { 2 * self.ff } else { self.ff };
        Spec { kv_heads, head_dim, ff, global_heads: None, ..self.clone() }
    }
    /// The block whose keys and values block `i` uses, if not its own.
    pub fn kv_source(&self, i: usize) -> Option<usize> {
        let first = self.layers.saturating_sub(self.shared_kv);
        if i < first {
            return None;
        }
        (0..first).rev().find(|&own| (self.window_of(own) == 0) == (self.window_of(i) == 0))
    }
    /// Whether a later block uses the keys and values of block `i`.
    pub fn gives_kv(&self, i: usize) -> bool {
        (0..self.layers).any(|user| self.kv_source(user) == Some(i))
    }
    /// Whether the values of block `i` are its projected keys.
    pub fn values_are_keys(&self, i: usize) -> bool {
        self.keys_are_values && self.window_of(i) == 0
    }
    /// Elements of a token's keys and values that block `i` keeps when text is generated.
    pub fn cached(&self, i: usize) -> usize {
        let HeadSizes { kv_heads, head_dim } = self.heads_of(i);
        if self.attends(i) && self.kv_source(i).is_none() { 2 * kv_heads * head_dim } else { 0 }
    }
    /// Outputs of the head per token.
    pub fn outputs(&self) -> usize {
        if self.score { 1 } else { self.vocab }
    }
    /// Elements in a row of fused queries, keys and values.
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// The experts of block `i`, if it is sparse.
    pub fn experts_of(&self, i: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| self.has(i, Branch::FeedForward) && !experts.dense.contains(&i))
    }
    /// Number of sparse blocks.
    pub fn sparse_blocks(&self) -> usize {
        (0..self.layers).filter(|&i| self.experts_of(i).is_some()).count()
    }
    /// Whether some block has a dense feed-forward layer.
    pub fn has_dense_blocks(&self) -> bool {
        let is_dense = |i| self.has(i, Branch::FeedForward) && self.experts_of(i).is_none();
        (0..self.layers).any(is_dense) || self.experts.as_ref().is_some_and(|experts| experts.beside)
    }
    /// Whether block `i` has this branch.
    pub fn has(&self, i: usize, branch: Branch) -> bool {
        self.single.get(i).is_none_or(|only| *only == branch)
    }
    /// Whether block `i` has attention.
    pub fn attends(&self, i: usize) -> bool {
        self.has(i, Branch::Mixer) && (self.side_by_side || self.recurrence_of(i).is_none())
    }
    pub fn gated(&self) -> bool {
        matches!(self.activation, Activation::SwiGlu | Activation::GeGlu)
    }
    /// Whether attention reads other rows than were projected, but for rotations in place and biases.
    pub fn transforms_rows(&self) -> bool {
        self.qk_norm || self.row_norm.is_some() || self.qkv_clip.is_some()
    }
    /// Whether outputs of branches have factors.
    pub fn has_residual_factors(&self) -> bool {
        let BlockFactors { attention, other, .. } = self.block_factors;
        let has = |factor: f32| factor != 1.0;
        [self.residual_multiplier, attention, other].into_iter().any(has)
            || (0..self.layers).any(|i| has(self.mlp_factor(i)))
    }
    /// The factor of the output of the second branch of block `i`.
    pub fn mlp_factor(&self, i: usize) -> f32 {
        match self.experts_of(i) {
            Some(experts) if experts.averaged => 0.5,
            _ => self.block_factors.mlp,
        }
    }
    /// Whether what experts add to the residual is normalized.
    pub fn norms_experts(&self) -> bool {
        self.post_norms || self.expert_norms
    }
    /// Tokens that block `i` attends to; 0 means all.
    pub fn window_of(&self, i: usize) -> usize {
        if self.windowed.get(i) == Some(&true) { self.window } else { 0 }
    }
    /// What block `i` has in place of attention, or next to it.
    pub fn recurrence_of(&self, i: usize) -> Option<&Recurrence> {
        self.recurrence.as_ref().filter(|_| self.recurrent.get(i) == Some(&true))
    }
    /// Blocks with attention, and blocks with the other mixer.
    pub fn mixers(&self) -> [usize; 2] {
        let others = (0..self.layers).filter(|&i| self.recurrence_of(i).is_some()).count();
        [(0..self.layers).filter(|&i| self.attends(i)).count(), others]
    }
    /// Blocks before block `i` with the mixer that is not attention.
    pub fn place_of(&self, i: usize) -> usize {
        (0..i).filter(|&before| self.recurrence_of(before).is_some()).count()
    }
    /// Whether block `i` rotates with `local_rope`.
    pub fn uses_local_rope(&self, i: usize) -> bool {
        self.local_rope.is_some() && self.window_of(i) > 0
    }
    /// Whether block `i` has rotary positions.
    pub fn is_rotated(&self, i: usize) -> bool {
        self.rope.is_some() && self.rotated.get(i) != Some(&false)
    }
    /// Whether block `i` normalizes heads.
    pub fn norms_heads(&self, i: usize) -> bool {
        self.qk_norm && (!self.bare_head_norms || self.is_rotated(i))
    }
    /// Whether queries of block `i` grow with their position.
    pub fn grows(&self, i: usize) -> bool {
        self.query_growth.is_some_and(|growth| growth.unrotated != self.is_rotated(i))
    }
    /// Whether some norms have no weights.
    pub fn has_bare_norms(&self) -> bool {
        self.bare_norms || self.bare_head_norms
    }
    /// Whether norms are LayerNorms, with two statistics.
    pub fn has_layer_norm(&self) -> bool {
        self.layer_norm || self.arch == Arch::Gpt
    }
    /// Whether some block normalizes heads without rotating them afterwards.
    pub fn normed_still(&self) -> bool {
        self.qk_norm
            && (self.norm_after_rope || self.rotated_in_part() || (0..self.layers).any(|i| !self.is_rotated(i)))
    }
    /// The length from which on documents rotate differently, if they do in some layer.
    pub fn long_from(&self) -> Option<usize> {
        [&self.rope, &self.local_rope].into_iter().flatten().find_map(Rotary::original_if_long)
    }
    /// Rows of the tables of positions per position: two if short and long documents rotate differently.
    pub fn forms(&self) -> usize {
        1 + usize::from(self.long_from().is_some())
    }
    /// Whether other elements of a head are not rotated.
    pub fn rotated_in_part(&self) -> bool {
        self.rotary_dim() < self.head_dim
    }
    /// Elements of a head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.head_dim)
    }
    /// The same in layers without a window.
    pub fn global_rotary_dim(&self) -> usize {
        self.global_heads.map_or(self.rotary_dim(), |sizes| sizes.head_dim)
    }
    /// The factor of scores.
    pub fn score_factor(&self) -> f32 {
        let scale = self.score_scale.unwrap_or(self.query_scalar.unwrap_or(self.head_dim as f64).sqrt().recip());
        (scale * self.block_factors.scores as f64) as f32
    }
}
