//! Bytes a rank will hold: builds the run on a device without memory and reads its meter. Never allocates memory of the
//! model's size, and never computes.
use crate::base::{CATEGORIES, Category, Meter, Result};
use crate::comm::unbacked::UnbackedMember;
use crate::comm::{Mesh, MeshSizes};
use crate::device::counted::dry;
use crate::device::{Device, gpu};
use std::sync::Arc;

/// A hypothetical rank.
#[derive(Clone, Copy, Debug)]
pub struct PlannedRank {
    pub mesh: MeshSizes,
    pub rank: usize,
    /// Adjacent ranks that share gathered weights: those of a host. 1 on GPUs.
    pub sharing: usize,
    /// Bytes for each set of ranks that it exchanges data with.
    pub stage: usize,
    /// Backward uses the scratch of the GPU kernels, at the maximum of all architectures.
    pub gpu: bool,
}

impl PlannedRank {
    /// Bytes that the result of `build` holds, in the order of [`CATEGORIES`]. No rank holds more than rank 0: where
    /// words or columns do not divide by tp, the first ranks have one more.
    pub fn bytes<T>(&self, build: impl FnOnce(Arc<dyn Device>, &Mesh) -> Result<T>) -> Result<Vec<(Category, usize)>> {
        let PlannedRank { mesh, rank, sharing, stage, gpu } = *self;
        let meter = Meter::default();
        let device = dry(meter.clone(), if gpu { gpu::backward_scratch } else { |_, _, _| 0 });
        let mesh = Mesh::new(UnbackedMember::new(&meter, (rank, mesh.world()), sharing, stage), mesh)?;
        let _built = build(Arc::new(device), &mesh)?;
        Ok(CATEGORIES.iter().map(|&(category, _)| (category, meter.live(category))).collect())
    }
}
