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
pub use dirs::{Lock, Resume, newest, prepare, resolve};
pub use load::{inspect, inspect_model};
pub use room::check_export;
pub use safetensors::Dtype;
pub use save::Saved;
pub use source::is_model;
pub use state::TrainerState;

use crate::base::{Category, DType, Error, Result};
use crate::comm::mesh::{Coords, MeshSizes};
use crate::comm::{Collective, CommUse, Mesh, Tag};
use crate::device::{Buf, Device};
use crate::nn::{Layout, Spec};
use crate::store::Store;
use layout::{MAX_FILE_BYTES, Plan, Share};
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
    /// Kept from one save behind training to the next.
    snapshot: behind::Snapshot,
    exchange: Exchange,
    /// Of the mesh, and where this rank is in it.
    sizes: MeshSizes,
    at: Coords,
}

/// Bytes of the buffer between device and files, the largest that is ever held; it stays in a core's second-level cache.
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
        let exchange = Exchange::new(&*dev, mesh.world.clone(), 1 + plan.tensors.list.len())?;
        Ok(Checkpointer {
            dev,
            spec: spec.clone(),
            layouts: layouts.to_vec(),
            max_file_bytes,
            moments,
            plan: Arc::new(plan),
            companions: Companions::default(),
            behind: save::Behind::default(),
            snapshot: behind::Snapshot::default(),
            exchange,
            sizes: mesh.sizes,
            at: mesh.coords,
        })
    }

    /// What is saved from now on has these files beside the weights. Only rank 0 needs them.
    pub fn accompany(&mut self, companions: Companions) {
        self.companions = companions;
    }

    /// Bytes that [`Checkpointer::new`] allocates on a rank: a message, and its part of the host's buffer for all of them.
    pub fn planned(layouts: &[Layout], moments: &[&str]) -> (Category, usize) {
        let tensors = Plan::of_masters(layouts, moments, MAX_FILE_BYTES).tensors.list.len();
        (Category::Other, 2 * Exchange::bytes(1 + tensors))
    }

    /// Bytes of a rank's copy for a save behind training, but for what an uneven cut adds to one rank.
    pub fn planned_copy(layouts: &[Layout], moments: &[&str], ranks: usize) -> usize {
        let segments = layouts.iter().flat_map(|l| &l.segments);
        let values = segments.map(|s| s.len() * (1 + if s.trainable { moments.len() } else { 0 }));
        (values.sum::<usize>() * DType::F32.size()).div_ceil(ranks)
    }

    fn rank(&self) -> usize {
        self.exchange.group.rank()
    }

    /// What of its pieces this rank writes. Where parameters are sharded, replicas are the ranks of dp_replicate; else all
    /// ranks but for those of tp.
    fn share(&self, store: &dyn Store) -> Share {
        let (MeshSizes { dp_replicate, dp_shard, sp, .. }, at) = (self.sizes, self.at);
        let (index, of) = match store.replicated() {
            true => ((at.dp_replicate * dp_shard + at.dp_shard) * sp + at.sp, dp_replicate * dp_shard * sp),
            false => (at.dp_replicate, dp_replicate),
        };
        Share { index, of, whole: at.tp == 0 }
    }
}

/// Numbers from each rank to all, through the group.
struct Exchange {
    group: Arc<dyn Collective>,
    mine: Buf,
    all: Buf,
    bytes: Vec<u8>,
}

impl Exchange {
    /// Of a message of one rank.
    const fn bytes(words: usize) -> usize {
        words * size_of::<u64>()
    }
    /// Of up to `words` numbers a rank.
    fn new(dev: &dyn Device, group: Arc<dyn Collective>, words: usize) -> Result<Exchange> {
        let bytes = Exchange::bytes(words);
        let mine = dev.alloc(DType::U8, bytes, Category::Other)?;
        let all = group.alloc(DType::U8, bytes * group.size(), CommUse::Gathered, Category::Other)?;
        Ok(Exchange { bytes: vec![0; bytes * group.size()], group, mine, all })
    }

    /// Every rank's numbers, as many as this rank gave, in rank order.
    fn gather(&mut self, dev: &dyn Device, words: &[u64]) -> Result<Vec<u64>> {
        let len = self.mine.len();
        self.bytes[..len].fill(0);
        for (to, word) in self.bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        dev.upload(&self.bytes[..len], self.mine.view_mut())?;
        let ticket = self.group.all_gather(Tag::new("checkpoint", 0), self.mine.view(), self.all.view_mut())?;
        self.group.wait(ticket)?;
        dev.download(self.all.view(), &mut self.bytes)?;
        self.group.release(ticket)?;
        let word = |b: &[u8]| b.iter().rev().fold(0, |word, byte| word << 8 | *byte as u64);
        let of_rank =
            |bytes: &[u8]| bytes.chunks_exact(size_of::<u64>()).take(words.len()).map(word).collect::<Vec<_>>();
        Ok(self.bytes.chunks_exact(len).flat_map(of_rank).collect())
    }

    /// `mine`, when all ranks succeeded; else an error on every rank: its own, or one that names the rank that failed.
    fn agree<T>(&mut self, dev: &dyn Device, what: &str, mine: Result<T>) -> Result<T> {
        let (done, value) = match mine {
            Ok(value) => (Ok(Vec::new()), Some(value)),
            Err(error) => (Err(error), None),
        };
        self.share(dev, what, done, 0)?;
        value.ok_or_else(|| Error::op("checkpoint", "agreed on nothing"))
    }

    /// As [`Exchange::agree`]; what all ranks found, `words` numbers each, in rank order.
    fn share(&mut self, dev: &dyn Device, what: &str, mine: Result<Vec<u64>>, words: usize) -> Result<Vec<Vec<u64>>> {
        let mut sent = vec![0; 1 + words];
        match &mine {
            Ok(found) => sent[1..].copy_from_slice(found),
            Err(error) => sent[0] = error.exit_status() as u64,
        }
        let all = self.gather(dev, &sent);
        mine?; // first: a peer that has heard of it may be gone already, and that is not what went wrong
        let all = all?;
        let ranks = all.chunks_exact(sent.len());
        let Some((rank, failed)) = ranks.clone().enumerate().find(|(_, r)| r[0] != 0) else {
            return Ok(ranks.map(|r| r[1..].to_vec()).collect());
        };
        let text = format!("rank {rank} could not {what}; its own message says why");
        Err(if failed[0] == 2 { Error::Input(text) } else { Error::Run(text) })
    }
}

/// Every tensor's checksum: ranks' sums added up.
fn total(ranks: &[Vec<u64>], tensors: usize) -> Vec<u64> {
    (0..tensors).map(|i| ranks.iter().fold(0u64, |sum, rank| sum.wrapping_add(rank[i]))).collect()
}
