//! Low-rank adapters (Hu et al. 2022, "LoRA"): a frozen matrix W is trained as W + (alpha / rank) B A. Never holds a
//! buffer.
//!
//! Names, shapes and initial values follow the PEFT library: `...q_proj.weight` (out, in) gets
//! `...q_proj.lora_A.weight` (rank, in), uniform within ±1 / sqrt(in), and `...q_proj.lora_B.weight` (out, rank), zero.
//! So the model initially computes the same function. With dropout, a module's adapter reads a masked copy of its
//! input.
use super::context::AdapterDropout;
use super::layout::{Init, Layout, Segment, Tp};
use super::linear::{Adapter, Linear};
use crate::base::{Error, Result};
use xxhash_rust::xxh3::xxh3_64;

/// Which modules are adapted, and how.
#[derive(Clone, PartialEq, Debug)]
pub struct Lora {
    pub rank: usize,
    /// The adapter's output is scaled by alpha / rank.
    pub alpha: f32,
    /// Dropout probability of the adapter's input in training, in [0, 1).
    pub dropout: f32,
    /// Last parts of module names (`q_proj`), or `all-linear`.
    pub targets: Vec<String>,
}

/// PEFT's keyword for every linear layer but the head.
pub const ALL_LINEAR: &str = "all-linear";
/// The head of a reward model.
pub const SCORE: &str = "score.weight";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";

/// Whether the segment belongs to an adapter.
pub fn is_adapter(segment: &Segment) -> bool {
    segment.name.ends_with(A) || segment.name.ends_with(B)
}

/// Whether the segment is trained, and saved, with adapters: theirs, and the score head of a reward model.
pub fn goes_with_adapters(segment: &Segment) -> bool {
    is_adapter(segment) || segment.name == SCORE
}

/// Whether the segment is a matrix that an adapter can be attached to: not of experts, nor of their routers.
fn is_target(segment: &Segment) -> bool {
    let sparse = [".experts.", ".shared_expert.", ".shared_expert_gate.", "mlp.gate.", "block_sparse_moe."];
    segment.shape.len() == 2 && !sparse.iter().any(|part| segment.name.contains(part))
}

/// Whether the model is frozen with adapters; then only adapters are saved.
pub fn has_adapters(layouts: &[Layout]) -> bool {
    layouts.iter().flat_map(|l| &l.segments).any(is_adapter)
}

/// The tp distribution of adapters A and B of a matrix: one is sharded along the same side as the matrix. The other is
/// replicated, and its gradient is the sum over ranks.
fn adapter_tp(matrix: Tp) -> (Tp, Tp) {
    match matrix {
        Tp::Same => (Tp::Same, Tp::Same),
        Tp::Summed => (Tp::Summed, Tp::Summed),
        cut @ Tp::Cut { dim: 0, .. } => (Tp::Summed, cut),
        cut @ Tp::Cut { .. } => (cut, Tp::Summed),
    }
}

impl Lora {
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }
    /// The module name of the matrix `segment`, if it is a target.
    fn module<'a>(&self, segment: &'a Segment) -> Option<&'a str> {
        let module = segment.name.strip_suffix(".weight").filter(|_| is_target(segment))?;
        let last = module.rsplit('.').next().unwrap_or(module);
        self.targets.iter().any(|t| t == ALL_LINEAR || t == last).then_some(module)
    }
    /// Freezes the model, except for the score head of a reward model, and appends the adapters' segments to those of
    /// each block.
    pub fn apply(&self, layouts: &mut [Layout]) -> Result<()> {
        if self.rank == 0 || !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(Error::input(format!(
                "lora: rank {} and alpha {}: both must be greater than 0",
                self.rank, self.alpha
            )));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::input(format!("lora: dropout {} is not in [0, 1)", self.dropout)));
        }
        let (root, blocks) = layouts.split_first_mut().ok_or_else(|| Error::op("lora", "the model has no layers"))?;
        root.segments.iter_mut().for_each(|s| s.trainable = goes_with_adapters(s));
        let mut known = Vec::new();
        blocks.iter_mut().flat_map(|l| &mut l.segments).for_each(|s| s.trainable = false);
        for layout in blocks.iter_mut().filter(|layout| !layout.experts) {
            known = layout.segments.iter().filter(|s| is_target(s)).map(|s| s.name.clone()).collect();
            let adapted: Vec<(String, Segment)> =
                layout.segments.iter().filter_map(|s| Some((self.module(s)?.to_string(), s.clone()))).collect();
            for (module, matrix) in adapted {
                let (outputs, inputs) = (matrix.shape[0], matrix.shape[1]);
                let start = Init::Uniform((matrix.global_shape()[1] as f32).sqrt().recip());
                let (a, b) = adapter_tp(matrix.tp);
                layout.push_part(format!("{module}{A}"), &[self.rank, inputs], a, true, start);
                layout.push_part(format!("{module}{B}"), &[outputs, self.rank], b, true, Init::Constant(0.0));
            }
        }
        let last = |name: &String| name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default().to_string();
        let known: Vec<String> = known.iter().map(last).collect();
        match self.targets.iter().find(|t| *t != ALL_LINEAR && !known.contains(t)) {
            None if self.targets.is_empty() => Err(Error::input(format!(
                "lora: target_modules is empty: use {ALL_LINEAR}, or some of {}",
                known.join(", ")
            ))),
            None => Ok(()),
            Some(target) => Err(Error::input(format!(
                "lora: target_modules names {target}, which no block has; choose from {} and {ALL_LINEAR}",
                known.join(", ")
            ))),
        }
    }
    /// Attaches the adapter of the weight in `layout` to `linear`, if there is one. `masks`: hashed names of the
    /// modules with dropout so far.
    pub(super) fn adapt(&self, linear: &mut Linear, layout: &Layout, masks: &mut Vec<u64>) {
        let Some(module) = self.module(&layout.segments[linear.weight]) else { return };
        let find = |suffix: &str| layout.segments.iter().position(|s| s.name.strip_suffix(suffix) == Some(module));
        if let (Some(a), Some(b)) = (find(A), find(B)) {
            let dropout = (self.dropout > 0.0).then(|| {
                masks.push(xxh3_64(module.as_bytes()));
                let first = match layout.segments[linear.weight].tp {
                    Tp::Cut { dim: 1, over, whole } => over.share(whole).start,
                    _ => 0,
                };
                AdapterDropout { p: self.dropout, key: masks.len() - 1, first }
            });
            linear.adapter = Some(Adapter { a, b, rank: self.rank, scale: self.scale(), dropout });
        }
    }
}
