//! The optimizers over a store's shards. AdamW and SGD are one fused pass per shard; Muon's matrices are in `muon`.
//! Never reduces, clips or schedules: the gradient, its scale and the learning rate are inputs.
use super::moments::{Moments, States, StoredSlice, UnitMoments, UpdateRun};
use super::muon::Muon;
use super::owners::{self, MuonMatrix};
use crate::base::{DType, Error, Result};
use crate::comm::Mesh;
use crate::device::host::Staged;
use crate::device::ops::{AdamW, AdamWScalars, AdamWStep, Sgd, SgdScalars};
use crate::device::{Device, HostUpdate, Place, View, ViewMut};
use crate::nn::{Layout, Segment, Storage};
use crate::store::{PartId, Store};
use std::collections::HashSet;
use std::ops::Range;

/// The update rule and its hyperparameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// Loshchilov & Hutter 2019: decay applies to the weight, not to the gradient.
    /// `moments`: how they are stored: f32, bf16, or u8 in blocks.
    AdamW { beta1: f32, beta2: f32, eps: f32, weight_decay: f32, moments: DType },
    /// PyTorch's form: decay is added to the gradient.
    Sgd { momentum: f32, weight_decay: f32 },
    /// `torch.optim.Muon` with `match_rms_adamw` for the matrices of blocks, AdamW for all other tensors. `steps`: of
    /// the iteration.
    Muon { momentum: f32, steps: usize, beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
}

/// AdamW with the binaries' defaults.
impl Default for Rule {
    fn default() -> Rule {
        Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, moments: DType::F32 }
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
    /// What it keeps of each tensor, under PyTorch's names. Muon's momentum is the first.
    pub fn state(&self) -> Moments {
        let all = |names| Moments { names, dtype: DType::F32, without_matrices: false };
        match *self {
            Rule::AdamW { moments, .. } => Moments { dtype: moments, ..all(&["exp_avg", "exp_avg_sq"]) },
            Rule::Muon { .. } => Moments { without_matrices: true, ..all(&["exp_avg", "exp_avg_sq"]) },
            Rule::Sgd { momentum: 0.0, .. } => all(&[]),
            Rule::Sgd { .. } => all(&["momentum_buffer"]),
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

fn update_kind(segment: &Segment) -> UpdateKind {
    (segment.decay, segment.lr_scale)
}

/// Adds the kinds of a layout's trainable tensors to `kinds`.
fn collect(layout: &Layout, kinds: &mut Vec<UpdateKind>) {
    for segment in layout.segments.iter().filter(|s| s.is_trained()) {
        let kind = update_kind(segment);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
}

pub struct Optimizer {
    rule: Rule,
    /// Per unit, by [`PartId::buffer`]: of its trainable shards.
    states: Vec<States>,
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
    /// masters are updated by the device's host threads. `seed`: for stochastic rounding. Collective: every rank of the
    /// mesh calls it alike, with the layouts of the store.
    pub fn new(
        dev: &dyn Device,
        mesh: &Mesh,
        layouts: &[Layout],
        store: &mut dyn Store,
        rule: Rule,
        seed: u64,
    ) -> Result<Optimizer> {
        let mut states: Vec<States> = (0..store.units()).map(|_| States::default()).collect();
        let matrix_names = if matches!(rule, Rule::Muon { .. }) { owners::names(layouts) } else { HashSet::new() };
        let (mut matrices, mut dtype, replicated) = (Vec::new(), DType::F32, store.replicated());
        let mut staged: Option<Staged> = None;
        let mut kinds = Vec::new();
        let on_device = |place: Place| place != Place::Mapped;
        store.for_each_shard(&mut |shard| {
            if let Some(grad) = &shard.grad {
                collect(shard.layout, &mut kinds);
                let len = shard.master.len();
                if shard.master.dtype() != DType::F32 && !matches!(rule, Rule::AdamW { .. }) {
                    let what = format!("masters: {} rounds no weights stochastically; keep them in f32", rule.name());
                    return Err(Error::input(what));
                }
                if !on_device(shard.master.place()) {
                    let staged = staged.get_or_insert(Staged { owned: 0, grads: false, weights: None });
                    staged.owned += len;
                    staged.grads |= on_device(grad.place());
                    staged.weights = shard.param.as_ref().filter(|p| on_device(p.place())).map(ViewMut::dtype);
                }
                let kind = |segment: &Segment| kinds.iter().position(|k| *k == update_kind(segment)).unwrap_or(0);
                let is_matrix = |segment: &Segment| matrix_names.contains(&segment.name);
                let runs = UpdateRun::all(&shard, &rule.state(), seed, &kind, &is_matrix);
                let part = shard.part();
                states[part.unit][part.buffer] = UnitMoments::new(dev, &rule.state(), &shard, runs)?;
                let coded = shard.layout.segments.iter().any(|segment| matches!(segment.storage, Storage::Coded(_)));
                let alone = if coded { DType::Bf16 } else { DType::F32 };
                dtype = shard.param.as_ref().map_or(alone, ViewMut::dtype);
                for segment in shard.layout.segments.iter().filter(|segment| is_matrix(segment)) {
                    matrices.push(MuonMatrix::new(part, segment, (!replicated).then_some(len), kind(segment)));
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
        Ok(Optimizer { rule, states, muon, kinds, constants, step: 0, host })
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
    /// The states of elements `range`, all of one tensor, of this rank's shard of the trainable `part`, each with its
    /// index in [`Rule::state`]. For checkpoints.
    pub fn state(&mut self, part: PartId, range: Range<usize>) -> impl Iterator<Item = (usize, StoredSlice<'_>)> {
        self.states[part.unit][part.buffer].of(range)
    }
    /// All states of this rank's shard of the trainable `part`.
    pub fn states(&mut self, part: PartId) -> impl Iterator<Item = ViewMut<'_>> {
        self.states[part.unit][part.buffer].views()
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
                Rule::AdamW { beta1, beta2, eps, weight_decay, .. } => {
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
        let (rule, numbers) = (self.rule, &self.constants);
        if let Some(muon) = &mut self.muon {
            muon.step(dev, store, &mut self.states, (constants, rule.constants()), scale)?;
        }
        store.for_each_shard(&mut |mut shard| {
            let PartId { unit, buffer } = shard.part();
            let Some(grad) = shard.grad else { return Ok(()) }; // frozen
            let UnitMoments { bufs, in_blocks, runs, whole_first } = &mut self.states[unit][buffer];
            for UpdateRun { range, state, in_blocks: blocks, kind, at } in runs.iter() {
                let own = kind * rule.constants()..(kind + 1) * rule.constants();
                let g = grad.as_view().slice(range.clone());
                let p = shard.master.reborrow().slice(range.clone());
                let out = shard.param.as_mut().map(|out| out.reborrow().slice(range.clone()));
                let places = [if *whole_first { range } else { state }, state];
                let bufs = if *blocks { &mut *in_blocks } else { &mut *bufs };
                let mut state = bufs.iter_mut().zip(places).map(|(s, place)| s.slice(place.clone()));
                let (h, host_h) = (constants.slice(own.clone()), &numbers[own]);
                match (rule, &mut self.host) {
                    (Rule::AdamW { .. } | Rule::Muon { .. }, host) => {
                        let (h, host_h) = (h.slice(0..AdamWScalars::LEN), &host_h[..AdamWScalars::LEN]);
                        let (Some(m), Some(v)) = (state.next(), state.next()) else {
                            return Err(Error::op("adamw", "AdamW needs two moments"));
                        };
                        let absmax = m.absmax.zip(v.absmax).map(|((of_m, _), (of_v, _))| [of_m, of_v]);
                        let update = AdamW { h, scale, g, m: m.values, v: v.values, p, out, absmax, at: *at };
                        match host {
                            None => dev.adamw(update)?,
                            Some(host) => host.adamw(dev, host_h, update)?,
                        }
                    }
                    (Rule::Sgd { .. }, host) => {
                        let update = Sgd { h, scale, g, m: state.next().map(|m| m.values), p, out };
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
