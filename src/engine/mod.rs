//! Floor 7: one rank's training engine. A [`Strategy`] decides how parameters are kept; [`Engine`] is everything else that
//! a rank needs for a step, and is the same for all of them. Never knows flags, files or the loop.
mod engine;
mod generate;
mod reference;
mod staging;
mod summed;
mod watched;
mod zero;

pub use engine::{Engine, EngineOptions, Step, StepReport};
pub use generate::{Generator, GeneratorOptions, Sampling};
pub use reference::ReferenceFsdp;
pub use zero::ZeroDp;

use crate::base::{Category, DType, Result};
use crate::comm::{Mesh, MeshSizes};
use crate::device::Device;
use crate::nn::Layout;
use crate::store::{Offload, Replicated, ReplicatedOptions, Sharded, ShardedOptions, Store};
use std::sync::Arc;

/// How parameters, gradients and optimizer state are spread over the ranks of a mesh.
pub trait Strategy: Send + Sync {
    fn name(&self) -> &'static str;
    /// The compute dtype.
    fn dtype(&self) -> DType;
    /// What is in host memory.
    fn offload(&self) -> Offload;
    /// Allocates everything that holds parameters and gradients. Every rank of the mesh calls it alike. `layouts`: this rank's
    /// part of the tensors.
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>>;
    /// Bytes that [`Strategy::store`] allocates on a rank.
    fn planned(&self, layouts: &[Layout], mesh: &MeshSizes) -> Vec<(Category, usize)>;
    /// Bytes that a rank holds beyond those of [`Strategy::planned`] where ranks do not share what is gathered: on GPUs.
    fn gathered_apart(&self, _layouts: &[Layout], _mesh: &MeshSizes) -> usize {
        0
    }
    /// Elements, padding included, that a rank owns and keeps optimizer state for.
    fn owned(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize;
}

/// Sharded: FULL_SHARD or SHARD_GRAD_OP.
#[derive(Clone, Debug, Default)]
pub struct Fsdp(pub ShardedOptions);

impl Strategy for Fsdp {
    fn name(&self) -> &'static str {
        "fsdp"
    }
    fn dtype(&self) -> DType {
        self.0.dtype
    }
    fn offload(&self) -> Offload {
        self.0.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Sharded::new(dev, mesh, layouts, &self.0)?))
    }
    fn planned(&self, layouts: &[Layout], mesh: &MeshSizes) -> Vec<(Category, usize)> {
        Sharded::planned(layouts, &self.0, mesh.fsdp())
    }
    fn gathered_apart(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        Sharded::gathered_apart(layouts, &self.0, mesh.fsdp())
    }
    fn owned(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        Sharded::owned(layouts, &self.0, mesh.fsdp())
    }
}

/// Replicated: DDP and NO_SHARD.
#[derive(Clone, Debug, Default)]
pub struct Ddp(pub ReplicatedOptions);

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        "ddp"
    }
    fn dtype(&self) -> DType {
        self.0.dtype
    }
    fn offload(&self) -> Offload {
        self.0.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Replicated::new(dev, mesh.loss.clone(), layouts, &self.0)?))
    }
    fn planned(&self, layouts: &[Layout], mesh: &MeshSizes) -> Vec<(Category, usize)> {
        Replicated::planned(layouts, &self.0, mesh.world() / mesh.tp)
    }
    fn owned(&self, layouts: &[Layout], _: &MeshSizes) -> usize {
        Replicated::owned(layouts, &self.0)
    }
}
