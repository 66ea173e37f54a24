//! Floor 7: one rank's training engine. A [`Strategy`] decides how parameters are kept; [`Engine`] is everything else that
//! a rank needs for a step, and is the same for all of them. Never knows flags, files or the loop.
mod engine;
mod generate;
mod staging;

pub use engine::{Engine, EngineOptions, Step, StepReport};
pub use generate::{Generator, Sampling};

use crate::base::{Category, DType, Result};
use crate::comm::Collective;
use crate::device::Device;
use crate::nn::Layout;
use crate::store::{Replicated, ReplicatedOptions, Sharded, ShardedOptions, Store};
use std::sync::Arc;

/// How parameters, gradients and optimizer state are spread over the ranks of a group.
pub trait Strategy: Send + Sync {
    fn name(&self) -> &'static str;
    /// The compute dtype.
    fn dtype(&self) -> DType;
    /// Allocates everything that holds parameters and gradients. Every rank of `group` calls it alike.
    fn store(&self, dev: Arc<dyn Device>, group: Arc<dyn Collective>, layouts: &[Layout]) -> Result<Box<dyn Store>>;
    /// Bytes that [`Strategy::store`] allocates on a rank of so many.
    fn planned(&self, layouts: &[Layout], ranks: usize) -> Vec<(Category, usize)>;
    /// Bytes that a rank holds beyond those of [`Strategy::planned`] where ranks do not share what is gathered: on GPUs.
    fn gathered_apart(&self, _layouts: &[Layout], _ranks: usize) -> usize {
        0
    }
    /// Elements, padding included, that a rank owns and keeps optimizer state for.
    fn owned(&self, layouts: &[Layout], ranks: usize) -> usize;
}

/// Sharded: FULL_SHARD or SHARD_GRAD_OP.
#[derive(Clone, Debug)]
pub struct Fsdp(pub ShardedOptions);

impl Strategy for Fsdp {
    fn name(&self) -> &'static str {
        "fsdp"
    }
    fn dtype(&self) -> DType {
        self.0.dtype
    }
    fn store(&self, dev: Arc<dyn Device>, group: Arc<dyn Collective>, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Sharded::new(dev, group, layouts, &self.0)?))
    }
    fn planned(&self, layouts: &[Layout], ranks: usize) -> Vec<(Category, usize)> {
        Sharded::planned(layouts, &self.0, ranks)
    }
    fn gathered_apart(&self, layouts: &[Layout], ranks: usize) -> usize {
        Sharded::gathered_apart(layouts, &self.0, ranks)
    }
    fn owned(&self, layouts: &[Layout], ranks: usize) -> usize {
        Sharded::owned(layouts, &self.0, ranks)
    }
}

/// Replicated: DDP and NO_SHARD.
#[derive(Clone, Debug)]
pub struct Ddp(pub ReplicatedOptions);

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        "ddp"
    }
    fn dtype(&self) -> DType {
        self.0.dtype
    }
    fn store(&self, dev: Arc<dyn Device>, group: Arc<dyn Collective>, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Replicated::new(dev, group, layouts, &self.0)?))
    }
    fn planned(&self, layouts: &[Layout], _: usize) -> Vec<(Category, usize)> {
        Replicated::planned(layouts, &self.0)
    }
    fn owned(&self, layouts: &[Layout], _: usize) -> usize {
        Replicated::owned(layouts, &self.0)
    }
}
