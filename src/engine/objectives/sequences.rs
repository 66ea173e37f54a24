//! The sequences of a micro-batch: log-probabilities come from the device, weights go back to it. Pairs are adjacent:
//! sequence 2i is the chosen answer of pair i, sequence 2i + 1 the rejected one. A labeled answer is one sequence.
//! Never runs a model.
//!
//! The weights are computed on the host, in f64, from one number per sequence. So a GPU waits for the host once per
//! micro-batch, and needs no kernel of its own.
use super::dpo::PairValues;
use super::kto::{Kto, LabeledAnswer};
use super::objective::Objective;
use super::sums::PreferenceSums;
use crate::base::{Category, DType, Error, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Reduce, Tag};
use crate::data::MicroBatch;
use crate::device::{Buf, Device, IGNORE};
use crate::nn::{LossRows, SequenceBuffers, SequenceLoss, SequenceRows};
use std::sync::Arc;

/// Buffers are allocated once, for any micro-batch of the engine's size.
pub(in crate::engine) struct Sequences {
    objective: Objective,
    sp: Arc<dyn Collective>,
    sums: Buf,
    weights: Buf,
    /// This rank's rows by sequence. Padding is one more sequence.
    rows: Vec<SequenceRows>,
    /// Answer tokens by sequence; 0 if the sequence only pads the batch.
    tokens: Vec<u64>,
    /// [`MicroBatch::numbers`].
    numbers: Vec<f32>,
    reference: Vec<f64>,
    policy: Vec<f64>,
    host_weights: Vec<f32>,
    host_scores: Vec<f32>,
    /// Factor of every gradient: the loss scale over the pairs, or answers, of the step.
    scale: f64,
    /// The baseline of labeled answers.
    pub baseline: f64,
    /// Labeled answers of an evaluation, whose baseline is known at its end.
    evaluated: Vec<LabeledAnswer>,
    totals: PreferenceSums,
}

impl Sequences {
    /// For micro-batches of up to `tokens` tokens.
    pub fn new(dev: &dyn Device, mesh: &Mesh, objective: Objective, tokens: usize) -> Result<Sequences> {
        let _for = dev.meter().purpose("sequences");
        let dtype = if objective.scores() { DType::F32 } else { DType::F64 };
        let most = tokens + 1; // a document may be one token, and padding is one more
        Ok(Sequences {
            objective,
            sums: mesh.group(Axis::Sp).alloc(dtype, most, CommUse::Reduced, Category::Other)?,
            weights: dev.alloc(DType::F32, most, Category::Other)?,
            sp: mesh.group(Axis::Sp).clone(),
            rows: Vec::with_capacity(2 * most),
            tokens: Vec::with_capacity(most),
            numbers: Vec::with_capacity(most),
            reference: Vec::with_capacity(most),
            policy: Vec::with_capacity(most),
            host_weights: Vec::with_capacity(most),
            host_scores: Vec::with_capacity(if objective.scores() { most } else { 0 }),
            scale: 0.0,
            baseline: 0.0,
            evaluated: Vec::new(),
            totals: PreferenceSums::default(),
        })
    }

    /// Starts a micro-batch. `local`: the rows of the whole batch that this rank holds; none: all.
    pub fn begin(&mut self, dev: &dyn Device, batch: &MicroBatch, local: Option<&[u32]>, scale: f64) -> Result<()> {
        self.scale = scale;
        self.tokens.clear();
        for document in batch.cu_seqlens.windows(2) {
            let targets = &batch.targets[document[0] as usize..document[1] as usize];
            self.tokens.push(targets.iter().filter(|&&target| target != IGNORE).count() as u64);
        }
        self.numbers.clear();
        self.numbers.extend(&batch.numbers);
        let documents = self.tokens.len();
        self.rows.clear();
        match local {
            None => {
                let bounds = batch.cu_seqlens.windows(2).map(|d| d[0] as usize..d[1] as usize).enumerate();
                let rows = bounds.map(|(sequence, rows)| SequenceRows { rows, sequence, ends: true });
                self.rows.extend(rows.filter(|of| !of.rows.is_empty()));
            }
            Some(local) => {
                for (at, &row) in local.iter().enumerate() {
                    // Rows after the last document are padding.
                    let sequence = batch.cu_seqlens.partition_point(|&start| start <= row).min(documents + 1) - 1;
                    let ends = batch.cu_seqlens.get(sequence + 1) == Some(&(row + 1));
                    match self.rows.last_mut().filter(|last| last.sequence == sequence) {
                        Some(last) => (last.rows.end, last.ends) = (at + 1, ends),
                        None => self.rows.push(SequenceRows { rows: at..at + 1, sequence, ends }),
                    }
                }
            }
        }
        dev.zero(self.sums.view_mut())
    }
    /// The sums are those of the reference.
    pub fn keep_reference(&mut self, dev: &dyn Device) -> Result<()> {
        self.read(dev)?;
        std::mem::swap(&mut self.reference, &mut self.policy);
        Ok(())
    }
    /// The reference's sums come with the micro-batch.
    pub fn give_reference(&mut self, batch: &MicroBatch) -> Result<()> {
        let (given, needed) = (batch.reference.len(), self.tokens.len());
        if given != needed {
            return Err(Error::op("reference", format!("{given} log-probabilities for {needed} sequences")));
        }
        self.reference.clear();
        self.reference.extend(&batch.reference);
        Ok(())
    }
    /// The reference's summed token losses, by sequence.
    pub fn reference(&self) -> &[f64] {
        &self.reference
    }
    /// The sums are those of the policy: adds the losses to the totals, and assigns the weights.
    fn judge(&mut self, dev: &dyn Device) -> Result<()> {
        self.read(dev)?;
        self.host_weights.clear();
        self.host_weights.resize(self.weights.len(), 0.0);
        match self.kto() {
            None => self.judge_pairs(),
            Some(kto) => {
                for i in 0..self.tokens.len() {
                    let Some(answer) = self.answer(i) else { continue };
                    // The sum of token losses is the log-probability, negated.
                    self.host_weights[i] = (-self.judge_answer(&kto, &answer) * self.scale) as f32;
                }
            }
        }
        Ok(())
    }
    fn judge_pairs(&mut self) {
        for first in (0..self.tokens.len() / 2 * 2).step_by(2) {
            let both = [first, first + 1];
            if both.map(|i| self.tokens[i]).contains(&0) {
                continue;
            }
            // Sums of token losses are log-probabilities, negated.
            let sign = if self.objective.scores() { 1.0 } else { -1.0 };
            let of = |values: &[f64]| both.map(|i| values.get(i).map_or(0.0, |x| sign * x));
            let margin = self.numbers.get(first / 2).copied().unwrap_or(0.0) as f64;
            let (policy, reference) = (of(&self.policy), of(&self.reference));
            let values = PairValues { policy, reference, tokens: self.tokens[first], margin };
            let Some(pair) = self.objective.of(&values) else { continue };
            for (i, gradient) in both.into_iter().zip(pair.gradient) {
                self.host_weights[i] = (sign * gradient * self.scale) as f32;
            }
            let [chosen, rejected] = pair.rewards;
            self.totals += PreferenceSums {
                loss: pair.loss,
                chosen,
                chosen_count: 1.0,
                rejected,
                rejected_count: 1.0,
                accurate: f64::from(u8::from(chosen > rejected)),
                ..PreferenceSums::default()
            };
        }
    }
    /// Adds the loss to the totals, and returns its gradient with respect to the log-probability.
    fn judge_answer(&mut self, kto: &Kto, answer: &LabeledAnswer) -> f64 {
        let of = kto.of(answer, self.baseline);
        let sums = PreferenceSums { loss: of.loss, ..PreferenceSums::default() };
        self.totals += match answer.desirable {
            true => PreferenceSums { chosen: of.reward, chosen_count: 1.0, ..sums },
            false => PreferenceSums { rejected: of.reward, rejected_count: 1.0, ..sums },
        };
        of.gradient
    }
    /// Sequence `i`, unless it only pads the batch.
    fn answer(&self, i: usize) -> Option<LabeledAnswer> {
        let desirable = self.numbers.get(i).is_some_and(|&label| label > 0.5);
        (self.tokens[i] > 0).then(|| LabeledAnswer { ratio: self.reference[i] - self.policy[i], desirable })
    }
    pub fn kto(&self) -> Option<Kto> {
        if let Objective::Kto(kto) = self.objective { Some(kto) } else { None }
    }
    /// The sums are those of the policy for mismatched answers: adds their log-ratios to the totals.
    pub fn diverge(&mut self, dev: &dyn Device) -> Result<()> {
        self.read(dev)?;
        for i in 0..self.tokens.len() {
            let Some(answer) = self.answer(i) else { continue };
            self.totals.divergence += answer.ratio;
            self.totals.mismatched += 1.0;
        }
        Ok(())
    }
    /// The sums are those of the policy: adds the losses to the totals, or keeps answers that wait for their baseline.
    pub fn evaluate(&mut self, dev: &dyn Device) -> Result<()> {
        if self.kto().is_none() {
            return self.judge(dev);
        }
        self.read(dev)?;
        let answers = (0..self.tokens.len()).filter_map(|i| self.answer(i)).collect::<Vec<_>>();
        self.evaluated.extend(answers);
        Ok(())
    }
    /// Judges the kept answers.
    pub fn end_evaluation(&mut self) {
        for answer in std::mem::take(&mut self.evaluated) {
            self.kto().map(|kto| self.judge_answer(&kto, &answer));
        }
    }
    /// The sums over what was judged since they were last taken. Ranks of sp hold the same answers: only the first has
    /// sums.
    pub fn totals(&self) -> PreferenceSums {
        if self.sp.rank() == 0 { self.totals } else { PreferenceSums::default() }
    }
    pub fn take_totals(&mut self) -> PreferenceSums {
        let totals = self.totals();
        self.totals = PreferenceSums::default();
        totals
    }

    /// Sums over the ranks of sp into `policy`, and starts anew.
    fn read(&mut self, dev: &dyn Device) -> Result<()> {
        let all = 0..self.tokens.len();
        if self.sp.size() > 1 {
            let sums = self.sums.view_mut().slice(all.clone());
            let ticket = self.sp.all_reduce(Tag::new("sequence losses", 0), sums, Reduce::Sum)?;
            self.sp.wait(ticket)?;
            self.sp.wait_sent(ticket)?;
        }
        self.policy.clear();
        self.policy.resize(all.len(), 0.0);
        if self.objective.scores() {
            self.host_scores.clear();
            self.host_scores.resize(all.len(), 0.0);
            dev.download(self.sums.view().slice(all), bytemuck::cast_slice_mut(&mut self.host_scores))?;
            self.policy.iter_mut().zip(&self.host_scores).for_each(|(value, &score)| *value = score as f64);
        } else {
            dev.download(self.sums.view().slice(all), bytemuck::cast_slice_mut(&mut self.policy))?;
        }
        dev.zero(self.sums.view_mut())
    }
}

impl SequenceLoss for Sequences {
    fn buffers(&mut self) -> SequenceBuffers<'_> {
        SequenceBuffers {
            rows: LossRows::Sequences(&self.rows),
            sums: self.sums.view_mut(),
            entropies: None,
            weights: self.weights.view(),
        }
    }
    fn weigh(&mut self, dev: &dyn Device) -> Result<()> {
        self.judge(dev)?;
        dev.upload(bytemuck::cast_slice(&self.host_weights), self.weights.view_mut())
    }
}
