//! Groups that end the piece of a step that a driver keeps back ([`Graphs`]) before they do anything: a collective orders itself
//! after what compute was given, so compute must have been given it. Never looks at data.
use super::mesh::Mesh;
use super::seam::{Hook, Hooked, Seam, Started};
use super::{Collective, Ticket};
use crate::device::gpu::graphs::Graphs;
use std::sync::Arc;

/// Every group of the mesh; as it is where no driver keeps anything back.
pub fn watch(mesh: Mesh, graphs: Option<&Arc<Graphs>>) -> Mesh {
    mesh.wrap(|group| of(group, graphs))
}
/// One group.
pub fn of(group: Arc<dyn Collective>, graphs: Option<&Arc<Graphs>>) -> Arc<dyn Collective> {
    match graphs {
        Some(graphs) => Arc::new(Hooked::with(group, Cuts(graphs.clone()))),
        None => group,
    }
}

struct Cuts(Arc<Graphs>);

impl Hook for Cuts {
    fn before(&self, _: Seam, _: Started) {
        self.0.cut();
    }
    fn after(&self, _: Seam, _: Started, _: Option<Ticket>) {}
    fn before_wait(&self, _: Seam, _: Ticket) {
        self.0.cut();
    }
    fn after_wait(&self, _: Seam, _: Ticket) {}
}
