//! What the ranks of tp have parts of (Shoeybi et al. 2019, "Megatron-LM"), and what of a model is then a rank's own. Never
//! communicates.
use super::{Slice, Split};
use crate::base::{Error, Result};
use crate::nn::layout::Tp;
use crate::nn::spec::{Arch, Spec};

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

impl Split {
    /// This rank's part of what is cut, or all of what is not.
    pub fn part(&self, cut: bool) -> Slice {
        if cut { self.tp } else { Slice::WHOLE }
    }
    /// Whether residuals are split over tp along the tokens.
    pub fn sequence(&self) -> bool {
        self.sequence_parallel && self.tp.of > 1
    }
    /// Rows of the residual stream that a rank has of `tokens`; with sequence parallelism an equal part of them, padded.
    pub fn rows(&self, tokens: usize) -> usize {
        if self.sequence() { tokens.div_ceil(self.tp.of) } else { tokens }
    }
    /// How the weight of a norm of the residual stream stands to tp: each rank norms its own rows, or all of them.
    pub(in crate::nn) fn norm(&self) -> Tp {
        if self.sequence() { Tp::Summed } else { Tp::Same }
    }
    /// How the weight of a norm of heads stands to tp: each rank norms its own heads.
    pub(in crate::nn) fn head_norm(&self) -> Tp {
        if self.part(self.cuts.attention).of > 1 { Tp::Summed } else { Tp::Same }
    }
    /// Key and value heads that a rank computes: its own, or one that it shares with the ranks beside it.
    fn kv_heads(&self, spec: &Spec) -> usize {
        (spec.kv_heads / self.part(self.cuts.attention).of).max(1)
    }
    /// The first of them; where ranks share one, each has all the weights, computes with this one's, and gradients are summed.
    pub(in crate::nn) fn shared_kv(&self, spec: &Spec) -> Option<usize> {
        let Slice { index, of } = self.part(self.cuts.attention);
        (spec.kv_heads < of).then(|| index * spec.kv_heads / of)
    }

    /// The model as wide as this rank's activations are.
    pub(in crate::nn) fn local(&self, spec: &Spec) -> Spec {
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
                 then compute for all tokens; use a plan that cuts attention, mlp and lm_head, or --no-sequence-parallel"
            )));
        }
        Ok(())
    }
}
