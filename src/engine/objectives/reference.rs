//! What the policy is compared with: a frozen model, sharded like the trained one, with weights in the compute dtype
//! only and without gradients or optimizer state. Never trains.
use crate::base::Result;
use crate::comm::Mesh;
use crate::device::Device;
use crate::nn::{
    Batch, Checkpointing, Decoder, Groups, Scored, SequenceLoss, Slice, Spec, Split, Tuning, Workspace,
    WorkspaceOptions,
};
use crate::store::{self, Store, Strategy};
use std::sync::Arc;

/// The reference model of a preference objective.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum ReferenceModel {
    /// The trained model without its adapters.
    #[default]
    Base,
    /// A model whose frozen weights are sharded like the trained one's.
    Frozen(Box<Spec>),
    /// None: its log-probabilities come with the micro-batches ([`crate::data::MicroBatch::reference`]).
    Given,
}

pub(in crate::engine) struct FrozenModel {
    pub decoder: Decoder,
    pub store: Box<dyn Store>,
    pub workspace: Workspace,
}

impl FrozenModel {
    /// Weights are zero until the store is filled. `tokens`: the most in a rank's share of a micro-batch. `split`: the
    /// trained model's; without experts the model shares none. `tuning`: that of a model whose base this is.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        (spec, tuning): (&Spec, &Tuning),
        split: &Split,
        strategy: &dyn Strategy,
        tokens: usize,
    ) -> Result<FrozenModel> {
        let _for = dev.meter().purpose("reference model");
        let ep = if spec.experts.is_some() { split.ep } else { Slice::WHOLE };
        let decoder = Decoder::base(spec.clone(), tuning, &Split { ep, ..*split })?;
        let options =
            WorkspaceOptions { tokens, dtype: strategy.dtype(), checkpoint: Checkpointing::Off, train: false };
        Ok(FrozenModel {
            workspace: decoder.workspace(&*dev, &Groups::of(mesh), &options)?,
            store: store::allocate(strategy, dev, mesh, &decoder.frozen_layouts())?,
            decoder,
        })
    }
    pub fn score(&mut self, dev: &dyn Device, batch: &Batch, loss: &mut dyn SequenceLoss) -> Result<()> {
        let scored = Scored { loss, base: true };
        self.decoder.evaluate(dev, &mut *self.store, batch, &mut self.workspace, Some(scored))
    }
}
