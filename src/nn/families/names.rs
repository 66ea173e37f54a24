//! Layouts from names: tensors as files have them, whole or cut to a rank's share. Never decides what a layer has.
use crate::device::ops::RmsNormShape;
use crate::nn::families::table::SparseNames;
use crate::nn::latent::LatentProjections;
use crate::nn::layout::{Init, Layout, Tp, columns_name, half_name, slice_name};
use crate::nn::linear::Linear;
use crate::nn::norm::Norm;
use crate::nn::row_transform::PartNorm;
use crate::nn::spec::{Latent, RowNorm, Spec};
use crate::nn::split::{Slice, Split};
use std::ops::Range;

pub(super) const WEIGHT: &str = "weight";
pub(super) const BIAS: &str = "bias";

/// Builds a layout from names under `prefix`, of whole tensors or this rank's shards.
pub(super) struct Names<'a> {
    pub prefix: String,
    pub layout: Layout,
    pub spec: &'a Spec,
    pub split: &'a Split,
}

impl Names<'_> {
    pub fn push(&mut self, name: &str, suffix: &str, shape: &[usize], tp: Tp, init: Init) -> usize {
        let name = [&self.prefix, name, ".", suffix].concat(); // one allocation: mixtures have tens of thousands
        self.layout.push_part(name, shape, tp, shape.len() > 1, init)
    }
    /// This rank's shard, along `dim`, of a tensor of `shape`.
    pub fn cut(&mut self, name: &str, suffix: &str, shape: &[usize], dim: usize, over: Slice, init: Init) -> usize {
        let (mut part, whole) = (shape.to_vec(), shape[dim]);
        part[dim] = over.share(whole).len();
        let tp = if over.of > 1 { Tp::Cut { dim, over, whole } } else { Tp::Same };
        self.push(name, suffix, &part, tp, init)
    }
    /// The projections of latent attention. Each rank of tp has the latents, and what follows for its `heads`.
    pub fn latent(&mut self, latent: Latent, heads: usize, by_heads: Slice) -> LatentProjections {
        let &Spec { dim, heads: all, head_dim, qkv_bias, .. } = self.spec;
        let Latent { q_rank, kv_rank, nope, rope, value } = latent;
        let replicated = if by_heads.of > 1 { Tp::Summed } else { Tp::Same };
        let to_latent = |names: &mut Self, name: &str, width: usize| {
            let linear = Linear::new(names.push(name, WEIGHT, &[width, dim], replicated, Init::NORMAL), width, dim);
            if qkv_bias { linear.bias(names.push(name, BIAS, &[width], replicated, Init::ZEROS)) } else { linear }
        };
        let of_heads = |names: &mut Self, name: &str, each: usize, inputs: usize| {
            let weight = names.cut(name, WEIGHT, &[all * each, inputs], 0, by_heads, Init::NORMAL);
            Linear::new(weight, heads * each, inputs)
        };
        let (q_latent, q) = if q_rank > 0 {
            let linear = to_latent(self, "self_attn.q_a_proj", q_rank);
            let norm = self.scale("self_attn.q_a_layernorm", q_rank, replicated);
            (Some((linear, norm)), of_heads(self, "self_attn.q_b_proj", nope + rope, q_rank))
        } else {
            (None, of_heads(self, "self_attn.q_proj", nope + rope, dim))
        };
        let kv_latent = to_latent(self, "self_attn.kv_a_proj_with_mqa", kv_rank + rope);
        let kv_norm = self.scale("self_attn.kv_a_layernorm", kv_rank, replicated);
        let kv = of_heads(self, "self_attn.kv_b_proj", nope + value, kv_rank);
        LatentProjections { shape: latent, heads, head_dim, q_latent, q, kv_latent, kv_norm, kv }
    }
    /// The tensors of expert `e` of gpt-oss: in files, those of a kind are one tensor. A rank's columns of the first
    /// two are pairs of a gate and an up.
    pub fn clamped(&mut self, e: usize, ff: usize, over: Slice) {
        let (dim, down) = (self.spec.dim, Init::residual(self.spec.layers));
        let kinds = [
            ("gate_up_proj", vec![dim, 2 * ff], Some(1), Init::NORMAL),
            ("gate_up_proj_bias", vec![2 * ff], Some(0), Init::ZEROS),
            ("down_proj", vec![ff, dim], Some(0), down),
            ("down_proj_bias", vec![dim], None, Init::ZEROS),
        ];
        for (kind, mut shape, cut, init) in kinds {
            let tp = match cut {
                _ if over.of == 1 => Tp::Same,
                None => Tp::Summed,
                Some(dim) => {
                    let whole = shape[dim];
                    shape[dim] = over.share(whole).len();
                    Tp::Cut { dim, over, whole }
                }
            };
            let name = format!("{}{}", self.prefix, slice_name(kind, e));
            self.layout.push_part(name, &shape, tp, shape.len() > 1, init);
        }
    }
    /// A matrix of expert `e` of block `i`, which files have in one tensor for the block: its gate (`k` is 0) above its
    /// up (1), or left of it, or its down (2).
    pub fn stacked(
        &mut self,
        [gate_up, down]: [&str; 2],
        (i, e, k): (usize, usize, usize),
        mut shape: [usize; 2],
        cut: usize,
        over: Slice,
        init: Init,
    ) -> usize {
        let block = format!("model.layers.{i}.");
        let name = match k {
            2 => slice_name(&format!("{block}{down}"), e),
            half => {
                let name = if self.spec.arch.family().modules.sparse.transposed { columns_name } else { half_name };
                name(&format!("{block}{gate_up}"), e, half)
            }
        };
        let whole = shape[cut];
        shape[cut] = over.share(whole).len();
        let tp = if over.of > 1 { Tp::Cut { dim: cut, over, whole } } else { Tp::Same };
        self.layout.push_part(name, &shape, tp, true, init)
    }
    /// Column-parallel gate and up, which are one tensor.
    pub fn gate_and_up(&mut self, name: &str, ff: usize, over: Slice) -> (Linear, Linear) {
        let (both, dim) = (self.parts(name, [ff, ff], over), self.spec.dim);
        let own = over.share(ff).len();
        let half = || Linear::new(both, own, dim);
        (half(), half().from(own))
    }
    /// This rank's shards of matrices that are one tensor, one below the other.
    pub fn parts<const N: usize>(&mut self, name: &str, rows: [usize; N], over: Slice) -> usize {
        self.rows_of_parts((name, WEIGHT), rows, &[self.spec.dim], over, Init::NORMAL)
    }
    /// The same for tensors of rows of any shape.
    pub fn rows_of_parts<const N: usize>(
        &mut self,
        (name, suffix): (&str, &str),
        rows: [usize; N],
        row: &[usize],
        over: Slice,
        init: Init,
    ) -> usize {
        let own = rows.map(|n| over.share(n).len()).iter().sum();
        let shape = [&[own][..], row].concat();
        let rows = std::array::from_fn(|i| rows.get(i).copied().unwrap_or(0));
        self.push(name, suffix, &shape, if over.of > 1 { Tp::Parts { over, rows } } else { Tp::Same }, init)
    }
    /// Column-parallel: from the model's width to a shard of `outputs`.
    pub fn column(&mut self, name: &str, outputs: usize, over: Slice, bias: bool) -> Linear {
        let (dim, own) = (self.spec.dim, over.share(outputs).len());
        let linear = Linear::new(self.cut(name, WEIGHT, &[outputs, dim], 0, over, Init::NORMAL), own, dim);
        if bias { linear.bias(self.cut(name, BIAS, &[outputs], 0, over, Init::ZEROS)) } else { linear }
    }
    /// Row-parallel: from a shard of `inputs` to the model's width. Outputs are summed; then the bias, held by every
    /// rank, is added.
    pub fn row(&mut self, name: &str, inputs: usize, over: Slice, bias: bool) -> Linear {
        let (dim, own, init) = (self.spec.dim, over.share(inputs).len(), Init::residual(self.spec.layers));
        let linear = Linear::new(self.cut(name, WEIGHT, &[dim, inputs], 1, over, init), dim, own);
        if bias { linear.bias(self.push(name, BIAS, &[dim], Tp::Same, Init::ZEROS)) } else { linear }
    }
    /// The weights of a norm, initialized to multiply by 1.
    pub fn scale(&mut self, name: &str, width: usize, tp: Tp) -> usize {
        self.push(name, WEIGHT, &[width], tp, if self.spec.norm_from_one { Init::ZEROS } else { Init::ONES })
    }
    pub fn rms(&self) -> RmsNormShape {
        RmsNormShape { eps: self.spec.norm_eps, offset: if self.spec.norm_from_one { 1.0 } else { 0.0 } }
    }
    /// How a residual norm's weight relates to tp: each rank normalizes its own rows, or all of them.
    pub fn residual_norm(&self) -> Tp {
        if self.split.sequence() { Tp::Summed } else { Tp::Same }
    }
    /// How a head norm's weight relates to tp: each rank normalizes its own heads.
    pub fn head_norm(&self) -> Tp {
        if self.split.part(self.split.cuts.attention).of > 1 { Tp::Summed } else { Tp::Same }
    }
    /// Norms of queries and of keys, of which there are so many heads, and this rank has some. Every rank holds the
    /// weights of all heads.
    pub fn row_norms(&mut self, heads: [(usize, Range<usize>); 2]) -> Vec<PartNorm> {
        let &Spec { head_dim, norm_eps: eps, row_norm, .. } = self.spec;
        let (tp, mut norms, mut column) = (self.head_norm(), Vec::new(), 0);
        for (name, (all, own)) in self.spec.arch.family().modules.head_norms.into_iter().zip(heads) {
            let columns = column..column + own.len() * head_dim;
            column = columns.end;
            match row_norm {
                None => {}
                Some(RowNorm::All) => {
                    let (width, shape) = (columns.len(), self.rms());
                    norms.push(PartNorm { norm: Norm::Rms { w: self.scale(name, width, tp), shape }, columns, width });
                }
                Some(RowNorm::Heads) => {
                    let w = self.scale(name, head_dim, tp);
                    let b = Some(self.push(name, BIAS, &[head_dim], tp, Init::ZEROS));
                    norms.push(PartNorm { norm: Norm::Layer { w, b, eps, from_one: false }, columns, width: head_dim });
                }
                Some(RowNorm::EachHead { apart }) => {
                    for head in 0..all {
                        let w = match apart {
                            true => self.scale(&format!("{name}.norms.{head}"), head_dim, tp),
                            false => self.push(name, &slice_name(WEIGHT, head), &[head_dim], tp, Init::ONES),
                        };
                        if own.contains(&head) {
                            let first = columns.start + (head - own.start) * head_dim;
                            let norm = Norm::Layer { w, b: None, eps, from_one: false };
                            norms.push(PartNorm { norm, columns: first..first + head_dim, width: head_dim });
                        }
                    }
                }
            }
        }
        norms
    }
    pub fn norm(&mut self, name: &str, width: usize) -> Norm {
        if self.spec.bare_norms {
            return Norm::Bare { eps: self.spec.norm_eps, rms: !self.spec.layer_norm };
        }
        let w = self.scale(name, width, self.residual_norm());
        let &Spec { norm_eps: eps, norm_from_one: from_one, .. } = self.spec;
        if !self.spec.layer_norm {
            return Norm::Rms { w, shape: self.rms() };
        }
        let tp = self.residual_norm();
        let b = self.spec.norm_bias.then(|| self.push(name, BIAS, &[width], tp, Init::ZEROS));
        Norm::Layer { w, b, eps, from_one }
    }
    /// The norm of a branch's input, if the family has it.
    pub fn branch_norm(&mut self, has: bool, name: &str) -> Norm {
        if has { self.norm(name, self.spec.dim) } else { Norm::Absent }
    }
}

/// Gate, up and down of expert `e` of block `i`. None where a file holds them in another form than as matrices.
pub fn expert_names(spec: &Spec, i: usize, e: usize) -> Option<[String; 3]> {
    let &SparseNames { module, expert, stacked, transposed, .. } = &spec.arch.family().modules.sparse;
    if transposed || !spec.gated() || spec.experts.as_ref().is_none_or(|experts| experts.clamp.is_some()) {
        return None;
    }
    let block = format!("model.layers.{i}.");
    Some(match stacked.map(|whole| whole.map(|name| format!("{block}{name}"))) {
        None => expert.map(|kind| format!("{block}{module}.experts.{e}.{kind}.weight")),
        Some([gate_up, down]) => [half_name(&gate_up, e, 0), half_name(&gate_up, e, 1), slice_name(&down, e)],
    })
}
