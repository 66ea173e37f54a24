//! AdamW and SGD over the pieces of a store, one fused pass a piece. Never reduces, clips or schedules: gradient, scale
//! and learning rate come in finished.
use crate::base::{Category, DType, Error, Result};
use crate::device::host::Staged;
use crate::device::{self, Buf, Device, HostUpdate, Place, View, ViewMut};
use crate::store::flat::{self, Run};
use crate::store::{Offload, Store};

/// The update and its constants.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// Loshchilov & Hutter 2019: decay is applied to the weight, not to the gradient.
    AdamW { beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
    /// PyTorch's form, with decay added to the gradient.
    Sgd { momentum: f32, weight_decay: f32 },
}

impl Rule {
    /// Names of the state tensors, by which checkpoints call them (PyTorch's names). Each is f32, as long as the piece.
    pub fn state(&self) -> &'static [&'static str] {
        match *self {
            Rule::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
        }
    }
    /// Bytes of state for `owned` elements, padding included.
    pub fn planned(&self, owned: usize) -> (Category, usize) {
        (Category::Optimizer, self.state().len() * owned * DType::F32.size())
    }
    /// The same where that is offloaded, and what the update takes there.
    pub fn planned_host(&self, owned: usize, offload: Offload, dtype: DType) -> (Category, usize) {
        let weights = (offload < Offload::Parameters).then_some(dtype);
        let staged = Staged { owned, grads: offload < Offload::Gradients, weights };
        (Category::Host, self.planned(owned).1 + staged.planned())
    }
}

/// Of a unit's trainable piece; empty where all of it is frozen.
#[derive(Default)]
struct Unit {
    /// In the order of [`Rule::state`].
    state: Vec<Buf>,
    /// Which decay and learning rate apply where in the piece.
    runs: Vec<Run>,
}

pub struct Optimizer {
    rule: Rule,
    units: Vec<Unit>,
    step: u64,
    /// Where masters and state are offloaded.
    host: Option<HostUpdate>,
}

impl Optimizer {
    /// Allocates zeroed state beside every trainable piece of `store`: where its masters are.
    pub fn new(dev: &dyn Device, store: &mut dyn Store, rule: Rule) -> Result<Optimizer> {
        let mut units: Vec<Unit> = (0..store.units()).map(|_| Unit::default()).collect();
        let mut staged: Option<Staged> = None;
        let on_device = |place: Place| place != Place::Mapped;
        store.for_each_piece(&mut |piece| {
            if let Some(grad) = &piece.grad {
                let len = piece.master.len();
                let host = !on_device(piece.master.place());
                if host {
                    let staged = staged.get_or_insert(Staged { owned: 0, grads: false, weights: None });
                    staged.owned += len;
                    staged.grads |= on_device(grad.place());
                    staged.weights = piece.param.as_ref().filter(|p| on_device(p.place())).map(ViewMut::dtype);
                }
                let state = rule.state().iter().map(|name| {
                    let _for = dev.meter().purpose(name);
                    match host {
                        true => dev.alloc_host(DType::F32, len),
                        false => dev.alloc(DType::F32, len, Category::Optimizer),
                    }
                });
                let runs = flat::runs(piece.layout, piece.start..piece.start + len);
                units[piece.unit] = Unit { state: state.collect::<Result<_>>()?, runs };
            }
            Ok(())
        })?;
        let host = staged.map(|staged| HostUpdate::new(dev, &staged)).transpose()?;
        Ok(Optimizer { rule, units, step: 0, host })
    }
    pub fn rule(&self) -> Rule {
        self.rule
    }
    /// Updates done so far: bias correction counts them.
    pub fn steps(&self) -> u64 {
        self.step
    }
    /// Continues a run that had done so many updates.
    pub fn resume(&mut self, steps: u64) {
        self.step = steps;
    }
    /// The state of the trainable piece of `unit` that this rank owns, named as in [`Rule::state`]: what checkpoints write
    /// and read.
    pub fn state(&mut self, unit: usize) -> impl Iterator<Item = (&'static str, ViewMut<'_>)> {
        self.rule.state().iter().copied().zip(self.units[unit].state.iter_mut().map(Buf::view_mut))
    }

    /// One update of every piece with the gradient times `scale[0]` (f32, from [`super::GradNorm`]); also writes the copy
    /// in the compute dtype.
    pub fn step(&mut self, dev: &dyn Device, store: &mut dyn Store, lr: f32, scale: View) -> Result<()> {
        let (rule, step) = (self.rule, self.step + 1);
        store.for_each_piece(&mut |mut piece| {
            let Some(grad) = piece.grad else { return Ok(()) }; // frozen
            let Unit { state, runs } = &mut self.units[piece.unit];
            for Run { range, decay, lr_scale } in runs {
                let lr = lr * *lr_scale;
                let decay = |weight_decay: f32| if *decay { weight_decay } else { 0.0 };
                let g = grad.as_view().slice(range.clone());
                let p = piece.master.reborrow().slice(range.clone());
                let out = piece.param.as_mut().map(|out| out.reborrow().slice(range.clone()));
                let mut state = state.iter_mut().map(|s| s.view_mut().slice(range.clone()));
                match rule {
                    Rule::AdamW { beta1, beta2, eps, weight_decay } => {
                        let (Some(m), Some(v)) = (state.next(), state.next()) else {
                            return Err(Error::op("adamw", "two moments are needed"));
                        };
                        let h = device::AdamW { lr, beta1, beta2, eps, weight_decay: decay(weight_decay), step };
                        match &mut self.host {
                            None => dev.adamw(&h, scale, g, m, v, p, out)?,
                            Some(host) => host.adamw(dev, &h, scale, g, m, v, p, out)?,
                        }
                    }
                    Rule::Sgd { momentum, weight_decay } => {
                        let h = device::Sgd { lr, momentum, weight_decay: decay(weight_decay) };
                        match &mut self.host {
                            None => dev.sgd(&h, scale, g, state.next(), p, out)?,
                            Some(host) => host.sgd(dev, &h, scale, g, state.next(), p, out)?,
                        }
                    }
                }
            }
            Ok(())
        })?;
        if let Some(host) = &mut self.host {
            host.finish(dev)?;
        }
        self.step = step;
        store.weights_updated()
    }
}
