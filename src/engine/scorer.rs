//! Log-probabilities of a reference model, computed once over a data set for [`ReferenceModel::Given`]. Never trains.
//!
//! A sequence's sum does not depend on the other sequences of its micro-batch, so a step with these numbers is bitwise
//! a step with the model.
use super::objectives::{FrozenModel, Sequences};
use super::options::EngineOptions;
use super::staging::BatchStaging;
use crate::base::Result;
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::Device;
use crate::nn::{Decoder, Spec};
use crate::store::Store;
use std::sync::Arc;

/// A reference model without a policy. Created by every rank of a mesh.
pub struct ReferenceScorer {
    dev: Arc<dyn Device>,
    model: FrozenModel,
    sequences: Sequences,
    staging: BatchStaging,
}

impl ReferenceScorer {
    /// For the micro-batches of `options`. Weights are zero until they are filled.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        options: &EngineOptions,
        reference: &Spec,
    ) -> Result<ReferenceScorer> {
        let EngineOptions { tokens, strategy, objective, .. } = options;
        let (tokens, split) = (*tokens, options.split(&mesh.sizes, &mesh.coords));
        let (own, tuning) = (tokens.div_ceil(mesh.sizes.sp), options.tuning_of(reference));
        let model = FrozenModel::new(dev.clone(), mesh, (reference, &tuning), &split, &**strategy, own)?;
        Ok(ReferenceScorer {
            sequences: Sequences::new(&*dev, mesh, *objective, tokens)?,
            staging: BatchStaging::new(&*dev, tokens, &model.decoder)?,
            model,
            dev,
        })
    }
    /// The model and its store, to load weights into.
    pub fn model(&mut self) -> (&Decoder, &mut dyn Store) {
        (&self.model.decoder, &mut *self.model.store)
    }
    /// The summed token losses of each sequence: its log-probability, negated. Collective.
    pub fn score(&mut self, batch: &MicroBatch) -> Result<&[f64]> {
        let (dev, staged) = (&*self.dev, self.staging.upload(&*self.dev, batch)?);
        self.sequences.begin(dev, batch, staged.local, 0.0)?;
        self.model.score(dev, &staged.batch, &mut self.sequences)?;
        self.sequences.keep_reference(dev)?;
        Ok(self.sequences.reference())
    }
}
