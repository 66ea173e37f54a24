//! Distillation from a frozen teacher, sharded like the trained model. Never trains.
use super::reference::FrozenModel;
use super::students::{StudentMeans, StudentSamples, StudentSums};
use crate::base::Result;
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::Device;
use crate::device::ops::DistillTerms;
use crate::engine::staging::StagedBatch;
use crate::nn::{Decoder, Groups, Pass, ROOT, Spec, Split, TeacherPass, TeacherStats, Tuning};
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
    /// Micro-batches are samples of the student: the divergence is `KL(student || teacher)`, and their recorded
    /// log-probabilities are compared with the student's.
    pub on_policy: bool,
}

pub(in crate::engine) struct TeacherModel {
    model: FrozenModel,
    stats: TeacherStats,
    terms: DistillTerms,
    samples: Option<StudentSamples>,
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
        let terms = DistillTerms {
            alpha: teaching.alpha as f32,
            temperature: teaching.temperature as f32,
            teacher_cap: 0.0,
            reverse: teaching.on_policy,
        };
        let samples = teaching.on_policy.then(|| StudentSamples::new(&*dev, mesh, tokens)).transpose()?;
        Ok(TeacherModel { model, stats, terms, samples })
    }
    /// The model and its store, to load weights into.
    pub fn model(&mut self) -> (&Decoder, &mut dyn Store) {
        (&self.model.decoder, &mut *self.model.store)
    }
    /// Micro-batches are samples of the student.
    pub fn corrects_samples(&self) -> bool {
        self.samples.is_some()
    }
    /// Runs the teacher up to its head.
    pub fn begin<'a>(
        &'a mut self,
        dev: &'a dyn Device,
        staged: &StagedBatch<'a>,
        host: &MicroBatch,
    ) -> Result<TeacherPass<'a>> {
        let FrozenModel { decoder, store, workspace } = &mut self.model;
        let student = self.samples.as_mut().map(|samples| samples.begin(host, staged.local));
        decoder.teach(dev, &mut **store, &staged.batch, (workspace, &mut self.stats), (self.terms, student))
    }
    /// After the end of the pass.
    pub fn end(&mut self, dev: &dyn Device) -> Result<()> {
        self.samples.as_mut().map_or(Ok(()), |samples| samples.end(dev))?;
        self.model.store.release(ROOT, Pass::Evaluate)
    }
    /// What is known of the student's samples since it was last taken, with those that the data set has; None.
    pub fn take_totals(&mut self) -> Option<StudentSums> {
        self.samples.as_mut().map(StudentSamples::take_totals)
    }
    /// From the sums of all ranks and the step's mean loss.
    pub fn means(&self, sums: StudentSums, loss: f64) -> Option<StudentMeans> {
        let squared = (self.terms.temperature as f64).powi(2);
        self.samples.as_ref().map(|samples| samples.means(sums, loss / squared))
    }
}
