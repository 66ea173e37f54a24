//! State shared by saving and loading; `save`, `load` and `merge` are its operations. Never reads or writes a file.
use super::async_save::{AsyncSave, Snapshot};
use super::companions::Companions;
use super::disk::Disk;
use super::layout::{FilePlan, MAX_FILE_BYTES, Share};
use super::merging::Merging;
use super::room::Exports;
use super::state::hex;
use super::tower::Tower;
use crate::base::timeline::Timeline;
use crate::base::{DType, Result};
use crate::comm::exchange::Exchange;
use crate::comm::mesh::{Coords, MeshSizes};
use crate::comm::{Axis, Mesh};
use crate::device::Device;
use crate::nn::{Layout, Spec, goes_with_adapters, has_adapters};
use crate::optim::Moments;
use crate::store::Store;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Saves and loads the state of a mesh. Every rank creates one, and all make the same calls in the same order.
pub struct Checkpointer {
    pub(super) dev: Arc<dyn Device>,
    pub(super) spec: Spec,
    pub(super) layouts: Vec<Layout>,
    pub(super) max_file_bytes: u64,
    pub(super) moments: Moments,
    pub(super) plan: Arc<FilePlan>,
    /// What the loaded model has besides the text model, if it is a vision-language model.
    pub(super) tower: Option<Tower>,
    pub(super) companions: Companions,
    /// What is added to the store's weights while they are written.
    pub(super) merging: Option<Merging>,
    pub(super) background: AsyncSave,
    pub(super) timeline: Timeline,
    /// Reused from one async save to the next.
    pub(super) snapshot: Snapshot,
    pub(super) exchange: Exchange,
    pub(super) disk: Disk,
    /// With the run's id, which checkpoints have too.
    pub(super) exports: Exports,
    /// The mesh, and this rank's coordinates.
    pub(super) sizes: MeshSizes,
    pub(super) at: Coords,
}

impl Checkpointer {
    /// `layouts` are the decoder's; `moments`: the optimizer's states.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        spec: &Spec,
        layouts: &[Layout],
        moments: Moments,
    ) -> Result<Checkpointer> {
        let exchange = Checkpointer::exchange(&*dev, mesh, layouts, &moments)?;
        let plan = FilePlan::of_masters(layouts, &moments, MAX_FILE_BYTES, None);
        Ok(Checkpointer {
            dev,
            spec: spec.clone(),
            layouts: layouts.to_vec(),
            max_file_bytes: MAX_FILE_BYTES,
            moments,
            plan: Arc::new(plan),
            tower: None,
            companions: Companions::default(),
            merging: None,
            background: AsyncSave::default(),
            timeline: Timeline::default(),
            snapshot: Snapshot::default(),
            exchange,
            disk: Disk::default(),
            exports: Exports {
                run: hex(RandomState::new().hash_one(std::process::id())),
                overwrite: false,
                beside: false,
            },
            sizes: mesh.sizes,
            at: mesh.coords,
        })
    }

    /// All that a checkpointer holds on the device: a number for each tensor of every rank.
    pub fn exchange(dev: &dyn Device, mesh: &Mesh, layouts: &[Layout], moments: &Moments) -> Result<Exchange> {
        Exchange::new(dev, mesh.group(Axis::World).clone(), "checkpoint", 1 + FilePlan::count(layouts, moments))
    }

    /// Limits files to `bytes` each, or to one tensor if that is larger.
    pub fn with_files_of(mut self, bytes: u64) -> Checkpointer {
        self.max_file_bytes = bytes;
        self.lay_out();
        self
    }
    /// Later saves carry what the loaded model has besides the text model.
    pub(super) fn carry(&mut self, tower: Option<Tower>) {
        self.tower = tower;
        self.lay_out();
    }
    fn lay_out(&mut self) {
        let carried = self.tower.as_ref().map(|tower| &tower.carried);
        self.plan = Arc::new(FilePlan::of_masters(&self.layouts, &self.moments, self.max_file_bytes, carried));
    }
    /// Records async saves on `timeline`.
    pub fn on_timeline(&mut self, timeline: Timeline) {
        self.timeline = timeline;
    }
    /// Sets the run id of later saves. Without it, a new id is made, or that of the loaded checkpoint is kept.
    pub fn of_run(&mut self, id: &str) {
        self.exports.run = id.into();
    }
    /// Whether an export may replace a model of another run.
    pub fn overwrite(&mut self, yes: bool) {
        self.exports.overwrite = yes;
    }
    /// An export whose place another run has taken gets a name next to it, with this run's id: trained weights are
    /// never lost.
    pub fn export_beside(&mut self) {
        self.exports.beside = true;
    }
    /// Sends later file operations through `disk`.
    pub fn on_disk(&mut self, disk: Disk) {
        self.disk = disk;
    }
    /// Adds these files to later saves. Only rank 0 needs them.
    pub fn accompany(&mut self, companions: Companions) {
        self.companions = companions;
    }

    /// Bytes of a rank's copy for an async save, not counting the padding of uneven shards. `masters`: their dtype.
    pub fn copy_bytes(layouts: &[Layout], masters: DType, moments: &Moments, mesh: &MeshSizes) -> usize {
        let adapters = has_adapters(layouts);
        let bytes = |experts: bool| -> usize {
            let layouts = layouts.iter().enumerate().filter(|(_, layout)| layout.experts == experts);
            let segments = layouts.flat_map(|(layer, l)| l.segments.iter().map(move |s| (layer, s)));
            let copied = segments.filter(|(_, s)| !adapters || goes_with_adapters(s)).map(|(layer, s)| {
                let kept = (0..moments.names.len()).filter(|&moment| moments.has(moment, layer, s)).count();
                s.len() * masters.size() + kept * moments.bytes(s)
            });
            copied.sum()
        };
        // Replicas share the writing; experts are spread over ep already.
        let ranks = mesh.dp_replicate * mesh.fsdp();
        [(false, ranks), (true, ranks / mesh.ep)].map(|(experts, ranks)| bytes(experts).div_ceil(ranks)).iter().sum()
    }

    pub(super) fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// Which part of its shards this rank writes. With sharded parameters the replicas are the ranks of dp_replicate,
    /// otherwise all ranks except along tp.
    pub(super) fn share(&self, store: &dyn Store) -> Share {
        let (MeshSizes { dp_replicate, dp_shard, sp, .. }, at) = (self.sizes, self.at);
        let (index, of) = match store.replicated() {
            true => ((at.dp_replicate * dp_shard + at.dp_shard) * sp + at.sp, dp_replicate * dp_shard * sp),
            false => (at.dp_replicate, dp_replicate),
        };
        Share { index, of, whole: at.tp == 0 }
    }
}
