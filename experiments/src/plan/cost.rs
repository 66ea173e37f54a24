//! The result of planning: the cluster, and the cost of each candidate on it. Never computes more than sums.
use super::candidates::Candidate;
use super::machine::MachineModel;
use super::simulate::{BatchShape, Simulated};
use flatshard::base::CATEGORIES;
use flatshard::base::Category;
use flatshard::comm::MeshSizes;
use flatshard::engine::EngineOptions;
use std::sync::Arc;

/// Bytes of a GPU that no plan sees: the driver's context, NCCL's buffers, what fragments leave. Assumed.
pub const RESERVED: usize = 3 << 29;

/// A candidate after planning.
pub struct PlanRow {
    pub candidate: Candidate,
    /// Why it cannot run, or what it costs.
    pub outcome: std::result::Result<Cost, String>,
}

pub struct Cost {
    pub mesh: MeshSizes,
    pub engine: EngineOptions,
    pub params: usize,
    pub work: BatchShape,
    /// Of a rank, in the order of [`flatshard::base::CATEGORIES`]; on GPUs with what the device itself holds.
    pub bytes: Vec<(Category, usize)>,
    pub fits: bool,
    /// None where the host updates weights: of its speed nothing is known.
    pub step: Option<Simulated>,
    /// Of the whole job.
    pub tokens_per_sec: f64,
    pub mfu: Option<f64>,
    /// Seconds of a step as it was run here: of rank 0's thread, and on the wall.
    pub measured: Option<[f64; 2]>,
}

impl Cost {
    /// Of the device.
    pub fn total(&self) -> usize {
        self.bytes.iter().map(|b| b.1).sum::<usize>() - self.host()
    }
    /// Of the host: what is offloaded.
    pub fn host(&self) -> usize {
        host(&self.bytes)
    }
}

/// Bytes of the host among them.
pub fn host(bytes: &[(Category, usize)]) -> usize {
    let host = CATEGORIES.iter().find(|c| c.1 == "host").map(|c| c.0);
    bytes.iter().filter(|b| Some(b.0) == host).map(|b| b.1).sum()
}

/// Where the ranks are.
pub struct Cluster {
    pub machine: Arc<dyn MachineModel>,
    pub gpus: usize,
    pub per_node: usize,
}
