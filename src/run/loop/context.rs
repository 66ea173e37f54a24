//! What the parts of a rank's run share. Never changes while it runs.
use crate::comm::flight::Flight;
use crate::comm::mesh::Mesh;
use crate::device::Device;
use crate::device::gpu::cuda::Cuda;
use crate::device::gpu::graphs::Graphs;
use crate::run::plan::Plan;
use crate::run::watch::RunLog;
use std::sync::Arc;

/// What a rank runs on, and its recorders.
pub struct RankContext<'a> {
    pub plan: &'a Plan,
    pub log: &'a RunLog,
    pub device: Arc<dyn Device>,
    pub gpu: Option<Arc<Cuda>>,
    /// Set if steps are captured as CUDA graphs.
    pub graphs: Option<Arc<Graphs>>,
    pub flight: &'a Flight,
    pub mesh: &'a Mesh,
}
