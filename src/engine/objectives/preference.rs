//! A micro-batch of judged answers, or of rollouts: the reference's log-probabilities first, then the loss of the
//! policy's. Never runs backward, and never reduces over data-parallel ranks: the engine does.
use super::objective::Objective;
use super::reference::{FrozenModel, ReferenceModel};
use super::rollouts::Rollouts;
use super::sequences::Sequences;
use super::sums::{PreferenceSums, SUMS, StepMeans};
use crate::base::{Error, Result};
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::Device;
use crate::engine::staging::{BatchStaging, StagedBatch};
use crate::nn::{Batch, Decoder, ParamStore, Scored, SequenceLoss, Split, Tuning, Workspace};
use crate::store::{Store, Strategy};
use std::sync::Arc;

/// The trained model, for passes without gradients.
pub(in crate::engine) struct Policy<'a> {
    pub dev: &'a dyn Device,
    pub decoder: &'a Decoder,
    pub store: &'a mut dyn ParamStore,
    pub ws: &'a mut Workspace,
}

impl Policy<'_> {
    fn score(&mut self, batch: &Batch, loss: &mut dyn SequenceLoss, base: bool) -> Result<()> {
        self.decoder.evaluate(self.dev, self.store, batch, self.ws, Some(Scored { loss, base }))
    }
}

/// What the trained model is compared with.
enum Compared {
    Nothing,
    /// The trained model without its adapters.
    Base,
    Frozen(Box<FrozenModel>),
    /// Log-probabilities that come with the micro-batches.
    Given,
}

/// Turns log-probabilities into weights.
enum Judge {
    Sequences(Box<Sequences>),
    Rollouts(Box<Rollouts>),
}

pub(in crate::engine) struct PreferenceLoss {
    judge: Judge,
    reference: Compared,
}

impl PreferenceLoss {
    /// A rank has the part of the reference model that is its `split`. `tuning`: of the model whose base a frozen one
    /// is. `tokens`: the most in a micro-batch.
    pub fn new(
        dev: &Arc<dyn Device>,
        mesh: &Mesh,
        objective: Objective,
        (reference, tuning): (&ReferenceModel, &Tuning),
        split: &Split,
        strategy: &dyn Strategy,
        tokens: usize,
    ) -> Result<PreferenceLoss> {
        let own = tokens.div_ceil(mesh.sizes.sp);
        let reference = match reference {
            _ if !objective.compares() => Compared::Nothing,
            ReferenceModel::Base => Compared::Base,
            ReferenceModel::Frozen(spec) => {
                let frozen = FrozenModel::new(dev.clone(), mesh, (spec, tuning), split, strategy, own)?;
                let decoder = frozen.decoder.at_temperature(objective.temperature());
                Compared::Frozen(Box::new(FrozenModel { decoder, ..frozen }))
            }
            ReferenceModel::Given => Compared::Given,
        };
        let judge = match objective {
            Objective::Grpo(grpo) => Judge::Rollouts(Box::new(Rollouts::new(&**dev, mesh, grpo, own)?)),
            _ => Judge::Sequences(Box::new(Sequences::new(&**dev, mesh, objective, tokens)?)),
        };
        Ok(PreferenceLoss { judge, reference })
    }
    /// The frozen reference and its store, to load weights into.
    pub fn reference(&mut self) -> Option<(&Decoder, &mut dyn Store)> {
        let Compared::Frozen(reference) = &mut self.reference else { return None };
        Some((&reference.decoder, &mut *reference.store))
    }

    /// Starts a micro-batch with the reference's log-probabilities. Gradients will be multiplied by `scale`.
    pub fn begin(
        &mut self,
        policy: &mut Policy,
        host: &MicroBatch,
        staged: &StagedBatch,
        scale: f64,
    ) -> Result<&mut dyn SequenceLoss> {
        let PreferenceLoss { judge, reference } = self;
        match judge {
            Judge::Sequences(sequences) => sequences.begin(policy.dev, host, staged.local, scale)?,
            Judge::Rollouts(rollouts) => rollouts.begin(host, staged.local, scale)?,
        }
        match (reference, &mut *judge) {
            (Compared::Nothing, _) => return Ok(judge.loss()),
            (Compared::Given, Judge::Sequences(sequences)) => {
                sequences.give_reference(host)?;
                return Ok(judge.loss());
            }
            (Compared::Given, Judge::Rollouts(_)) => {
                return Err(Error::op("reference", "log-probabilities of tokens are not given, but computed"));
            }
            (Compared::Base, judge) => policy.score(&staged.batch, judge.loss(), true)?,
            (Compared::Frozen(reference), judge) => reference.score(policy.dev, &staged.batch, judge.loss())?,
        }
        match judge {
            Judge::Sequences(sequences) => sequences.keep_reference(policy.dev)?,
            Judge::Rollouts(rollouts) => rollouts.keep_reference(policy.dev)?,
        }
        Ok(judge.loss())
    }
    /// Adds the log-ratios of the micro-batch's mismatched answers to the totals, if it has any.
    pub fn diverge(&mut self, policy: &mut Policy, staging: &mut BatchStaging, host: &MicroBatch) -> Result<()> {
        let Some(mismatched) = &host.mismatched else { return Ok(()) };
        let staged = staging.upload(policy.dev, mismatched)?;
        let loss = self.begin(policy, mismatched, &staged, 0.0)?;
        policy.score(&staged.batch, loss, false)?;
        self.sequences()?.diverge(policy.dev)
    }
    /// Forward only.
    pub fn evaluate(&mut self, policy: &mut Policy, staging: &mut BatchStaging, host: &MicroBatch) -> Result<()> {
        self.diverge(policy, staging, host)?;
        let staged = staging.upload(policy.dev, host)?;
        let loss = self.begin(policy, host, &staged, 0.0)?;
        policy.score(&staged.batch, loss, false)?;
        self.sequences()?.evaluate(policy.dev)
    }
    /// Judges what was evaluated since the last call.
    pub fn end_evaluation(&mut self) {
        if let Judge::Sequences(sequences) = &mut self.judge {
            sequences.end_evaluation();
        }
    }
    fn sequences(&mut self) -> Result<&mut Sequences> {
        match &mut self.judge {
            Judge::Sequences(sequences) => Ok(sequences),
            Judge::Rollouts(_) => Err(Error::op("evaluate", "rollouts are trained on, not evaluated")),
        }
    }

    pub fn has_rollouts(&self) -> bool {
        matches!(self.judge, Judge::Rollouts(_))
    }
    /// The loss of labeled answers, which needs a baseline.
    pub fn has_baseline(&self) -> bool {
        matches!(&self.judge, Judge::Sequences(sequences) if sequences.kto().is_some())
    }
    /// `sums`: this rank's [`PreferenceLoss::totals`] over all ranks.
    pub fn set_baseline(&mut self, sums: &PreferenceSums) {
        if let Judge::Sequences(sequences) = &mut self.judge {
            sequences.baseline = sums.kl();
        }
    }
    /// The sums over this rank's answers since the last [`PreferenceLoss::take_totals`].
    pub fn totals(&self) -> PreferenceSums {
        if let Judge::Sequences(sequences) = &self.judge { sequences.totals() } else { PreferenceSums::default() }
    }
    /// What ranks sum, and that of which they take the largest.
    pub fn take_totals(&mut self) -> ([f64; SUMS], f64) {
        match &mut self.judge {
            Judge::Sequences(sequences) => (sequences.take_totals().to_array(), 0.0),
            Judge::Rollouts(rollouts) => rollouts.take_totals(),
        }
    }
    /// From the sums and the largest number over all ranks.
    pub fn means(&self, sums: [f64; SUMS], largest: f64) -> StepMeans {
        let none = StepMeans::default();
        match &self.judge {
            Judge::Sequences(_) => StepMeans { preference: Some(PreferenceSums::from_array(sums).means()), ..none },
            Judge::Rollouts(rollouts) => StepMeans { rollouts: Some(rollouts.means(sums, largest)), ..none },
        }
    }
}

impl Judge {
    fn loss(&mut self) -> &mut dyn SequenceLoss {
        match self {
            Judge::Sequences(sequences) => &mut **sequences,
            Judge::Rollouts(rollouts) => &mut **rollouts,
        }
    }
}
