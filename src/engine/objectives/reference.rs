//! A frozen model, sharded like the trained one: weights in the compute dtype only, without gradients or optimizer
//! state. Never trains.
use super::sequences::Sequences;
use crate::base::Result;
use crate::comm::Mesh;
use crate::device::Device;
use crate::nn::{Batch, Checkpointing, Decoder, Groups, Spec, Split, Tuning, Workspace, WorkspaceOptions};
use crate::store::{self, Store, Strategy};
use std::sync::Arc;

pub(super) struct FrozenModel {
    pub decoder: Decoder,
    pub store: Box<dyn Store>,
    workspace: Workspace,
}

impl FrozenModel {
    /// Weights are zero until the store is filled. `tokens`: the most in a rank's share of a micro-batch.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        spec: &Spec,
        split: &Split,
        strategy: &dyn Strategy,
        tokens: usize,
    ) -> Result<FrozenModel> {
        let _for = dev.meter().purpose("reference model");
        let decoder = Decoder::split(spec.clone(), &Tuning::default(), split)?;
        let options =
            WorkspaceOptions { tokens, dtype: strategy.dtype(), checkpoint: Checkpointing::Off, train: false };
        Ok(FrozenModel {
            workspace: decoder.workspace(&*dev, &Groups::of(mesh), &options)?,
            store: store::allocate(strategy, dev, mesh, &decoder.frozen_layouts())?,
            decoder,
        })
    }
    pub fn score(&mut self, dev: &dyn Device, batch: &Batch, sequences: &mut Sequences) -> Result<()> {
        self.decoder.score_sequences(dev, &mut *self.store, batch, &mut self.workspace, sequences, false)
    }
}
