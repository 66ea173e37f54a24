//! The sampled tokens of a micro-batch: log-probabilities come from the device, weights go back to it, one per token.
//! Never runs a model.
//!
//! A token's loss depends on no other token: what it needs of its group and its sample comes with the data. So ranks of
//! sp, which hold parts of the same samples, exchange nothing before backward.
use super::grpo::{Grpo, SampledToken};
use super::sums::{RolloutMeans, RolloutSums, SUMS};
use crate::base::{Category, DType, Error, Result};
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::{Buf, Device, IGNORE};
use crate::nn::{LossRows, SequenceBuffers, SequenceLoss};

/// A token with loss, on this rank.
struct OwnToken {
    row: usize,
    old: f32,
    advantage: f64,
    weight: f64,
}

/// Buffers are allocated once, for any micro-batch of the engine's size.
pub(super) struct Rollouts {
    grpo: Grpo,
    /// Ranks of sp hold the same samples: only the first counts them.
    is_first: bool,
    /// f64 (rows): minus the log-probability of each row's target.
    losses: Buf,
    /// f32 (rows)
    weights: Buf,
    /// f32 (rows)
    entropies: Buf,
    /// This rank has all logits, and its device entropies.
    measures: bool,
    /// Rows of this rank in the micro-batch.
    rows: usize,
    tokens: Vec<OwnToken>,
    /// By document: advantage, and tokens with loss.
    samples: Vec<(f64, u64)>,
    advantages: Vec<f64>,
    /// By row, as `losses`.
    reference: Vec<f64>,
    policy: Vec<f64>,
    host_weights: Vec<f32>,
    host_entropies: Vec<f32>,
    /// Factor of every gradient: the loss scale over what the step's loss is divided by.
    scale: f64,
    totals: RolloutSums,
    /// Largest difference between a recorded log-probability and the policy's.
    mismatch: f64,
}

impl Rollouts {
    /// `tokens`: the most in a rank's share of a micro-batch.
    pub fn new(dev: &dyn Device, mesh: &Mesh, grpo: Grpo, tokens: usize) -> Result<Rollouts> {
        let _for = dev.meter().purpose("rollouts");
        Ok(Rollouts {
            grpo,
            is_first: mesh.coords.sp == 0,
            losses: dev.alloc(DType::F64, tokens, Category::Other)?,
            weights: dev.alloc(DType::F32, tokens, Category::Other)?,
            entropies: dev.alloc(DType::F32, tokens, Category::Other)?,
            measures: dev.has_entropies() && mesh.sizes.tp == 1,
            rows: 0,
            tokens: Vec::with_capacity(tokens),
            samples: Vec::new(),
            advantages: Vec::new(),
            reference: Vec::with_capacity(tokens),
            policy: Vec::with_capacity(tokens),
            host_weights: Vec::with_capacity(tokens),
            host_entropies: Vec::with_capacity(tokens),
            scale: 0.0,
            totals: RolloutSums::default(),
            mismatch: 0.0,
        })
    }

    /// Starts a micro-batch. `local`: the rows of the whole batch that this rank holds; none: all.
    pub fn begin(&mut self, batch: &MicroBatch, local: Option<&[u32]>, scale: f64) -> Result<()> {
        self.scale = scale;
        self.judge_samples(batch)?;
        let all = batch.tokens.len();
        self.rows = local.map_or(all, <[u32]>::len);
        self.tokens.clear();
        for row in 0..self.rows {
            let at = local.map_or(row, |local| local[row] as usize);
            // Rows after the last document are padding.
            if at >= all || batch.targets[at] == IGNORE {
                continue;
            }
            let (advantage, tokens) = self.samples[batch.cu_seqlens.partition_point(|&start| start as usize <= at) - 1];
            let old = batch.recorded.logprobs.get(at).copied().unwrap_or(0.0);
            self.tokens.push(OwnToken { row, old, advantage, weight: self.grpo.weight(tokens) });
        }
        Ok(())
    }
    /// Derives the samples' advantages, and counts their rewards.
    fn judge_samples(&mut self, batch: &MicroBatch) -> Result<()> {
        let (recorded, documents) = (&batch.recorded, batch.cu_seqlens.len().saturating_sub(1));
        let [tokens, logprobs, rewards] = [batch.tokens.len(), recorded.logprobs.len(), recorded.rewards.len()];
        // The micro-batches of a rehearsal have no rewards.
        if rewards > 0 && (rewards, logprobs) != (documents, tokens) {
            let what =
                format!("{rewards} rewards of {documents} samples, {logprobs} log-probabilities of {tokens} tokens");
            return Err(Error::op("rollouts", what));
        }
        self.advantages.clear();
        let mut first = 0;
        for &end in &recorded.groups {
            let end = end as usize;
            self.grpo.advantages(&recorded.rewards[first..end], &mut self.advantages);
            first = end;
        }
        self.advantages.resize(documents, 0.0);
        let targets = batch.cu_seqlens.windows(2).map(|bounds| &batch.targets[bounds[0] as usize..bounds[1] as usize]);
        let tokens = targets.map(|targets| targets.iter().filter(|&&target| target != IGNORE).count() as u64);
        self.samples.clear();
        self.samples.extend(self.advantages.iter().copied().zip(tokens));
        if self.is_first {
            for reward in recorded.rewards.iter().map(|&reward| reward as f64) {
                self.totals.reward += reward;
                self.totals.reward_squares += reward * reward;
                self.totals.samples += 1.0;
            }
        }
        Ok(())
    }
    /// The losses are those of the reference.
    pub fn keep_reference(&mut self, dev: &dyn Device) -> Result<()> {
        self.read(dev)?;
        std::mem::swap(&mut self.reference, &mut self.policy);
        Ok(())
    }
    /// The sums since they were last taken, and the largest mismatch.
    pub fn take_totals(&mut self) -> ([f64; SUMS], f64) {
        (std::mem::take(&mut self.totals).to_array(), std::mem::take(&mut self.mismatch))
    }
    /// From the sums and the largest mismatch of all ranks.
    pub fn means(&self, sums: [f64; SUMS], mismatch: f64) -> RolloutMeans {
        RolloutMeans::of(sums, mismatch, self.grpo.compares(), self.measures)
    }

    fn read(&mut self, dev: &dyn Device) -> Result<()> {
        self.policy.clear();
        self.policy.resize(self.rows, 0.0);
        dev.download(self.losses.view().slice(0..self.rows), bytemuck::cast_slice_mut(&mut self.policy))
    }
    fn measure(&mut self, dev: &dyn Device) -> Result<()> {
        if !self.measures {
            return Ok(());
        }
        self.host_entropies.clear();
        self.host_entropies.resize(self.rows, 0.0);
        let own = self.entropies.view().slice(0..self.rows);
        dev.download(own, bytemuck::cast_slice_mut(&mut self.host_entropies))?;
        self.totals.entropy += self.tokens.iter().map(|token| self.host_entropies[token.row] as f64).sum::<f64>();
        Ok(())
    }
    /// The losses are those of the policy: adds to the totals, and assigns the weights.
    fn judge(&mut self) {
        self.host_weights.clear();
        self.host_weights.resize(self.rows, 0.0);
        for &OwnToken { row, old, advantage, weight } in &self.tokens {
            // A token's loss is its log-probability, negated.
            let policy = -self.policy[row];
            let reference = self.reference.get(row).map_or(0.0, |loss| -loss);
            let of = self.grpo.of(&SampledToken { policy, old: old as f64, reference, advantage });
            self.host_weights[row] = (-of.gradient * weight * self.scale) as f32;
            self.totals.loss += of.loss * weight;
            self.totals.kl += of.kl;
            self.totals.clipped += f64::from(u8::from(of.clipped));
            self.totals.tokens += 1.0;
            let apart = (policy as f32 - old).abs() as f64;
            self.mismatch = if apart > self.mismatch || apart.is_nan() { apart } else { self.mismatch };
        }
    }
}

impl SequenceLoss for Rollouts {
    fn buffers(&mut self) -> SequenceBuffers<'_> {
        SequenceBuffers {
            rows: LossRows::Each,
            sums: self.losses.view_mut(),
            entropies: self.measures.then(|| self.entropies.view_mut()),
            weights: self.weights.view(),
        }
    }
    fn weigh(&mut self, dev: &dyn Device) -> Result<()> {
        self.read(dev)?;
        self.measure(dev)?;
        self.judge();
        if self.rows == 0 {
            return Ok(());
        }
        dev.upload(bytemuck::cast_slice(&self.host_weights), self.weights.view_mut().slice(0..self.rows))
    }
}
