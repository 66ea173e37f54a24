//! HYBRID_SHARD: ranks of dp_replicate own the same shards and sum their gradients after the reduce-scatter within each
//! replica. Never decides when, and never shards anything.
//!
//! Replicas all_reduce in f32, whatever the reduce dtype within a replica of N ranks (PyTorch's HSDP uses
//! `reduce_dtype` for both). A rank receives at most 8/N bytes per parameter, once per step, against 2 (N - 1)/N for a
//! bf16 reduce-scatter: with N = 8, 1 against 1.75. A bf16 all_reduce would receive 4/N, but take 2/N more memory and
//! round twice more: each replica's sum, and the sum of those.
use super::Offload;
use crate::base::{Category, DType, Result};
use crate::comm::{Axis, Collective, CommUse, Mesh, Reduce, Tag, Ticket};
use crate::device::{Buf, Device, ViewMut};
use std::sync::Arc;

pub(super) struct Replicas {
    group: Arc<dyn Collective>,
    flying: Vec<Ticket>,
}

impl Replicas {
    /// For a store with `shards` shards.
    pub fn new(mesh: &Mesh, shards: usize) -> Replicas {
        Replicas { group: mesh.group(Axis::DpReplicate).clone(), flying: Vec::with_capacity(shards) }
    }
    /// Whether there is more than one replica.
    pub fn any(&self) -> bool {
        self.group.size() > 1
    }
    /// A shard's f32 gradient, which peers read in place unless it is offloaded.
    pub fn grad(&self, dev: &dyn Device, offload: Offload, len: usize) -> Result<Buf> {
        let _for = dev.meter().purpose("sharded gradients");
        match self.any() && offload < Offload::Gradients {
            true => self.group.alloc(DType::F32, len, CommUse::Reduced, Category::Grads),
            false => offload.alloc(Offload::Gradients, dev, DType::F32, len, Category::Grads),
        }
    }
    /// Starts the all_reduce of a unit's reduced gradient.
    pub fn sum(&mut self, unit: usize, grad: ViewMut) -> Result<()> {
        if self.any() {
            self.flying.push(self.group.all_reduce(Tag::new("replicate", unit), grad, Reduce::Sum)?);
        }
        Ok(())
    }
    /// Waits for all sums that were started.
    pub fn finish(&mut self) -> Result<()> {
        self.flying.drain(..).try_for_each(|ticket| self.group.wait(ticket))
    }
}
