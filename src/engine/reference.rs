//! Reference FSDP as a strategy. Never communicates itself.
use super::Strategy;
use crate::base::{Category, DType, Result};
use crate::comm::{Mesh, MeshSizes};
use crate::device::Device;
use crate::nn::Layout;
use crate::store::{Offload, Reference, ReferenceOptions, Store};
use std::sync::Arc;

/// A tensor at a time: FULL_SHARD or SHARD_GRAD_OP.
#[derive(Clone, Debug)]
pub struct ReferenceFsdp(pub ReferenceOptions);

impl Strategy for ReferenceFsdp {
    fn name(&self) -> &'static str {
        "fsdp_reference"
    }
    fn dtype(&self) -> DType {
        self.0.dtype
    }
    fn offload(&self) -> Offload {
        self.0.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Reference::new(dev, mesh, layouts, &self.0)?))
    }
    fn planned(&self, layouts: &[Layout], mesh: &MeshSizes) -> Vec<(Category, usize)> {
        Reference::planned(layouts, &self.0, mesh.fsdp())
    }
    fn gathered_apart(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        Reference::gathered_apart(layouts, &self.0, mesh.fsdp())
    }
    fn owned(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        Reference::owned(layouts, mesh.fsdp())
    }
}
