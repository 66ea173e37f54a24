//! Distillation from a frozen teacher, sharded like the trained model. Never trains.
use super::reference::FrozenModel;
use crate::base::Result;
use crate::comm::Mesh;
use crate::device::Device;
use crate::device::ops::DistillTerms;
use crate::nn::{Batch, Decoder, Groups, Pass, ROOT, Spec, Split, TeacherPass, TeacherStats, Tuning};
use crate::store::{Store, Strategy};
use std::sync::Arc;

/// A teacher, and its share of the loss: `(1 - alpha) CE + alpha T^2 KL(teacher || student)` of each token with loss,
/// with both models' logits divided by T in the divergence.
#[derive(Clone, PartialEq, Debug)]
pub struct Teaching {
    /// The teacher; of the student's vocabulary.
    pub spec: Spec,
    /// In (0, 1].
    pub alpha: f64,
    /// T, above 0.
    pub temperature: f64,
}

pub(in crate::engine) struct TeacherModel {
    model: FrozenModel,
    stats: TeacherStats,
    terms: DistillTerms,
}

impl TeacherModel {
    /// Weights are zero until they are filled. `tokens`: the most in a rank's share of a micro-batch.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        teaching: &Teaching,
        split: &Split,
        strategy: &dyn Strategy,
        tokens: usize,
    ) -> Result<TeacherModel> {
        let model = FrozenModel::new(dev.clone(), mesh, (&teaching.spec, &Tuning::default()), split, strategy, tokens)?;
        let stats = model.decoder.teacher_stats(&*dev, &Groups::of(mesh), &model.workspace)?;
        let (alpha, temperature) = (teaching.alpha as f32, teaching.temperature as f32);
        Ok(TeacherModel { model, stats, terms: DistillTerms { alpha, temperature, teacher_cap: 0.0 } })
    }
    /// The model and its store, to load weights into.
    pub fn model(&mut self) -> (&Decoder, &mut dyn Store) {
        (&self.model.decoder, &mut *self.model.store)
    }
    /// Runs the teacher up to its head.
    pub fn begin<'a>(&'a mut self, dev: &'a dyn Device, batch: &Batch<'a>) -> Result<TeacherPass<'a>> {
        let FrozenModel { decoder, store, workspace } = &mut self.model;
        decoder.teach(dev, &mut **store, batch, (workspace, &mut self.stats), self.terms)
    }
    /// After the end of the pass.
    pub fn end(&mut self) -> Result<()> {
        self.model.store.release(ROOT, Pass::Evaluate)
    }
}
