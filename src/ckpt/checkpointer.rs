//! What the ranks of a mesh share when they save and load. `save`, `load` and `merge` are what it does. Never reads or
//! writes a file.
use super::async_save::{AsyncSave, Snapshot};
use super::companions::Companions;
use super::disk::Disk;
use super::layout::{FilePlan, MAX_FILE_BYTES, Share};
use super::state::hex;
use crate::base::timeline::Timeline;
use crate::base::{DType, Result};
use crate::comm::Mesh;
use crate::comm::exchange::Exchange;
use crate::comm::mesh::{Coords, MeshSizes};
use crate::device::Device;
use crate::nn::{Layout, Spec, has_adapters, is_adapter};
use crate::store::Store;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Saves and loads what the ranks of a mesh hold. Every rank makes one and calls the same things in the same order.
pub struct Checkpointer {
    pub(super) dev: Arc<dyn Device>,
    pub(super) spec: Spec,
    pub(super) layouts: Vec<Layout>,
    pub(super) max_file_bytes: u64,
    pub(super) moments: &'static [&'static str],
    pub(super) plan: Arc<FilePlan>,
    pub(super) companions: Companions,
    pub(super) background: AsyncSave,
    pub(super) timeline: Timeline,
    /// Kept from one async save to the next.
    pub(super) snapshot: Snapshot,
    pub(super) exchange: Exchange,
    pub(super) disk: Disk,
    /// Id of the run, in what it writes; and whether it may replace models that are not its own.
    pub(super) run: String,
    pub(super) overwrite: bool,
    /// Of the mesh, and where this rank is in it.
    pub(super) sizes: MeshSizes,
    pub(super) at: Coords,
}

impl Checkpointer {
    /// `layouts`: the decoder's. `moments`: what the optimizer's rule calls its state.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        spec: &Spec,
        layouts: &[Layout],
        moments: &'static [&'static str],
    ) -> Result<Checkpointer> {
        let plan = FilePlan::of_masters(layouts, moments, MAX_FILE_BYTES);
        let exchange = Exchange::new(&*dev, mesh.world.clone(), "checkpoint", 1 + plan.tensors.list.len())?;
        Ok(Checkpointer {
            dev,
            spec: spec.clone(),
            layouts: layouts.to_vec(),
            max_file_bytes: MAX_FILE_BYTES,
            moments,
            plan: Arc::new(plan),
            companions: Companions::default(),
            background: AsyncSave::default(),
            timeline: Timeline::default(),
            snapshot: Snapshot::default(),
            exchange,
            disk: Disk::default(),
            run: hex(RandomState::new().hash_one(std::process::id())),
            overwrite: false,
            sizes: mesh.sizes,
            at: mesh.coords,
        })
    }

    /// With files of at most `bytes`, one tensor at least.
    pub fn with_files_of(self, bytes: u64) -> Checkpointer {
        let plan = Arc::new(FilePlan::of_masters(&self.layouts, self.moments, bytes));
        Checkpointer { plan, max_file_bytes: bytes, ..self }
    }
    /// What async saves do is written on it from now on.
    pub fn on_timeline(&mut self, timeline: Timeline) {
        self.timeline = timeline;
    }
    /// What is saved from now on is of the run with this id. Without it a new run begins, or one goes on that is
    /// loaded.
    pub fn of_run(&mut self, id: &str) {
        self.run = id.into();
    }
    /// A model of another run is replaced by [`Checkpointer::save_hf`].
    pub fn overwrite(&mut self, yes: bool) {
        self.overwrite = yes;
    }
    /// Saves from now on are seen by this disk's watcher.
    pub fn on_disk(&mut self, disk: Disk) {
        self.disk = disk;
    }
    /// What is saved from now on has these files next to the weights. Only rank 0 needs them.
    pub fn accompany(&mut self, companions: Companions) {
        self.companions = companions;
    }

    /// Bytes of a rank's copy for an async save, but for what an uneven cut adds to one rank.
    pub fn copy_bytes(layouts: &[Layout], moments: &[&str], ranks: usize) -> usize {
        let adapters = has_adapters(layouts);
        let segments = layouts.iter().flat_map(|l| &l.segments).filter(|s| is_adapter(s) == adapters);
        let values = segments.map(|s| s.len() * (1 + if s.trainable { moments.len() } else { 0 }));
        (values.sum::<usize>() * DType::F32.size()).div_ceil(ranks)
    }

    pub(super) fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// What of its pieces this rank writes. Where parameters are sharded, replicas are the ranks of dp_replicate; else
    /// all ranks but for those of tp.
    pub(super) fn share(&self, store: &dyn Store) -> Share {
        let (MeshSizes { dp_replicate, dp_shard, sp, .. }, at) = (self.sizes, self.at);
        let (index, of) = match store.replicated() {
            true => ((at.dp_replicate * dp_shard + at.dp_shard) * sp + at.sp, dp_replicate * dp_shard * sp),
            false => (at.dp_replicate, dp_replicate),
        };
        Share { index, of, whole: at.tp == 0 }
    }
}
