//! What a step minimizes, with the models and buffers that this takes: the engine's loop knows no objective. Never runs
//! backward, and never reduces over data-parallel ranks: the engine does.
use super::preference::{Policy, PreferenceLoss};
use super::students::StudentSums;
use super::sums::{SUMS, StepMeans};
use super::teaching::TeacherModel;
use crate::base::Result;
use crate::data::MicroBatch;
use crate::device::Device;
use crate::engine::staging::StagedBatch;
use crate::nn::{Minimized, SequenceLoss, TeacherPass};

pub(in crate::engine) enum StepObjective {
    /// The cross entropy of tokens.
    Tokens,
    /// That and the divergence from a teacher.
    Taught(Box<TeacherModel>),
    /// The loss of answers, or of rollouts.
    Judged(Box<PreferenceLoss>),
}

/// The objective of one micro-batch.
#[allow(clippy::large_enum_variant)] // on the stack, because a step allocates nothing
pub(in crate::engine) enum MicroObjective<'a> {
    Tokens,
    Taught(TeacherPass<'a>),
    Judged(&'a mut dyn SequenceLoss),
}

/// What a rank adds to the sums of a step.
#[derive(Default)]
pub(in crate::engine) struct StepTotals {
    /// From the host, after the device's loss if [`StepObjective::has_device_loss`].
    pub sums: [f64; SUMS],
    /// How many of these there are.
    pub count: usize,
    /// The number of which ranks take the largest.
    pub largest: f64,
}

impl StepObjective {
    /// Room for the sums of a step, and of an evaluation.
    pub fn sums(&self) -> usize {
        match self {
            StepObjective::Tokens => 2,
            StepObjective::Taught(teacher) if !teacher.corrects_samples() => 2,
            StepObjective::Taught(_) | StepObjective::Judged(_) => SUMS,
        }
    }
    /// Ranks take the largest of a number.
    pub fn has_largest(&self) -> bool {
        match self {
            StepObjective::Tokens => false,
            StepObjective::Taught(teacher) => teacher.corrects_samples(),
            StepObjective::Judged(judged) => judged.has_rollouts(),
        }
    }
    /// The loss is a sum on the device, the first of a step's sums.
    pub fn has_device_loss(&self) -> bool {
        !matches!(self, StepObjective::Judged(_))
    }
    pub fn judged(&mut self) -> Option<&mut PreferenceLoss> {
        if let StepObjective::Judged(judged) = self { Some(judged) } else { None }
    }
    pub fn teacher(&mut self) -> Option<&mut TeacherModel> {
        if let StepObjective::Taught(teacher) = self { Some(teacher) } else { None }
    }

    /// Runs the other models of a micro-batch. Gradients will be multiplied by `scale`.
    pub fn begin<'a>(
        &'a mut self,
        dev: &'a dyn Device,
        policy: &mut Policy,
        host: &MicroBatch,
        staged: &StagedBatch<'a>,
        scale: f64,
    ) -> Result<MicroObjective<'a>> {
        Ok(match self {
            StepObjective::Tokens => MicroObjective::Tokens,
            StepObjective::Taught(teacher) => MicroObjective::Taught(teacher.begin(dev, staged, host)?),
            StepObjective::Judged(judged) => MicroObjective::Judged(judged.begin(policy, host, staged, scale)?),
        })
    }
    /// After the end of the micro-batch.
    pub fn end(&mut self, dev: &dyn Device) -> Result<()> {
        self.teacher().map_or(Ok(()), |teacher| teacher.end(dev))
    }
    /// The totals of all micro-batches since the last call.
    pub fn take_totals(&mut self) -> StepTotals {
        match self {
            StepObjective::Tokens => StepTotals::default(),
            StepObjective::Taught(teacher) => {
                let Some(StudentSums { entropy, tokens, mismatch }) = teacher.take_totals() else {
                    return StepTotals::default();
                };
                let mut sums = [0.0; SUMS];
                sums[..2].copy_from_slice(&[entropy, tokens]);
                StepTotals { sums, count: 2, largest: mismatch }
            }
            StepObjective::Judged(judged) => {
                let (sums, largest) = judged.take_totals();
                StepTotals { sums, count: SUMS, largest }
            }
        }
    }
    /// From the sums and the largest number of all ranks, and the mean loss.
    pub fn means(&self, sums: [f64; SUMS], largest: f64, loss: f64) -> StepMeans {
        match self {
            StepObjective::Tokens => StepMeans::default(),
            StepObjective::Taught(teacher) => {
                let [_, entropy, tokens, ..] = sums;
                let student = teacher.means(StudentSums { entropy, tokens, mismatch: largest }, loss);
                StepMeans { student, ..StepMeans::default() }
            }
            StepObjective::Judged(judged) => judged.means(sums, largest),
        }
    }
}

impl MicroObjective<'_> {
    pub fn minimized(&mut self) -> Minimized<'_> {
        match self {
            MicroObjective::Tokens => Minimized::Tokens,
            MicroObjective::Taught(teacher) => Minimized::Taught(teacher),
            MicroObjective::Judged(loss) => Minimized::Sequences(&mut **loss),
        }
    }
    /// After backward.
    pub fn end(self) -> Result<()> {
        if let MicroObjective::Taught(teacher) = self { teacher.end() } else { Ok(()) }
    }
}
