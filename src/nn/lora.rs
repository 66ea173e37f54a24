//! Low-rank adapters (Hu et al. 2022, "LoRA"): a frozen matrix W is trained as W + (alpha / rank) B A. Never holds a
//! buffer.
//!
//! Names, shapes and initial values follow the PEFT library: `...q_proj.weight` (out, in) gets
//! `...q_proj.lora_A.weight` (rank, in), uniform within ±1 / sqrt(in), and `...q_proj.lora_B.weight` (out, rank), zero.
//! So the model initially computes the same function. With dropout, a module's adapter reads a masked copy of its
//! input. Each expert's matrices are modules of their own, as in transformers 4; routers have no adapters.
use super::context::AdapterDropout;
use super::grouped::{GroupedAdapter, GroupedLinear};
use super::layout::{Init, Layout, Segment, Storage, Tp};
use super::linear::{Adapter, Linear};
use super::store::Stride;
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
    /// Ends of the paths of modules (`q_proj`, `layers.0.self_attn.q_proj`), or `all-linear`.
    pub targets: Vec<String>,
}

/// PEFT's keyword for every linear layer but the head.
pub const ALL_LINEAR: &str = "all-linear";
/// The head of a reward model.
pub const SCORE: &str = "score.weight";
/// The name of the matrix of logits, if it is not the embedding's.
pub const HEAD: &str = "lm_head.weight";
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

/// Takes the adapters out of the layouts; the other segments keep their numbers, since adapters follow them.
pub(super) fn remove(layouts: &mut [Layout]) {
    for layout in layouts {
        layout.segments.retain(|segment| !is_adapter(segment));
        layout.place_again();
    }
}

/// Whether the segment is the matrix of a router.
fn is_router(segment: &Segment) -> bool {
    const ROUTERS: [&str; 10] = [
        ".mixer.gate.weight",
        ".mlp.gate.weight",
        ".mlp.gate.wg.weight",
        ".mlp.router.weight",
        ".mlp.router.gate.weight",
        ".router.proj.weight",
        ".feed_forward.gate.weight",
        ".block_sparse_moe.gate.weight",
        ".block_sparse_moe.router.layer.weight",
        ".shared_expert_gate.weight",
    ];
    ROUTERS.iter().any(|end| segment.name.ends_with(end))
}

/// The last part of the module's name, if an adapter can be attached to the segment.
pub fn linear_module(segment: &Segment) -> Option<&str> {
    let is_matrix = segment.shape.len() == 2 && segment.adaptable;
    let module = segment.name.strip_suffix(".weight").filter(|_| is_matrix)?;
    module.rsplit('.').next().filter(|name| !is_router(segment) && (!is_of_root(segment) || *name == ROOT_MODULE))
}
/// The matrix of the root that is no embedding and no head.
const ROOT_MODULE: &str = "per_layer_model_projection";
fn is_of_root(segment: &Segment) -> bool {
    ![".layers.", ".h."].iter().any(|of_block| segment.name.contains(of_block))
}

/// Names of all modules that adapters can be attached to.
pub fn linear_modules(layouts: &[Layout]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in layouts.iter().flat_map(|l| &l.segments).filter_map(linear_module) {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_string());
        }
    }
    names
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
        cut @ (Tp::Cut { dim: 0, .. } | Tp::Parts { .. }) => (Tp::Summed, cut),
        cut @ Tp::Cut { .. } => (cut, Tp::Summed),
    }
}

/// Whether `end` is the path `module` or its end, from a dot on, as PEFT matches names.
pub fn is_path_end(end: &str, module: &str) -> bool {
    module.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The module name of the matrix `segment`, if `target` names it.
fn named<'a>(target: &str, segment: &'a Segment) -> Option<&'a str> {
    let module = linear_module(segment).and_then(|_| segment.name.strip_suffix(".weight"))?;
    (target == ALL_LINEAR || is_path_end(target, module)).then_some(module)
}

impl Lora {
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }
    /// The module name of the matrix `segment`, if it is a target.
    fn module<'a>(&self, segment: &'a Segment) -> Option<&'a str> {
        self.targets.iter().find_map(|target| named(target, segment))
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
        let root = layouts.first_mut().ok_or_else(|| Error::op("lora", "the model has no layers"))?;
        let kept = |s: &Segment| if goes_with_adapters(s) { Storage::Trained } else { Storage::Frozen };
        root.segments.iter_mut().for_each(|s| s.storage = kept(s));
        let (known, routes) = (linear_modules(layouts), layouts.iter().flat_map(|l| &l.segments).any(is_router));
        let names_none =
            |target: &&String| !layouts.iter().flat_map(|l| &l.segments).any(|s| named(target, s).is_some());
        let unknown = self.targets.iter().find(names_none);
        let unloadable: Vec<String> =
            layouts.iter().flat_map(|l| &l.segments).filter(|s| !s.adaptable).map(|s| s.name.clone()).collect();
        for (i, layout) in layouts.iter_mut().enumerate() {
            if i > 0 {
                layout.segments.iter_mut().for_each(|s| s.storage = Storage::Frozen);
            }
            let adapted: Vec<(String, Segment)> =
                layout.segments.iter().filter_map(|s| Some((self.module(s)?.to_string(), s.clone()))).collect();
            if let Some((module, _)) = adapted.first().filter(|_| layout.experts && self.dropout > 0.0) {
                return Err(Error::input(format!(
                    "lora: dropout {} with adapters of experts, such as {module}, is not supported: use dropout 0, or \
                     target_modules without {}",
                    self.dropout,
                    module.rsplit('.').next().unwrap_or_default()
                )));
            }
            for (module, matrix) in adapted {
                let (outputs, inputs) = (matrix.shape[0], matrix.shape[1]);
                let start = Init::Uniform((matrix.global_shape()[1] as f32).sqrt().recip());
                let (a, b) = adapter_tp(matrix.tp);
                let parts = [(A, vec![self.rank, inputs], a, start), (B, vec![outputs, self.rank], b, Init::ZEROS)];
                for (suffix, shape, tp, init) in parts {
                    let name = format!("{module}{suffix}");
                    layout.place(Segment { name, shape, tp, init, storage: Storage::Trained, ..matrix.clone() });
                }
            }
        }
        match unknown {
            None if self.targets.is_empty() => Err(Error::input(format!(
                "lora: target_modules is empty: use {ALL_LINEAR}, or some of {}",
                known.join(", ")
            ))),
            None => Ok(()),
            Some(target)
                if routes
                    && ["gate", "wg", "layer", "router", "proj", "shared_expert_gate"].contains(&target.as_str()) =>
            {
                Err(Error::input(format!(
                    "lora: target_modules names {target}, a router, whose adapters are not supported; choose from {} and \
                     {ALL_LINEAR}",
                    known.join(", ")
                )))
            }
            Some(target) if unloadable.iter().any(|name| name.ends_with(&format!(".{target}.weight"))) => {
                Err(Error::input(format!(
                    "lora: target_modules names {target}, but PEFT loads no adapters of it in Mamba layers of this family; \
                     choose from {} and {ALL_LINEAR}",
                    known.join(", ")
                )))
            }
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
            linear.adapter = Some(Adapter { a, b, rank: self.rank, scale: self.scale(), dropout, kept: None });
        }
    }
    /// Attaches the adapters of all experts' matrices in `layout` to `linear`, if there are any.
    pub(super) fn adapt_experts(&self, linear: &mut GroupedLinear, layout: &Layout) {
        let count = linear.weight.count;
        let find = |e: usize, suffix: &str| {
            let module = self.module(&layout.segments[linear.weight.segment(e)])?;
            layout.segments.iter().position(|s| s.name.strip_suffix(suffix) == Some(module))
        };
        let all = |suffix: &str| {
            let first = find(0, suffix)?;
            let step = if count > 1 { find(1, suffix)? - first } else { 0 };
            Some(Stride { first, step, count })
        };
        if let (Some(a), Some(b)) = (all(A), all(B)) {
            linear.adapter = Some(GroupedAdapter { a, b, rank: self.rank, scale: self.scale() });
        }
    }
}
