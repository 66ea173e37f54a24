//! The result of planning: the cluster, and the cost of each candidate on it. Never computes more than sums.
use super::candidates::Candidate;
use super::machine::MachineModel;
use super::simulate::{BatchShape, Simulated};
use flatshard::base::CATEGORIES;
use flatshard::base::Category;
use flatshard::ckpt::CarriedSize;
use flatshard::comm::MeshSizes;
use flatshard::engine::EngineOptions;
use std::sync::Arc;

/// GPU memory outside the plan: the driver's context, NCCL's buffers, fragmentation. An assumption.
pub const RESERVED: usize = 3 << 29;

/// A candidate after planning.
pub struct PlanRow {
    pub candidate: Candidate,
    /// Its cost, or why it cannot run.
    pub outcome: std::result::Result<Cost, String>,
    /// Flags of sizes that a run would derive from its rows.
    pub sizes: Vec<String>,
}

pub struct Cost {
    pub mesh: MeshSizes,
    pub engine: EngineOptions,
    pub params: usize,
    pub carried: Option<CarriedSize>,
    pub work: BatchShape,
    /// Bytes per rank, in the order of [`flatshard::base::CATEGORIES`]; on GPUs including those of the device itself.
    pub bytes: Vec<(Category, usize)>,
    pub fits: bool,
    /// None with optimizer updates on the host, whose speed is unknown.
    pub step: Option<Simulated>,
    /// Throughput of the whole job.
    pub tokens_per_sec: f64,
    /// By the definition of [`flatshard::nn::Spec::flops_per_token`].
    pub mfu: Option<f64>,
    /// Measured seconds per step: CPU time of rank 0's thread, and wall-clock time.
    pub measured: Option<[f64; 2]>,
}

impl Cost {
    /// Device bytes.
    pub fn total(&self) -> usize {
        self.bytes.iter().map(|b| b.1).sum::<usize>() - self.host()
    }
    /// Host bytes, for offloaded state.
    pub fn host(&self) -> usize {
        host(&self.bytes)
    }
}

/// The host bytes among them.
pub fn host(bytes: &[(Category, usize)]) -> usize {
    let host = CATEGORIES.iter().find(|c| c.1 == "host").map(|c| c.0);
    bytes.iter().filter(|b| Some(b.0) == host).map(|b| b.1).sum()
}

/// The machines the ranks run on.
pub struct Cluster {
    pub machine: Arc<dyn MachineModel>,
    pub gpus: usize,
    pub per_node: usize,
}
