//! A micro-batch of judged answers: the reference's log-probabilities first, then the loss of the policy's. Never runs
//! backward, and never reduces over data-parallel ranks: the engine does.
use super::objective::Objective;
use super::reference::{FrozenModel, ReferenceModel};
use super::sequences::Sequences;
use super::sums::PreferenceSums;
use crate::base::Result;
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

pub(in crate::engine) struct PreferenceLoss {
    sequences: Sequences,
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
            _ if objective.scores() => Compared::Nothing,
            ReferenceModel::Base => Compared::Base,
            ReferenceModel::Frozen(spec) => {
                Compared::Frozen(Box::new(FrozenModel::new(dev.clone(), mesh, (spec, tuning), split, strategy, own)?))
            }
            ReferenceModel::Given => Compared::Given,
        };
        Ok(PreferenceLoss { sequences: Sequences::new(&**dev, mesh, objective, tokens)?, reference })
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
        let PreferenceLoss { sequences, reference } = self;
        sequences.begin(policy.dev, host, staged.local, scale)?;
        match reference {
            Compared::Nothing => return Ok(sequences),
            Compared::Given => {
                sequences.give_reference(host)?;
                return Ok(sequences);
            }
            Compared::Base => policy.score(&staged.batch, sequences, true)?,
            Compared::Frozen(reference) => reference.score(policy.dev, &staged.batch, sequences)?,
        }
        sequences.keep_reference(policy.dev)?;
        Ok(sequences)
    }
    /// Adds the log-ratios of the micro-batch's mismatched answers to the totals, if it has any.
    pub fn diverge(&mut self, policy: &mut Policy, staging: &mut BatchStaging, host: &MicroBatch) -> Result<()> {
        let Some(mismatched) = &host.mismatched else { return Ok(()) };
        let staged = staging.upload(policy.dev, mismatched)?;
        let loss = self.begin(policy, mismatched, &staged, 0.0)?;
        policy.score(&staged.batch, loss, false)?;
        self.sequences.diverge(policy.dev)
    }
    /// Forward only.
    pub fn evaluate(&mut self, policy: &mut Policy, staging: &mut BatchStaging, host: &MicroBatch) -> Result<()> {
        self.diverge(policy, staging, host)?;
        let staged = staging.upload(policy.dev, host)?;
        let loss = self.begin(policy, host, &staged, 0.0)?;
        policy.score(&staged.batch, loss, false)?;
        self.sequences.evaluate(policy.dev)
    }
    /// Judges what was evaluated since the last call.
    pub fn end_evaluation(&mut self) {
        self.sequences.end_evaluation();
    }

    /// The loss of labeled answers, which needs a baseline.
    pub fn has_baseline(&self) -> bool {
        self.sequences.kto().is_some()
    }
    /// `sums`: this rank's [`PreferenceLoss::totals`] over all ranks.
    pub fn set_baseline(&mut self, sums: &PreferenceSums) {
        self.sequences.baseline = sums.kl();
    }
    /// The sums over this rank's answers since the last [`PreferenceLoss::take_totals`].
    pub fn totals(&self) -> PreferenceSums {
        self.sequences.totals()
    }
    pub fn take_totals(&mut self) -> PreferenceSums {
        self.sequences.take_totals()
    }
}
