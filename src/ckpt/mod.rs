//! Floor 6: checkpoints as plain safetensors in the model's own global layout. Every rank writes the bytes that it owns
//! and reads the bytes that it needs, so that nothing is gathered anywhere, and another number of ranks, strategy or
//! precision needs no conversion. A checkpoint is there complete or not at all. Never knows the loop.
//!
//! ```text
//! CKPT_DIR/latest                        "step-00000100"
//! CKPT_DIR/step-00000100/config.json     a Hugging Face model directory, with
//!                        model*.safetensors      f32 masters
//!                        optimizer*.safetensors  exp_avg.{tensor}, exp_avg_sq.{tensor}
//!                        trainer_state.json      where the run stood; checksums of all the above
//! ```
pub mod adapter;
mod behind;
mod checksum;
mod companions;
pub mod dirs;
pub mod disk;
pub mod header;
pub mod hf;
pub mod layout;
mod load;
mod room;
mod save;
mod source;
pub mod state;
mod writer;

pub use companions::Companions;
pub use dirs::{Lock, Resume, candidates, clear, newest, prepare, resolve};
pub use load::{inspect, inspect_model};
pub use room::{check_export, same_place};
pub use safetensors::Dtype;
pub use save::Saved;
pub use source::is_model;
pub use state::{TrainerState, fingerprint};

use crate::base::timeline::Timeline;
use crate::base::{Category, DType, Result};
use crate::comm::Mesh;
use crate::comm::exchange::Exchange;
use crate::comm::mesh::{Coords, MeshSizes};
use crate::device::Device;
use crate::nn::{Layout, Spec, has_adapters, is_adapter};
use crate::store::Store;
use layout::{MAX_FILE_BYTES, Plan, Share};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Saves and loads what the ranks of a mesh hold. Every rank makes one and calls the same things in the same order.
pub struct Checkpointer {
    dev: Arc<dyn Device>,
    spec: Spec,
    layouts: Vec<Layout>,
    max_file_bytes: u64,
    moments: &'static [&'static str],
    plan: Arc<Plan>,
    companions: Companions,
    behind: save::Behind,
    timeline: Timeline,
    /// Kept from one save behind training to the next.
    snapshot: behind::Snapshot,
    exchange: Exchange,
    disk: disk::Disk,
    /// Id of the run, in what it writes; and whether it may replace models that are not its own.
    run: String,
    overwrite: bool,
    /// Of the mesh, and where this rank is in it.
    sizes: MeshSizes,
    at: Coords,
}

/// Bytes of the buffer between device and files, the largest that is ever held; it stays in a core's second-level
/// cache.
const CHUNK: usize = 1 << 20;

impl Checkpointer {
    /// `layouts`: the decoder's. `moments`: what the optimizer's rule calls its state.
    pub fn new(
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        spec: &Spec,
        layouts: &[Layout],
        moments: &'static [&'static str],
    ) -> Result<Checkpointer> {
        Checkpointer::with_files_of(MAX_FILE_BYTES, dev, mesh, spec, layouts, moments)
    }

    /// With files of at most `max_file_bytes`, one tensor at least.
    pub fn with_files_of(
        max_file_bytes: u64,
        dev: Arc<dyn Device>,
        mesh: &Mesh,
        spec: &Spec,
        layouts: &[Layout],
        moments: &'static [&'static str],
    ) -> Result<Checkpointer> {
        let plan = Plan::of_masters(layouts, moments, max_file_bytes);
        let exchange = Exchange::new(&*dev, mesh.world.clone(), "checkpoint", 1 + plan.tensors.list.len())?;
        Ok(Checkpointer {
            dev,
            spec: spec.clone(),
            layouts: layouts.to_vec(),
            max_file_bytes,
            moments,
            plan: Arc::new(plan),
            companions: Companions::default(),
            behind: save::Behind::default(),
            timeline: Timeline::default(),
            snapshot: behind::Snapshot::default(),
            exchange,
            disk: disk::Disk::default(),
            run: state::hex(RandomState::new().hash_one(std::process::id())),
            overwrite: false,
            sizes: mesh.sizes,
            at: mesh.coords,
        })
    }

    /// What goes on behind training is written on it from now on.
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
    pub fn on_disk(&mut self, disk: disk::Disk) {
        self.disk = disk;
    }
    /// What is saved from now on has these files beside the weights. Only rank 0 needs them.
    pub fn accompany(&mut self, companions: Companions) {
        self.companions = companions;
    }

    /// Bytes that [`Checkpointer::new`] allocates on a rank: a message, and its part of the host's buffer for all of
    /// them.
    pub fn planned(layouts: &[Layout], moments: &[&str]) -> (Category, usize) {
        let tensors = Plan::of_masters(layouts, moments, MAX_FILE_BYTES).tensors.list.len();
        (Category::Other, 2 * Exchange::bytes(1 + tensors))
    }

    /// Bytes of a rank's copy for a save behind training, but for what an uneven cut adds to one rank.
    pub fn planned_copy(layouts: &[Layout], moments: &[&str], ranks: usize) -> usize {
        let adapters = has_adapters(layouts);
        let segments = layouts.iter().flat_map(|l| &l.segments).filter(|s| is_adapter(s) == adapters);
        let values = segments.map(|s| s.len() * (1 + if s.trainable { moments.len() } else { 0 }));
        (values.sum::<usize>() * DType::F32.size()).div_ceil(ranks)
    }

    fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// What of its pieces this rank writes. Where parameters are sharded, replicas are the ranks of dp_replicate; else
    /// all ranks but for those of tp.
    fn share(&self, store: &dyn Store) -> Share {
        let (MeshSizes { dp_replicate, dp_shard, sp, .. }, at) = (self.sizes, self.at);
        let (index, of) = match store.replicated() {
            true => ((at.dp_replicate * dp_shard + at.dp_shard) * sp + at.sp, dp_replicate * dp_shard * sp),
            false => (at.dp_replicate, dp_replicate),
        };
        Share { index, of, whole: at.tp == 0 }
    }
}

/// Every tensor's checksum: ranks' sums added up.
fn total(ranks: &[Vec<u64>], tensors: usize) -> Vec<u64> {
    (0..tensors).map(|i| ranks.iter().fold(0u64, |sum, rank| sum.wrapping_add(rank[i]))).collect()
}
