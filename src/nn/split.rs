//! How the work inside a layer is split over the ranks of tp (heads, columns, vocabulary: Shoeybi et al. 2019,
//! "Megatron-LM"), sp (tokens) and ep (experts): as data for plans, and as groups at run time. Never communicates.
use super::arch::Arch;
use super::recurrence::{DeltaNet, Recurrence};
use super::spec::{Experts, HeadSizes, RowNorm, Spec};
use crate::base::{Error, Result};
use crate::comm::{Axis, Collective, Mesh, solo::Solo};
use crate::device::Device;
use crate::device::ops::DeltaShape;
use std::ops::Range;
use std::sync::Arc;

/// The slice `index` of `of`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    pub index: usize,
    pub of: usize,
}

impl Slice {
    pub const WHOLE: Slice = Slice { index: 0, of: 1 };
    /// This slice of `n` items, in blocks of equal length: the last slices may be shorter or empty.
    pub fn range(&self, n: usize) -> Range<usize> {
        let each = n.div_ceil(self.of);
        (self.index * each).min(n)..((self.index + 1) * each).min(n)
    }
    /// This slice of `n` items, as evenly as possible: the first slices may have one more than the last.
    pub fn share(&self, n: usize) -> Range<usize> {
        let first = |index: usize| index * (n / self.of) + index.min(n % self.of);
        first(self.index)..first(self.index + 1)
    }
    /// The largest share of `n` items.
    pub fn most(&self, n: usize) -> usize {
        n.div_ceil(self.of)
    }
}

/// How queries meet the keys and values of the other sp ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpImpl {
    /// Block by block around the ring, overlapping attention over the previous block (Liu et al. 2023).
    #[default]
    Ring,
    /// All at once, before the attention.
    AllGather,
    /// Heads are exchanged for tokens, so that each rank attends with some heads over all tokens (Jacobs et al. 2023).
    /// Ranks beyond the number of heads form a ring.
    Ulysses,
}

/// The ranks of sp: those of a *group* exchange heads for tokens, and the groups form a ring. With one of the two, the
/// other has size 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpGrid {
    /// This rank in its group.
    pub ulysses: Slice,
    /// Its group in the ring.
    pub ring: Slice,
}

impl SpGrid {
    /// The sp rank at these indices: groups are consecutive ranks, which are more likely to be on one host.
    pub fn rank(&self, ring: usize, ulysses: usize) -> usize {
        ring * self.ulysses.of + ulysses
    }
    /// This rank.
    pub fn index(&self) -> usize {
        self.rank(self.ring.index, self.ulysses.index)
    }
    pub fn ranks(&self) -> usize {
        self.ring.of * self.ulysses.of
    }
}

/// Which parts of a model are sharded over tp. The others are replicated and computed on every rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cuts {
    /// Heads: columns of the query, key and value projections, rows of the output projection.
    pub attention: bool,
    /// Columns of gate and up, rows of down.
    pub mlp: bool,
    /// Rows of the token embedding.
    pub embedding: bool,
    /// Rows of the head, by vocabulary. If tied, its weight is the embedding's.
    pub head: bool,
}

impl Cuts {
    pub const ALL: Cuts = Cuts { attention: true, mlp: true, embedding: true, head: true };
}

impl Default for Cuts {
    fn default() -> Cuts {
        Cuts::ALL
    }
}

/// One rank's share of the work inside a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    pub tp: Slice,
    pub sp: Slice,
    /// The experts of each sparse block; a rank has its [`Slice::share`] of them.
    pub ep: Slice,
    /// Rows travel to the ranks of ep and back in two halves, each while the experts of the other compute.
    pub moe_overlap: bool,
    /// Norms and residuals are split over tp along the tokens (Korthikanti et al. 2022).
    pub sequence_parallel: bool,
    /// Which parts are sharded over tp.
    pub cuts: Cuts,
    pub sp_impl: SpImpl,
}

impl Split {
    /// Everything on one rank.
    pub const NONE: Split = Split {
        tp: Slice::WHOLE,
        sp: Slice::WHOLE,
        ep: Slice::WHOLE,
        moe_overlap: false,
        sequence_parallel: false,
        cuts: Cuts::ALL,
        sp_impl: SpImpl::Ring,
    };
}

impl Split {
    /// This rank's slice of a sharded part, or all of a replicated one.
    pub fn part(&self, cut: bool) -> Slice {
        if cut { self.tp } else { Slice::WHOLE }
    }
    /// The ranks of sp, given the query heads of a tp rank: of the group sizes that divide sp, the largest in which
    /// each rank has a head.
    pub fn grid(&self, heads: usize) -> SpGrid {
        let Slice { index, of } = self.sp;
        let fits = |&size: &usize| of.is_multiple_of(size) && size <= heads;
        let group = if self.sp_impl == SpImpl::Ulysses { (1..=of).rev().find(fits).unwrap_or(1) } else { 1 };
        SpGrid {
            ulysses: Slice { index: index % group, of: group },
            ring: Slice { index: index / group, of: of / group },
        }
    }
    /// [`Split::grid`] of a model.
    pub fn grid_of(&self, spec: &Spec) -> SpGrid {
        self.grid(self.local(spec).heads)
    }
    /// Whether the residual stream is sharded over tp along the tokens.
    pub fn sequence(&self) -> bool {
        self.sequence_parallel && self.tp.of > 1
    }
    /// Rows of the residual stream on a rank, for `tokens`. With sequence parallelism, an equal share, padded.
    pub fn rows(&self, tokens: usize) -> usize {
        if self.sequence() { tokens.div_ceil(self.tp.of) } else { tokens }
    }
    /// How many of `all` key/value heads a rank computes: its own, or one shared with its neighbors.
    fn kv_heads(&self, all: usize) -> usize {
        (all / self.part(self.cuts.attention).of).max(1)
    }
    /// The first of them, where ranks share one: each then has all the weights, computes with this head's, and
    /// gradients are summed.
    pub(super) fn shared_kv(&self, spec: &Spec) -> Option<usize> {
        let Slice { index, of } = self.part(self.cuts.attention);
        (spec.kv_heads < of).then(|| index * spec.kv_heads / of)
    }

    /// The model with this rank's activation widths.
    pub(super) fn local(&self, spec: &Spec) -> Spec {
        let Cuts { attention, mlp, .. } = self.cuts;
        let columns = |n: usize| self.part(mlp).share(n).len();
        let own = |e: &Experts| Experts { ff: columns(e.ff), shared_ff: columns(e.shared_ff), ..e.clone() };
        Spec {
            heads: spec.heads / self.part(attention).of,
            kv_heads: self.kv_heads(spec.kv_heads),
            global_heads: spec.global_heads.map(|sizes| HeadSizes { kv_heads: self.kv_heads(sizes.kv_heads), ..sizes }),
            ff: columns(spec.ff),
            recurrence: spec.recurrence.map(|mixer| match mixer {
                Recurrence::Delta(net) => {
                    let (of, shape) = (self.part(attention).of, net.shape);
                    let (key_heads, value_heads) = (shape.key_heads / of, shape.value_heads / of);
                    Recurrence::Delta(DeltaNet { shape: DeltaShape { key_heads, value_heads, ..shape }, ..net })
                }
                Recurrence::Conv { channels, taps } => {
                    Recurrence::Conv { channels: self.part(attention).share(channels).len(), taps }
                }
            }),
            experts: spec.experts.as_ref().map(own),
            vocab: self.part(self.cuts.head).share(spec.vocab).len(),
            ..spec.clone()
        }
    }

    /// Checks the relations that the split relies on.
    pub fn check(&self, spec: &Spec) -> Result<()> {
        self.check_tp(spec)?;
        self.check_sp(spec)?;
        self.check_ep(spec)
    }

    fn check_sp(&self, spec: &Spec) -> Result<()> {
        let (heads, of) = (self.local(spec).heads, self.sp.of);
        if let Some(mixer) = spec.recurrence.filter(|_| of > 1) {
            return Err(Error::input(format!(
                "ring-attn-size {of}: the {} of {} keep a state along a whole sequence, which ranks cannot share yet; \
                 use ring-attn-size 1",
                mixer.name(),
                spec.arch.name()
            )));
        }
        if self.sp_impl == SpImpl::Ulysses && of > 1 && (spec.global_heads.is_some() || spec.shared_kv > 0) {
            return Err(Error::input(format!(
                "ring-attn-size {of} with sp-impl ulysses: the layers of {} have heads of several sizes, or share keys and \
                 values, which ulysses cannot exchange yet; use sp-impl ring",
                spec.arch.name()
            )));
        }
        if self.sp_impl != SpImpl::Ulysses || of == 1 || self.grid_of(spec).ulysses.of > 1 {
            return Ok(());
        }
        Err(Error::input(format!(
            "ring-attn-size {of} with sp-impl ulysses: no size above 1 divides {of} and leaves each rank at least one of the \
             {heads} heads (num_heads {} / tp-size {}); choose another ring-attn-size, or sp-impl ring",
            spec.heads,
            self.part(self.cuts.attention).of
        )))
    }

    fn check_ep(&self, spec: &Spec) -> Result<()> {
        let (ep, name) = (self.ep.of, spec.arch.name());
        match &spec.experts {
            _ if ep == 1 => Ok(()),
            None => Err(Error::input(format!("ep-size {ep}, but {name} has no experts to share; use ep-size 1"))),
            Some(experts) if experts.count < ep => Err(Error::input(format!(
                "ep-size {ep} is more than the {} experts of a block: a rank would have none; choose an ep-size of at \
                 most {}",
                experts.count, experts.count
            ))),
            Some(_) => Ok(()),
        }
    }

    fn check_tp(&self, spec: &Spec) -> Result<()> {
        let Split { tp: Slice { of, .. }, cuts, .. } = *self;
        if of == 1 {
            return Ok(());
        }
        if spec.arch == Arch::Gpt {
            return Err(Error::input(format!(
                "tp-size {of} with arch gpt: its fused qkv projection cannot be sharded by heads; use tp-size 1, or \
                 another arch"
            )));
        }
        if cuts.attention && spec.row_norm == Some(RowNorm::All) {
            return Err(Error::input(format!(
                "tp-size {of}: {} normalizes all heads of a token together, so its attention cannot be sharded by heads; \
                 use a plan that replicates attention, or tp-size 1",
                spec.arch.name()
            )));
        }
        for kv in spec.kinds_of_heads().map(|sizes| sizes.kv_heads).filter(|_| cuts.attention) {
            let heads = spec.heads;
            if !heads.is_multiple_of(of) {
                return Err(Error::input(format!(
                    "num_heads {heads} is not divisible by tp-size {of}: every tp rank needs the same number of heads; choose a \
                     tp-size that divides {heads}"
                )));
            }
            if spec.fused_qkv && !spec.qkv_by_heads && kv % of > 0 {
                return Err(Error::input(format!(
                    "num_kv_heads {kv} is not divisible by tp-size {of}: queries, keys and values of {} are one matrix, of \
                     which every tp rank has an equal share of each; choose a tp-size that divides {kv}",
                    spec.arch.name()
                )));
            }
            if let Some(blocks) = spec.qkv_blocks.filter(|blocks| blocks % of > 0) {
                return Err(Error::input(format!(
                    "tp-size {of}: queries, keys and values of {} are one matrix of {blocks} blocks, of which every tp rank \
                     has an equal share; choose a tp-size that divides {blocks}",
                    spec.arch.name()
                )));
            }
            if !kv.is_multiple_of(of) && !of.is_multiple_of(kv) {
                return Err(Error::input(format!(
                    "num_kv_heads {kv} and tp-size {of}: neither divides the other, so a rank's heads would need parts of \
                     different key/value heads; choose a tp-size that divides {kv} or is a multiple of it"
                )));
            }
        }
        if let Some(Recurrence::Delta(net)) = spec.recurrence
            && cuts.attention
            && !net.shape.key_heads.is_multiple_of(of)
        {
            return Err(Error::input(format!(
                "{} {} is not divisible by tp-size {of}: every tp rank needs the same number of heads; choose a tp-size \
                 that divides {}, or a plan that replicates attention",
                match net.groups() {
                    Some(_) => "the number of groups of Mamba layers",
                    None => "linear_num_key_heads",
                },
                net.shape.key_heads,
                net.shape.key_heads
            )));
        }
        // Columns and vocabulary entries need not divide evenly, but no share may be empty.
        let (ff, shared) = spec.experts.as_ref().map_or((of, of), |e| (e.ff, e.shared_ff));
        for (is_cut, name, value, what) in [
            (cuts.mlp, "ff_hidden_dim", spec.ff, "columns"),
            (cuts.mlp, "width of experts", ff, "columns"),
            (cuts.mlp && shared > 0, "width of the shared expert", shared, "columns"),
            (cuts.embedding || cuts.head, "vocab_size", spec.vocab, "vocabulary entries"),
        ] {
            if is_cut && value < of {
                return Err(Error::input(format!(
                    "{name} {value} < tp-size {of}: a tp rank would have no {what}; choose a tp-size of at most {value}"
                )));
            }
        }
        if let Some(Experts { ff, clamp: Some(_), .. }) = &spec.experts
            && cuts.mlp
            && ff % of > 0
        {
            return Err(Error::input(format!(
                "tp-size {of}: gate and up of {} are one matrix in which they alternate, so tp-size must divide \
                 intermediate_size {ff}",
                spec.arch.name()
            )));
        }
        if spec.tied && cuts.embedding != cuts.head {
            return Err(Error::input(format!(
                "the head is tied to the embedding: a tensor-parallel plan must shard both or neither (embed_tokens {}, lm_head {})",
                cuts.embedding, cuts.head
            )));
        }
        for (has, what) in [
            (spec.layer_inputs > 0, "the layers of {} have inputs besides the residual stream, which are"),
            (spec.rope.is_none(), "learned positions of {} are"),
        ] {
            if self.sequence_parallel && has {
                let what = what.replace("{}", spec.arch.name());
                return Err(Error::input(format!(
                    "sequence-parallel: {what} not cut along the tokens yet; use `sequence_parallel: false`"
                )));
            }
        }
        if self.sequence_parallel && !(cuts.attention && cuts.mlp && cuts.head) {
            let parts = [("attention", cuts.attention), ("mlp", cuts.mlp), ("lm_head", cuts.head)];
            let whole: Vec<&str> = parts.iter().filter(|(_, cut)| !cut).map(|(name, _)| *name).collect();
            return Err(Error::input(format!(
                "sequence-parallel: the tensor-parallel plan replicates {}, which every rank would then compute for all \
                 tokens; use a plan that shards attention, mlp and lm_head, or `sequence_parallel: false`",
                whole.join(" and ")
            )));
        }
        Ok(())
    }
}

/// The groups that layers communicate in.
#[derive(Clone)]
pub struct Groups {
    pub tp: Arc<dyn Collective>,
    pub sp: Arc<dyn Collective>,
    /// Ranks that share the experts.
    pub ep: Arc<dyn Collective>,
    /// Ranks that see different tokens: the load of experts is summed over them.
    pub loss: Arc<dyn Collective>,
}

impl Groups {
    pub fn of(mesh: &Mesh) -> Groups {
        Groups {
            tp: mesh.group(Axis::Tp).clone(),
            sp: mesh.group(Axis::Sp).clone(),
            ep: mesh.group(Axis::Ep).clone(),
            loss: mesh.group(Axis::Loss).clone(),
        }
    }
    /// For [`Split::NONE`].
    pub fn solo(dev: &Arc<dyn Device>) -> Groups {
        let group = |axis| Arc::new(Solo::new(dev.clone(), axis, 0));
        Groups { tp: group(Axis::Tp), sp: group(Axis::Sp), ep: group(Axis::Ep), loss: group(Axis::Loss) }
    }
}
