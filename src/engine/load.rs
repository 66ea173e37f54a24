//! The load of a step's experts, summed over ranks by the decoder and read at the step's end. Never communicates.
use crate::base::Result;
use crate::device::Device;
use crate::nn::{Spec, Workspace};

/// How evenly a step's tokens used the experts, over all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpertLoad {
    /// The load-balancing loss without its factor: the mean over the micro-batches.
    pub aux_loss: f64,
    /// The largest share of any expert in the rows of its block, over the mean share.
    pub max: f64,
}

pub(super) struct LoadTally {
    /// Experts of a block; 0 without any.
    experts: usize,
    micro_batches: usize,
    /// The loss, then the rows of each expert of each block.
    host: Vec<f64>,
}

impl LoadTally {
    pub fn new(spec: &Spec) -> LoadTally {
        let experts = spec.experts.as_ref().map_or(0, |e| e.count);
        LoadTally { experts, micro_batches: 0, host: vec![0.0; 1 + spec.sparse_blocks() * experts] }
    }
    pub fn begin(&mut self, micro_batches: usize) {
        self.micro_batches = micro_batches.max(1);
    }
    /// Reads the step's load and begins the next one's.
    pub fn take(&mut self, dev: &dyn Device, workspace: &mut Workspace) -> Result<Option<ExpertLoad>> {
        if self.experts == 0 {
            return Ok(None);
        }
        workspace.take_load(dev, bytemuck::cast_slice_mut(&mut self.host))?;
        let [loss, counts @ ..] = &self.host[..] else { return Ok(None) };
        let relative = |block: &[f64]| {
            let all: f64 = block.iter().sum();
            block.iter().fold(0.0, |most: f64, &rows| most.max(rows)) * self.experts as f64 / all.max(1.0)
        };
        let max = counts.chunks_exact(self.experts).map(relative).fold(0.0, f64::max);
        Ok(Some(ExpertLoad { aux_loss: loss / self.micro_batches as f64, max }))
    }
}
