//! How the work inside a layer is split over the ranks of tp (heads, columns, vocabulary: Shoeybi et al. 2019,
//! "Megatron-LM") and of sp (tokens): as plain data for plans, and as groups for what runs. Never communicates.
use super::spec::{Arch, Spec};
use crate::base::{Error, Result};
use crate::comm::{Axis, Collective, Mesh, solo::Solo};
use crate::device::Device;
use std::ops::Range;
use std::sync::Arc;

/// One of `of` parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    pub index: usize,
    pub of: usize,
}

impl Slice {
    pub const WHOLE: Slice = Slice { index: 0, of: 1 };
    /// This part of `n` things in a row; the last parts may have fewer than the first, or none.
    pub fn range(&self, n: usize) -> Range<usize> {
        let each = n.div_ceil(self.of);
        (self.index * each).min(n)..((self.index + 1) * each).min(n)
    }
    /// This part of `n` things in a row, where no two parts differ by more than one: the first may have one more than
    /// the last.
    pub fn share(&self, n: usize) -> Range<usize> {
        let first = |index: usize| index * (n / self.of) + index.min(n % self.of);
        first(self.index)..first(self.index + 1)
    }
    /// The most that any part has of `n` things.
    pub fn most(&self, n: usize) -> usize {
        n.div_ceil(self.of)
    }
}

/// How keys and values reach the queries of the other ranks of sp.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RingImpl {
    /// Block by block around the ring, under the attention over the block before (Liu et al. 2023).
    #[default]
    Ring,
    /// All at once, before the attention.
    AllGather,
}

/// The parts of a model that are cut over tp. What is not, every rank has and computes all of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cuts {
    /// Heads: columns of the projections to queries, keys and values, rows of the one that ends the branch.
    pub attention: bool,
    /// Columns of gate and up, rows of down.
    pub mlp: bool,
    /// Rows of the token embedding.
    pub embedding: bool,
    /// Rows of the head: words. Its weight is the embedding's where the two are tied.
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

/// One rank's part of the work inside a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    pub tp: Slice,
    pub sp: Slice,
    /// Norms and residuals are split over tp along the tokens (Korthikanti et al. 2022).
    pub sequence_parallel: bool,
    /// What the ranks of tp have parts of.
    pub cuts: Cuts,
    pub ring: RingImpl,
}

impl Split {
    /// Everything on one rank.
    pub const NONE: Split =
        Split { tp: Slice::WHOLE, sp: Slice::WHOLE, sequence_parallel: false, cuts: Cuts::ALL, ring: RingImpl::Ring };
}

impl Split {
    /// This rank's part of what is cut, or all of what is not.
    pub fn part(&self, cut: bool) -> Slice {
        if cut { self.tp } else { Slice::WHOLE }
    }
    /// Whether residuals are split over tp along the tokens.
    pub fn sequence(&self) -> bool {
        self.sequence_parallel && self.tp.of > 1
    }
    /// Rows of the residual stream that a rank has of `tokens`; with sequence parallelism an equal part of them,
    /// padded.
    pub fn rows(&self, tokens: usize) -> usize {
        if self.sequence() { tokens.div_ceil(self.tp.of) } else { tokens }
    }
    /// Key and value heads that a rank computes: its own, or one that it shares with the ranks beside it.
    fn kv_heads(&self, spec: &Spec) -> usize {
        (spec.kv_heads / self.part(self.cuts.attention).of).max(1)
    }
    /// The first of them; where ranks share one, each has all the weights, computes with this one's, and gradients are
    /// summed.
    pub(super) fn shared_kv(&self, spec: &Spec) -> Option<usize> {
        let Slice { index, of } = self.part(self.cuts.attention);
        (spec.kv_heads < of).then(|| index * spec.kv_heads / of)
    }

    /// The model as wide as this rank's activations are.
    pub(super) fn local(&self, spec: &Spec) -> Spec {
        let Cuts { attention, mlp, .. } = self.cuts;
        Spec {
            heads: spec.heads / self.part(attention).of,
            kv_heads: self.kv_heads(spec),
            ff: self.part(mlp).share(spec.ff).len(),
            vocab: self.part(self.cuts.head).share(spec.vocab).len(),
            ..spec.clone()
        }
    }

    /// The equations that the cut relies on.
    pub fn check(&self, spec: &Spec) -> Result<()> {
        let Split { tp: Slice { of, .. }, cuts, .. } = *self;
        if of == 1 {
            return Ok(());
        }
        if spec.arch == Arch::Gpt {
            return Err(Error::input(format!(
                "tp-size {of} with arch gpt: its fused queries, keys and values are not cut by heads; use tp-size 1, or \
                 another arch"
            )));
        }
        if cuts.attention {
            let (heads, kv) = (spec.heads, spec.kv_heads);
            if heads % of > 0 {
                return Err(Error::input(format!(
                    "num_heads {heads} = {} x tp-size {of} + {}: each rank of tp takes as many heads; choose a tp-size that \
                     divides {heads}",
                    heads / of,
                    heads % of
                )));
            }
            if !kv.is_multiple_of(of) && !of.is_multiple_of(kv) {
                return Err(Error::input(format!(
                    "num_kv_heads {kv} and tp-size {of}: neither divides the other, so the heads of a rank would read parts of \
                     different key/value heads; choose a tp-size that divides {kv} or is a multiple of it"
                )));
            }
        }
        // Columns and words are many: shares of them may differ by one, but none is empty.
        for (is_cut, name, value, what) in [
            (cuts.mlp, "ff_hidden_dim", spec.ff, "columns"),
            (cuts.embedding || cuts.head, "vocab_size", spec.vocab, "words"),
        ] {
            if is_cut && value < of {
                return Err(Error::input(format!(
                    "{name} {value} < tp-size {of}: a rank of tp would have no {what}; choose a tp-size of at most {value}"
                )));
            }
        }
        if spec.tied && cuts.embedding != cuts.head {
            return Err(Error::input(format!(
                "the head is tied to the embedding: a tensor-parallel plan cuts both or neither (embed_tokens {}, lm_head {})",
                cuts.embedding, cuts.head
            )));
        }
        if self.sequence_parallel && !(cuts.attention && cuts.mlp && cuts.head) {
            return Err(Error::input(format!(
                "sequence-parallel: the tensor-parallel plan leaves a branch or the head whole ({cuts:?}), which every rank would \
                 then compute for all tokens; use a plan that cuts attention, mlp and lm_head, or `sequence_parallel: false`"
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
}

impl Groups {
    pub fn of(mesh: &Mesh) -> Groups {
        Groups { tp: mesh.tp.clone(), sp: mesh.sp.clone() }
    }
    /// For [`Split::NONE`].
    pub fn solo(dev: &Arc<dyn Device>) -> Groups {
        let group = |axis| Arc::new(Solo::new(dev.clone(), axis, 0));
        Groups { tp: group(Axis::Tp), sp: group(Axis::Sp) }
    }
}
