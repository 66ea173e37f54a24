//! The sequences of a micro-batch: log-probabilities come from the device, weights go back to it. Pairs are adjacent:
//! sequence 2i is the chosen answer of pair i, sequence 2i + 1 the rejected one. Never runs a model.
//!
//! The weights are computed on the host, in f64, from one number per sequence. So a GPU waits for the host once per
//! micro-batch, and needs no kernel of its own.
use super::dpo::PairValues;
use super::objective::Objective;
use super::pairs::PairSums;
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, CommUse, Mesh, Reduce, Tag};
use crate::data::MicroBatch;
use crate::device::{Buf, Device, IGNORE};
use crate::nn::{SequenceBuffers, SequenceLoss, SequenceRows};
use std::sync::Arc;

/// Buffers are allocated once, for any micro-batch of the engine's size.
pub(super) struct Sequences {
    objective: Objective,
    sp: Arc<dyn Collective>,
    sums: Buf,
    weights: Buf,
    /// This rank's rows by sequence. Padding is one more sequence.
    rows: Vec<SequenceRows>,
    /// Answer tokens by sequence; 0 if the sequence only pads the batch.
    tokens: Vec<u64>,
    /// By pair; empty without margins.
    margins: Vec<f32>,
    reference: Vec<f64>,
    policy: Vec<f64>,
    host_weights: Vec<f32>,
    host_scores: Vec<f32>,
    /// Factor of every gradient: the loss scale over the pairs of the step.
    scale: f64,
    totals: PairSums,
}

impl Sequences {
    /// For micro-batches of up to `tokens` tokens.
    pub fn new(dev: &dyn Device, mesh: &Mesh, objective: Objective, tokens: usize) -> Result<Sequences> {
        let _for = dev.meter().purpose("sequences");
        let dtype = if objective.scores() { DType::F32 } else { DType::F64 };
        let most = tokens + 1; // a document may be one token, and padding is one more
        Ok(Sequences {
            objective,
            sums: mesh.sp.alloc(dtype, most, CommUse::Reduced, Category::Other)?,
            weights: dev.alloc(DType::F32, most, Category::Other)?,
            sp: mesh.sp.clone(),
            rows: Vec::with_capacity(2 * most),
            tokens: Vec::with_capacity(most),
            margins: Vec::with_capacity(most),
            reference: Vec::with_capacity(most),
            policy: Vec::with_capacity(most),
            host_weights: Vec::with_capacity(most),
            host_scores: Vec::with_capacity(if objective.scores() { most } else { 0 }),
            scale: 0.0,
            totals: PairSums::default(),
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
        self.margins.clear();
        self.margins.extend(&batch.margins);
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
    /// The sums are those of the policy: adds the losses of the pairs to the totals.
    pub fn judge(&mut self, dev: &dyn Device) -> Result<()> {
        self.read(dev)?;
        self.host_weights.clear();
        self.host_weights.resize(self.weights.len(), 0.0);
        for first in (0..self.tokens.len() / 2 * 2).step_by(2) {
            let both = [first, first + 1];
            if both.map(|i| self.tokens[i]).contains(&0) {
                continue;
            }
            // Sums of token losses are log-probabilities, negated.
            let sign = if self.objective.scores() { 1.0 } else { -1.0 };
            let of = |values: &[f64]| both.map(|i| values.get(i).map_or(0.0, |x| sign * x));
            let margin = self.margins.get(first / 2).copied().unwrap_or(0.0) as f64;
            let (policy, reference) = (of(&self.policy), of(&self.reference));
            let values = PairValues { policy, reference, tokens: self.tokens[first], margin };
            let Some(pair) = self.objective.of(&values) else { continue };
            for (i, gradient) in both.into_iter().zip(pair.gradient) {
                self.host_weights[i] = (sign * gradient * self.scale) as f32;
            }
            let [chosen, rejected] = pair.rewards;
            let accurate = f64::from(u8::from(chosen > rejected));
            self.totals += PairSums { loss: pair.loss, chosen, rejected, accurate, pairs: 1.0 };
        }
        Ok(())
    }
    /// The sums over the pairs judged since the last call. Ranks of sp hold the same pairs: only the first has sums.
    pub fn take_totals(&mut self) -> PairSums {
        let totals = std::mem::take(&mut self.totals);
        if self.sp.rank() == 0 { totals } else { PairSums::default() }
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
        SequenceBuffers { rows: &self.rows, sums: self.sums.view_mut(), weights: self.weights.view() }
    }
    fn weigh(&mut self, dev: &dyn Device) -> Result<()> {
        self.judge(dev)?;
        dev.upload(bytemuck::cast_slice(&self.host_weights), self.weights.view_mut())
    }
}
