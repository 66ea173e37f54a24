//! The optimizers over a store's shards. AdamW and SGD are one fused pass per shard; Muon's matrices are in `muon`.
//! Never reduces, clips or schedules: the gradient, its scale and the learning rate are inputs.
use super::muon::{self, Muon};
use super::owners::MuonMatrix;
use crate::base::{Category, DType, Error, Result};
use crate::comm::Mesh;
use crate::device::host::Staged;
use crate::device::ops::{AdamW, AdamWScalars, AdamWStep, Sgd, SgdScalars};
use crate::device::{Buf, Device, HostUpdate, Place, View, ViewMut};
use crate::nn::{Layout, Segment};
use crate::store::Store;
use crate::store::flat::{self, Run};

/// The update rule and its hyperparameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// Loshchilov & Hutter 2019: decay applies to the weight, not to the gradient.
    AdamW { beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
    /// PyTorch's form: decay is added to the gradient.
    Sgd { momentum: f32, weight_decay: f32 },
    /// `torch.optim.Muon` with `match_rms_adamw` for the matrices of blocks, AdamW for all other tensors. `steps`: of
    /// the iteration.
    Muon { momentum: f32, steps: usize, beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
}

/// AdamW with the binaries' defaults.
impl Default for Rule {
    fn default() -> Rule {
        Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

impl Rule {
    /// The name used in flags and checkpoints.
    pub fn name(&self) -> &'static str {
        match self {
            Rule::AdamW { .. } => "adamw",
            Rule::Sgd { .. } => "sgd",
            Rule::Muon { .. } => "muon",
        }
    }
    /// Names of the state tensors in checkpoints (PyTorch's names). Each is f32 and as long as the shard. Muon's
    /// momentum is the first; its matrices leave the second zero.
    pub fn state(&self) -> &'static [&'static str] {
        match *self {
            Rule::AdamW { .. } | Rule::Muon { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
        }
    }
    /// Number of constants per update that all elements share.
    fn constants(&self) -> usize {
        match self {
            Rule::AdamW { .. } => AdamWScalars::LEN,
            Rule::Sgd { .. } => SgdScalars::LEN,
            Rule::Muon { .. } => AdamWScalars::LEN + SgdScalars::LEN,
        }
    }
    /// Elements of [`Optimizer::constants`] for these layers.
    pub fn constants_of(&self, layouts: &[Layout]) -> usize {
        let mut kinds = Vec::new();
        layouts.iter().for_each(|layout| collect(layout, &mut kinds));
        self.constants() * kinds.len()
    }
}

/// Whether to decay, and the learning-rate factor. Tensors that agree in both share their constants.
type UpdateKind = (bool, f32);

/// Adds the kinds of a layout's trainable tensors to `kinds`.
fn collect(layout: &Layout, kinds: &mut Vec<UpdateKind>) {
    for segment in layout.segments.iter().filter(|s| s.trainable) {
        let kind = (segment.decay, segment.lr_scale);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
}

/// The parts of `runs`, of a shard that starts at `start` of its unit, outside of the segments that `of` selects, each
/// with the padding behind it.
fn without(runs: Vec<Run>, start: usize, layout: &Layout, of: impl Fn(&&Segment) -> bool) -> Vec<Run> {
    let ends = layout.segments.iter().map(|s| s.start).skip(1).chain([usize::MAX]);
    let selected = layout.segments.iter().zip(ends).filter(|(segment, _)| of(segment));
    let selected: Vec<_> = selected.map(|(s, end)| s.start.saturating_sub(start)..end.saturating_sub(start)).collect();
    let parts = runs.into_iter().flat_map(|run| {
        let starts = std::iter::once(run.range.start).chain(selected.iter().map(|s| s.end.max(run.range.start)));
        let ends = selected.iter().map(|s| s.start.min(run.range.end)).chain([run.range.end]);
        let parts: Vec<_> = starts.zip(ends).map(|(from, to)| from..to).filter(|part| !part.is_empty()).collect();
        parts.into_iter().map(move |range| Run { range, ..run.clone() })
    });
    parts.collect()
}

pub struct Optimizer {
    rule: Rule,
    /// Per unit: the state of its trainable shard, in the order of [`Rule::state`].
    states: Vec<Vec<Buf>>,
    /// Per unit: which weight decay and learning rate apply to each range of the shard, without Muon's matrices.
    runs: Vec<Vec<Run>>,
    muon: Option<Muon>,
    kinds: Vec<UpdateKind>,
    /// Per-kind constants of an update.
    constants: Vec<f32>,
    step: u64,
    /// Set if masters and state are offloaded.
    host: Option<HostUpdate>,
}

impl Optimizer {
    /// Allocates zeroed state for every trainable shard of `store`, in the same memory as its masters. Offloaded
    /// masters are updated by the device's host threads. Collective: every rank of the mesh calls it alike, with the
    /// layouts of the store.
    pub fn new(
        dev: &dyn Device,
        mesh: &Mesh,
        layouts: &[Layout],
        store: &mut dyn Store,
        rule: Rule,
    ) -> Result<Optimizer> {
        if matches!(rule, Rule::Muon { .. }) && mesh.sizes.ep > 1 {
            let what =
                format!("muon with ep {}: the owners of matrices do not know who has which experts", mesh.sizes.ep);
            return Err(Error::input(format!("{what}; use adamw, or ep 1")));
        }
        let mut states: Vec<Vec<Buf>> = (0..store.units()).map(|_| Vec::new()).collect();
        let mut runs = vec![Vec::new(); states.len()];
        let names = if matches!(rule, Rule::Muon { .. }) { muon::names(layouts) } else { Vec::new() };
        let (mut matrices, mut dtype, replicated) = (Vec::new(), DType::F32, store.replicated());
        let mut staged: Option<Staged> = None;
        let mut kinds = Vec::new();
        let on_device = |place: Place| place != Place::Mapped;
        store.for_each_shard(&mut |shard| {
            if let Some(grad) = &shard.grad {
                collect(shard.layout, &mut kinds);
                let len = shard.master.len();
                let host = !on_device(shard.master.place());
                if host {
                    let staged = staged.get_or_insert(Staged { owned: 0, grads: false, weights: None });
                    staged.owned += len;
                    staged.grads |= on_device(grad.place());
                    staged.weights = shard.param.as_ref().filter(|p| on_device(p.place())).map(ViewMut::dtype);
                }
                let state = rule.state().iter().map(|name| {
                    let _for = dev.meter().purpose(name);
                    match host {
                        true => dev.alloc_host(DType::F32, len),
                        false => dev.alloc(DType::F32, len, Category::Optimizer),
                    }
                });
                states[shard.unit] = state.collect::<Result<_>>()?;
                let whole = flat::runs(shard.layout, shard.start..shard.start + len);
                let own = |segment: &&Segment| names.contains(&segment.name);
                runs[shard.unit] = without(whole, shard.start, shard.layout, own);
                dtype = shard.param.as_ref().map_or(DType::F32, ViewMut::dtype);
                for segment in shard.layout.segments.iter().filter(own) {
                    let kind = kinds.iter().position(|kind| *kind == (segment.decay, segment.lr_scale)).unwrap_or(0);
                    matrices.push(MuonMatrix::new(shard.unit, segment, (!replicated).then_some(len), kind));
                }
            }
            Ok(())
        })?;
        let host = staged.map(|staged| HostUpdate::new(dev, &staged, dev.host_threads())).transpose()?;
        let constants = vec![0.0; rule.constants() * kinds.len()];
        let muon = match rule {
            Rule::Muon { momentum, steps, .. } => Some(Muon::new(dev, mesh, matrices, (momentum, steps), dtype)?),
            _ => None,
        };
        Ok(Optimizer { rule, states, runs, muon, kinds, constants, step: 0, host })
    }
    pub fn rule(&self) -> Rule {
        self.rule
    }
    /// Number of updates so far, which bias correction uses.
    pub fn steps(&self) -> u64 {
        self.step
    }
    /// Sets the update count when a run resumes.
    pub fn resume(&mut self, steps: u64) {
        self.step = steps;
    }
    /// State of this rank's trainable shard of `unit`, named as in [`Rule::state`], for checkpoints.
    pub fn state(&mut self, unit: usize) -> impl Iterator<Item = (&'static str, ViewMut<'_>)> {
        self.rule.state().iter().copied().zip(self.states[unit].iter_mut().map(Buf::view_mut))
    }

    /// Constants of the next update at learning rate `lr`. Copy them to the device and pass them to
    /// [`Optimizer::step`].
    pub fn constants(&mut self, lr: f32) -> &[f32] {
        let (rule, step) = (self.rule, self.step + 1);
        let each = self.constants.chunks_exact_mut(rule.constants());
        for ((decays, lr_scale), constants) in self.kinds.iter().zip(each) {
            let lr = lr * lr_scale;
            let decay = |weight_decay: f32| if *decays { weight_decay } else { 0.0 };
            match rule {
                Rule::AdamW { beta1, beta2, eps, weight_decay } => {
                    let h = AdamWStep { lr, beta1, beta2, eps, weight_decay: decay(weight_decay), step };
                    constants.copy_from_slice(bytemuck::cast_slice(&[h.scalars()]));
                }
                Rule::Sgd { momentum, weight_decay } => {
                    let h = SgdScalars { lr, momentum, weight_decay: decay(weight_decay) };
                    constants.copy_from_slice(bytemuck::cast_slice(&[h]));
                }
                Rule::Muon { beta1, beta2, eps, weight_decay, .. } => {
                    let (adamw, matrix) = constants.split_at_mut(AdamWScalars::LEN);
                    let h = AdamWStep { lr, beta1, beta2, eps, weight_decay: decay(weight_decay), step };
                    adamw.copy_from_slice(bytemuck::cast_slice(&[h.scalars()]));
                    let h = SgdScalars { lr, momentum: 0.0, weight_decay: decay(weight_decay) };
                    matrix.copy_from_slice(bytemuck::cast_slice(&[h]));
                }
            }
        }
        &self.constants
    }

    /// Updates every shard with the gradient times `scale[0]` (f32, from [`super::GradNorm`]) and also writes the
    /// compute-dtype copy. `constants` must be on the device. If the scale is not finite, nothing changes; if it is
    /// finite, the caller reports the update with [`Optimizer::count`].
    pub fn step(&mut self, dev: &dyn Device, store: &mut dyn Store, constants: View, scale: View) -> Result<()> {
        let (rule, kinds, numbers) = (self.rule, &self.kinds, &self.constants);
        if let Some(muon) = &mut self.muon {
            muon.step(dev, store, &mut self.states, (constants, rule.constants()), scale)?;
        }
        store.for_each_shard(&mut |mut shard| {
            let Some(grad) = shard.grad else { return Ok(()) }; // frozen
            let state = &mut self.states[shard.unit];
            for Run { range, decay, lr_scale } in &self.runs[shard.unit] {
                let kind = kinds.iter().position(|kind| *kind == (*decay, *lr_scale));
                let kind = kind.ok_or_else(|| Error::op("optimizer", "a run has an unknown kind"))?;
                let own = kind * rule.constants()..(kind + 1) * rule.constants();
                let g = grad.as_view().slice(range.clone());
                let p = shard.master.reborrow().slice(range.clone());
                let out = shard.param.as_mut().map(|out| out.reborrow().slice(range.clone()));
                let mut state = state.iter_mut().map(|s| s.view_mut().slice(range.clone()));
                let (h, host_h) = (constants.slice(own.clone()), &numbers[own]);
                match (rule, &mut self.host) {
                    (Rule::AdamW { .. } | Rule::Muon { .. }, host) => {
                        let (h, host_h) = (h.slice(0..AdamWScalars::LEN), &host_h[..AdamWScalars::LEN]);
                        let (Some(m), Some(v)) = (state.next(), state.next()) else {
                            return Err(Error::op("adamw", "AdamW needs two moments"));
                        };
                        let update = AdamW { h, scale, g, m, v, p, out };
                        match host {
                            None => dev.adamw(update)?,
                            Some(host) => host.adamw(dev, host_h, update)?,
                        }
                    }
                    (Rule::Sgd { .. }, host) => {
                        let update = Sgd { h, scale, g, m: state.next(), p, out };
                        match host {
                            None => dev.sgd(update)?,
                            Some(host) => host.sgd(dev, host_h, update)?,
                        }
                    }
                }
            }
            Ok(())
        })?;
        if let Some(host) = &mut self.host {
            host.finish(dev)?;
        }
        store.weights_updated()
    }

    /// Reports that the last update changed the weights.
    pub fn count(&mut self) {
        self.step += 1;
    }
}
