//! Samples of a student that a teacher corrects: their entropies, and whether the log-probabilities that they were
//! sampled with are those of training. Never runs a model.
use crate::base::{Category, DType, Result};
use crate::comm::Mesh;
use crate::data::MicroBatch;
use crate::device::{Buf, Device, IGNORE};
use crate::nn::StudentRows;
use serde::Serialize;

/// Sums over the sampled tokens of a step, and the largest difference.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(in crate::engine) struct StudentSums {
    pub entropy: f64,
    pub tokens: f64,
    pub mismatch: f64,
}

/// What is known of a step's samples.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct StudentMeans {
    /// Mean over tokens of KL(student || teacher), in nats, at the temperature of the loss.
    pub reverse_kl: f64,
    /// Mean over tokens of the student's entropy, in nats; None on devices that do not compute it, and over tp.
    pub entropy: Option<f64>,
    pub completion_tokens: u64,
    /// Largest difference between a log-probability that a token was sampled with and the student's.
    pub logprob_mismatch: f64,
}

/// Buffers are allocated once, for any micro-batch of the engine's size.
pub(in crate::engine) struct StudentSamples {
    /// f64 (rows): minus the log-probability of each row's target.
    losses: Buf,
    /// f32 (rows)
    entropies: Buf,
    /// This rank has all logits, and its device entropies.
    measures: bool,
    /// Rows of this rank in the micro-batch.
    rows: usize,
    /// Rows with a target, and the log-probabilities that they were sampled with.
    sampled: Vec<(usize, f32)>,
    host_losses: Vec<f64>,
    host_entropies: Vec<f32>,
    totals: StudentSums,
}

impl StudentSamples {
    /// `tokens`: the most in a rank's share of a micro-batch.
    pub fn new(dev: &dyn Device, mesh: &Mesh, tokens: usize) -> Result<StudentSamples> {
        let _for = dev.meter().purpose("rollouts");
        Ok(StudentSamples {
            losses: dev.alloc(DType::F64, tokens, Category::Other)?,
            entropies: dev.alloc(DType::F32, tokens, Category::Other)?,
            measures: dev.has_entropies() && mesh.sizes.tp == 1,
            rows: 0,
            sampled: Vec::with_capacity(tokens),
            host_losses: Vec::with_capacity(tokens),
            host_entropies: Vec::with_capacity(tokens),
            totals: StudentSums::default(),
        })
    }
    /// Starts a micro-batch. `local`: the rows of the whole batch that this rank holds; none: all.
    pub fn begin(&mut self, batch: &MicroBatch, local: Option<&[u32]>) -> StudentRows<'_> {
        let all = batch.tokens.len();
        self.rows = local.map_or(all, <[u32]>::len);
        self.sampled.clear();
        for row in 0..self.rows {
            let at = local.map_or(row, |local| local[row] as usize);
            // Rows after the last document are padding.
            if at < all && batch.targets[at] != IGNORE {
                self.sampled.push((row, batch.recorded.logprobs.get(at).copied().unwrap_or(0.0)));
            }
        }
        StudentRows { losses: self.losses.view_mut(), entropies: self.entropies.view_mut() }
    }
    /// The rows are assigned: adds them to the totals.
    pub fn end(&mut self, dev: &dyn Device) -> Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        self.host_losses.resize(self.rows, 0.0);
        dev.download(self.losses.view().slice(0..self.rows), bytemuck::cast_slice_mut(&mut self.host_losses))?;
        self.host_entropies.resize(self.rows, 0.0);
        if self.measures {
            let own = self.entropies.view().slice(0..self.rows);
            dev.download(own, bytemuck::cast_slice_mut(&mut self.host_entropies))?;
        }
        let StudentSums { entropy, tokens, mismatch } = &mut self.totals;
        for &(row, old) in &self.sampled {
            *entropy += self.host_entropies[row] as f64;
            *tokens += 1.0;
            let apart = (-self.host_losses[row] as f32 - old).abs() as f64;
            *mismatch = if apart > *mismatch || apart.is_nan() { apart } else { *mismatch };
        }
        Ok(())
    }
    pub fn take_totals(&mut self) -> StudentSums {
        std::mem::take(&mut self.totals)
    }
    /// From the sums of all ranks.
    pub fn means(&self, sums: StudentSums, reverse_kl: f64) -> StudentMeans {
        StudentMeans {
            reverse_kl,
            entropy: self.measures.then_some(sums.entropy / sums.tokens),
            completion_tokens: sums.tokens as u64,
            logprob_mismatch: sums.mismatch,
        }
    }
}
