//! ZeRO as a strategy. Never communicates itself.
use super::Strategy;
use crate::base::{Category, DType, Result};
use crate::comm::{Mesh, MeshSizes};
use crate::device::Device;
use crate::nn::Layout;
use crate::store::{Offload, Stage, Store, Zero, ZeroOptions};
use std::sync::Arc;

/// ZeRO-DP: stage 1, 2 or 3.
#[derive(Clone, Debug)]
pub struct ZeroDp(pub ZeroOptions);

impl Strategy for ZeroDp {
    fn name(&self) -> &'static str {
        match self.0.stage {
            Stage::One => "zero_1",
            Stage::Two => "zero_2",
            Stage::Three => "zero_3",
        }
    }
    fn dtype(&self) -> DType {
        self.0.dtype
    }
    fn offload(&self) -> Offload {
        self.0.offload
    }
    fn store(&self, dev: Arc<dyn Device>, mesh: &Mesh, layouts: &[Layout]) -> Result<Box<dyn Store>> {
        Ok(Box::new(Zero::new(dev, mesh, layouts, &self.0)?))
    }
    fn planned(&self, layouts: &[Layout], mesh: &MeshSizes) -> Vec<(Category, usize)> {
        Zero::planned(layouts, &self.0, mesh.fsdp())
    }
    fn gathered_apart(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        Zero::gathered_apart(layouts, &self.0, mesh.fsdp())
    }
    fn owned(&self, layouts: &[Layout], mesh: &MeshSizes) -> usize {
        Zero::owned(layouts, &self.0, mesh.fsdp())
    }
}
