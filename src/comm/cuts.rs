//! Groups that flush the part of a step that a driver is capturing ([`Graphs`]) before each call: a collective is
//! ordered after compute, so compute must have been submitted. Never reads data.
use super::mesh::Mesh;
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Axis, Collective, Member, Ticket};
use crate::base::Result;
use crate::device::gpu::graphs::Graphs;
use std::sync::Arc;
use std::time::Duration;

/// Wraps a member so that its groups flush. Not for NCCL: its collectives are captured with the step, and flush
/// themselves where they are not.
pub struct Cutting {
    pub member: Arc<dyn Member>,
    pub graphs: Arc<Graphs>,
}

impl Member for Cutting {
    fn rank(&self) -> usize {
        self.member.rank()
    }
    fn size(&self) -> usize {
        self.member.size()
    }
    fn group(&self, axis: Axis, ranks: Vec<usize>) -> Result<Arc<dyn Collective>> {
        Ok(of(self.member.group(axis, ranks)?, &self.graphs))
    }
    fn set_timeout(&self, timeout: Duration) {
        self.member.set_timeout(timeout);
    }
    fn abort(&self) {
        self.member.abort();
    }
    fn failed(&self) -> Option<usize> {
        self.member.failed()
    }
}

/// Wraps every group of the mesh.
pub fn watch(mesh: Mesh, graphs: &Arc<Graphs>) -> Mesh {
    mesh.wrap(|group| of(group, graphs))
}
fn of(group: Arc<dyn Collective>, graphs: &Arc<Graphs>) -> Arc<dyn Collective> {
    Arc::new(Hooked::with(group, GraphCuts(graphs.clone())))
}

struct GraphCuts(Arc<Graphs>);

impl Hook for GraphCuts {
    fn before(&self, _: Seam, _: Started) {
        self.0.cut();
    }
    fn after(&self, _: Seam, _: Started, _: Option<Ticket>) {}
    fn before_wait(&self, _: Seam, _: Ticket) {
        self.0.cut();
    }
    fn after_wait(&self, _: Seam, _: Ticket) {}
}
