//! Evaluation, and sums over ranks. Never changes a weight.
use super::objectives::{Policy, PreferenceSums};
use super::step::Engine;
use crate::base::{Error, Result};
use crate::comm::{Axis, Reduce, Tag};
use crate::data::MicroBatch;

impl Engine {
    /// The sum of token losses over all ranks' batches, and the number of tokens. Keeps nothing for a backward pass.
    pub fn evaluate(&mut self, batches: &[MicroBatch]) -> Result<(f64, u64)> {
        for batch in batches {
            let batch = self.staging.upload(&*self.dev, batch)?.batch;
            self.decoder.evaluate(&*self.dev, &mut *self.store, &batch, &mut self.workspace, None)?;
        }
        let loss = self.workspace.take_loss(&*self.dev)?;
        let tokens: u64 = batches.iter().map(MicroBatch::loss_tokens).sum();
        let [loss, tokens] = self.sum("evaluation", [loss, self.counted(tokens)])?;
        Ok((loss, tokens as u64))
    }

    /// Evaluates pairs or labeled answers of a preference objective, until [`Engine::end_evaluation`]. Rows that only
    /// pad do not count.
    pub fn evaluate_preferences(&mut self, batches: &[MicroBatch]) -> Result<()> {
        let Engine { dev, decoder, store, workspace: ws, staging, objective, .. } = self;
        let judged = objective.judged().ok_or_else(|| Error::op("evaluate", "the objective has no answers"))?;
        let policy = &mut Policy { dev: &**dev, decoder, store: &mut **store, ws };
        batches.iter().try_for_each(|batch| judged.evaluate(policy, staging, batch))
    }
    /// The sums over all ranks' answers since the last call.
    pub fn end_evaluation(&mut self) -> Result<PreferenceSums> {
        self.sum_baseline()?;
        let Some(judged) = self.objective.judged() else { return Ok(PreferenceSums::default()) };
        judged.end_evaluation();
        let (sums, _) = judged.take_totals();
        Ok(PreferenceSums::from_array(self.sum("evaluation", sums)?))
    }

    /// The baseline of labeled answers, from all micro-batches of a step, before one of them is trained on.
    pub(super) fn set_baseline(&mut self, batches: &[MicroBatch]) -> Result<()> {
        let Engine { dev, decoder, store, workspace: ws, staging, objective, .. } = self;
        let Some(judged) = objective.judged() else { return Ok(()) };
        let policy = &mut Policy { dev: &**dev, decoder, store: &mut **store, ws };
        batches.iter().try_for_each(|batch| judged.diverge(policy, staging, batch))?;
        self.sum_baseline()
    }
    fn sum_baseline(&mut self) -> Result<()> {
        let Some(judged) = self.objective.judged().filter(|judged| judged.has_baseline()) else { return Ok(()) };
        let sums = judged.totals().to_array();
        let sums = PreferenceSums::from_array(self.sum("baseline", sums)?);
        self.objective.judged().into_iter().for_each(|judged| judged.set_baseline(&sums));
        Ok(())
    }

    /// The sum of `local` over all ranks, counting the ranks of sp once; exact below 2^53.
    pub fn global_count(&mut self, local: u64) -> Result<u64> {
        let [count, _] = self.sum("count", [self.counted(local), 0.0])?;
        Ok(count as u64)
    }
    /// `count` as a summand over the ranks of `loss`: ranks of sp hold the same micro-batches, and only the first
    /// counts.
    fn counted(&self, count: u64) -> f64 {
        if self.mesh.coords.sp == 0 { count as f64 } else { 0.0 }
    }
    /// All-reduces the first `len` sums.
    pub(super) fn reduce(&mut self, what: &'static str, len: usize) -> Result<()> {
        let sums = self.sums.view_mut().slice(0..len);
        let ticket = self.mesh.group(Axis::Loss).all_reduce(Tag::new(what, 0), sums, Reduce::Sum)?;
        self.mesh.group(Axis::Loss).wait(ticket)
    }
    fn sum<const N: usize>(&mut self, what: &'static str, values: [f64; N]) -> Result<[f64; N]> {
        let mut sums = values;
        self.dev.upload(bytemuck::cast_slice(&sums), self.sums.view_mut().slice(0..N))?;
        self.reduce(what, N)?;
        self.dev.download(self.sums.view().slice(0..N), bytemuck::cast_slice_mut(&mut sums))?;
        Ok(sums)
    }
}
