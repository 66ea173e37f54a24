//! Async checkpoints: copies what this rank owns and writes the copy on a thread. Never touches the store after the
//! copy, and never holds more than one copy.
use super::disk::{CHUNK, Disk};
use super::elements::widen_device;
use super::layout::{FilePlan, Share};
use super::publish::{Publication, SavedCheckpoint};
use super::writer::{ShardWriter, each_run};
use crate::base::dynamic8::{BLOCK, DynamicMap};
use crate::base::meter::Lease;
use crate::base::timeline::{Lane, Timeline};
use crate::base::{Category, DType, Error, Result};
use crate::device::Device;
use crate::optim::{Optimizer, StoredSlice};
use crate::store::Store;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

/// What a rank owns, copied between two steps.
#[derive(Default)]
pub(super) struct Snapshot {
    bytes: Vec<u8>,
    /// In order.
    runs: Vec<CopiedRun>,
    lease: Option<Lease>,
}

/// Elements of one tensor or state, and of those in blocks the largest magnitudes.
struct CopiedRun {
    tensor: usize,
    /// First element in this rank's part of it.
    at: usize,
    len: usize,
    dtype: DType,
    blocks: Option<&'static DynamicMap>,
}

impl Snapshot {
    /// Replaces the previous contents. The memory is reused from save to save.
    pub fn take(
        &mut self,
        dev: &dyn Device,
        plan: &FilePlan,
        share: Share,
        store: &mut dyn Store,
        mut optimizer: Option<&mut Optimizer>,
    ) -> Result<()> {
        if self.lease.is_none() {
            let mut needed = 0;
            each_run(plan, share, store, optimizer.as_deref_mut(), &mut |_, _, data| {
                needed += data.views().map(|view| view.bytes()).sum::<usize>();
                Ok(())
            })?;
            self.bytes.try_reserve_exact(needed).map_err(|e| {
                Error::op(
                    "async-save",
                    format!(
                        "cannot allocate {needed} bytes for the copy ({e}): set `async_save: \
                                                 false`"
                    ),
                )
            })?;
            self.bytes.resize(needed, 0);
            self.lease = Some(dev.meter().lease(Category::Other, needed));
        }
        let (runs, mut rest) = (&mut self.runs, &mut self.bytes[..]);
        runs.clear();
        each_run(plan, share, store, optimizer, &mut |index, at, data| {
            runs.push(CopiedRun::new(index, at, &data));
            data.views().try_for_each(|view| {
                let Some((mine, after)) = std::mem::take(&mut rest).split_at_mut_checked(view.bytes()) else {
                    return Err(Error::op("async-save", "the store has grown since the last save"));
                };
                rest = after;
                dev.download(view, mine)
            })
        })
    }

    fn write(&self, mut writer: ShardWriter) -> Result<Vec<u64>> {
        let mut rest = &self.bytes[..];
        let mut values = vec![0f32; CHUNK / 4];
        for CopiedRun { tensor, at, len, dtype, blocks } in &self.runs {
            let (mine, after) = rest.split_at(len * dtype.size());
            let (absmax, after) = after.split_at(blocks.map_or(0, |_| len.div_ceil(BLOCK) * size_of::<f32>()));
            rest = after;
            let mut absmax = absmax.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
            for (i, chunk) in mine.chunks(CHUNK / 4 * dtype.size()).enumerate() {
                let values = &mut values[..chunk.len() / dtype.size()];
                match blocks {
                    Some(map) => map.dequantize_all(chunk, absmax.by_ref(), values),
                    None => widen_device(chunk, *dtype, values),
                }
                writer.put(*tensor, at + i * CHUNK / 4, values)?;
            }
        }
        writer.finish()
    }
}

impl CopiedRun {
    fn new(tensor: usize, at: usize, data: &StoredSlice) -> CopiedRun {
        let blocks = data.absmax.as_ref().map(|(_, map)| *map);
        CopiedRun { tensor, at, len: data.len(), dtype: data.values.dtype(), blocks }
    }
}

/// The thread that writes one snapshot, and returns it.
pub(super) struct SaveJob(JoinHandle<(Snapshot, Result<Vec<u64>>)>);

impl SaveJob {
    pub fn start(
        snapshot: Snapshot,
        disk: Disk,
        plan: Arc<FilePlan>,
        dir: PathBuf,
        timeline: Timeline,
    ) -> Result<SaveJob> {
        let write = move || {
            let write = || ShardWriter::open(&disk, plan, &dir).and_then(|writer| snapshot.write(writer));
            let sums = timeline.host(Lane::Checkpoint, "write", None, write);
            (snapshot, sums)
        };
        let thread = std::thread::Builder::new().name("save".into()).spawn(write);
        thread.map(SaveJob).map_err(|e| Error::Run(format!("cannot start the checkpoint thread: {e}")))
    }
    pub fn ended(&self) -> bool {
        self.0.is_finished()
    }
    /// Waits until it ends.
    pub fn join(self) -> (Snapshot, Result<Vec<u64>>) {
        let lost = |_| (Snapshot::default(), Err(Error::op("async-save", "the checkpoint thread panicked")));
        self.0.join().unwrap_or_else(lost)
    }
}

/// The state of the save in the background, the same on every rank.
#[derive(Default)]
pub(super) enum AsyncSave {
    #[default]
    Nothing,
    Writing(SaveJob, Box<Publication>),
    /// Rank 0 keeps the thread until its result is reported; the other ranks are done.
    Publishing(Option<JoinHandle<Result<SavedCheckpoint>>>),
}
