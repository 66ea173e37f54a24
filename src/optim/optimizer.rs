//! AdamW and SGD over a store's shards, one fused pass per shard. Never reduces, clips or schedules: the gradient, its
//! scale and the learning rate are inputs.
use crate::base::{Category, DType, Error, Result};
use crate::device::host::Staged;
use crate::device::ops::{AdamW, AdamWScalars, AdamWStep, Sgd, SgdScalars};
use crate::device::{Buf, Device, HostUpdate, Place, View, ViewMut};
use crate::nn::Layout;
use crate::store::Store;
use crate::store::flat::{self, Run};

/// The update rule and its hyperparameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// Loshchilov & Hutter 2019: decay applies to the weight, not to the gradient.
    AdamW { beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
    /// PyTorch's form: decay is added to the gradient.
    Sgd { momentum: f32, weight_decay: f32 },
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
        }
    }
    /// Names of the state tensors in checkpoints (PyTorch's names). Each is f32 and as long as the shard.
    pub fn state(&self) -> &'static [&'static str] {
        match *self {
            Rule::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
        }
    }
    /// Number of constants per update that all elements share.
    fn constants(&self) -> usize {
        match self {
            Rule::AdamW { .. } => AdamWScalars::LEN,
            Rule::Sgd { .. } => SgdScalars::LEN,
        }
    }
    /// Elements of [`Optimizer::constants`] for these layers.
    pub fn constants_of(&self, layouts: &[Layout]) -> usize {
        let mut kinds = Vec::new();
        layouts.iter().for_each(|layout| collect(layout, &mut kinds));
        self.constants() * kinds.len()
    }
}

/// State of a unit's trainable shard; empty if the whole unit is frozen.
#[derive(Default)]
struct UnitState {
    /// In the order of [`Rule::state`].
    state: Vec<Buf>,
    /// Which weight decay and learning rate apply to each range of the shard.
    runs: Vec<Run>,
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

pub struct Optimizer {
    rule: Rule,
    units: Vec<UnitState>,
    kinds: Vec<UpdateKind>,
    /// Per-kind constants of an update.
    constants: Vec<f32>,
    step: u64,
    /// Set if masters and state are offloaded.
    host: Option<HostUpdate>,
}

impl Optimizer {
    /// Allocates zeroed state for every trainable shard of `store`, in the same memory as its masters. Offloaded
    /// masters are updated by the device's host threads.
    pub fn new(dev: &dyn Device, store: &mut dyn Store, rule: Rule) -> Result<Optimizer> {
        let mut units: Vec<UnitState> = (0..store.units()).map(|_| UnitState::default()).collect();
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
                let runs = flat::runs(shard.layout, shard.start..shard.start + len);
                units[shard.unit] = UnitState { state: state.collect::<Result<_>>()?, runs };
            }
            Ok(())
        })?;
        let host = staged.map(|staged| HostUpdate::new(dev, &staged, dev.host_threads())).transpose()?;
        let constants = vec![0.0; rule.constants() * kinds.len()];
        Ok(Optimizer { rule, units, kinds, constants, step: 0, host })
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
        self.rule.state().iter().copied().zip(self.units[unit].state.iter_mut().map(Buf::view_mut))
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
            }
        }
        &self.constants
    }

    /// Updates every shard with the gradient times `scale[0]` (f32, from [`super::GradNorm`]) and also writes the
    /// compute-dtype copy. `constants` must be on the device. If the scale is not finite, nothing changes; if it is
    /// finite, the caller reports the update with [`Optimizer::count`].
    pub fn step(&mut self, dev: &dyn Device, store: &mut dyn Store, constants: View, scale: View) -> Result<()> {
        let (rule, kinds, numbers) = (self.rule, &self.kinds, &self.constants);
        store.for_each_shard(&mut |mut shard| {
            let Some(grad) = shard.grad else { return Ok(()) }; // frozen
            let UnitState { state, runs } = &mut self.units[shard.unit];
            for Run { range, decay, lr_scale } in runs {
                let kind = kinds.iter().position(|kind| *kind == (*decay, *lr_scale));
                let kind = kind.ok_or_else(|| Error::op("optimizer", "a run has an unknown kind"))?;
                let own = kind * rule.constants()..(kind + 1) * rule.constants();
                let g = grad.as_view().slice(range.clone());
                let p = shard.master.reborrow().slice(range.clone());
                let out = shard.param.as_mut().map(|out| out.reborrow().slice(range.clone()));
                let mut state = state.iter_mut().map(|s| s.view_mut().slice(range.clone()));
                let (h, host_h) = (constants.slice(own.clone()), &numbers[own]);
                match (rule, &mut self.host) {
                    (Rule::AdamW { .. }, host) => {
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
