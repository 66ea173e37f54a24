//! A micro-batch of pairs: the reference's log-probabilities first, then the loss of the policy's. Never runs backward,
//! and never reduces over data-parallel ranks: the engine does.
use super::objective::Objective;
use super::pairs::PairSums;
use super::reference::FrozenModel;
use super::sequences::Sequences;
use crate::base::Result;
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::Device;
use crate::nn::{Batch, Decoder, ParamStore, SequenceLoss, Spec, Split, Workspace};
use crate::store::{Store, Strategy};
use std::sync::Arc;

/// A micro-batch on the host, and on the device.
pub(in crate::engine) struct StagedPairs<'a> {
    pub host: &'a MicroBatch,
    /// The rows of the whole batch that this rank holds; none: all.
    pub local: Option<&'a [u32]>,
    pub batch: Batch<'a>,
}

/// What the trained model is compared with.
enum Compared {
    Nothing,
    /// The trained model without its adapters.
    Base,
    Frozen(Box<FrozenModel>),
}

pub(in crate::engine) struct PreferenceLoss {
    sequences: Sequences,
    reference: Compared,
}

impl PreferenceLoss {
    /// `frozen`: the reference model, of which a rank has the part that is its `Split`. `tokens`: the most in a
    /// micro-batch.
    pub fn new(
        dev: &Arc<dyn Device>,
        mesh: &Mesh,
        objective: Objective,
        frozen: Option<(&Spec, &Split)>,
        strategy: &dyn Strategy,
        tokens: usize,
    ) -> Result<PreferenceLoss> {
        let own = tokens.div_ceil(mesh.sizes.sp);
        let reference = match frozen {
            _ if objective.scores() => Compared::Nothing,
            Some((spec, split)) => {
                Compared::Frozen(Box::new(FrozenModel::new(dev.clone(), mesh, spec, split, strategy, own)?))
            }
            None => Compared::Base,
        };
        Ok(PreferenceLoss { sequences: Sequences::new(&**dev, mesh, objective, tokens)?, reference })
    }
    /// The frozen reference and its store, to load weights into.
    pub fn reference(&mut self) -> Option<(&Decoder, &mut dyn Store)> {
        let Compared::Frozen(reference) = &mut self.reference else { return None };
        Some((&reference.decoder, &mut *reference.store))
    }

    /// Starts a micro-batch with the reference's log-probabilities. Gradients will be multiplied by `scale`.
    #[allow(clippy::too_many_arguments)] // those of the decoder
    pub fn begin(
        &mut self,
        dev: &dyn Device,
        decoder: &Decoder,
        store: &mut dyn ParamStore,
        pairs: &StagedPairs,
        ws: &mut Workspace,
        scale: f64,
    ) -> Result<&mut dyn SequenceLoss> {
        let PreferenceLoss { sequences, reference } = self;
        sequences.begin(dev, pairs.host, pairs.local, scale)?;
        match reference {
            Compared::Nothing => return Ok(sequences),
            Compared::Base => decoder.score_sequences(dev, store, &pairs.batch, ws, sequences, true)?,
            Compared::Frozen(reference) => reference.score(dev, &pairs.batch, sequences)?,
        }
        sequences.keep_reference(dev)?;
        Ok(sequences)
    }
    /// Forward only.
    pub fn evaluate(
        &mut self,
        dev: &dyn Device,
        decoder: &Decoder,
        store: &mut dyn ParamStore,
        pairs: &StagedPairs,
        ws: &mut Workspace,
    ) -> Result<()> {
        let loss = self.begin(dev, decoder, store, pairs, ws, 0.0)?;
        decoder.score_sequences(dev, store, &pairs.batch, ws, loss, false)?;
        self.sequences.judge(dev)
    }
    /// The sums over this rank's pairs since the last call.
    pub fn take_totals(&mut self) -> PairSums {
        self.sequences.take_totals()
    }
}
