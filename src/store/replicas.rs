//! HYBRID_SHARD: ranks of dp_replicate own the same shards, and sum their gradients when those have been reduced over
//! the ranks of one replica. Never decides when, and never cuts anything.
//!
//! They exchange f32, whatever gradients travel in inside a replica of N ranks (PyTorch's HSDP takes `reduce_dtype` for
//! both). A rank receives at most 8/N bytes a parameter, once a step, where a reduction in bf16 receives 2 (N - 1)/N:
//! for N = 8, 1 beside 1.75. In bf16 it would be 4/N, for 2/N more of memory and two more roundings: of each replica's
//! sum, and of the sum of those.
use super::Offload;
use crate::base::{Category, DType, Result};
use crate::comm::{Collective, CommUse, Mesh, Reduce, Tag, Ticket};
use crate::device::{Buf, Device, ViewMut};
use std::sync::Arc;

pub(super) struct Replicas {
    group: Arc<dyn Collective>,
    flying: Vec<Ticket>,
}

impl Replicas {
    /// Of a store of so many units.
    pub fn new(mesh: &Mesh, units: usize) -> Replicas {
        Replicas { group: mesh.dp_replicate.clone(), flying: Vec::with_capacity(units) }
    }
    /// There are others.
    pub fn any(&self) -> bool {
        self.group.size() > 1
    }
    /// A shard's gradient, f32, which the others read in place unless it is offloaded.
    pub fn grad(&self, dev: &dyn Device, offload: Offload, len: usize) -> Result<Buf> {
        let _for = dev.meter().purpose("gradients of shards");
        match self.any() && offload < Offload::Gradients {
            true => self.group.alloc(DType::F32, len, CommUse::Reduced, Category::Grads),
            false => offload.alloc(Offload::Gradients, dev, DType::F32, len, Category::Grads),
        }
    }
    /// Starts the sum of a unit's reduced gradient.
    pub fn sum(&mut self, unit: usize, grad: ViewMut) -> Result<()> {
        if self.any() {
            self.flying.push(self.group.all_reduce(Tag::new("replicate", unit), grad, Reduce::Sum)?);
        }
        Ok(())
    }
    /// All that were started are done.
    pub fn finish(&mut self) -> Result<()> {
        self.flying.drain(..).try_for_each(|ticket| self.group.wait(ticket))
    }
}
